"""Hugging Face transformers: ViTModel, ViTForImageClassification, Dinov2Model, with registers too.

A folder: model.safetensors, config.json, preprocessor_config.json. Files on disk keep the names
of transformers 4; since 5.9 a model in memory has others, which a `state_dict()` that somebody
saved shows. Both are read, those of the disk are written.
"""

from typing import Any

from vitlab.models.vit import ViTConfig
from vitlab.weights.foreign import (
    HALF,
    IMAGENET,
    Beside,
    Facts,
    Format,
    Lack,
    Seen,
    State,
    lacks,
    share,
    with_slot,
)
from vitlab.weights.tables import THIRDS, Row
from vitlab.weights.timm import layer

BLOCK, DISK, MEMORY = "blocks.{}.", "encoder.layer.{}.", "layers.{}."
DINO = 2  # which of a block's rows DINOv2 has, counted from 0


def block(ours: str, vit: str, memory: str, dino: str) -> list[Row]:
    """Rows of a layer in a block: on disk, in memory, and in DINOv2."""
    theirs = (DISK + vit, MEMORY + memory, DISK + dino)
    return [row for name in theirs for row in layer(BLOCK + ours, name)]


def attention(theirs: str) -> list[Row]:
    """Rows of queries, keys and values, which lie apart."""
    ours = f"{BLOCK}attention.qkv"
    return [Row(f"{ours}.{leaf}", f"{theirs}.{leaf}", THIRDS) for leaf in ("weight", "bias")]


TABLE = (
    Row("class_token", "embeddings.cls_token"),
    Row("registers", "embeddings.register_tokens"),
    Row("positions", "embeddings.position_embeddings"),
    *layer("patch", "embeddings.patch_embeddings.projection"),
    *block("norm1", "layernorm_before", "layernorm_before", "norm1"),
    *attention(DISK + "attention.attention.{query|key|value}"),
    *attention(MEMORY + "attention.{q_proj|k_proj|v_proj}"),
    *attention(DISK + "attention.{q_proj|k_proj|v_proj}"),
    *block("attention.out", "attention.output.dense", "attention.o_proj", "attention.o_proj"),
    *block("norm2", "layernorm_after", "layernorm_after", "norm2"),
    *block("mlp.up", "intermediate.dense", "mlp.fc1", "mlp.fc1"),
    *block("mlp.down", "output.dense", "mlp.fc2", "mlp.fc2"),
    Row(f"{BLOCK}scale1", f"{DISK}layer_scale1.lambda1"),
    Row(f"{BLOCK}scale2", f"{DISK}layer_scale2.lambda1"),
    *layer("norm", "layernorm"),
    *layer("hidden", "pooler.dense"),
    *layer("head", "classifier"),
)
REFUSED = (
    (r".*\.mlp\.(weights_(in|out)|(gate|up|gate_up|down)_proj)\..*", "a SwiGLU MLP"),
    (r".*(distillation_token|distillation_classifier|cls_classifier).*", "a distilled DeiT"),
    (r"decoder\..*", "the decoder of masked pre-training"),
)
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
DEFAULTS: dict[str, dict[str, Any]] = {  # of their configurations, which need not be written out
    "vit": {"layer_norm_eps": 1e-12},
    "dinov2": {"layer_norm_eps": 1e-6},
    "dinov2_with_registers": {"layer_norm_eps": 1e-6},
}


def _kind(scaled: bool, registers: bool) -> str:
    return "vit" if not scaled else "dinov2_with_registers" if registers else "dinov2"


