"""Sets known by name: the embedded sample, Fashion-MNIST, torchvision's and the hub's."""

import gzip
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from vitlab.data import decode
from vitlab.data.sources import SPLITS, Source, from_arrays, listing

SAMPLE = Path(__file__).parent.parent / "assets" / "sample"
SYSTEM = Path("/usr/share/datasets/fashion-mnist")  # Debian's dataset-fashion-mnist
FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_TRAIN = {"train": {"train": True}, "test": {"train": False}}
_SPLIT = {"train": {"split": "train"}, "test": {"split": "test"}}
_VAL = {"train": {"split": "train"}, "val": {"split": "val"}, "test": {"split": "test"}}
TORCHVISION: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {  # name -> class, arguments
    "mnist": ("MNIST", _TRAIN),
    "kmnist": ("KMNIST", _TRAIN),
    "usps": ("USPS", _TRAIN),
    "cifar10": ("CIFAR10", _TRAIN),
    "cifar100": ("CIFAR100", _TRAIN),
    "svhn": ("SVHN", _SPLIT),
    "stl10": ("STL10", _SPLIT),
    "food101": ("Food101", _SPLIT),
    "gtsrb": ("GTSRB", _SPLIT),
    "flowers102": ("Flowers102", _VAL),
    "dtd": ("DTD", _VAL),
    "pcam": ("PCAM", _VAL),
    "fgvc-aircraft": ("FGVCAircraft", _VAL),
    "oxford-iiit-pet": (
        "OxfordIIITPet", {"train": {"split": "trainval"}, "test": {"split": "test"}},
    ),
    "eurosat": ("EuroSAT", {"all": {}}),
    "caltech101": ("Caltech101", {"all": {}}),
    "caltech256": ("Caltech256", {"all": {}}),
    "sun397": ("SUN397", {"all": {}}),
}  # fmt: skip
NAMES = ("sample", "fashion-mnist", *TORCHVISION)
TIMEOUT = 20  # seconds without an answer from a server before a download is given up


def open_named(name: str) -> dict[str, Source]:
    """A set by name; downloaded to the cache folder where it is not at hand."""
    if name == "sample":
        return _idx(name, SAMPLE)
    if name == "fashion-mnist":
        return _idx(name, SYSTEM) if SYSTEM.is_dir() else _torchvision(name, "FashionMNIST", _TRAIN)
    return _torchvision(name, *TORCHVISION[name])


def cache_folder() -> Path:
    """`$VITLAB_CACHE`, else `$XDG_CACHE_HOME/vitlab`, else `~/.cache/vitlab`."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("VITLAB_CACHE") or base / "vitlab")


def _idx(name: str, folder: Path) -> dict[str, Source]:
    """MNIST's file form: gzip of a big-endian header, then bytes."""
    sources = {}
    for split, stem in (("train", "train"), ("test", "t10k")):
        images = _read_idx(folder / f"{stem}-images-idx3-ubyte.gz")
        labels = _read_idx(folder / f"{stem}-labels-idx1-ubyte.gz")
        source = from_arrays(images, labels.tolist(), FASHION)
        sources[split] = replace(source, spec=name, split=split)
    return sources


def _read_idx(path: Path) -> np.ndarray:
    with gzip.open(path) as f:
        rank = struct.unpack(">4B", f.read(4))[3]
        shape = struct.unpack(f">{rank}I", f.read(4 * rank))
        return np.frombuffer(f.read(), dtype=np.uint8).reshape(shape)


@dataclass(frozen=True)
class Items:
    """Reads pictures from a sequence of (PIL picture, ...), or of mappings to encoded files."""

    items: Any
    column: int | str

    def __call__(self, i: int) -> np.ndarray:
        picture = self.items[i][self.column]
        if isinstance(picture, dict):  # the hub's undecoded form
            return decode.decode(picture["bytes"] or picture["path"])
        return decode.to_rgb(picture)


