"""torchvision's VisionTransformer: the state dict that its published `.pth` files hold."""

from vitlab.models.vit import ViTConfig
from vitlab.weights.foreign import IMAGENET, Facts, Format, Lack, Seen, lacks, with_slot
from vitlab.weights.tables import Row
from vitlab.weights.timm import layer

OURS, THEIRS = "blocks.{}.", "encoder.layers.encoder_layer_{}."
FUSED = f"{THEIRS}self_attention.in_proj_"
TABLE = (
    Row("class_token", "class_token"),
    Row("positions", "encoder.pos_embedding"),
    *layer("patch", "conv_proj"),
    *layer(f"{OURS}norm1", f"{THEIRS}ln_1"),
    Row(f"{OURS}attention.qkv.weight", f"{FUSED}weight"),
    Row(f"{OURS}attention.qkv.bias", f"{FUSED}bias"),
    *layer(f"{OURS}attention.out", f"{THEIRS}self_attention.out_proj"),
    *layer(f"{OURS}norm2", f"{THEIRS}ln_2"),
    *layer(f"{OURS}mlp.up", f"{THEIRS}mlp.0"),
    *layer(f"{OURS}mlp.down", f"{THEIRS}mlp.3"),
    *layer(f"{OURS}mlp.up", f"{THEIRS}mlp.linear_1"),  # before 0.12
    *layer(f"{OURS}mlp.down", f"{THEIRS}mlp.linear_2"),
    *layer("norm", "encoder.ln"),
    *layer("hidden", "heads.pre_logits"),
    *layer("head", "heads.head"),
)


def _facts(seen: Seen) -> Facts:
    config = {"activation": "gelu", "norm_eps": 1e-6, "class_position": True}
    how = {"crop": 224 / 256, "interpolation": "bilinear", **IMAGENET}
    return Facts(config, how)


def _lacks(config: ViTConfig) -> list[Lack]:
    return lacks(config, {"hidden"})


VIT = Format(
    name="torchvision",
    table=TABLE,
    anchors=("conv_proj.weight", "encoder.pos_embedding"),
    file="model.pth",
    suffixes=(".pth", ".pt", ".bin", ".safetensors"),
    refused=((r"conv_proj\.conv_bn_relu_.*|conv_proj\.conv_last\..*", "a convolutional stem"),),
    computes={"activation": "gelu", "norm_eps": 1e-6},
    facts=_facts,
    lacks=_lacks,
    adapt=with_slot,
)
