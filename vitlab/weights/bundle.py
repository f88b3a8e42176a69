"""The bundle: a folder with all that using a model needs. A run is one, with its history."""

import difflib
import fnmatch
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitlab.data.preprocess import Preprocess as Preprocess
from vitlab.data.sources import printable
from vitlab.data.writing import utf8, written
from vitlab.models import zoo
from vitlab.models.vit import ViTConfig
from vitlab.weights.predictor import Prediction, predict

VERSION = 1
DEEPEST = 1000  # blocks of a model; a number damaged into a billion would be built for hours


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a bundle tells of itself beside model, preprocessing and classes."""

    task: str = "classification"  # or multi-label
    calibration: dict[str, Any] | None = None  # e.g. a temperature; None: as trained
    source: dict[str, Any] = field(default_factory=dict)  # where the weights came from
    data: dict[str, Any] = field(default_factory=dict)  # spec, split rule, seed, held-out ids
    metrics: dict[str, Any] = field(default_factory=dict)  # scores and what they were scored on


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A model with its preprocessing, class names and card."""

    model: zoo.Model
    preprocess: Preprocess
    classes: tuple[str, ...]  # names of the outputs; empty for a model without head
    card: Card = Card()

    def predict(self, images: Any, *, top: int = 5, batch: int = 32) -> list[Prediction]:
        """See `vitlab.predict`."""
        return predict(self, images, top=top, batch=batch)


def save(bundle: Bundle, path: str | os.PathLike[str], format: str = "vitlab") -> None:
    """Write a bundle's files into a folder: all of them, or what was there stays.

    Raises ValueError for a format that is not known, OSError if the disk refuses.
    """
    if format != "vitlab":
        raise ValueError(f"unknown format {format!r}: only vitlab is known")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        k.removeprefix("_orig_mod."): v.detach().to("cpu", copy=True).contiguous()
        for k, v in bundle.model.state_dict().items()  # of a compiled model: under its own names
    }
    config = folder / "config.json"
    # Renamed from the last to the first: a folder with a config.json is a whole bundle.
    with (
        written(config) as config_aside,
        written(folder / "README.md") as readme_aside,
        written(folder / "model.safetensors") as model_aside,
    ):
        config_aside.write_text(json.dumps(_config(bundle), indent=2) + "\n", encoding="utf-8")
        readme_aside.write_bytes(utf8(model_card(bundle)))
        save_file(tensors, model_aside, metadata={"format": "pt"})
        config.unlink(missing_ok=True)


def _config(bundle: Bundle) -> dict[str, Any]:
    config = bundle.model.config
    family = next(name for name, (kind, _) in zoo.FAMILIES.items() if kind is type(config))
    return {
        "format": "vitlab",
        "version": VERSION,
        "task": bundle.card.task,
        "model": {"family": family, **asdict(config)},
        "preprocess": asdict(bundle.preprocess),
        "classes": list(bundle.classes),
        **{k: v for k, v in asdict(bundle.card).items() if k != "task"},
    }


def load(path_or_name: str | os.PathLike[str], drop: Iterable[str] = ()) -> Bundle:
    """Read a bundle from its folder; the model is on the CPU, in evaluation mode.

    Args:
        path_or_name: the folder of a bundle or of a finished run.
        drop: patterns of tensor names (`head.*`) that keep their initial values instead.

    Raises FileNotFoundError if there is none, ValueError if it is damaged or does not fit.
    """
    folder = Path(path_or_name)
    if not (folder / "config.json").is_file():
        what = "an unfinished run" if (folder / "run.yaml").exists() else "no bundle"
        raise FileNotFoundError(f"{folder}: {what} (there is no config.json)")
    config = _read_config(folder / "config.json")
    try:
        shape = dict(config["model"])
        family = shape.pop("family")
        if family not in zoo.FAMILIES:
            raise ValueError(f"model family {family!r} is not known")
        kind, _ = zoo.FAMILIES[family]
        _check(shape, kind)
        _check(config["preprocess"], Preprocess)
        with torch.device("meta"):  # names and shapes alone, of whatever size
            model = zoo.build(kind(**shape))
        preprocess = Preprocess(**config["preprocess"])
        classes = config["classes"]
        if not _are_names(classes):
            raise ValueError("classes is no list of names")
        card = Card(**{f.name: config[f.name] for f in fields(Card) if f.name in config})
        for name in ("source", "data", "metrics"):
            if not isinstance(getattr(card, name), dict):
                raise ValueError(f"{name} is no mapping")
        if not _are_names(card.data.get("held_out_ids", [])):
            raise ValueError("held_out_ids is no list of names")
        if len(classes) != model.config.classes:
            raise ValueError(f"{len(classes)} class names for {model.config.classes} outputs")
        if len(set(classes)) != len(classes):
            raise ValueError("a class name occurs twice")
        if preprocess.size != model.config.image:
            raise ValueError(f"preprocess size {preprocess.size}, model {model.config.image}")
    except Exception as e:  # numbers of any size make torch raise errors of any kind
        reason = f"{e} is missing" if isinstance(e, KeyError) else str(e).partition("\n")[0][:300]
        raise ValueError(f"{folder / 'config.json'}: {reason or type(e).__name__}") from e
    tensors = _read_tensors(model, folder / "model.safetensors", tuple(drop))
    if len(tensors) < len(model.state_dict()):  # what was dropped keeps its initial values
        model = zoo.build(model.config)
        tensors = {**model.state_dict(), **tensors}
    model.load_state_dict(tensors, assign=True)
    return Bundle(model=model.eval(), preprocess=preprocess, classes=tuple(classes), card=card)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: damaged, not JSON ({e})") from e
    if not isinstance(config, dict) or config.get("format") != "vitlab":
        raise ValueError(f"{path}: not the configuration of a vitlab bundle")
    if config.get("version") != VERSION:
        version = printable(str(config.get("version")))
        raise ValueError(f"{path}: version {version}; this vitlab reads {VERSION}")
    return config


