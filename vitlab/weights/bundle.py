"""The bundle: a folder with all that using a model needs. A run is one, with its history."""

import difflib
import fnmatch
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vitlab.data.preprocess import Preprocess
from vitlab.models.vit import ViT, ViTConfig
from vitlab.weights.predictor import Prediction, predict

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a bundle tells of itself beside model, preprocessing and classes."""

    task: str = "classification"
    calibration: dict[str, Any] | None = None  # e.g. a temperature; None: as trained
    source: dict[str, Any] = field(default_factory=dict)  # where the weights came from
    data: dict[str, Any] = field(default_factory=dict)  # spec, split rule, seed, held-out ids
    metrics: dict[str, Any] = field(default_factory=dict)  # scores and what they were scored on


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A model with its preprocessing, class names and card."""

    model: ViT
    preprocess: Preprocess
    classes: tuple[str, ...]  # names of the outputs; empty for a model without head
    card: Card = Card()

    def predict(self, images: Any, *, top: int = 5, batch: int = 32) -> list[Prediction]:
        """See `vitlab.predict`."""
        return predict(self, images, top=top, batch=batch)


def save(bundle: Bundle, path: str | os.PathLike[str], format: str = "vitlab") -> None:
    """Write a bundle's files into a folder; each is written aside and renamed.

    Raises ValueError for a format that is not known.
    """
    if format != "vitlab":
        raise ValueError(f"unknown format {format!r}: only vitlab is known")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        k: v.detach().to("cpu", copy=True).contiguous()
        for k, v in bundle.model.state_dict().items()
    }
    aside = folder / ".model.safetensors.part"
    save_file(tensors, aside, metadata={"format": "pt"})
    _settle(aside, folder / "model.safetensors")
    write_text(folder / "README.md", model_card(bundle))
    # Last, so that a folder with a config.json is a whole bundle.
    write_text(folder / "config.json", json.dumps(_config(bundle), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file aside, flush it to the disk and rename it: all of it or nothing."""
    aside = path.with_name(f".{path.name}.part")
    aside.write_text(text, encoding="utf-8")
    _settle(aside, path)


def _settle(aside: Path, path: Path) -> None:
    with open(aside, "rb+") as f:
        os.fsync(f.fileno())
    os.replace(aside, path)


def _config(bundle: Bundle) -> dict[str, Any]:
    return {
        "format": "vitlab",
        "version": VERSION,
        "task": bundle.card.task,
        "model": {"family": "vit", **asdict(bundle.model.config)},
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
        family = shape.pop("family", None)
        if family != "vit":
            raise ValueError(f"model family {family!r} is not known")
        _refuse_unknown(shape, ViTConfig)
        _refuse_unknown(config["preprocess"], Preprocess)
        model = ViT(ViTConfig(**shape))
        preprocess = Preprocess(**config["preprocess"])
        classes = tuple(map(str, config["classes"]))
        card = Card(**{f.name: config[f.name] for f in fields(Card) if f.name in config})
        if len(classes) != model.config.classes:
            raise ValueError(f"{len(classes)} class names for {model.config.classes} outputs")
        if preprocess.size != model.config.image:
            raise ValueError(f"preprocess size {preprocess.size}, model {model.config.image}")
    except (KeyError, TypeError, ValueError) as e:
        reason = f"{e} is missing" if isinstance(e, KeyError) else str(e)
        raise ValueError(f"{folder / 'config.json'}: {reason}") from e
    _read_tensors(model, folder / "model.safetensors", tuple(drop))
    return Bundle(model=model.eval(), preprocess=preprocess, classes=classes, card=card)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: damaged, not JSON ({e})") from e
    if not isinstance(config, dict) or config.get("format") != "vitlab":
        raise ValueError(f"{path}: not the configuration of a vitlab bundle")
    if config.get("version") != VERSION:
        raise ValueError(f"{path}: version {config.get('version')}; this vitlab reads {VERSION}")
    return config


def _refuse_unknown(values: dict[str, Any], kind: type) -> None:
    known = [f.name for f in fields(kind)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0)[0]
            raise ValueError(f"unknown key {key!r}: did you mean {near}?")


def _read_tensors(model: ViT, path: Path, drop: Sequence[str]) -> None:
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: is missing") from None
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{path}: damaged ({e}); restore it from where it came") from e
    tensors = {k: v for k, v in tensors.items() if not any(fnmatch.fnmatch(k, d) for d in drop)}
    own = model.state_dict()
    missing = [k for k in own if k not in tensors and not any(fnmatch.fnmatch(k, d) for d in drop)]
    extra = [k for k in tensors if k not in own]
    if missing or extra:
        raise ValueError(
            f"{path}: does not fit its config.json (missing: {', '.join(missing[:3]) or 'none'};"
            f" unknown: {', '.join(extra[:3]) or 'none'})"
        )
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{path}: {name} has shape {list(tensor.shape)},"
                f" its config.json says {list(own[name].shape)}"
            )
    model.load_state_dict({**own, **tensors})


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def model_card(bundle: Bundle) -> str:
    """README.md: what the hub shows, and what a person wants to know first."""
    config, card = bundle.model.config, bundle.card
    parameters = sum(p.numel() for p in bundle.model.parameters())
    lines = [
        "---", "library_name: vitlab", "pipeline_tag: image-classification",
        "tags: [vision-transformer, image-classification]", "---", "",
        f"# Vision Transformer, {len(bundle.classes)} classes", "",
        f"Width {config.width}, depth {config.depth}, {config.heads} heads, patch"
        f" {config.patch[0]} x {config.patch[1]}, images {config.image[0]} x {config.image[1]}"
        f" (H x W), {parameters:,} parameters.", "",
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
