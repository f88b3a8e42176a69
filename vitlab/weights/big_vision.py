"""`.npz` files of google-research/big_vision.

As those of vision_transformer, but the position table stands by itself and is added before the
class token is put in front: it has no row for that token. Old files have one, or another name.
"""

from vitlab.models.vit import ViTConfig
from vitlab.weights import google
from vitlab.weights.foreign import HALF, Facts, Format, Lack, Seen, lacks, without_slot
from vitlab.weights.tables import Row

TABLE = (
    Row("positions", "pos_embedding"),
    Row("positions", "Transformer/pos_embedding"),  # before 2022
    *google.ENDS,
    *google.LINEN,
    *google.PRE_LINEN,
)


def _facts(seen: Seen) -> Facts:
    found = google.facts(seen)
    del found.config["class_position"]  # old files have a row for it
    # resize_small(256), central_crop(224): by area, to which antialiased bilinear is nearest.
    found.preprocess = {"resize": "crop", "crop": 0.875, "interpolation": "bilinear", **HALF}
    return found


def _lacks(config: ViTConfig) -> list[Lack]:
    return lacks(config, {"hidden", "mean", "no class token", "rectangles"})


VIT = Format(
    name="big_vision",
    table=TABLE,
    anchors=("embedding/kernel", "Transformer/encoder_norm/scale"),
    file="model.npz",
    suffixes=(".npz",),
    sep="/",
    prefix="params/",
    refused=(
        (r"MAPHead_\d+/.*|probe", "a MAP head (attention pooling)"),
        (r"(Mixer|MixerBlock).*|pre_head_layer_norm/.*", "an MLP-Mixer"),
    ),
    computes={"activation": "gelu_tanh", "norm_eps": 1e-6},
    facts=_facts,
    lacks=_lacks,
    adapt=without_slot,
    unstack=google.unstack,
    stack=google.stack,
)
