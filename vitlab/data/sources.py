"""Pictures with labels, by index: what every spec opens to, and how to take it apart.

A source yields `(image, label)` by index and knows its class names. A spec opens to one source a
split. Classes are those of the training part; the other parts' labels are matched to them by name.
"""

import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data import decode

SPLITS = {  # folder, column value or hub split, lower case -> our word
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
MAX_MEMBER = 256 << 20  # bytes of one file inside a zip, against archives that explode
Load = Callable[[int], np.ndarray]  # row -> picture [h, w, 3] uint8
Row = tuple[str, str, str, str]  # id, class name, split, group


@dataclass(frozen=True, kw_only=True)
class Source:
    """Pictures and labels by index.

    `source[i]` is `(image, label)`: image [h, w, 3] uint8, label an index into `classes`; it
    raises `decode.Unreadable` for a file that is not a picture, OSError for one that is not there.
    """

    spec: str  # what the user named
    split: str  # train, val, test or all
    classes: tuple[str, ...]  # class names; labels index them
    labels: np.ndarray  # [N] int64; of shards int32, mapped from their index
    ids: np.ndarray  # [N] bytes: each picture's path or number (one buffer, cheap to share)
    load: Load
    groups: np.ndarray | None = None  # [N] int64: pictures of one group stay in one split; numbers
    # of the whole set, the same group has the same in each split; below 0: a picture by itself
    notes: tuple[str, ...] = ()  # what was ignored while reading, for people
    many: np.ndarray | None = None  # [N, K] bool: all labels of each picture, where it may have
    # several; `labels` has the first

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return self.load(i), int(self.labels[i])

    def id(self, i: int) -> str:
        return os.fsdecode(bytes(self.ids[i]))


# Readers: small frozen objects, because they travel to the processes that decode ---------------


class Stored:
    """A reader of encoded files."""

    def file(self, i: int) -> str | bytes:
        """Where picture i lies, or its bytes."""
        raise NotImplementedError


@dataclass(frozen=True)
class Files(Stored):
    """Reads pictures from a folder."""

    root: str
    paths: np.ndarray  # [N] bytes, relative to root

    def file(self, i: int) -> str:
        """Where it lies."""
        return os.path.join(self.root, os.fsdecode(bytes(self.paths[i])))

    def __call__(self, i: int) -> np.ndarray:
        return decode.decode(self.file(i))


@dataclass(frozen=True)
class Members(Stored):
    """Reads pictures from a zip, without unpacking it.

    It knows where each picture lies, so that no process holds the archive's directory (a million
    names cost a gigabyte as objects) and none shares a file offset with another.
    """

    archive: str
    entries: np.ndarray  # [N, 4] int64: offset of the local header, bytes, CRC-32, method

    def __call__(self, i: int) -> np.ndarray:
        return decode.decode(self.file(i))

    def file(self, i: int) -> bytes:
        """Its bytes, unpacked and checked."""
        offset, size, crc, method = self.entries[i].tolist()
        if method not in (0, 8):
            how = "encrypted" if method < 0 else f"packed by method {method}, not stored or deflate"
            raise decode.Unreadable(f"{how} in the zip")
        try:
            with open(self.archive, "rb") as file:
                file.seek(offset)
                head = file.read(30)  # name and extra field follow it, their lengths end it
                file.seek(int.from_bytes(head[26:28], "little"), os.SEEK_CUR)
                file.seek(int.from_bytes(head[28:30], "little"), os.SEEK_CUR)
                data = file.read(min(size, MAX_MEMBER + 1))
            if method == 8:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, MAX_MEMBER + 1)
        except (OSError, zlib.error) as e:
            raise decode.Unreadable(f"cannot be read from the zip ({e})") from e
        if len(data) > MAX_MEMBER:
            raise decode.Unreadable(f"larger than {MAX_MEMBER >> 20} MiB")
        if not head.startswith(b"PK\3\4") or zlib.crc32(data) != crc:
            raise decode.Unreadable("truncated or damaged in the zip")
        return data


@dataclass(frozen=True)
class Images:
    """Pictures in memory."""

    images: Sequence[Any] | np.ndarray

    def __call__(self, i: int) -> np.ndarray:
        return decode.from_array(self.images[i])


@dataclass(frozen=True)
class Chosen:
    """A part of another reader."""

    load: Load
    rows: np.ndarray  # [N] int64

    def __call__(self, i: int) -> np.ndarray:
        return self.load(int(self.rows[i]))


def load_region(load: Load, i: int, region: decode.Region, least: tuple[int, int]) -> np.ndarray:
    """The part of picture i that `region` chooses by (h, w), see `decode.decode`.

    For training alone: a file is decoded no finer than that takes.
    """
    if isinstance(load, Chosen):
        return load_region(load.load, int(load.rows[i]), region, least)
    if isinstance(load, Stored):
        return decode.decode(load.file(i), region=region, least=least)
    image = load(i)
    left, top, right, bottom = region(*image.shape[:2])
    return image[top:bottom, left:right]


