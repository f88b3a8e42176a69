"""What a run does to a model before its optimizer is made: head, positions, adapters, freezing."""

import difflib
import fnmatch
import logging
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.data.preprocess import Preprocess
from vitlab.models import zoo
from vitlab.models.vit import ViT, ViTConfig
from vitlab.training import adapters
from vitlab.training.config import TrainConfig
from vitlab.training.optim import HEAD

log = logging.getLogger("vitlab")
BACKBONE = "backbone"  # --freeze: all but the head


def image_size(config: TrainConfig) -> tuple[int, int] | None:
    """(H, W) as asked for, in pixels; one number is a square."""
    return None if config.size is None else (config.size[0], config.size[-1])


def with_head(config: TrainConfig, shape: zoo.Config) -> zoo.Config:
    """A new model's shape, with the tanh layer of pre-training where it is asked for."""
    if not config.tanh_head:
        return shape
    if not isinstance(shape, ViTConfig):
        raise ValueError("--tanh-head needs a Vision Transformer")
    return replace(shape, head_hidden=shape.width)


def with_preprocess(config: TrainConfig, own: Preprocess) -> Preprocess:
    """The evaluation transform, with what the options change of it."""
    asked: dict[str, Any] = {
        "resize": config.resize, "crop": config.eval_crop, "interpolation": config.interpolation,
        "antialias": config.antialias,
    }  # fmt: skip
    return replace(own, **{k: v for k, v in asked.items() if v is not None})


def prepare(config: TrainConfig, model: zoo.Model, new_head: bool) -> None:
    """Set initial values that the options ask for, add adapters, freeze; in place.

    Raises ValueError for options that do not fit the model.
    """
    if new_head:
        set_head_bias(config, model)
    if config.positions == "sincos":
        if config.from_ is not None or not isinstance(model, ViT):
            raise ValueError("--positions sincos is for a new Vision Transformer")
        fix_positions(model)
    if config.lora:
        adapters.inject(model, config.lora)
    if config.freeze:
        freeze(model, config.freeze)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if config.lora or config.freeze:
        log.info("%s of %s parameters are trained", f"{trained:,}",
                 f"{sum(p.numel() for p in model.parameters()):,}")  # fmt: skip


@torch.no_grad()
def set_head_bias(config: TrainConfig, model: zoo.Model) -> None:
    """A new head's bias: as given; else 0, or -log K for a sigmoid of single labels.

    With it the sigmoids of K classes begin at 1 / K each, as one label a picture gives: -6.9 for
    ImageNet and -10 for ImageNet-21k in the originals.
    """
    if model.head is None:
        return
    bias = 0.0
    if config.head_bias is not None:
        bias = config.head_bias
    elif config.loss == "sigmoid" and config.task == "single-label":
        bias = -math.log(model.head.out_features)
    model.head.bias.fill_(bias)


def sincos(grid: tuple[int, int], width: int) -> Tensor:
    """Fixed 2-D positions [h * w, D]: sines and cosines of x, then of y (MoCo v3, big_vision).

    The frequencies fall from 1 to 1 / 10,000. Raises ValueError if 4 does not divide D.
    """
    if width % 4 or width < 8:
        raise ValueError(f"--positions sincos needs a width that 4 divides, not {width}")
    h, w = grid
    quarter = width // 4
    frequencies = 10_000.0 ** -(torch.arange(quarter, dtype=torch.float64) / (quarter - 1))
    y = torch.arange(h, dtype=torch.float64).repeat_interleave(w)[:, None] * frequencies
    x = torch.arange(w, dtype=torch.float64).repeat(h)[:, None] * frequencies
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).float()


@torch.no_grad()
def fix_positions(model: ViT) -> None:
    """Fill E_pos with `sincos` and keep it so; a class token's row is zero."""
    table = sincos(model.config.grid, model.config.width)
    model.positions.zero_()
    model.positions[0, -len(table) :] = table
    model.positions.requires_grad = False


def freeze(model: nn.Module, patterns: str) -> None:
    """Keep tensors as they are, in place: names by patterns (`blocks.[0-5].*,patch.*`).

    `backbone` stands for all but the head. Raises ValueError for a pattern that matches nothing,
    or when nothing would be left to train.
    """
    parameters = dict(model.named_parameters())
    for pattern in filter(None, (p.strip() for p in patterns.split(","))):
        if pattern == BACKBONE:
            found = [name for name in parameters if not HEAD.search(name)]
        else:
            found = fnmatch.filter(parameters, pattern)
        if not found:
            near = difflib.get_close_matches(pattern, [*parameters, BACKBONE], n=1, cutoff=0)[0]
            raise ValueError(f"--freeze {pattern}: no tensor has such a name; did you mean {near}?")
        for name in found:
            parameters[name].requires_grad = False
    if not any(p.requires_grad for p in parameters.values()):
        raise ValueError(f"--freeze {patterns}: nothing would be left to train")
