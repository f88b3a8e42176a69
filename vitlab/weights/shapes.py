"""From shapes of tensors to a configuration, and back. Names of files are never parsed."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitlab.models.basics import pair
from vitlab.models.resnet import BiTConfig, StemConfig
from vitlab.models.vit import ViTConfig
from vitlab.models.zoo import SIZES, Config, Model, build

HEADS = {size["width"]: size["heads"] for size in SIZES.values()}  # of the published widths


def vit(
    ours: Mapping[str, Tensor], facts: Mapping[str, Any], asked: Mapping[str, Any]
) -> tuple[ViTConfig, list[str]]:
    """The configuration of a ViT's tensors, and what had to be assumed.

    Args:
        ours: tensors under our names.
        facts: fields that tensors do not tell; `image` is that of the position table.
        asked: fields that the caller insists on; `image` is the size wanted.

    Raises ValueError where something is missing, or where fields and tensors disagree.
    """
    notes = []
    for name in ("patch.weight", "positions", "blocks.0.mlp.up.weight"):
        if name not in ours:
            raise ValueError(f"there is no {name}, without which sizes are unknown")
    fields = {**facts, **{k: v for k, v in asked.items() if k != "image"}}
    width, _, *patch = ours["patch.weight"].shape
    fields |= {
        "patch": tuple(patch),
        "width": width,
        "depth": count(ours, r"blocks\.(\d+)\..*"),
        "mlp_width": ours["blocks.0.mlp.up.weight"].shape[0],
        "classes": ours["head.weight"].shape[0] if "head.weight" in ours else 0,
        "head_hidden": ours["hidden.weight"].shape[0] if "hidden.weight" in ours else 0,
        "registers": ours["registers"].shape[-2] if "registers" in ours else 0,
        "class_token": "class_token" in ours,
        "layer_scale": (fields.get("layer_scale") or 1.0) if "blocks.0.scale1" in ours else 0.0,
    }
    stem, stride = fields.pop("stem", {}), 1
    if "stem.conv.weight" in ours:
        fields["stem"] = _stem(ours, stem)
        stride = fields["stem"].stride
    if "heads" not in fields:
        fields["heads"] = _heads(width)
        notes.append(f"{fields['heads']} heads, as published for width {width}")
    after = fields.get("norm") == "after_pool"
    fields.setdefault("pool", "mean" if after or not fields["class_token"] else "token")
    if asked.get("pool") == "token" and after:
        raise ValueError(
            "pool=token was asked for, but the checkpoint is mean-pooled (avg):"
            " its last norm stands after the pooling"
        )
    if fields["pool"] == "token" and not fields["class_token"]:
        raise ValueError("pool=token was asked for, but the checkpoint has no class token")
    step = (patch[0] * stride, patch[1] * stride)
    rows, tokens = ours["positions"].shape[-2], int(fields["class_token"])
    told = fields.get("class_position")  # of the class token: has it a row in the table?
    slots = (tokens, 0) if told is None else (tokens if told else 0,)
    grid = _known(rows, slots, fields.get("image"), step)
    if grid is None and (grid := _square(rows, slots)) and slots[0] > rows - math.prod(grid):
        notes.append(f"{rows} positions: {grid[0]} x {grid[1]}, none of them the class token's")
    grid = grid or _known(rows, slots, asked.get("image"), step)
    if grid is None:
        distilled = tokens and math.isqrt(rows - 2) ** 2 == rows - 2
        raise ValueError(
            f"a position table of {rows} rows is no square grid, with or without a class token;"
            + (" two more than a square are a distilled DeiT, which is not read" if distilled else
               " say the image size it is for: stored=(h, w)")
        )  # fmt: skip
    fields["image"] = (grid[0] * step[0], grid[1] * step[1])
    fields["class_position"] = not tokens or rows > math.prod(grid)
    return ViTConfig(**fields), notes


def bit(
    ours: Mapping[str, Tensor], facts: Mapping[str, Any], asked: Mapping[str, Any]
) -> tuple[BiTConfig, list[str]]:
    """As `vit`, of a BiT ResNet."""
    asked = {k: v for k, v in asked.items() if k != "image"}
    for name in asked.keys() - {"norm_eps"}:
        raise ValueError(f"a BiT ResNet has no {name}")
    if "conv.weight" not in ours:
        raise ValueError("there is no conv.weight, without which sizes are unknown")
    classes = ours["head.weight"].shape[0] if "head.weight" in ours else 0
    width = int(ours["conv.weight"].shape[0])
    fields = {**facts, **asked, "classes": classes, "width": width, "layers": _stages(ours)}
    return BiTConfig(**fields), []


def _heads(width: int) -> int:
    if width not in HEADS:
        raise ValueError(
            f"the number of heads is not in the file, and width {width} is none of the published"
            f" ones: say it (heads={max(1, width // 64)} would make them {min(width, 64)} wide)"
        )
    return int(HEADS[width])


def _stem(ours: Mapping[str, Tensor], facts: Mapping[str, Any]) -> StemConfig:
    width = int(ours["stem.conv.weight"].shape[0])
    return StemConfig(**{**facts, "layers": _stages(ours, r"stem\."), "width": width})


def _known(
    rows: int, slots: Sequence[int], image: int | tuple[int, int] | None, step: tuple[int, int]
) -> tuple[int, int] | None:
    """The grid of an image size, if a table of so many rows can be of it."""
    if image is None:
        return None
    h, w = (side // s for side, s in zip(pair(image), step, strict=True))
    return (h, w) if rows - h * w in slots else None


def _square(rows: int, slots: Sequence[int]) -> tuple[int, int] | None:
    """The square grid behind a table, with so many rows for the class token."""
    for slot in slots:
        side = math.isqrt(max(rows - slot, 0))
        if side and side**2 == rows - slot:
            return side, side
    return None


def _stages(ours: Mapping[str, Tensor], prefix: str = "") -> tuple[int, ...]:
    stages = count(ours, rf"{prefix}stages\.(\d+)\..*")
    return tuple(count(ours, rf"{prefix}stages\.{i}\.(\d+)\..*") for i in range(stages))


class _Still(TorchFunctionMode):
    """Draws no random numbers. On tensors without memory that would load half of torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def skeleton(config: Config) -> Model:
    """A model of names and shapes alone, to be filled by `load_state_dict(..., assign=True)`."""
    with torch.device("meta"), _Still():
        return build(config)


def count(names: Mapping[str, Any], pattern: str) -> int:
    """One more than the largest number that a pattern finds in names."""
    found = (re.fullmatch(pattern, name) for name in names)
    return max((int(m[1]) + 1 for m in found if m), default=0)
