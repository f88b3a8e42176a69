"""Every public form of a Vision Transformer's weights, in and out: `read`, `write`, `convert`.

The rules, for all formats: nothing is dropped or left random in silence. A tensor without a place,
in the model or in the file to write, is an error unless a `drop` pattern names it; a `Report`
tells what became of each.
"""

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from vitlab.data.writing import written
from vitlab.models.basics import pair, zero_
from vitlab.models.resnet import BiT, BiTConfig
from vitlab.models.vit import ViT, ViTConfig
from vitlab.models.zoo import Model
from vitlab.weights import (
    big_vision,
    files,
    google,
    huggingface,
    labels,
    own,
    public,
    shipped,
    timm,
    torchvision,
)
from vitlab.weights import bundle as bundles
from vitlab.weights.bundle import Bundle, Card
from vitlab.weights.detect import detect, matches
from vitlab.weights.foreign import Facts, Format
from vitlab.weights.reading import read_model
from vitlab.weights.report import Refused, Report
from vitlab.weights.writing import write_model

# Google stands before big_vision, whose files differ from it by the name of one tensor.
FORMATS: tuple[Format, ...] = (
    google.VIT, google.BIT, big_vision.VIT, timm.VIT, timm.BIT, huggingface.VIT, torchvision.VIT,
    own.VIT, own.BIT,
)  # fmt: skip
log = logging.getLogger("vitlab")
NAMES = ("vitlab", *dict.fromkeys(f.name for f in FORMATS))
ASKED = ("heads", "pool", "activation", "norm_eps", "dropout", "drop_path")  # of a ViT


def read(
    path: str | os.PathLike[str], *, drop: str | Iterable[str] = (),
    image: int | tuple[int, int] | None = None, classes: int | Sequence[str] | None = None,
    stored: int | tuple[int, int] | None = None, resample: str = "bicubic",
    known: Facts | None = None, **asked: Any,
) -> tuple[Bundle, Report]:  # fmt: skip
    """Read weights of any format, and tell what became of each tensor.

    Args:
        path: a file or folder, whose content says what it is, or the name of a model that
            ships (`shipped.names`) or of a published checkpoint (`public.TABLE`). Of several
            models in a file the averaged one is read (`model_ema`, `teacher`).
        drop: patterns (`head.*`) of tensors, under their names or ours, to do without. A head or
            tanh layer is then left out; what the model needs stays as initialised and is listed
            as new.
        image: the image size wanted, (h, w) or one number: positions are resampled.
        classes: names of the classes wanted, or how many. As many as the head has: they name its
            outputs. Another number: the head starts anew, at zero, and the tanh layer of
            pre-training goes, as the original code does. 0: features, the norm's output.
        stored: the image size that the file's position table is for, where it does not say.
        resample: see `positions.resample`.
        known: what is known of the file from elsewhere.
        asked: heads, pool, activation, norm_eps, dropout or drop_path, whatever the file says.

    Raises FileNotFoundError, or ValueError (with a `report`, if it is `Refused`) naming the file,
    the tensor and what to do.
    """
    for field in asked:
        if field not in ASKED:
            raise ValueError(f"{field} is not asked of a file: {', '.join(ASKED)} are")
    where, patterns, name = Path(path), _patterns(drop), None
    if inside := shipped.find(path):
        where, name = inside, str(path)
    elif public.is_name(path):
        name = str(path)
        where, known = public.find(name)
        stored = known.config.get("image") if stored is None else stored
    found = _bundle(where, patterns)
    if found and asked:
        raise ValueError(f"{where}: is a bundle, which says {', '.join(asked)} itself")
    asked["image"] = image
    bundle, report = found or _foreign(where, patterns, stored, known, asked)
    if name:
        card = replace(bundle.card, source={"name": name, **bundle.card.source})
        bundle = replace(bundle, card=card)
    return _fit(bundle, report, image, classes, resample)


def _patterns(drop: str | Iterable[str]) -> tuple[str, ...]:
    return (drop,) if isinstance(drop, str) else tuple(drop)


def _bundle(path: Path, drop: Sequence[str]) -> tuple[Bundle, Report] | None:
    """A bundle of our own, if it is one."""
    folder = path.parent if path.name in ("config.json", "model.safetensors") else path
    config = folder / "config.json"
    ours = config.is_file() and files.read_json(config).get("format") == "vitlab"
    if not ours and not (folder / "run.yaml").is_file():
        return None
    bundle = bundles.load(folder, drop)
    names = tuple(bundle.model.state_dict())
    new = tuple(name for name in names if matches(name, drop))
    read = tuple(name for name in names if name not in new)
    sha256 = bundles.sha256(folder / "model.safetensors")
    return bundle, Report(format="vitlab", sha256=sha256, read=read, new=new, dropped=new)


