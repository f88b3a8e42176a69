"""Names of published Vision Transformers and what they stand for (Table 1; AugReg for Ti and S)."""

import difflib
import re
from dataclasses import fields, replace
from typing import Any

from vitlab.models.vit import ViT, ViTConfig

SIZES: dict[str, dict[str, Any]] = {  # variant -> D, L, MLP, k
    "ti": {"width": 192, "depth": 12, "mlp_width": 768, "heads": 3},
    "s": {"width": 384, "depth": 12, "mlp_width": 1536, "heads": 6},
    "b": {"width": 768, "depth": 12, "mlp_width": 3072, "heads": 12},
    "l": {"width": 1024, "depth": 24, "mlp_width": 4096, "heads": 16},
    "h": {"width": 1280, "depth": 32, "mlp_width": 5120, "heads": 16},
}
MODELS: dict[str, ViTConfig] = {
    f"vit-{size}{patch}": ViTConfig(patch=(patch, patch), **SIZES[size])
    for size, patch in [
        ("ti", 16), ("s", 16), ("s", 32), ("b", 8), ("b", 16), ("b", 32),
        ("l", 16), ("l", 32), ("h", 14),
    ]
}  # fmt: skip
FOREIGN = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h"}


def find(name: str) -> str:
    """Our name of a model, from ours or a usual foreign spelling.

    `ViT-B/16`, `ViT-B_16`, `vit_base_patch16_224`, `vit_b_16`, `google/vit-base-patch16-224`
    all give `vit-b16`. Raises ValueError with the nearest known name.
    """
    if name in MODELS:
        return name
    plain = re.sub(r"^.*/(?=vit)", "", name.lower()).partition(".")[0]
    match = re.fullmatch(
        r"vit[-_](tiny|small|base|large|huge|ti|s|b|l|h)[-_/]?(?:patch)?(\d+)(?:[-_]\d{3})?", plain
    )
    if match:
        known = f"vit-{FOREIGN.get(match[1], match[1])}{match[2]}"
        if known in MODELS:
            return known
    near = difflib.get_close_matches(plain, MODELS, n=1, cutoff=0)[0]
    raise ValueError(f"unknown model {name!r}: did you mean {near}? (`vitlab models` lists all)")


def configure(name: str, **changes: Any) -> ViTConfig:
    """The configuration behind a name, with some fields changed (a field's None: unchanged)."""
    known = [f.name for f in fields(ViTConfig)]
    for key in changes:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0)[0]
            raise ValueError(f"unknown model option {key!r}: did you mean {near}?")
    return replace(MODELS[find(name)], **{k: v for k, v in changes.items() if v is not None})


def create(name: str, **changes: Any) -> ViT:
    """A freshly initialised model by name: `create("vit-b16", classes=10, image=384)`.

    Keyword arguments are fields of `ViTConfig`. Raises ValueError for an unknown name or field,
    or for values that do not fit together.
    """
    return ViT(configure(name, **changes))
