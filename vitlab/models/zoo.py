"""Names of models and what they stand for: Table 1, its hybrids, BiT; AugReg for Ti and S."""

import difflib
import re
from dataclasses import fields, replace
from typing import Any

from vitlab.models.resnet import BiT, BiTConfig, StemConfig
from vitlab.models.vit import ViT, ViTConfig

Config = ViTConfig | BiTConfig
Model = ViT | BiT
FAMILIES: dict[str, tuple[type[Config], type[Model]]] = {
    "vit": (ViTConfig, ViT),
    "bit": (BiTConfig, BiT),
}
SIZES: dict[str, dict[str, Any]] = {  # variant -> D, L, MLP, k
    "ti": {"width": 192, "depth": 12, "mlp_width": 768, "heads": 3},
    "s": {"width": 384, "depth": 12, "mlp_width": 1536, "heads": 6},
    "b": {"width": 768, "depth": 12, "mlp_width": 3072, "heads": 12},
    "l": {"width": 1024, "depth": 24, "mlp_width": 4096, "heads": 16},
    "h": {"width": 1280, "depth": 32, "mlp_width": 5120, "heads": 16},
}
NANO: dict[str, Any] = {
    "image": (64, 64), "width": 224, "mlp_width": 896, "heads": 4, "classes": 200,
    "pool": "mean", "class_token": False,
}  # fmt: skip
UNITS: dict[str, tuple[int, ...]] = {  # depth of a ResNet -> units of each stage
    "r26": (2, 2, 2, 2),
    "r50": (3, 4, 6, 3),
    "r101": (3, 4, 23, 3),
    "r152": (3, 8, 36, 3),
    "r200": (3, 24, 36, 3),
}


def _hybrid(layers: tuple[int, ...], size: str, patch: int = 1) -> ViTConfig:
    return ViTConfig(patch=(patch, patch), stem=StemConfig(layers=layers), **SIZES[size])


MODELS: dict[str, Config] = {
    # The small model that ships, half as deep as Ti and a little wider, and a hybrid of its cost.
    "vit-nano8": ViTConfig(patch=(8, 8), depth=6, **NANO),
    "r-vit-nano8": ViTConfig(patch=(2, 2), depth=5, stem=StemConfig(layers=(1,)), **NANO),
    **{
        f"vit-{size}{patch}": ViTConfig(patch=(patch, patch), **SIZES[size])
        for size, patch in [
            ("ti", 16), ("s", 16), ("s", 32), ("b", 8), ("b", 16), ("b", 32),
            ("l", 16), ("l", 32), ("h", 14),
        ]
    },
    # The number at the end is the whole stride. For 16, the units of stage 4 go to stage 3
    # (section 4.1). R+Ti/16 is called so by its authors, though its stride is 4 x 8 = 32.
    "r-vit-ti16": _hybrid((), "ti", patch=8),
    "r26-vit-s32": _hybrid(UNITS["r26"], "s"),
    "r26-vit-b32": _hybrid(UNITS["r26"], "b"),
    "r50-vit-b16": _hybrid((3, 4, 9), "b"),
    "r50-vit-b32": _hybrid(UNITS["r50"], "b"),
    "r50-vit-l16": _hybrid((3, 4, 9), "l"),
    "r50-vit-l32": _hybrid(UNITS["r50"], "l"),
    **{
        f"bit-{depth}x{factor}": BiTConfig(layers=UNITS[depth], width=64 * factor)
        for depth, factor in [
            ("r50", 1), ("r50", 2), ("r101", 1), ("r101", 3),
            ("r152", 1), ("r152", 2), ("r152", 4), ("r200", 3),
        ]
    },
}  # fmt: skip
FOREIGN = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h"}
SIZE = "(tiny|small|base|large|huge|ti|s|b|l|h)"
SPELLINGS = [  # a whole name, in lower case -> ours
    (rf"vit[-_]{SIZE}[-_/]?(?:patch)?(\d+)(?:[-_]\d{{3}})?", "vit-{}{}"),
    (rf"(r\d*)[-_+]vit[-_]{SIZE}[-_/]?(\d+)(?:[-_]\d{{3}})?", "{}-vit-{}{}"),
    (rf"vit[-_]{SIZE}[-_](r\d*)[-_]s(\d+)(?:[-_]p8)?(?:[-_]\d{{3}})?", "{1}-vit-{0}{2}"),
    (r"bit[-_](?:[sml][-_])?(r\d+)x(\d)", "bit-{}x{}"),
    (r"resnetv2[-_](\d+)x(\d)[-_]bitm?(?:[-_].*)?", "bit-r{}x{}"),
]


def find(name: str) -> str:
    """Our name of a model, from ours or a usual foreign spelling.

    `ViT-B/16`, `ViT-B_16`, `vit_base_patch16_224`, `vit_b_16`, `google/vit-base-patch16-224`
    all give `vit-b16`; `R50+ViT-B_16` and `vit_base_r50_s16_384` give `r50-vit-b16`,
    `BiT-M-R50x1` and `resnetv2_50x1_bit` `bit-r50x1`. Raises ValueError with the nearest name.
    """
    plain = re.sub(r"^.*/(?=vit|r\d*\+|bit|resnetv2)", "", name.lower()).partition(".")[0]
    for spelling, ours in SPELLINGS:
        if match := re.fullmatch(spelling, plain):
            plain = ours.format(*(FOREIGN.get(group, group) for group in match.groups()))
            break
    if plain in MODELS:
        return plain
    near = difflib.get_close_matches(plain, MODELS, n=1, cutoff=0)[0]
    raise ValueError(f"unknown model {name!r}: did you mean {near}? (`vitlab models` lists all)")


def configure(name: str, **changes: Any) -> Config:
    """The configuration behind a name, with some fields changed (a field's None: unchanged)."""
    config = MODELS[find(name)]
    known = [f.name for f in fields(config)]
    of_any = {f.name for kind, _ in FAMILIES.values() for f in fields(kind)}
    for key, value in changes.items():
        if key not in known and not (value is None and key in of_any):
            near = difflib.get_close_matches(key, known, n=1, cutoff=0)[0]
            raise ValueError(f"unknown model option {key!r} of {name}: did you mean {near}?")
    return replace(config, **{k: v for k, v in changes.items() if v is not None})


def build(config: Config) -> Model:
    """A freshly initialised model of a configuration."""
    return BiT(config) if isinstance(config, BiTConfig) else ViT(config)


def create(name: str, **changes: Any) -> Model:
    """A freshly initialised model by name: `create("vit-b16", classes=10, image=384)`.

    Keyword arguments are fields of its configuration, `ViTConfig` or `BiTConfig`. Raises
    ValueError for an unknown name or field, or for values that do not fit together.
    """
    return build(configure(name, **changes))