def _no_bundle(folder: Path) -> None:
    """Our own tensors in a folder belong to a bundle, which is damaged or incomplete."""
    if (folder / "config.json").is_file():
        raise ValueError(f"{folder / 'config.json'}: not the configuration of a vitlab bundle")
    raise FileNotFoundError(f"{folder}: no bundle (there is no config.json)")


def _foreign(
    path: Path, drop: Sequence[str], stored: Any, known: Facts | None, asked: Mapping[str, Any]
) -> tuple[Bundle, Report]:
    opened = files.open_any(path)
    sha256 = opened.sha256()
    try:
        found = detect(opened, FORMATS, drop)
        if found.format.name == "vitlab" and path.is_dir():
            _no_bundle(path)
        opened.tensors = {}
        reading = read_model(opened, found, drop, stored, asked)
    except Refused as e:
        raise Refused(f"{path}: {e}", replace(e.report, sha256=sha256)) from e
    except ValueError as e:
        said = str(e).startswith(str(path))
        raise ValueError(str(e) if said else f"{path}: {e}") from e
    known = known or Facts()
    size = reading.model.config.image
    how = {**reading.facts.preprocess, **opened.record.get("preprocess", {}), **known.preprocess}
    preprocess = bundles.Preprocess(**{**how, "size": size})
    given = known.classes or opened.record.get("classes") or reading.facts.classes
    classes, notes = _names(given, reading.model.config.classes)
    licence = known.licence or reading.facts.licence or opened.licence
    source = {**reading.source, "file": path.name, "sha256": sha256}
    source |= {"licence": licence} if licence else {}
    card = Card(source=source)
    report = replace(reading.report, sha256=sha256, notes=(*reading.report.notes, *notes))
    return Bundle(model=reading.model, preprocess=preprocess, classes=classes, card=card), report


def _names(given: Sequence[str] | None, count: int) -> tuple[tuple[str, ...], list[str]]:
    """A name for each output of a head, and what there is to say of them."""
    if not count:
        return (), []
    if given and len(given) == count:
        names, notes = tuple(map(str, given)), []
    elif names := labels.imagenet(count):
        notes = [f"{count:,} outputs: taken as the classes of ImageNet in their usual order"]
    else:
        names, notes = tuple(map(str, range(count))), ["the classes have no names: numbers taken"]
    if len(set(names)) < len(names):
        names = tuple(f"{n} ({i})" if names.count(n) > 1 else n for i, n in enumerate(names))
        notes.append("some classes had the same name: their numbers were added")
    return names, notes


def _fit(
    bundle: Bundle, report: Report, image: Any, classes: int | Sequence[str] | None, resample: str
) -> tuple[Bundle, Report]:
    """The image size and the classes that are wanted."""
    model, notes = bundle.model, list(report.notes)
    if image is not None and pair(image) != model.config.image:
        old, size = model.config, pair(image)
        model = model.resize(size, resample)
        bundle = replace(bundle, preprocess=replace(bundle.preprocess, size=size))
        if isinstance(old, ViTConfig) and isinstance(model, ViT):
            (a, b), (c, d) = old.grid, model.config.grid
            how = f"positions, {a} x {b} to {c} x {d} ({resample})"
            report = replace(report, interpolated=(how,))
    if classes is None:
        return bundle, report
    count = classes if isinstance(classes, int) else len(classes)
    if count == model.config.classes:
        named = bundle.classes if isinstance(classes, int) else tuple(map(str, classes))
        return replace(bundle, classes=named), report
    before = model.config.classes
    gone = [name for name in model.state_dict() if name.startswith(("head.", "hidden."))]
    _new_head(model, count)
    new = ("head.weight", "head.bias") if count else ()
    notes.append(f"{count} classes instead of {before}: the head is new")
    names = tuple(map(str, range(count))) if isinstance(classes, int) else tuple(map(str, classes))
    report = replace(report, new=(*report.new, *new), dropped=(*report.dropped, *gone))
    return replace(bundle, model=model, classes=names), replace(report, notes=tuple(notes))


