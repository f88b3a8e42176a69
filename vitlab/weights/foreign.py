"""What a foreign format is: a table of names, and what names do not tell."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vitlab.models.resnet import BiTConfig
from vitlab.models.vit import ViTConfig
from vitlab.weights.tables import Row

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
State = dict[str, Tensor]


@dataclass(frozen=True)
class Seen:
    """What a format may look at beside the tensors themselves."""

    shapes: Mapping[str, tuple[int, ...]]  # of all tensors, under their names without prefix
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json
    processor: Mapping[str, Any] = field(default_factory=dict)  # preprocessor_config.json


@dataclass
class Facts:
    """What is known of a file beside its tensors."""

    config: dict[str, Any] = field(default_factory=dict)  # fields of our configuration
    preprocess: dict[str, Any] = field(default_factory=dict)  # fields of `Preprocess`, not size
    classes: tuple[str, ...] | None = None
    licence: str | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Lack:
    """Something of a configuration that a format has no place for."""

    reason: str
    tensors: str = ""  # pattern of our tensors that may be left out for it; "": none may
    without: Mapping[str, Any] = field(default_factory=dict)  # fields once they are


@dataclass(frozen=True, kw_only=True)
class Format:
    """One foreign format for one family of models."""

    name: str  # as `--to` says it
    family: str = "vit"
    table: tuple[Row, ...]
    anchors: tuple[str, ...]  # names in each of its files; what stands before them is a prefix
    file: str  # how its file in a folder is called
    suffixes: tuple[str, ...]  # of its files when they stand alone
    sep: str = "."  # between the parts of a name
    prefix: str = ""  # written before each name
    bases: tuple[str, ...] = ("",)  # what stands before the names of all tensors but the head's
    refused: tuple[tuple[str, str], ...] = ()  # pattern of a name -> what has such tensors
    aside: tuple[str, ...] = ()  # names of tensors that training alone reads
    wants: Callable[[Any], dict[str, tuple[int, ...]]] = lambda config: {}  # those its code expects
    computes: Mapping[str, Any] = field(default_factory=dict)  # fields that its code has fixed
    told: tuple[str, ...] = ()  # fields that the files beside the tensors tell
    resizes: tuple[str, ...] = ("crop", "squash", "pad")  # ways to resize that they tell
    restyles: bool = True  # does a file go back under the very names it came with

    facts: Callable[[Seen], Facts]  # what its files say, or its code does
    lacks: Callable[[Any], list[Lack]]  # what it has no place for
    adapt: Callable[[Any, State], tuple[Any, State, list[str]]] = lambda c, state: (c, state, [])
    style: Callable[[Any], dict[str, int]] = lambda config: {}  # which rows a model needs
    base: Callable[[Any], str] = lambda config: ""  # which of `bases` is written
    unstack: Callable[[State], bool] = lambda tensors: False  # in place; was it stacked?
    stack: Callable[[State], State] = lambda tensors: tensors
    beside: Callable[["Beside"], dict[str, dict[str, Any]]] | None = None  # JSON files, by name


@dataclass(frozen=True)
class Beside:
    """What the files beside the tensors are made from."""

    config: Any
    preprocess: Any
    classes: tuple[str, ...]
    record: dict[str, Any]  # what vitlab wants to find again
    aside: tuple[str, ...] = ()  # tensors that training alone reads


GROUPS = Lack("GroupNorms of other than 32 groups")  # which no shape shows

# What a ViT may have that a format may not: a test, its Lack
FEATURES: dict[str, tuple[Callable[[ViTConfig], bool], Lack]] = {
    "registers": (lambda c: c.registers > 0, Lack("registers", "registers", {"registers": 0})),
    "layer_scale": (lambda c: c.layer_scale != 0, Lack("LayerScale")),
    "hidden": (
        lambda c: c.head_hidden > 0,
        Lack("the tanh layer before the head", "hidden.*", {"head_hidden": 0}),
    ),
    "mean": (lambda c: c.pool == "mean", Lack("mean pooling")),
    "mean beside class": (
        lambda c: c.pool == "mean" and c.class_token,
        Lack("mean pooling in a model with a class token"),
    ),
    "norm after pooling": (lambda c: c.norm == "after_pool", Lack("a norm after pooling")),
    "no class token": (lambda c: not c.class_token, Lack("a model without class token")),
    "stem": (lambda c: c.stem is not None, Lack("the ResNet stem of a hybrid")),
    "groups": (lambda c: c.stem is not None and c.stem.groups != 32, GROUPS),
    "rectangles": (
        lambda c: c.image[0] != c.image[1] or c.patch[0] != c.patch[1],
        Lack("images or patches that are no squares"),
    ),
}


def lacks(config: ViTConfig, holds: Iterable[str]) -> list[Lack]:
    """What a format that holds only some of FEATURES has no place for."""
    held = set(holds)
    assert held <= FEATURES.keys()
    return [lack for name, (has, lack) in FEATURES.items() if name not in held and has(config)]


def groups(config: BiTConfig) -> list[Lack]:
    """What formats of BiT have no place for."""
    return [GROUPS] if config.groups != 32 else []


def with_slot(config: ViTConfig, state: State) -> tuple[ViTConfig, State, list[str]]:
    """For tables that have a row for the class token: a row of zeros, where ours has none."""
    if not config.class_token or config.class_position:
        return config, state, []
    table = state["positions"]
    table = torch.cat([table.new_zeros(1, 1, table.shape[2]), table], dim=1)
    note = "positions: a row of zeros is added for the class token, which has no position"
    return replace(config, class_position=True), {**state, "positions": table}, [note]


def without_slot(config: ViTConfig, state: State) -> tuple[ViTConfig, State, list[str]]:
    """For tables that have no such row: it is added to the class token."""
    if not config.class_token or not config.class_position:
        return config, state, []
    slot, table = state["positions"][:, :1], state["positions"][:, 1:]
    token = state["class_token"]
    token = token + slot if slot.any() else token  # -0 + 0 would lose its sign
    note = "class_token: its row of the position table is added to it; tokens agree to rounding"
    state = {**state, "positions": table, "class_token": token}
    return replace(config, class_position=False), state, [note]


def share(size: float, edge: float) -> float:
    """The `Preprocess.crop` with which a crop of `size` is cut from a picture of `edge`."""
    crop = min(size / edge, 1.0)
    while math.floor(size / crop) < math.floor(edge):  # 224 / (224 / 249) falls below 249
        crop = math.nextafter(crop, 0.0)
    return crop
