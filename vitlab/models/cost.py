"""What a model costs: its parameters, and the multiply-accumulates of one image."""

import math

import torch

from vitlab.models.resnet import EXPANSION, BiTConfig, StemConfig
from vitlab.models.zoo import Config, build


def parameters(config: Config) -> int:
    """How many numbers a model learns."""
    with torch.device("meta"):  # shapes alone: no memory, no time for initial values
        return sum(p.numel() for p in build(config).parameters())


def macs(config: Config) -> int:
    """Multiply-accumulates of the products and convolutions of one forward pass, one image."""
    if isinstance(config, BiTConfig):
        return _resnet(config, config.image) + config.features * config.classes
    c, patches = config, math.prod(config.grid)
    tokens = patches + c.prefix
    block = tokens * c.width * (4 * c.width + 2 * tokens + 2 * c.mlp_width)
    head = c.width * c.head_hidden + (c.head_hidden or c.width) * c.classes
    stem, channels = (_resnet(c.stem, c.image), c.stem.channels) if c.stem else (0, 3)
    return stem + patches * channels * math.prod(c.patch) * c.width + c.depth * block + head


def _resnet(config: StemConfig | BiTConfig, image: tuple[int, int]) -> int:
    """Of a ResNet's convolutions; h and w are halved by the root twice, then by each stage."""

    def cells(halvings: int) -> int:
        return math.prod(math.ceil(side / 2**halvings) for side in image)

    channels = config.width
    total = cells(1) * 7 * 7 * 3 * channels
    for i, units in enumerate(config.layers):
        f, outside = config.width * 2**i, EXPANSION * config.width * 2**i
        for j in range(units):
            inside = cells(i + 1 if i and not j else i + 2)
            after = cells(i + 2)
            projection = channels * outside if not j else 0
            total += inside * channels * f + after * (9 * f * f + f * outside + projection)
            channels = outside
    return total