# Opening ---------------------------------------------------------------------------------------


def open_spec(spec: str) -> dict[str, Source]:
    """Open a spec: sources by split (`train`, `val`, `test`), or one under `all`.

    Raises FileNotFoundError if nothing is there, ValueError if it holds no usable classes; with
    one line each, whatever the names in it.
    """
    try:
        return _open(spec)
    except FileNotFoundError as e:
        raise FileNotFoundError(printable(str(e))) from e
    except ValueError as e:
        raise ValueError(printable(str(e))) from e


def _open(spec: str) -> dict[str, Source]:
    from vitlab.data import named, shards, streams, tables, trees  # they import this module

    if "://" in spec:
        return streams.open_stream(spec)
    if spec.startswith("hf:"):
        return named.open_hub(spec)
    if spec in named.NAMES:
        return named.open_named(spec)
    path = Path(os.path.expanduser(spec))
    if shards.meant(spec):
        return shards.open_shards(spec)
    if path.is_dir():
        return trees.open_folder(spec, path)
    if not path.exists():
        raise FileNotFoundError(
            f"{spec}: does not exist, and is none of the named sets ({', '.join(named.NAMES)})"
        )
    if path.suffix.lower() == ".zip":
        return trees.open_zip(spec, path)
    if path.suffix.lower() in (".csv", ".jsonl"):
        return tables.open_table(spec, path)
    raise ValueError(f"{spec}: not a folder, .zip, .csv or .jsonl, and no .tar")


def from_arrays(
    images: Sequence[Any] | np.ndarray,
    labels: Sequence[int | str],
    classes: Sequence[str] | None = None,
) -> Source:
    """A source over pictures in memory.

    Args:
        images: N pictures, each as `decode.from_array` takes them ([h, w, 3] uint8 and the like).
        labels: N class names, or N indices (into `classes` where given, else named "0", "1", ...).
        classes: class names in their order; sorted names of `labels` by default.
    """
    if len(images) != len(labels) or not len(images):
        raise ValueError(f"{len(images)} images and {len(labels)} labels")
    if all(isinstance(label, str) for label in labels):
        names = [str(label) for label in labels]
        order = tuple(classes or sorted(set(names)))
    else:
        indices = [int(label) for label in labels]
        order = tuple(classes or map(str, range(max(indices) + 1)))
        if indices != list(labels) or not 0 <= min(indices) <= max(indices) < len(order):
            raise ValueError(f"labels must be class names, or whole numbers 0 ... {len(order) - 1}")
        names = [order[i] for i in indices]
    rows = [(str(i), name, "all", "") for i, name in enumerate(names)]
    return assemble("arrays", rows, lambda _: Images(images), order)["all"]


def assemble(
    spec: str,
    rows: Iterable[Row],
    reader: Callable[[np.ndarray], Load],
    classes: tuple[str, ...] | None = None,
    notes: tuple[str, ...] = (),
) -> dict[str, Source]:
    """Sources by split; `reader` makes each one's `load` of its ids.

    Without `classes` they are the sorted names of the training rows, or of all where there are
    none. Raises ValueError for a row of another class.
    """
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row[2], []).append(row)
    deciding = parts.get("train") or [row for part in parts.values() for row in part]
    order = classes or tuple(sorted({row[1] for row in deciding}))
    index = {name: i for i, name in enumerate(order)}
    check_classes(spec, order)
    sources = {}
    numbers = number_groups([row[3] for part in parts.values() for row in part])
    for split, part in parts.items():
        unknown = sorted({row[1] for row in part} - index.keys())
        if unknown:
            raise ValueError(
                f"{spec}: {split} has classes that {'`classes`' if classes else 'train'} has not: "
                f"{listing(unknown)}"
            )
        ids = strings(row[0] for row in part)
        groups, numbers = numbers[: len(part)], numbers[len(part) :]
        sources[split] = Source(
            spec=spec, split=split, classes=order, ids=ids, load=reader(ids), notes=notes,
            labels=np.array([index[row[1]] for row in part], dtype=np.int64),
            groups=groups if (groups >= 0).any() else None,
        )  # fmt: skip
    return sources


def check_classes(spec: str, classes: Sequence[str]) -> None:
    """Raise ValueError where two are the same, or one is no text."""
    if len(set(classes)) < len(classes):
        raise ValueError(f"{spec}: class names must differ: {listing(classes)}")
    if any("\ud800" <= c <= "\udfff" for name in classes for c in name):
        raise ValueError(f"{spec}: class names must be UTF-8 text: {listing(classes)}")


def number_groups(names: Sequence[str]) -> np.ndarray:
    """[N] int64: equal for equal names; a picture without one (an empty name) is by itself."""
    found = {name: i for i, name in enumerate(sorted({name for name in names if name}))}
    return np.array([found.get(name, -1 - i) for i, name in enumerate(names)], dtype=np.int64)