def _check(values: dict[str, Any], kind: type) -> None:
    """Refuse keys that a configuration does not have, and values of another type."""
    hints = get_type_hints(kind)
    for key, value in values.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1, cutoff=0)[0]
            raise ValueError(f"unknown key {key!r}: did you mean {near}?")
        inner = next((k for k in get_args(hints[key]) if is_dataclass(k)), None)
        if inner and isinstance(value, dict):
            _check(value, cast(type, inner))
        several = get_origin(hints[key]) is tuple
        hint = get_args(hints[key])[0] if several else hints[key]
        items = value if several and isinstance(value, list) else [value]
        if hint is bool and not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, not {value!r}")
        for item in items if hint in (int, float) else ():
            largest = {int: 2**63, float: sys.float_info.max}.get(type(item))
            if largest is None or not abs(item) <= largest:
                raise ValueError(f"{key} must be a number, not {item!r}")
            if hint is int and type(item) is float:
                raise ValueError(f"{key} must be a whole number, not {item!r}")
        if key in ("depth", "layers") and sum(items) > DEEPEST:
            raise ValueError(f"{key} must be at most {DEEPEST}, not {value!r}")


def _read_tensors(model: zoo.Model, path: Path, drop: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of a file, each of the name, shape and type that the model has."""
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: is missing") from None
    except (SafetensorError, OSError) as e:
        raise ValueError(
            f"{path}: damaged ({printable(str(e))}); restore it from where it came"
        ) from e

    def dropped(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in drop)

    own = {k: v for k, v in model.state_dict().items() if not dropped(k)}
    tensors = {k: v for k, v in tensors.items() if not dropped(k)}
    missing, extra = own.keys() - tensors.keys(), tensors.keys() - own.keys()
    if missing or extra:
        raise ValueError(
            f"{path}: does not fit its config.json (missing: {_some(missing)};"
            f" unknown: {_some(extra)})"
        )
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{path}: {name} has shape {list(tensor.shape)},"
                f" its config.json says {list(own[name].shape)}"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"{path}: {name} holds {tensor.dtype}, not floating-point numbers")
    # Copied: the file is only mapped into memory, at addresses that change how products round.
    return {k: v.to(own[k].dtype, copy=True) for k, v in tensors.items()}


def _some(names: Iterable[str]) -> str:
    return printable(", ".join(sorted(names)[:3])[:200]) or "none"


def sha256(path: Path) -> str:
    """Of a file's bytes, in hexadecimal."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def model_card(bundle: Bundle) -> str:
    """README.md: what the hub shows, and what a person wants to know first."""
    config, card = bundle.model.config, bundle.card
    parameters = sum(p.numel() for p in bundle.model.parameters())
    lines = [
        "---", "library_name: vitlab", "pipeline_tag: image-classification",
        "tags: [vision-transformer, image-classification]", "---", "",
        f"# {'Vision Transformer' if isinstance(config, ViTConfig) else 'BiT ResNet'},"
        f" {len(bundle.classes)} classes", "",
        f"{_describe(config)}, images {config.image[0]} x {config.image[1]} (H x W),"
        f" {parameters:,} parameters.", "",
    ]  # fmt: skip
    if card.data.get("spec"):
        lines += [f"Trained on `{card.data['spec']}`.", ""]
    if "top1" in card.metrics:
        low, high = card.metrics["top1_interval"]
        lines += [
            f"Accuracy {card.metrics['top1']:.2%} on {card.metrics['n']:,} pictures"
            f" ({card.metrics['scored_on']}; 95 % interval {low:.2%} to {high:.2%}).", "",
        ]  # fmt: skip
    shown = ", ".join(bundle.classes[:50]) + (", ..." if len(bundle.classes) > 50 else "")
    lines += [f"Classes: {shown}.", "", "```", "vitlab predict . picture.jpg", "```", ""]
    return "\n".join(lines)


def _describe(config: zoo.Config) -> str:
    if isinstance(config, ViTConfig):
        return (
            f"Width {config.width}, depth {config.depth}, {config.heads} heads, patch"
            f" {config.patch[0]} x {config.patch[1]}"
        )
    return f"Width {config.width}, units {', '.join(map(str, config.layers))}"
