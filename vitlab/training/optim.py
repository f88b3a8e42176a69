"""Optimizer, learning-rate schedules and the moving average of weights."""

import math
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.training import parallel
from vitlab.training.config import TrainConfig

BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")  # a parameter's name, under whatever wrapper
HEAD = re.compile(r"(?:^|\.)(?:head|hidden)\.")


def parameter_groups(
    model: nn.Module, weight_decay: float, layer_decay: float = 1.0, apart: bool = False
) -> list[dict[str, Any]]:
    """Groups for an optimizer: weight matrices and kernels decay; biases, norms, tokens,
    positions and LayerScale do not.

    What decays is a `weight` of two or more dimensions, whatever wrapper has put a prefix
    before its name. Parameters that do not require gradients are left out.

    Args:
        model: on its own or in a wrapper.
        weight_decay: of the groups that decay.
        layer_decay: below 1, the rate falls from the head down by this factor a block; each
            depth has its groups, `lr_scale` is their share of the rate.
        apart: the head has groups of its own, so that `hold_back` can train it alone; `is_head`
            marks them.

    Returns two groups (decaying, not decaying) a rate, the highest rate first. Raises ValueError
    for layer decay in a model without encoder blocks.
    """
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    depth = 1 + max((int(m[1]) for n, _ in model.named_parameters() if (m := BLOCK.search(n))),
                    default=-1)  # fmt: skip
    if layer_decay != 1 and not depth:
        raise ValueError("--layer-decay needs the encoder blocks of a Vision Transformer")
    kinds: dict[tuple[int, bool], tuple[list[nn.Parameter], list[nn.Parameter]]] = {}
    for name, parameter in trained:
        layer = _layer(name, depth) if layer_decay != 1 else depth + 1
        kind = (layer, apart and HEAD.search(name) is not None)
        decay, rest = kinds.setdefault(kind, ([], []))
        matrix = name.rpartition(".")[2] == "weight" and parameter.ndim >= 2
        (decay if matrix else rest).append(parameter)
    return [
        {
            "params": parameters, "weight_decay": own, "is_head": is_head,
            "lr_scale": layer_decay ** (depth + 1 - layer),
        }
        for (layer, is_head), pair in sorted(kinds.items(), key=lambda item: item[0], reverse=True)
        for parameters, own in zip(pair, (weight_decay, 0.0), strict=True)
    ]  # fmt: skip


def _layer(name: str, depth: int) -> int:
    """0: what makes z_0 (stem, patches, tokens, positions); i: block i - 1; then norm and head."""
    if match := BLOCK.search(name):
        return 1 + int(match[1])
    top = name.rpartition(".")[0].rpartition(".")[2] in ("norm", "hidden", "head")
    return depth + 1 if top and "stem." not in name else 0


def make_optimizer(
    model: nn.Module, name: str, weight_decay: float, **grouping: Any
) -> torch.optim.Optimizer:
    """AdamW (betas 0.9, 0.999) or SGD with momentum 0.9, both fused; the loop sets the rate.

    `grouping`: layer_decay and apart of `parameter_groups`.
    """
    groups = parameter_groups(model, weight_decay, **grouping)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, fused=True)
    for group in groups:  # torch's own decay of SGD goes through the momentum: ten times as much
        group["shrink"], group["weight_decay"] = group["weight_decay"], 0.0
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9, fused=True)
    optimizer.register_step_pre_hook(_shrink)
    return optimizer


def optimizer_of(config: TrainConfig, peak: float, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that a run's options ask for, at a peak rate."""
    decay = decay_of(config.weight_decay, config.decay_with_lr, peak)
    return make_optimizer(
        model, config.optimizer, decay,
        layer_decay=config.layer_decay, apart=config.head_first > 0,
    )  # fmt: skip


@torch.no_grad()
def _shrink(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Decoupled weight decay, as AdamW's: w <- (1 - rate x decay) w before the step."""
    for group in optimizer.param_groups:
        moving = [p for p in group["params"] if p.grad is not None]
        if group["shrink"] and moving:
            torch._foreach_mul_(moving, 1 - group["lr"] * group["shrink"])


def decay_of(weight_decay: float, with_lr: bool, peak: float) -> float:
    """The decay an optimizer needs, which multiplies it by the rate.

    Without `with_lr`, weights shrink by weight_decay x (rate / peak) a step: decoupled from the
    rate, as big_vision has it (1e-4 there at a rate of 1e-3 is 0.1 here).
    """
    return weight_decay if with_lr or not peak else weight_decay / peak


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The real rate of each group: its share of `rate`, whatever made that."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def hold_back(optimizer: torch.optim.Optimizer) -> None:
    """Forget the gradients of all but the head: clipping, moments and weights never see them."""
    for group in optimizer.param_groups:
        if not group["is_head"]:
            for parameter in group["params"]:
                parameter.grad = None


def learning_rate(
    step: int, total: int, *, peak: float, warmup: int, schedule: str, end: float = 0.0
) -> float:
    """The rate of update `step` (from 0): linear warm-up times cosine or linear decay.

    `utils.create_learning_rate_schedule` of google-research/vision_transformer, where cosine
    decays to 0; here `end` holds for both.
    """
    progress = min(max((step - warmup) / max(1, total - warmup), 0.0), 1.0)
    share = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    rate = end + (peak - end) * share
    return rate * min(1.0, step / warmup) if warmup else rate


class Average:
    """An exponential moving average of a model's tensors, with the warm-up of short runs.

    After n updates the decay is min(decay, (1 + n) / (10 + n)): with a fixed 0.9998, a run of
    100 steps would keep 98 % of the initial weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.tensors = {k: v.detach().clone() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        current = model.state_dict()
        torch._foreach_lerp_(
            list(self.tensors.values()), [current[k] for k in self.tensors], 1 - decay
        )


def clip_gradients(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """Scale gradients, in place, to a global norm of at most `largest` (0: never); their norm."""
    return parallel.whole(nn.utils.clip_grad_norm_(parameters, largest or math.inf))
