"""ResNets of the paper: the stem of its hybrids, and BiT, the baseline that it is measured against.

Both have GroupNorm in place of BatchNorm and standardise the kernels of their convolutions
(arXiv 1903.10520). They differ in the order inside a unit, in padding and in epsilons:

- hybrids (section 3.1) follow `models_resnet.py` of google-research/vision_transformer:
  normalisation after the convolution, TensorFlow's SAME padding, as in ResNet v1;
- BiT (arXiv 1912.11370) follows google-research/big_transfer: normalisation before the
  convolution, as in ResNet v2 (arXiv 1603.05027), and symmetric padding.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlab.models.basics import check_images, lecun_normal_, pair, zero_

Standardize = Literal["std", "var"]
EXPANSION = 4  # a unit of inner width f gives 4 f channels


@dataclass(frozen=True, kw_only=True)
class StemConfig:
    """The ResNet in front of a hybrid, whose feature map is cut into patches (section 3.1).

    Defaults are those of `models_resnet.py`, with the layers of R50+ViT-B/16.
    """

    layers: tuple[int, ...] = (3, 4, 9)  # units of each stage; empty: the root alone
    width: int = 64  # channels of the root; stage i gives 4 * 2^i times as many
    groups: int = 32  # of every GroupNorm
    norm_eps: float = 1e-6  # epsilon of every GroupNorm (timm's hybrids: 1e-5)
    standardize: Standardize = "std"  # kernels are divided by std + eps, or by sqrt(var + eps)
    standardize_eps: float = 1e-5  # that eps (timm's hybrids: var, 1e-8)

    def __post_init__(self) -> None:
        _settle(self)

    @property
    def stride(self) -> int:
        """Pixels, per side, behind one cell of the feature map: 4 for the root, 2 a stage more."""
        return 4 * 2 ** max(len(self.layers) - 1, 0)

    @property
    def channels(self) -> int:
        """Channels of the feature map."""
        return self.width * EXPANSION * 2 ** (len(self.layers) - 1) if self.layers else self.width


@dataclass(frozen=True, kw_only=True)
class BiTConfig:
    """Everything that shapes a BiT ResNet; R50x1 by default, with big_transfer's epsilons."""

    image: tuple[int, int] = (224, 224)  # (H, W) it is meant for, in pixels; any other size runs
    layers: tuple[int, ...] = (3, 4, 6, 3)  # units of each stage
    width: int = 64  # channels of the root, 64 times the factor in the name
    classes: int = 1000  # K, outputs of the head; 0: the model returns features
    groups: int = 32  # of every GroupNorm
    norm_eps: float = 1e-5  # epsilon of every GroupNorm
    standardize: Standardize = "var"  # kernels are divided by std + eps, or by sqrt(var + eps)
    standardize_eps: float = 1e-10  # that eps (timm: 1e-8)

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", pair(self.image))
        _settle(self)
        if min(self.image) < 1 or self.classes < 0 or not self.layers:
            raise ValueError("a BiT needs an image, stages, and 0 classes or more")

    @property
    def features(self) -> int:
        """Channels of the last stage, the size of the representation."""
        return self.width * EXPANSION * 2 ** (len(self.layers) - 1)


def _settle(config: StemConfig | BiTConfig) -> None:
    """What both configurations check."""
    object.__setattr__(config, "layers", tuple(config.layers))  # a list, when read from JSON
    if min(config.layers, default=1) < 1:
        raise ValueError(f"every stage needs a unit, layers are {config.layers}")
    if config.groups < 1 or config.width < 1 or config.width % config.groups:
        below = config.width // max(config.groups, 1) * config.groups
        near = f"{below} or {below + config.groups}" if below > 0 else f"{config.groups}"
        raise ValueError(
            f"width {config.width} is not a multiple of groups {config.groups} (nearest: {near})"
        )
    if config.standardize not in ("std", "var"):
        raise ValueError(f"standardize must be std or var, not {config.standardize}")