def regroup(parts: Mapping[str, Source], pattern: str) -> dict[str, Source]:
    """The same sources, grouped by what a regular expression finds in the pictures' paths.

    The name of a group is the expression's first group, or else all that it found. Raises
    ValueError where it is no expression, or finds nothing anywhere.
    """
    try:
        search = re.compile(pattern).search
    except re.error as e:
        raise ValueError(f"--group {pattern!r}: not a regular expression ({e})") from e
    names = []
    for source in parts.values():
        found = (search(source.id(i)) for i in range(len(source)))
        names += [(m[1] if m.re.groups else m[0]) or "" if m else "" for m in found]
    if not any(names):
        raise ValueError(f"--group {pattern!r}: found in no picture's path")
    ends = np.cumsum([len(source) for source in parts.values()])[:-1]
    numbers = np.split(number_groups(names), ends)
    pairs = zip(parts.items(), numbers, strict=True)
    return {split: replace(source, groups=groups) for (split, source), groups in pairs}


def strings(values: Iterable[str]) -> np.ndarray:
    """Names in one buffer [N] of bytes: a list of a million strings costs every worker a copy."""
    encoded = [os.fsencode(v) for v in values]
    return np.array(encoded, dtype=f"S{max(map(len, encoded), default=1) or 1}")


def listing(names: Sequence[str], most: int = 5) -> str:
    """A few of them, for a message."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def printable(text: str) -> str:
    """One line: what cannot be printed (line ends, lone surrogates) is written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# Taking apart ----------------------------------------------------------------------------------


def select(source: Source, rows: np.ndarray, split: str) -> Source:
    """The rows of a source, as a source of its own."""
    groups = None if source.groups is None else source.groups[rows]
    many = None if source.many is None else source.many[rows]
    return replace(
        source, split=split, labels=source.labels[rows], ids=source.ids[rows],
        load=Chosen(source.load, rows), groups=groups, many=many,
    )  # fmt: skip


def hold_out(source: Source, share: float, seed: int) -> tuple[Source, Source]:
    """Split into (train, held out): `share` of each class, chosen by seed alone.

    Of a class with two pictures or more, at least one is held out and one is kept. With groups,
    whole groups are held out, as near to these shares as a random order of them comes.
    """
    rng = np.random.default_rng([seed, 0])
    held = np.zeros(len(source), dtype=bool)
    if source.groups is None:
        for rows in _rows_by(source.labels):
            count = min(len(rows) - 1, max(1, round(share * len(rows))))
            held[rng.permutation(rows)[:count]] = True
    else:
        for rows in _groups_to_hold(source, share, _rows_by(source.groups), rng):
            held[rows] = True
    if not held.any():
        raise ValueError(f"{source.spec}: too few pictures or groups to hold out {share:.0%}")
    train, val = np.flatnonzero(~held), np.flatnonzero(held)
    return select(source, train, "train"), select(source, val, "val")


def _groups_to_hold(
    source: Source, share: float, groups: list[np.ndarray], rng: np.random.Generator
) -> list[np.ndarray]:
    """The groups (rows each) that bring the classes' shares nearer; one where none does."""
    kept = np.bincount(source.labels, minlength=len(source.classes))
    missing = share * kept
    chosen: list[np.ndarray] = []
    nearest: tuple[float, list[np.ndarray]] = (np.inf, [])
    for rows in (groups[i] for i in rng.permutation(len(groups))):
        classes, counts = np.unique(source.labels[rows], return_counts=True)
        if (kept[classes] == counts).any():
            continue  # it would leave a class without training pictures
        change = np.abs(missing[classes] - counts).sum() - np.abs(missing[classes]).sum()
        if change < 0:
            chosen.append(rows)
            kept[classes] -= counts
            missing[classes] -= counts
        nearest = min(nearest, (change, [rows]), key=lambda pair: pair[0])
    return chosen or nearest[1]


def _rows_by(values: np.ndarray) -> list[np.ndarray]:
    """The rows of each distinct value, values rising; one sort, however many there are."""
    order = np.argsort(values, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(values[order])) + 1)


def match_classes(source: Source, classes: tuple[str, ...]) -> Source:
    """The same source with labels that index `classes`, matched by name.

    Raises ValueError naming the source's classes that are not among them.
    """
    if source.classes == tuple(classes):
        return source
    index = {name: i for i, name in enumerate(classes)}
    unknown = [c for c in source.classes if c not in index]
    if unknown:
        raise ValueError(
            f"{source.spec}: {len(unknown)} of its classes are unknown to the model: "
            f"{listing(unknown)}; the model knows {listing(classes)}"
        )
    where = np.array([index[c] for c in source.classes], dtype=np.int64)
    many = None
    if source.many is not None:
        many = np.zeros((len(source), len(classes)), dtype=bool)
        many[:, where] = source.many
    return replace(source, classes=tuple(classes), labels=where[source.labels], many=many)
