"""What the families of models share: sizes, checks, initial values."""

import math
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D_h)) v, equations 6 and 7; all [B, k, N, D_h].

    Torch's fused kernel, except where two products and a softmax are faster: on a CPU, in
    bfloat16 or for few tokens (`bench/attention.py`), as long as [N, N] matrices stay small.
    """
    few = 600 if q.dtype == torch.bfloat16 else 32
    if q.device.type != "cpu" or q.shape[2] > few:
        return F.scaled_dot_product_attention(q, k, v)
    return (q * q.shape[3] ** -0.5 @ k.mT).softmax(dim=-1) @ v
