"""What the families of models share: sizes, checks, initial values."""

import math
from typing import TypeVar

from torch import Tensor, nn

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """(h, w) from one number or two. Raises ValueError for anything else."""
    h, *w = (value, value) if isinstance(value, int) else value
    if len(w) != 1:
        raise ValueError(f"a size is one number or two, (h, w), not {value}")
    return int(h), int(w[0])


def check_images(images: Tensor) -> None:
    """Raise ValueError for anything but [B, 3, H, W]."""
    if images.ndim != 4:
        raise ValueError(f"expected images [B, 3, H, W] of rank 4, got {list(images.shape)}")
    if images.shape[1] != 3:
        raise ValueError(f"expected 3 channels, got {images.shape[1]} in {list(images.shape)}")


def lecun_normal_(layer: Layer) -> Layer:
    """Fill a layer, in place, as flax does by default: N(0, 1 / fan_in) cut at 2 sigma, bias 0."""
    std = math.sqrt(1 / layer.weight[0].numel()) / 0.87962566103423978  # of N(0, 1) cut at 2
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def zero_(layer: nn.Linear) -> nn.Linear:
    """Fill a layer with zeros, in place."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