def _facts(seen: Seen) -> Facts:
    scaled = any(name.endswith("layer_scale1.lambda1") for name in seen.shapes)
    kind = _kind(scaled, "embeddings.register_tokens" in seen.shapes)
    c = {**DEFAULTS[kind], **seen.config}
    found = Facts()
    if (said := c.get("model_type", kind)) not in DEFAULTS:
        raise ValueError(f"model type {said!r} is not read; {', '.join(DEFAULTS)} are")
    if c.get("use_swiglu_ffn"):
        raise ValueError("a SwiGLU MLP (use_swiglu_ffn), which vitlab's models do not have")
    if c.get("qkv_bias") is False:
        raise ValueError("queries, keys and values without bias (qkv_bias), which vitlab's have")
    if scaled and "classifier.weight" in seen.shapes:
        raise ValueError(
            "Dinov2ForImageClassification's classifier reads the class token and the mean of the"
            " patches side by side, which vitlab's head does not; drop 'classifier.*' to leave it"
        )
    act = c.get("hidden_act", "gelu")
    if act not in ACTIVATIONS or c.get("pooler_act", "tanh") != "tanh":
        raise ValueError(f"activation {act!r} (pooler {c.get('pooler_act', 'tanh')!r}) is unknown")
    found.config = {"activation": ACTIVATIONS[act], "norm_eps": float(c["layer_norm_eps"])}
    found.config["class_position"] = True
    for theirs, ours in (
        ("num_attention_heads", "heads"), ("image_size", "image"),
        ("layerscale_value", "layer_scale"), ("hidden_dropout_prob", "dropout"),
    ):  # fmt: skip
        if c.get(theirs):
            found.config[ours] = tuple(c[theirs]) if isinstance(c[theirs], list) else c[theirs]
    if not seen.config:
        found.notes.append(
            f"no config.json: erf GELU and norm eps {c['layer_norm_eps']} taken, as transformers'"
        )
    if labels := c.get("id2label"):
        if not isinstance(labels, dict):
            raise ValueError(f"id2label is a {type(labels).__name__}, not names by number")
        found.classes = tuple(str(labels[i]) for i in sorted(labels, key=int))
    if seen.processor:
        found.preprocess = preprocess(seen.processor)
        cut = _crop(seen.processor)
        if cut and c.get("image_size") not in (None, cut):
            found.notes.append(
                f"its processor crops to {cut} px, its positions are for {c['image_size']}:"
                f" image={cut} would resample them"
            )
    else:
        found.notes.append("no preprocessor_config.json: the usual preprocessing taken")
        half = {"resize": "squash", "interpolation": "bilinear", **HALF}
        found.preprocess = half if kind == "vit" else {"crop": 224 / 256, **IMAGENET}
    return found


def _crop(p: Any) -> int:
    """The side of the crop that a processor cuts; 0: none."""
    crop = p.get("crop_size") or 0
    return crop.get("height", 0) if isinstance(crop, dict) else crop


def preprocess(p: Any) -> dict[str, Any]:
    """Fields of ours from preprocessor_config.json."""
    size, crop = p.get("size") or {}, p.get("crop_size") or {}
    size = size if isinstance(size, dict) else {"shortest_edge" if crop else "height": size}
    side = size.get("shortest_edge") or size.get("height") or 0
    cut = _crop(p)
    cropped = p.get("do_center_crop") and 0 < cut < side
    plain = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    normalised = p.get("do_normalize", True)
    return {
        "resize": "crop" if "shortest_edge" in size else "squash",
        "crop": share(cut, side) if cropped else 1.0,
        "interpolation": RESAMPLE.get(p.get("resample", 2), "bilinear"),
        **({"mean": tuple(p["image_mean"]), "std": tuple(p["image_std"])} if normalised else plain),
    }


def _lacks(config: ViTConfig) -> list[Lack]:
    c = config
    found = lacks(c, {"registers", "layer_scale", "hidden", "rectangles"})
    if c.head_hidden and c.classes:
        found.append(Lack("the tanh layer before a head", "hidden.*", {"head_hidden": 0}))
    if c.registers and not c.layer_scale:
        found.append(Lack("registers without LayerScale", "registers", {"registers": 0}))
    if c.layer_scale and c.classes:
        found.append(Lack("a head on DINOv2's class token alone", "head.*", {"classes": 0}))
    if c.layer_scale and c.head_hidden:
        found.append(Lack("DINOv2 with a tanh layer", "hidden.*", {"head_hidden": 0}))
    if c.layer_scale and c.mlp_width % c.width:
        found.append(Lack("an MLP that is no multiple of the width"))
    return found