@contextmanager
def _download(what: str, remedy: str) -> Iterator[None]:
    """Turn a failing download into one line, soon."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        yield
    except Exception as e:  # the libraries' own kinds are many
        reason = " ".join(str(e).split())[:200] or type(e).__name__
        raise OSError(f"{what}: could not be downloaded ({reason}); {remedy}") from e
    finally:
        socket.setdefaulttimeout(before)


def _sources(
    spec: str, parts: Mapping[str, tuple[Any, int | str, Sequence[Any]]],
    names: Sequence[str] | None, notes: tuple[str, ...] = (),
) -> dict[str, Source]:  # fmt: skip
    """Sources of (items, their picture's column, labels) by split.

    Labels are indices into `names`; without names, each distinct label of the training part is a
    class, sorted (numbers as numbers).
    """
    deciding = parts.get("train") or next(iter(parts.values()))
    values = range(len(names)) if names else sorted(set(deciding[2]))
    classes = tuple(names or map(str, values))
    word = dict(zip(values, classes, strict=True))
    sources = {}
    for split, (items, column, labels) in parts.items():
        unknown = sorted({str(label) for label in labels if label not in word})
        if unknown:
            raise ValueError(f"{spec}: {split} has classes that train has not: {listing(unknown)}")
        source = from_arrays(range(len(labels)), [word[label] for label in labels], classes)
        load = Items(items, column)
        sources[split] = replace(source, spec=spec, split=split, load=load, notes=notes)
    return sources


def _torchvision(name: str, kind: str, arguments: dict[str, dict[str, Any]]) -> dict[str, Source]:
    from torchvision import datasets

    root = cache_folder() / "data" / name
    parts: dict[str, tuple[Any, int | str, Sequence[Any]]] = {}
    names = None
    for split, kwargs in arguments.items():
        with _download(name, f"put torchvision's files for {kind} into {root}"):
            items = getattr(datasets, kind)(str(root), download=True, **kwargs)
        names = getattr(items, "classes", None) or getattr(items, "categories", None)
        parts[split] = (items, 0, _torchvision_labels(items))
    return _sources(name, parts, names)


def _torchvision_labels(items: Any) -> list[int]:
    """Labels, which torchvision keeps under several names, or only with the pictures."""
    for name in ("targets", "labels", "_labels", "y"):
        if hasattr(items, name):
            return [int(label) for label in getattr(items, name)]
    rows = getattr(items, "_samples", None) or (items[i] for i in range(len(items)))
    return [int(row[1]) for row in rows]


def open_hub(spec: str) -> dict[str, Source]:
    """`hf:org/name[?image=COLUMN&label=COLUMN&config=NAME]`, through the `datasets` library."""
    try:
        from datasets import load_dataset
    except ImportError as e:
        raise ValueError(f"{spec}: needs the hub extra: pip install 'vitlab[hub]'") from e
    name, _, query = spec.removeprefix("hf:").partition("?")
    options = dict(parse_qsl(query))
    unknown = options.keys() - {"image", "label", "config"}
    if unknown:
        raise ValueError(f"{spec}: unknown option {min(unknown)}; use image, label or config")
    with _download(spec, "check the name, or use a copy on disk"):
        tables = load_dataset(name, options.pop("config", None))
    return from_tables(spec, tables, **options)


def from_tables(
    spec: str, tables: Mapping[str, Any], *, image: str | None = None, label: str | None = None
) -> dict[str, Source]:
    """Sources from tables of the `datasets` library by split (a `DatasetDict`).

    Columns are found by their type; where several could be meant, they must be named. A split
    without labels (they are None or -1, as hidden test labels are) is left out.

    Raises ValueError, listing the columns found, where one must be named.
    """
    from datasets import Image

    parts: dict[str, tuple[Any, int | str, Sequence[Any]]] = {}
    names: Sequence[str] | None = None
    notes: tuple[str, ...] = ()
    for split, table in tables.items():
        pictures = _column(spec, "image", image, table.features, ("Image",))
        column = _column(spec, "label", label, table.features, ("ClassLabel", "Value"))
        names = getattr(table.features[column], "names", None)
        labels = list(table[column])
        if all(value in (None, -1) for value in labels):
            notes = (*notes, f"{spec}: ignored {split}, which has no labels")
            continue
        # Encoded files go through our own decoder, as everywhere, and other columns stay unread.
        items = table.select_columns([pictures]).cast_column(pictures, Image(decode=False))
        parts[SPLITS.get(split.lower(), split)] = (items, pictures, labels)
    if not parts:
        raise ValueError(f"{spec}: no labelled pictures")
    return _sources(spec, parts, names, notes)


def _column(
    spec: str, role: str, named: str | None, features: Mapping[str, Any], kinds: tuple[str, ...]
) -> str:
    """The column named, of one of these kinds; else the only one of the first kind."""
    kind = {name: type(feature).__name__ for name, feature in features.items()}
    found = [name for name in features if kind[name] == kinds[0]]
    chosen = named or (found[0] if len(found) == 1 else None)
    if chosen is None or kind.get(chosen) not in kinds:
        types = {name: getattr(f, "dtype", kind[name]) for name, f in features.items()}
        listed = ", ".join(f"{name} ({types[name] or kind[name]})" for name in features)
        raise ValueError(f"{spec}: which column is the {role}? add ?{role}=NAME; found {listed}")
    return chosen
