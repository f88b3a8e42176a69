"""`.npz` files of google-research/vision_transformer and of BiT (google-research/big_transfer).

Kernels are [in, out] and [h, w, in, out], projections [D, k, D_h]; the class token has a row in
the position table. Blocks are numbered as flax did before its linen modules (`LayerNorm_2`,
`MlpBlock_3`) or since (`LayerNorm_1`, `MlpBlock_0`), or stacked under one name, as scanned layers
are; GroupNorm is [1, 1, 1, C] or [C].
"""

import re

import torch
from torch import Tensor

from vitlab.models.vit import ViTConfig
from vitlab.weights.foreign import HALF, Facts, Format, Lack, Seen, State, groups, lacks, with_slot
from vitlab.weights.tables import (
    CHANNELS,
    CONV,
    DENSE,
    HEADS,
    HEADS_BIAS,
    POINT,
    SAME,
    UNHEADS,
    Layout,
    Row,
)

BLOCK = "Transformer/encoderblock_{}/"
STACKED = "Transformer/encoderblock/"
POSITIONS = "Transformer/posembed_input/pos_embedding"
OURS = "blocks.{}."


def kernel(ours: str, theirs: str, layout: Layout = DENSE, bias: Layout | None = SAME) -> list[Row]:
    """Rows of a layer: its kernel and, unless it has none, its bias."""
    rows = [Row(f"{ours}.weight", f"{theirs}/kernel", layout)]
    return rows + ([Row(f"{ours}.bias", f"{theirs}/bias", bias)] if bias else [])


def norm(ours: str, theirs: str, layout: Layout = SAME) -> list[Row]:
    """Rows of a LayerNorm or GroupNorm."""
    names = ((f"{ours}.weight", f"{theirs}/scale"), (f"{ours}.bias", f"{theirs}/bias"))
    return [Row(o, t, layout) for o, t in names]


def block(second: int, attention: int, mlp: int) -> list[Row]:
    """Rows of an encoder block, by the numbers of its second norm, its attention and its MLP."""
    heads = f"{BLOCK}MultiHeadDotProductAttention_{attention}/"
    return [
        *norm(f"{OURS}norm1", f"{BLOCK}LayerNorm_0"),
        *kernel(f"{OURS}attention.qkv", heads + "{query|key|value}", HEADS, HEADS_BIAS),
        *kernel(f"{OURS}attention.out", heads + "out", UNHEADS),
        *norm(f"{OURS}norm2", f"{BLOCK}LayerNorm_{second}"),
        *kernel(f"{OURS}mlp.up", f"{BLOCK}MlpBlock_{mlp}/Dense_0"),
        *kernel(f"{OURS}mlp.down", f"{BLOCK}MlpBlock_{mlp}/Dense_1"),
    ]


def group_norm(ours: str, theirs: str) -> list[Row]:
    """Rows of a GroupNorm, in either form."""
    return norm(ours, theirs, CHANNELS) + norm(ours, theirs)


PRE_LINEN, LINEN = block(second=2, attention=1, mlp=3), block(second=1, attention=0, mlp=0)
ENDS = [  # of every ViT, before and after its blocks
    Row("class_token", "cls"),
    *kernel("patch", "embedding", CONV),
    *norm("norm", "Transformer/encoder_norm"),
    *kernel("hidden", "pre_logits"),
    *kernel("head", "head"),
]
UNIT = "block{+}/unit{+}/"
STEM = [
    *kernel("stem.conv", "conv_root", CONV, None),
    *group_norm("stem.norm", "gn_root"),
    *(
        row
        for i in (1, 2, 3)
        for row in kernel(f"stem.stages.{{}}.{{}}.conv{i}", f"{UNIT}conv{i}", CONV, None)
        + group_norm(f"stem.stages.{{}}.{{}}.norm{i}", f"{UNIT}gn{i}")
    ),
    *kernel("stem.stages.{}.{}.project", f"{UNIT}conv_proj", CONV, None),
    *group_norm("stem.stages.{}.{}.project_norm", f"{UNIT}gn_proj"),
]


