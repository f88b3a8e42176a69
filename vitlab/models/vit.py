"""The Vision Transformer of "An Image is Worth 16x16 Words" (arXiv 2010.11929), section 3.1.

Read it beside the paper: `ViT.embed` is equation 1, `Block.forward` equations 2 and 3,
`ViT.represent` equation 4, `Attention` equations 5 to 8 of appendix A. What the paper does not
print (epsilons, the form of GELU, initialisers) follows google-research/vision_transformer.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlab.models import positions
from vitlab.models.basics import attend, check_images, lecun_normal_, pair, zero_
from vitlab.models.resnet import Stem, StemConfig


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Everything that shapes a Vision Transformer. Table 1 of the paper gives the usual sizes."""

    image: tuple[int, int] = (224, 224)  # (H, W) in pixels; one number means a square
    patch: tuple[int, int] = (16, 16)  # (P, P) in pixels, of a hybrid in cells of its feature map
    width: int = 768  # D, the latent size
    depth: int = 12  # L, the number of blocks
    heads: int = 12  # k, attention heads; each is D / k wide
    mlp_width: int = 3072  # the hidden size of the MLP, 4 D in Table 1
    classes: int = 1000  # K, outputs of the head; 0: the model returns features [B, D]
    pool: Literal["token", "mean"] = "token"  # what becomes y: the class token, or the patch mean
    head_hidden: int = 0  # hidden size of the tanh head of pre-training; 0: one linear layer
    class_token: bool = True  # is there an x_class (the originals' mean-pooled models have none)
    registers: int = 0  # extra learned tokens after the class token, without position
    class_position: bool = True  # does the class token have a row in E_pos
    norm: Literal["before_pool", "after_pool"] = "before_pool"  # where the last LayerNorm stands
    layer_scale: float = 0.0  # initial gamma on each residual branch; 0: no LayerScale
    dropout: float = 0.0  # after E_pos and after every dense layer except qkv (appendix B.1)
    drop_path: float = 0.0  # stochastic depth of the last block, falling linearly to 0 at the first
    activation: Literal["gelu_tanh", "gelu"] = "gelu_tanh"  # the originals use the tanh form
    norm_eps: float = 1e-6  # epsilon of every LayerNorm
    stem: StemConfig | None = None  # the ResNet of a hybrid; patches are cut from its feature map

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", pair(self.image))
        object.__setattr__(self, "patch", pair(self.patch))
        if isinstance(self.stem, dict):  # read from JSON
            object.__setattr__(self, "stem", StemConfig(**self.stem))
        for name in ("width", "depth", "heads", "mlp_width", "classes", "head_hidden", "registers"):
            least = 0 if name in ("classes", "head_hidden", "registers") else 1
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        of = f" x stride {self.stem.stride} of the stem" if self.stem else ""
        for i, side in enumerate(("height", "width")):
            image, patch, step = self.image[i], self.patch[i], self.footprint[i]
            if patch < 1 or image < step:
                raise ValueError(f"a patch of {patch}{of} does not fit an image {side} of {image}")
            if image % step:
                raise ValueError(
                    f"image {side} {image} is not a multiple of patch {patch}{of}"
                    f" (nearest: {_nearest(image, step)})"
                )
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not divisible by heads {self.heads}"
                f" (nearest widths: {_nearest(self.width, self.heads)})"
            )
        for name in ("dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), not {getattr(self, name)}")
        for name, choices in (
            ("pool", ("token", "mean")),
            ("norm", ("before_pool", "after_pool")),
            ("activation", ("gelu_tanh", "gelu")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be {' or '.join(choices)}, not {getattr(self, name)}"
                )
        if self.pool == "token" and not self.class_token:
            raise ValueError("pool token needs class_token")

    @property
    def footprint(self) -> tuple[int, int]:
        """Pixels (h, w) behind one patch: the patch, times the stride of a hybrid's stem."""
        stride = self.stem.stride if self.stem else 1
        return self.patch[0] * stride, self.patch[1] * stride

    @property
    def grid(self) -> tuple[int, int]:
        """Patches (h, w) of an image."""
        return self.image[0] // self.footprint[0], self.image[1] // self.footprint[1]

    @property
    def prefix(self) -> int:
        """Tokens before the patches: the class token, then registers."""
        return int(self.class_token) + self.registers

    @property
    def features(self) -> int:
        """Size of the representation y."""
        return self.width


def _nearest(value: int, step: int) -> str:
    below = value // step * step
    return f"{below} or {below + step}" if below else f"{step}"


class Attention(nn.Module):
    """Multi-head self-attention, equations 5 to 8: z [B, N, D] -> [B, N, D]."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)  # U_qkv; rows are [q; k; v]
        self.out = nn.Linear(config.width, config.width)  # U_msa
        with torch.no_grad():
            for third in self.qkv.weight.chunk(3):  # q, k, v: each drawn as its own D x D
                nn.init.xavier_uniform_(third)
        nn.init.xavier_uniform_(self.out.weight)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.out.bias)

    def forward(self, z: Tensor) -> Tensor:
        q, k, v = self.split(z)
        z = attend(q, k, v)  # softmax(q k^T / sqrt(D_h)) v
        return self.out(z.transpose(1, 2).flatten(2))  # heads side by side: [B, N, D]

    def split(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [B, k, N, D_h]."""
        q, k, v = self.qkv(z).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v


class MLP(nn.Module):
    """Dense, GELU, dense, each followed by dropout: z [B, N, D] -> [B, N, D]."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_width)
        self.down = nn.Linear(config.mlp_width, config.width)
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.dropout = nn.Dropout(config.dropout)
        for dense in (self.up, self.down):
            nn.init.xavier_uniform_(dense.weight)
            nn.init.normal_(dense.bias, std=1e-6)

    def forward(self, z: Tensor) -> Tensor:
        z = self.dropout(F.gelu(self.up(z), approximate=self.approximate))
        return self.dropout(self.down(z))


class Block(nn.Module):
    """One pre-norm encoder block, equations 2 and 3: z [B, N, D] -> [B, N, D]."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)
        self.drop_path = drop_path
        self.scale1 = self.scale2 = None  # LayerScale (arXiv 2103.17239)
        if config.layer_scale:
            self.scale1 = nn.Parameter(torch.full((config.width,), float(config.layer_scale)))
            self.scale2 = nn.Parameter(torch.full((config.width,), float(config.layer_scale)))

    def forward(self, z: Tensor) -> Tensor:
        z = z + self.branch(self.dropout(self.attention(self.norm1(z))), self.scale1)
        return z + self.branch(self.mlp(self.norm2(z)), self.scale2)

    def branch(self, z: Tensor, scale: Tensor | None) -> Tensor:
        """A residual branch after LayerScale and stochastic depth (per image, rescaled)."""
        if scale is not None:
            z = z * scale
        if self.drop_path and self.training:
            keep = 1 - self.drop_path
            z = z * z.new_empty(z.shape[0], 1, 1).bernoulli_(keep).div_(keep)
        return z


class ViT(nn.Module):
    """Images [B, 3, H, W], float, normalised -> logits [B, K], or features [B, D] when K is 0.

    Raises ValueError for images of another rank, channel count or size than `config.image`.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        c, d = config, config.width
        self.stem = Stem(c.stem) if c.stem else None
        channels = c.stem.channels if c.stem else 3
        self.patch = lecun_normal_(nn.Conv2d(channels, d, c.patch, stride=c.patch))  # E
        self.class_token = nn.Parameter(torch.zeros(1, 1, d)) if c.class_token else None
        registers = torch.empty(1, c.registers, d).normal_(std=0.02) if c.registers else None
        self.registers = None if registers is None else nn.Parameter(registers)
        rows = math.prod(c.grid) + int(c.class_token and c.class_position)
        self.positions = positions.learned(rows, d)  # E_pos
        self.dropout = nn.Dropout(c.dropout)
        rates = [c.drop_path * i / max(c.depth - 1, 1) for i in range(c.depth)]
        self.blocks = nn.ModuleList(Block(c, rate) for rate in rates)
        self.norm = nn.LayerNorm(d, eps=c.norm_eps)
        self.hidden = lecun_normal_(nn.Linear(d, c.head_hidden)) if c.head_hidden else None
        self.head = zero_(nn.Linear(c.head_hidden or d, c.classes)) if c.classes else None

    def forward(self, images: Tensor) -> Tensor:
        z = self.embed(images)
        for block in self.blocks:
            z = block(z)
        return self.classify(self.represent(z))

    def layers(self, images: Tensor) -> Iterator[Tensor]:
        """Yield z_0 ... z_L, each [B, N, D]: what enters each block, then what leaves the last.

        The one primitive behind features, attention maps and rollout: no hooks, no state.
        """
        z = self.embed(images)
        for block in self.blocks:
            yield z
            z = block(z)
        yield z

    def embed(self, images: Tensor) -> Tensor:
        """Equation 1: z_0 = [x_class; x_p^1 E; ...; x_p^N E] + E_pos, [B, N, D]."""
        self.check(images)
        x = images if self.stem is None else self.stem(images)  # a hybrid's map: [B, C, H', W']
        z = self.patch(x).flatten(2).transpose(1, 2)  # [B, h * w, D], row by row
        z = z + self.positions[:, -z.shape[1] :]
        prefix = []
        if self.class_token is not None:
            slot = self.positions[:, :1] if self.config.class_position else 0
            prefix.append(self.class_token + slot)
        if self.registers is not None:
            prefix.append(self.registers)
        z = torch.cat([*(token.expand(z.shape[0], -1, -1) for token in prefix), z], dim=1)
        return self.dropout(z)

    def represent(self, z: Tensor) -> Tensor:
        """Equation 4: y = LN(z_L^0), or the mean over patches (D.3): [B, N, D] -> [B, D]."""
        if self.config.norm == "before_pool":
            z = self.norm(z)
        y = z[:, 0] if self.config.pool == "token" else z[:, self.config.prefix :].mean(dim=1)
        return self.norm(y) if self.config.norm == "after_pool" else y

    def classify(self, y: Tensor) -> Tensor:
        """The head: linear, or with the tanh layer of pre-training before it; [B, D] -> [B, K]."""
        if self.hidden is not None:
            y = torch.tanh(self.hidden(y))
        return y if self.head is None else self.head(y)

    def resize(self, image: int | tuple[int, int], resample: str = "bicubic") -> "ViT":
        """Fit the model, in place, to images of (h, w) pixels; returns the model.

        The patch stays, the grid grows or shrinks, E_pos is interpolated in 2-D (section 3.2);
        see `positions.resample` for `resample`.
        """
        config = replace(self.config, image=pair(image))
        table = positions.resample(self.positions.data, self.config.grid, config.grid, resample)
        self.positions = nn.Parameter(table, requires_grad=self.positions.requires_grad)
        self.config = config
        return self

    def check(self, images: Tensor) -> None:
        """Raise ValueError for images of another rank, channel count or size."""
        check_images(images)
        size = (images.shape[2], images.shape[3])
        if size != self.config.image:
            h, w = self.config.image
            raise ValueError(
                f"the model takes images of {h} x {w} (H x W), got {size[0]} x {size[1]};"
                f" model.resize(({size[0]}, {size[1]})) fits it to them"
            )