class StdConv(nn.Conv2d):
    """A convolution without bias by standardised kernels: x [B, C, h, w] -> [B, C', h', w'].

    Each output channel's kernel has its mean subtracted and is divided by `std + eps` (the
    hybrids) or `sqrt(var + eps)` (BiT, timm), both of the population. The weights stay raw.
    """

    def __init__(
        self, inside: int, outside: int, kernel: int, config: StemConfig | BiTConfig,
        stride: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(inside, outside, kernel, stride=stride, bias=False)
        self.standardize, self.eps = config.standardize, config.standardize_eps
        self.same = isinstance(config, StemConfig)
        lecun_normal_(self)

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        below = var.sqrt() + self.eps if self.standardize == "std" else (var + self.eps).sqrt()
        kernel, stride = self.kernel_size[0], self.stride[0]
        x = pad_same(x, kernel, stride) if self.same else F.pad(x, [kernel // 2] * 4)
        return F.conv2d(x, (self.weight - mean) / below, None, stride)


def pad_same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Zeros around [..., h, w] so that ceil(h / stride) windows fit; an odd one goes to the end.

    This is SAME of TensorFlow and JAX: with stride 2, an even size is padded asymmetrically.
    """
    sides = []
    for size in (x.shape[-1], x.shape[-2]):  # F.pad counts from the last
        total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
        sides += [total // 2, total - total // 2]
    return F.pad(x, sides)


def _norm(channels: int, config: StemConfig | BiTConfig) -> nn.GroupNorm:
    return nn.GroupNorm(config.groups, channels, eps=config.norm_eps)


class PostUnit(nn.Module):
    """A bottleneck of the hybrids: x [B, C, h, w] -> [B, 4 f, h / stride, w / stride].

    1 x 1, 3 x 3 (with the stride), 1 x 1, each followed by GroupNorm; ReLU after the first two
    and after the sum. The last scale starts at 0: a fresh unit passes its input on.
    """

    def __init__(self, inside: int, f: int, stride: int, config: StemConfig) -> None:
        super().__init__()
        outside = EXPANSION * f
        self.conv1 = StdConv(inside, f, 1, config)
        self.norm1 = _norm(f, config)
        self.conv2 = StdConv(f, f, 3, config, stride)
        self.norm2 = _norm(f, config)
        self.conv3 = StdConv(f, outside, 1, config)
        self.norm3 = _norm(outside, config)
        nn.init.zeros_(self.norm3.weight)
        self.project = self.project_norm = None
        if inside != outside or stride != 1:
            self.project = StdConv(inside, outside, 1, config, stride)
            self.project_norm = _norm(outside, config)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        if self.project is not None and self.project_norm is not None:
            x = self.project_norm(self.project(x))
        return F.relu(x + y)


class PreUnit(nn.Module):
    """A bottleneck of BiT: x [B, C, h, w] -> [B, 4 f, h / stride, w / stride].

    GroupNorm and ReLU stand before each convolution; the projection, without a norm of its own,
    sees the input after the first of them.
    """

    def __init__(self, inside: int, f: int, stride: int, config: BiTConfig) -> None:
        super().__init__()
        outside = EXPANSION * f
        self.norm1 = _norm(inside, config)
        self.conv1 = StdConv(inside, f, 1, config)
        self.norm2 = _norm(f, config)
        self.conv2 = StdConv(f, f, 3, config, stride)
        self.norm3 = _norm(f, config)
        self.conv3 = StdConv(f, outside, 1, config)
        self.project = None
        if inside != outside or stride != 1:
            self.project = StdConv(inside, outside, 1, config, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        x = x if self.project is None else self.project(y)
        y = F.relu(self.norm2(self.conv1(y)))
        y = F.relu(self.norm3(self.conv2(y)))
        return x + self.conv3(y)


def _stages(config: StemConfig | BiTConfig) -> nn.Sequential:
    """Stage i has inner width 2^i times the root's; all but the first halve h and w."""
    stages, channels = nn.Sequential(), config.width
    for i, units in enumerate(config.layers):
        stage, f = nn.Sequential(), config.width * 2**i
        for j in range(units):
            stride = 2 if i and not j else 1
            if isinstance(config, StemConfig):
                stage.append(PostUnit(channels, f, stride, config))
            else:
                stage.append(PreUnit(channels, f, stride, config))
            channels = EXPANSION * f
        stages.append(stage)
    return stages


class Stem(nn.Module):
    """Images [B, 3, H, W] -> a feature map [B, C, H / stride, W / stride]."""

    def __init__(self, config: StemConfig) -> None:
        super().__init__()
        self.conv = StdConv(3, config.width, 7, config, stride=2)
        self.norm = _norm(config.width, config)
        self.stages = _stages(config)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(images)))  # [B, width, H / 2, W / 2]
        # The original pads with -inf; after ReLU zeros do the same.
        x = F.max_pool2d(pad_same(x, 3, 2), 3, stride=2)  # [B, width, H / 4, W / 4]
        return self.stages(x)


class BiT(nn.Module):
    """Images [B, 3, H, W] of any size -> logits [B, K], or features [B, C] when K is 0."""

    def __init__(self, config: BiTConfig) -> None:
        super().__init__()
        self.config = config
        self.conv = StdConv(3, config.width, 7, config, stride=2)
        self.stages = _stages(config)
        self.norm = _norm(config.features, config)
        self.head = zero_(nn.Linear(config.features, config.classes)) if config.classes else None

    def forward(self, images: Tensor) -> Tensor:
        y = self.represent(images)
        return y if self.head is None else self.head(y)

    def represent(self, images: Tensor) -> Tensor:
        """What the head sees: [B, features]."""
        check_images(images)
        x = self.conv(images)
        # No ReLU has been here: zeros around the map take part, as in big_transfer and timm
        # (big_vision's reading of the same weights pads with -inf).
        x = F.max_pool2d(F.pad(x, [1] * 4), 3, stride=2)  # [B, width, H / 4, W / 4]
        return F.relu(self.norm(self.stages(x))).mean(dim=(2, 3))

    def resize(self, image: int | tuple[int, int], resample: str = "bicubic") -> "BiT":
        """Record another image size, in place, as `ViT.resize` does; no tensor depends on it."""
        self.config = replace(self.config, image=pair(image))
        return self
