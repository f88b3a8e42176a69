"""Features for dense heads: class token, registers and patch maps of any layers, in one pass.

A function over `model.layers`: no hooks and no state, gradients flow, and nothing is computed
behind the last layer that is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from vitlab.models.vit import ViT
from vitlab.models.zoo import Model


@dataclass(frozen=True, kw_only=True)
class Features:
    """The tokens of one layer, apart."""

    layer: int  # 0: what enters the first block; i: what leaves block i; L: what leaves the last
    class_token: Tensor | None  # [B, D]; None: the model has none
    registers: Tensor  # [B, R, D]; R is 0 in models without
    patches: Tensor  # [B, D, h, w], the grid as it lies in the image


def extract(
    model: Model, images: Tensor, layers: int | Sequence[int] = -1, *, norm: bool = True
) -> tuple[Features, ...]:
    """The features of some layers, as many as asked and in that order.

    The model stays in the mode, on the device and in the dtype that it has; for features that are
    not trained, call it in evaluation mode under `torch.inference_mode()`.

    Args:
        model: a Vision Transformer or a hybrid, whatever its head and pooling.
        images: [B, 3, H, W] of the model's size, normalised.
        layers: which of z_0 ... z_L, numbered as a sequence is: 0 is what enters the first block,
            i what leaves the i-th, -1 the last. This is how transformers numbers `hidden_states`;
            block i of timm and DINOv2, who count from 0, is layer i + 1.
        norm: apply the final LayerNorm to the tokens of every layer, as DINOv2's
            `get_intermediate_layers(norm=True)` does. Where it stands after pooling
            (`config.norm`), it was trained on means and not on tokens: there False is wiser.

    Raises ValueError for a model without tokens, a layer that there is not, or images that do not
    fit the model.
    """
    if not isinstance(model, ViT):
        raise ValueError(
            f"features of layers are those of a Vision Transformer, not of a {type(model).__name__}"
        )
    depth = model.config.depth
    asked = [layers] if isinstance(layers, int) else list(layers)
    if not asked:
        raise ValueError("no layer is asked for")
    for layer in asked:
        if not -depth - 1 <= layer <= depth:
            raise ValueError(
                f"there is no layer {layer}: the model has 0 to {depth}, or -{depth + 1} to -1"
            )
    wanted = [range(depth + 1)[layer] for layer in asked]
    passing = islice(model.layers(images), max(wanted) + 1)
    tokens = {i: z for i, z in enumerate(passing) if i in wanted}
    return tuple(_split(model, i, model.norm(tokens[i]) if norm else tokens[i]) for i in wanted)


def _split(model: ViT, layer: int, z: Tensor) -> Features:
    """z [B, N, D], taken apart."""
    c = model.config
    return Features(
        layer=layer,
        class_token=z[:, 0] if c.class_token else None,
        registers=z[:, int(c.class_token) : c.prefix],
        patches=z[:, c.prefix :].transpose(1, 2).unflatten(2, c.grid),  # row by row
    )
