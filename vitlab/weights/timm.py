"""timm's names (huggingface/pytorch-image-models): ViT, DeiT, DeiT III, MAE, DINOv2, hybrids, BiT.

A file of tensors (`.safetensors`, `.pth`), or a folder as on the hub: config.json names an
architecture of timm's and what differs from it. The original files of DINOv2, DeiT III and MAE
have the same names but for a few, which are read as well.
"""

import math
from typing import Any

from vitlab.models.resnet import BiTConfig
from vitlab.models.vit import ViTConfig
from vitlab.models.zoo import UNITS
from vitlab.weights.foreign import (
    HALF,
    IMAGENET,
    Beside,
    Facts,
    Format,
    Lack,
    Seen,
    State,
    groups,
    lacks,
    without_slot,
)
from vitlab.weights.tables import SAME, Layout, Row

BLOCK = "blocks.{}."


def layer(ours: str, theirs: str, layout: Layout = SAME, bias: bool = True) -> list[Row]:
    """Rows of a torch layer: weight and bias."""
    rows = [Row(f"{ours}.weight", f"{theirs}.weight", layout)]
    return rows + ([Row(f"{ours}.bias", f"{theirs}.bias")] if bias else [])


STEM = "patch_embed.backbone."
UNIT = STEM + "stages.{}.blocks.{}."
TABLE = (
    Row("class_token", "cls_token"),
    Row("registers", "reg_token"),
    Row("registers", "register_tokens"),  # facebookresearch/dinov2
    Row("positions", "pos_embed"),
    *layer("patch", "patch_embed.proj"),
    *layer(f"{BLOCK}norm1", f"{BLOCK}norm1"),
    *layer(f"{BLOCK}attention.qkv", f"{BLOCK}attn.qkv"),
    *layer(f"{BLOCK}attention.out", f"{BLOCK}attn.proj"),
    *layer(f"{BLOCK}norm2", f"{BLOCK}norm2"),
    *layer(f"{BLOCK}mlp.up", f"{BLOCK}mlp.fc1"),
    *layer(f"{BLOCK}mlp.down", f"{BLOCK}mlp.fc2"),
    Row(f"{BLOCK}scale1", f"{BLOCK}ls1.gamma"),
    Row(f"{BLOCK}scale2", f"{BLOCK}ls2.gamma"),
    Row(f"{BLOCK}scale1", f"{BLOCK}gamma_1"),  # facebookresearch/deit
    Row(f"{BLOCK}scale2", f"{BLOCK}gamma_2"),
    *layer("norm", "norm"),
    *layer("norm", "fc_norm"),
    *layer("hidden", "pre_logits.fc"),  # before 0.6; later versions have no such layer
    *layer("head", "head"),
    *layer("stem.conv", f"{STEM}stem.conv", bias=False),
    *layer("stem.conv", f"{STEM}conv", bias=False),  # a stem without stages
    *layer("stem.norm", f"{STEM}stem.norm"),
    *layer("stem.norm", f"{STEM}norm"),
    *(
        row
        for i in (1, 2, 3)
        for row in layer(f"stem.stages.{{}}.{{}}.conv{i}", f"{UNIT}conv{i}", bias=False)
        + layer(f"stem.stages.{{}}.{{}}.norm{i}", f"{UNIT}norm{i}")
    ),
    *layer("stem.stages.{}.{}.project", f"{UNIT}downsample.conv", bias=False),
    *layer("stem.stages.{}.{}.project_norm", f"{UNIT}downsample.norm"),
)
REFUSED = (
    (r"(dist_token|head_dist)(\..*)?", "a distilled DeiT, with a second token and head"),
    (r"attn_pool\..*", "a MAP head (attention pooling)"),
    (r".*\.mlp\.(w12|w3|fc1_g|fc1_x|gate_proj)\..*", "a SwiGLU MLP"),
    (r".*\.attn\.(q_norm|k_norm)\..*", "norms of queries and keys"),
    (r"norm_pre\..*|pre_norm\..*", "a norm before the blocks, as CLIP has"),
    (r".*(rope|freqs|relative_position|rel_pos).*", "rotary or relative positions"),
    (r".*\.attn\.(q_proj|k_proj|v_proj|q_bias|v_bias)(\..*)?", "EVA or BEiT attention"),
    (r"patch_embed\.backbone\..*", "a stem that is no ResNet of the paper's"),
    (r"layers\.\d+\.(blocks|downsample)\..*", "a Swin Transformer"),
    (r"decoder_.*|decoder\..*", "the decoder of masked pre-training"),
)
CODE = {"activation": "gelu", "norm_eps": 1e-6}
STEM_CODE = {"norm_eps": 1e-5, "standardize": "var", "standardize_eps": 1e-8}
HYBRIDS = {  # units of each stage -> an architecture of timm's
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_base_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
CROPS = {"center": "crop", "squash": "squash", "border": "pad"}


def _facts(seen: Seen) -> Facts:
    found = Facts({**CODE, "stem": STEM_CODE})
    args, cfg = seen.config.get("model_args") or {}, seen.config.get("pretrained_cfg") or {}
    if "fc_norm.weight" in seen.shapes:
        found.config["norm"] = "after_pool"
    pool = {"avg": "mean", "token": "token"}.get(seen.config.get("global_pool", ""))
    if pool:
        found.config["pool"] = pool
    elif seen.config.get("global_pool"):
        raise ValueError(f"pooling {seen.config['global_pool']!r} is not one of vitlab's")
    if "num_heads" in args:
        found.config["heads"] = args["num_heads"]
    if act := args.get("act_layer"):
        if act not in ("gelu", "gelu_tanh"):
            raise ValueError(f"activation {act!r} is not one of vitlab's (gelu, gelu_tanh)")
        found.config["activation"] = act
    if args.get("norm_layer") not in (None, "layernorm"):
        raise ValueError(f"norm {args['norm_layer']!r} is not one of vitlab's (LayerNorm)")
    if args.get("init_values"):
        found.config["layer_scale"] = args["init_values"]
    size = args.get("img_size") or (cfg.get("input_size") or [])[1:]
    if size:
        found.config["image"] = size if isinstance(size, int) else tuple(size)
    found.preprocess = preprocess(cfg) if cfg.get("mean") else _guess(seen, found)
    names = seen.config.get("label_names") or cfg.get("label_names")
    if names:
        found.classes = tuple(map(str, names))
    found.licence = cfg.get("license")
    return found


def preprocess(cfg: dict[str, Any]) -> dict[str, Any]:
    """Fields of ours from timm's `pretrained_cfg`."""
    interpolation = cfg.get("interpolation", "bicubic")
    return {
        "resize": CROPS[cfg.get("crop_mode") or "center"],
        "crop": cfg.get("crop_pct") or 0.875,
        "interpolation": "bicubic" if interpolation == "random" else interpolation,
        "mean": tuple(cfg["mean"]),
        "std": tuple(cfg["std"]),
    }


def _guess(seen: Seen, found: Facts) -> dict[str, Any]:
    """Preprocessing of a file that says nothing of it, by what only certain families have."""
    scaled = any(n.startswith(("blocks.0.ls1.", "blocks.0.gamma_")) for n in seen.shapes)
    if scaled or "fc_norm.weight" in seen.shapes:
        whose, how = "DINOv2, DeiT III and MAE", {"crop": 1.0 if scaled else 0.875, **IMAGENET}
    else:
        whose, how = "timm's own ViTs (DeiT takes ImageNet's mean and std)", {"crop": 0.9, **HALF}
    found.notes.append(f"preprocessing is not in the file: taken as that of {whose}")
    return {"interpolation": "bicubic", **how}


def _lacks(config: ViTConfig) -> list[Lack]:
    holds = {
        "registers", "layer_scale", "mean", "mean beside class", "norm after pooling",
        "no class token", "stem", "rectangles",
    }  # fmt: skip
    return lacks(config, holds)


def _adapt(config: ViTConfig, state: State) -> tuple[ViTConfig, State, list[str]]:
    # A table has rows for the class token and registers, or for neither.
    return without_slot(config, state) if config.registers else (config, state, [])


def _style(config: ViTConfig) -> dict[str, int]:
    after = int(config.norm == "after_pool")
    bare = int(config.stem is not None and not config.stem.layers)
    return {
        "norm.weight": after, "norm.bias": after,
        "stem.conv.weight": bare, "stem.norm.weight": bare, "stem.norm.bias": bare,
    }  # fmt: skip


def _beside(b: Beside) -> dict[str, dict[str, Any]]:
    c: ViTConfig = b.config
    if c.stem and (c.stem.layers not in HYBRIDS or c.stem.width != 64):
        raise ValueError(
            f"timm has no hybrid with a stem of layers {c.stem.layers}, width {c.stem.width};"
            " its names alone can be written, to a .safetensors file"
        )
    architecture = HYBRIDS[c.stem.layers] if c.stem else _architecture(c)
    after = c.norm == "after_pool"
    args: dict[str, Any] = {
        "img_size": list(c.image), "embed_dim": c.width, "depth": c.depth, "num_heads": c.heads,
        "mlp_ratio": _ratio(c.mlp_width, c.width), "act_layer": c.activation,
        "class_token": c.class_token, "no_embed_class": not (c.class_token and c.class_position),
        "reg_tokens": c.registers, "init_values": c.layer_scale or None, "fc_norm": after,
        "global_pool": "avg" if c.pool == "mean" else "token",
        "patch_size": c.patch[0] if c.patch[0] == c.patch[1] else list(c.patch),
    }  # fmt: skip
    return {
        "config.json": hub_config(b, architecture, args, c.features, "patch_embed.proj", "head")
    }


def hub_config(
    b: Beside, architecture: str, args: dict[str, Any], features: int, first: str, head: str
) -> dict[str, Any]:
    """config.json as timm writes it to the hub."""
    p = b.preprocess
    modes = {ours: theirs for theirs, ours in CROPS.items()}
    return {
        "architecture": architecture,
        "num_classes": b.config.classes,
        "num_features": features,
        **({"label_names": list(b.classes)} if b.classes else {}),
        **({"global_pool": args["global_pool"]} if "global_pool" in args else {}),
        "model_args": args,
        "pretrained_cfg": {
            "tag": "vitlab", "custom_load": False, "input_size": [3, *b.config.image],
            "fixed_input_size": "img_size" in args,
            "interpolation": p.interpolation, "crop_pct": p.crop,
            "crop_mode": modes[p.resize], "mean": list(p.mean), "std": list(p.std),
            "num_classes": b.config.classes, "pool_size": None, "first_conv": first,
            "classifier": head,
        },
        "vitlab": b.record,
    }  # fmt: skip


def _architecture(c: ViTConfig) -> str:
    """The published architecture of a width, or of the nearest; `model_args` says the rest."""
    sizes = {192: "tiny_patch16", 384: "small_patch16", 768: "base_patch16", 1024: "large_patch16"}
    size = sizes.get(c.width, "huge_patch14" if c.width == 1280 else "base_patch16")
    return f"vit_{size}_224"


def _ratio(hidden: int, width: int) -> float:
    """A ratio with which `int(width * ratio)` gives the hidden size."""
    ratio = hidden / width
    while int(width * ratio) < hidden:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


VIT = Format(
    name="timm",
    table=TABLE,
    anchors=("patch_embed.proj.weight",),
    file="model.safetensors",
    suffixes=(".safetensors", ".pth", ".pt", ".bin"),
    refused=REFUSED,
    aside=("mask_token",),
    computes={**CODE, "stem": STEM_CODE},
    told=("activation", "heads", "image", "layer_scale", "pool", "norm"),
    facts=_facts,
    lacks=_lacks,
    adapt=_adapt,
    style=_style,
    beside=_beside,
)

# BiT

BIT_CODE = {"norm_eps": 1e-5, "standardize": "var", "standardize_eps": 1e-8}
POINT = Layout(lambda t: t[0].flatten(1), lambda t, k: [t[:, :, None, None]], 4)  # 1 x 1
BITS = {  # units of each stage, channels of the root -> an architecture of timm's
    (UNITS[f"r{depth}"], 64 * factor): f"resnetv2_{depth}x{factor}_bit"
    for depth, factor in ((50, 1), (50, 3), (101, 1), (101, 3), (152, 2), (152, 4))
}
BIT_UNIT = "stages.{}.blocks.{}."


def _bit_facts(seen: Seen) -> Facts:
    cfg = seen.config.get("pretrained_cfg") or {}
    size = (cfg.get("input_size") or [3, 224, 224])[1:]
    return Facts(
        {**BIT_CODE, "image": tuple(size)},
        preprocess(cfg if cfg.get("mean") else {"crop_pct": 0.875, **HALF}),
        tuple(map(str, seen.config.get("label_names") or ())) or None,
        cfg.get("license"),
    )


def _bit_beside(b: Beside) -> dict[str, dict[str, Any]]:
    c: BiTConfig = b.config
    architecture = BITS.get((c.layers, c.width))
    if architecture is None:
        raise ValueError(
            f"timm has no BiT with layers {c.layers}, width {c.width}; its names alone can be"
            " written, to a .safetensors file"
        )
    return {"config.json": hub_config(b, architecture, {}, c.features, "stem.conv", "head.fc")}


BIT = Format(
    name="timm",
    family="bit",
    table=(
        *layer("conv", "stem.conv", bias=False),
        *(
            row
            for i in (1, 2, 3)
            for row in layer(f"stages.{{}}.{{}}.conv{i}", f"{BIT_UNIT}conv{i}", bias=False)
            + layer(f"stages.{{}}.{{}}.norm{i}", f"{BIT_UNIT}norm{i}")
        ),
        *layer("stages.{}.{}.project", f"{BIT_UNIT}downsample.conv", bias=False),
        *layer("norm", "norm"),
        *layer("head", "head.fc", POINT),
    ),
    anchors=("stem.conv.weight", "stages.0.blocks.0.conv1.weight", "norm.weight"),
    file="model.safetensors",
    suffixes=(".safetensors", ".pth", ".pt", ".bin"),
    computes=BIT_CODE,
    facts=_bit_facts,
    lacks=groups,
    beside=_bit_beside,
)