def unstack(tensors: State) -> bool:
    """Scanned layers, whose first axis counts blocks, become blocks of their own, in place."""
    stacked = [name for name in tensors if name.startswith(STACKED)]
    for name in stacked:
        for i, tensor in enumerate(tensors.pop(name).unbind()):
            tensors[name.replace(STACKED, BLOCK.format(i))] = tensor
    return bool(stacked)


def stack(tensors: State) -> State:
    """The inverse of `unstack`."""
    layers: dict[str, dict[int, Tensor]] = {}
    out = {}
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"Transformer/encoderblock_(\d+)/(.*)", name):
            layers.setdefault(STACKED + found[2], {})[int(found[1])] = tensor
        else:
            out[name] = tensor
    return out | {k: torch.stack([v for _, v in sorted(d.items())]) for k, d in layers.items()}


def facts(seen: Seen) -> Facts:
    """What the original code does; the number of heads is in the shapes of projections."""
    heads = [s[1] for name, s in seen.shapes.items() if name.endswith("/query/kernel")]
    config = {"activation": "gelu_tanh", "norm_eps": 1e-6, "class_position": True}
    config |= {"heads": heads[0]} if heads else {}
    # Fine-tuning and evaluation squash pictures to the size, without antialias.
    how = {"resize": "squash", "interpolation": "bilinear", "antialias": False, **HALF}
    return Facts(config, how)


def _lacks(config: ViTConfig) -> list[Lack]:
    return lacks(config, {"hidden", "mean", "no class token", "stem", "rectangles"})


VIT = Format(
    name="google",
    table=(Row("positions", POSITIONS), *ENDS, *PRE_LINEN, *LINEN, *STEM),
    anchors=(POSITIONS, "embedding/kernel"),
    file="model.npz",
    suffixes=(".npz",),
    sep="/",
    computes={
        "activation": "gelu_tanh", "norm_eps": 1e-6,
        "stem": {"norm_eps": 1e-6, "standardize": "std", "standardize_eps": 1e-5},
    },
    facts=facts,
    lacks=_lacks,
    adapt=with_slot,
    unstack=unstack,
    stack=stack,
)  # fmt: skip

# BiT: units of ResNet v2, named after its TensorFlow modules


def _bit_unit() -> list[Row]:
    ours, theirs, rows = "stages.{}.{}.", "block{+}/unit{+0}/", []
    for i, letter in enumerate("abc", 1):
        conv, gn = f"{theirs}{letter}/standardized_conv2d", f"{theirs}{letter}/group_norm"
        rows += kernel(f"{ours}conv{i}", conv, CONV, None)
        rows += [
            Row(f"{ours}norm{i}.weight", f"{gn}/gamma"),
            Row(f"{ours}norm{i}.bias", f"{gn}/beta"),
        ]
    return rows + kernel(f"{ours}project", f"{theirs}a/proj/standardized_conv2d", CONV, None)


def _bit_facts(seen: Seen) -> Facts:
    # BiT-HyperRule: squash to 480 (128 for small pictures), bilinear.
    how = {"resize": "squash", "interpolation": "bilinear", "antialias": False, **HALF}
    config = {"norm_eps": 1e-5, "standardize": "var", "standardize_eps": 1e-10}
    return Facts(config, how)


BIT = Format(
    name="google",
    family="bit",
    table=(
        *kernel("conv", "root_block/standardized_conv2d", CONV, None),
        *_bit_unit(),
        Row("norm.weight", "group_norm/gamma"),
        Row("norm.bias", "group_norm/beta"),
        *kernel("head", "head/conv2d", POINT),
    ),
    anchors=("root_block/standardized_conv2d/kernel", "group_norm/gamma"),
    file="model.npz",
    suffixes=(".npz",),
    sep="/",
    prefix="resnet/",
    computes={"norm_eps": 1e-5, "standardize": "var", "standardize_eps": 1e-10},
    facts=_bit_facts,
    lacks=groups,
)