def _new_head(model: Model, count: int) -> None:
    """A zero head for `count` classes right behind the representation, in place."""
    like = next(model.parameters())
    if isinstance(model, ViT):
        model.hidden = None
        model.config = replace(model.config, classes=count, head_hidden=0)
    else:
        model.config = replace(model.config, classes=count)
    head = zero_(nn.Linear(model.config.features, count)) if count else None
    model.head = head and head.to(like.device, like.dtype)


def load(path_or_name: str | os.PathLike[str], drop: str | Iterable[str] = ()) -> Bundle:
    """Read a bundle, a run, or weights of any public format; the model is on the CPU, evaluating.

    As `read`, without the report: what became of a foreign file's tensors is logged.

    Args:
        path_or_name: a file or folder, or the name of a published checkpoint (`vitlab models`).
        drop: patterns of tensor names (`head.*`) to do without.

    Raises FileNotFoundError if there is none, ValueError if it is damaged or does not fit.
    """
    bundle, report = read(path_or_name, drop=drop)
    for line in report.lines() if report.format != "vitlab" else ():
        log.info(line)
    return bundle


def save(bundle: Bundle, path: str | os.PathLike[str], format: str = "vitlab") -> None:
    """Write a bundle in any format; see `write`, whose report is logged."""
    report = write(bundle, path, format)
    for line in report.lines() if format != "vitlab" else ():
        log.info(line)


def write(
    bundle: Bundle, path: str | os.PathLike[str], format: str = "vitlab",
    drop: str | Iterable[str] = (),
) -> Report:  # fmt: skip
    """Write a bundle in any format, all of it or nothing.

    Args:
        bundle: what to write.
        path: a file, by its suffix, or else a folder; huggingface and vitlab are folders.
        format: one of NAMES.
        drop: patterns of our tensors (`hidden.*`) to leave out where the format has no place.

    Raises ValueError (`Refused`, before anything is written, for what the format cannot hold) and
    OSError.
    """
    target = Path(path)
    if format not in NAMES:
        raise ValueError(f"unknown format {format!r}: {', '.join(NAMES)} are known")
    if format == "vitlab":
        bundles.save(bundle, target)
        return Report(format=format, read=tuple(bundle.model.state_dict()))
    family = "bit" if isinstance(bundle.model.config, BiTConfig) else "vit"
    fmt = next((f for f in FORMATS if (f.name, f.family) == (format, family)), None)
    if fmt is None:
        raise ValueError(f"{format} has no place for a BiT ResNet")
    file = target.suffix in files.SUFFIXES
    if file and target.suffix not in fmt.suffixes:
        raise ValueError(
            f"{target}: {format} is written to {' or '.join((*fmt.suffixes, 'a folder'))}"
        )
    if not file and (target / "run.yaml").exists():
        raise ValueError(f"{target}: holds a run; choose another folder")
    out = write_model(bundle, fmt, _patterns(drop), alone=file or fmt.beside is None)
    main = target if file else target / fmt.file
    main.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:  # renamed from the last to the first: config.json comes at the end
        for name, value in out.files.items():
            aside = stack.enter_context(written(main.parent / name))
            aside.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        aside = stack.enter_context(written(main))
        files.save(main.suffix, aside, out.tensors, out.record)
    return replace(out.report, sha256=bundles.sha256(main))


def convert(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], to: str,
    *, drop: str | Iterable[str] = (), **how: Any,
) -> tuple[Report, Report]:  # fmt: skip
    """Read weights of one format, write them in another; what became of them, there and here.

    `how` is passed to `read`; `drop` patterns hold for both.
    """
    if to not in NAMES:
        raise ValueError(f"unknown format {to!r}: {', '.join(NAMES)} are known")
    bundle, came = read(source, drop=drop, **how)
    return came, write(bundle, destination, to, drop)


def inspect(path: str | os.PathLike[str], **how: Any) -> dict[str, Any]:
    """What a file is, as plain values: its format, model, shapes, classes and the report.

    A file that is refused is told of as well: `reason` says why.
    """
    try:
        bundle, report = read(path, **how)
    except Refused as e:
        return {"file": str(path), "reason": str(e), **e.report.to_dict()}
    model = bundle.model
    return {
        "file": str(path),
        **report.to_dict(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "model": {"family": "bit" if isinstance(model, BiT) else "vit", **asdict(model.config)},
        "grid": list(model.config.grid) if isinstance(model.config, ViTConfig) else None,
        "preprocess": asdict(bundle.preprocess),
        "classes": list(bundle.classes),
        "source": bundle.card.source,
        "tensors": {name: list(t.shape) for name, t in model.state_dict().items()},
    }
