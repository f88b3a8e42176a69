"""Sets known by name: the embedded sample, Fashion-MNIST, torchvision's and the hub's."""

import gzip
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from vitlab.data import decode
from vitlab.data.sources import Source, from_arrays

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
    """Reads pictures from any sequence of (PIL picture, ...) or of mappings."""

    items: Sequence[Any]
    column: int | str

    def __call__(self, i: int) -> np.ndarray:
        return decode.to_rgb(self.items[i][self.column])


@contextmanager
def _download(what: str, remedy: str) -> Iterator[None]:
    """Turn a failing download into one line, soon."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        yield
    except (OSError, RuntimeError) as e:  # URLError is an OSError
        raise OSError(f"{what}: could not be downloaded ({str(e)[:200]}); {remedy}") from e
    finally:
        socket.setdefaulttimeout(before)


def _torchvision(name: str, kind: str, arguments: dict[str, dict[str, Any]]) -> dict[str, Source]:
    from torchvision import datasets

    root = cache_folder() / "data" / name
    sources = {}
    for split, kwargs in arguments.items():
        with _download(name, f"put torchvision's files for {kind} into {root}"):
            items = getattr(datasets, kind)(str(root), download=True, **kwargs)
        sources[split] = _from_items(name, split, items, 0, *_torchvision_labels(items))
    return sources


def _torchvision_labels(items: Any) -> tuple[list[int], Sequence[str] | None]:
    """Labels and class names, which torchvision keeps under several names."""
    labels = next(
        (getattr(items, a) for a in ("targets", "labels", "_labels", "y") if hasattr(items, a)),
        None,
    )
    if labels is None:
        labels = [items[i][1] for i in range(len(items))]
    names = getattr(items, "classes", None) or getattr(items, "categories", None)
    return [int(label) for label in labels], names


def _from_items(
    spec: str, split: str, items: Any, column: int | str, labels: list[int],
    names: Sequence[str] | None,
) -> Source:  # fmt: skip
    source = from_arrays(range(len(labels)), labels, names)
    return replace(source, spec=spec, split=split, load=Items(items, column))


def hugging_face(spec: str) -> dict[str, Source]:
    """`hf:org/name[?image=COLUMN&label=COLUMN&config=NAME]`, through the `datasets` library.

    Columns are found by their type; where several could be meant, they must be named.
    """
    try:
        from datasets import load_dataset
    except ImportError as e:
        raise ValueError(f"{spec}: needs the hub extra: pip install 'vitlab[hub]'") from e
    name, _, query = spec.removeprefix("hf:").partition("?")
    options = dict(parse_qsl(query))
    unknown = options.keys() - {"image", "label", "config"}
    if unknown:
        raise ValueError(f"{spec}: unknown option {unknown.pop()}; use image, label or config")
    with _download(spec, "check the name, or use a copy on disk"):
        parts = load_dataset(name, options.get("config"))
    sources = {}
    for split, table in parts.items():
        image = _column(spec, "image", options, table.features, ("Image",))
        label = _column(spec, "label", options, table.features, ("ClassLabel",))
        feature = table.features[label]
        labels = list(table[label])
        names = getattr(feature, "names", None)
        if names is None:
            names = sorted({str(v) for v in labels})
            labels = [names.index(str(v)) for v in labels]
        word = {"validation": "val"}.get(split, split)
        sources[word] = _from_items(spec, word, table, image, labels, names)
    return sources


def _column(
    spec: str, role: str, options: dict[str, str], features: Any, kinds: tuple[str, ...]
) -> str:
    found = [name for name, feature in features.items() if type(feature).__name__ in kinds]
    chosen = options.get(role) or (found[0] if len(found) == 1 else None)
    if chosen is None or chosen not in features:
        listing = ", ".join(f"{n} ({type(f).__name__})" for n, f in features.items())
        raise ValueError(f"{spec}: which column is the {role}? add ?{role}=NAME; found {listing}")
    return chosen