def _adapt(config: ViTConfig, state: State) -> tuple[ViTConfig, State, list[str]]:
    config, state, notes = with_slot(config, state)
    if not (config.classes or config.head_hidden or config.layer_scale):
        notes.append(
            "no pooler: ViTModel.from_pretrained(..., add_pooling_layer=False), or transformers"
            " adds a random one"
        )
    return config, state, notes


def _style(config: ViTConfig) -> dict[str, int]:
    if not config.layer_scale:
        return {}
    layers = ("norm1", "norm2", "mlp.up", "mlp.down")
    return {f"{BLOCK}{layer}.{leaf}": DINO for layer in layers for leaf in ("weight", "bias")}


def _wants(config: ViTConfig) -> dict[str, tuple[int, ...]]:
    return {"embeddings.mask_token": (1, config.width)} if config.registers else {}


def _base(config: ViTConfig) -> str:
    return "vit." if config.classes else ""


def _beside(b: Beside) -> dict[str, dict[str, Any]]:
    c: ViTConfig = b.config
    kind = _kind(bool(c.layer_scale), bool(c.registers))
    classes = {"vit": "ViT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
    square = {n: v[0] if v[0] == v[1] else list(v) for n, v in (("i", c.image), ("p", c.patch))}
    config: dict[str, Any] = {
        "architectures": [classes[kind] + ("ForImageClassification" if c.classes else "Model")],
        "model_type": kind, "hidden_size": c.width, "num_hidden_layers": c.depth,
        "num_attention_heads": c.heads, "image_size": square["i"], "patch_size": square["p"],
        "num_channels": 3, "qkv_bias": True, "layer_norm_eps": c.norm_eps,
        "hidden_act": "gelu" if c.activation == "gelu" else "gelu_pytorch_tanh",
        "hidden_dropout_prob": c.dropout, "vitlab": b.record,
    }  # fmt: skip
    if c.layer_scale:
        config |= {"mlp_ratio": c.mlp_width // c.width, "layerscale_value": c.layer_scale}
        if c.registers:
            config["num_register_tokens"] = c.registers
        else:
            config["use_mask_token"] = bool(b.aside)
    else:
        config["intermediate_size"] = c.mlp_width
    if c.head_hidden:
        config |= {"pooler_output_size": c.head_hidden, "pooler_act": "tanh"}
    if c.classes:
        config["id2label"] = {str(i): name for i, name in enumerate(b.classes)}
        config["label2id"] = {name: i for i, name in enumerate(b.classes)}
    return {"config.json": config, "preprocessor_config.json": processor(b.preprocess)}


def processor(p: Any) -> dict[str, Any]:
    """preprocessor_config.json."""
    (h, w), numbers = p.size, {name: number for number, name in RESAMPLE.items()}
    common = {
        "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "resample": numbers[p.interpolation], "image_mean": list(p.mean), "image_std": list(p.std),
    }  # fmt: skip
    if p.resize == "squash" and p.crop == 1:
        kind = {"image_processor_type": "ViTImageProcessor", "size": {"height": h, "width": w}}
        return {**kind, **common}
    # The shorter side, then the middle: of rectangles only nearly what `Preprocess` does.
    return {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": int(min(h, w) / p.crop)},
        "do_center_crop": True, "crop_size": {"height": h, "width": w}, "do_convert_rgb": True,
        **common,
    }  # fmt: skip


VIT = Format(
    name="huggingface",
    table=TABLE,
    anchors=("embeddings.patch_embeddings.projection.weight",),
    file="model.safetensors",
    suffixes=(),
    bases=("vit.", "dinov2.", "dinov2_with_registers.", ""),
    refused=REFUSED,
    aside=("embeddings.mask_token",),
    told=(
        "activation", "norm_eps", "heads", "image", "dropout", "layer_scale", "pool", "norm",
    ),
    resizes=("crop", "squash"),
    restyles=False,
    wants=_wants,
    facts=_facts,
    lacks=_lacks,
    adapt=_adapt,
    style=_style,
    base=_base,
    beside=_beside,
)  # fmt: skip
