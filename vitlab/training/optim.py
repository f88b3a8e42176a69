"""Optimizer, learning-rate schedules and the moving average of weights."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: weight matrices and kernels decay; biases, norms, tokens and positions do not.

    What decays is a `weight` of two or more dimensions, whatever wrapper has put a prefix
    before its name. Parameters that do not require gradients are left out.
    """
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decay = [p for n, p in trained if n.rpartition(".")[2] == "weight" and p.ndim >= 2]
    chosen = {id(p) for p in decay}
    rest = [p for _, p in trained if id(p) not in chosen]
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]


def make_optimizer(model: nn.Module, name: str, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW (betas 0.9, 0.999) or SGD with momentum 0.9, both fused; the loop sets the rate."""
    groups = parameter_groups(model, weight_decay)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, fused=True)
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9, fused=True)


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
    return nn.utils.clip_grad_norm_(parameters, largest or math.inf)
