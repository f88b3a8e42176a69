"""From a spec to pictures with labels: folders, zips, CSV and JSONL tables, arrays.

A source yields `(image, label)` by index and knows its class names. A spec opens to one source a
split. Classes are those of the training part; the other parts' labels are matched to them by name.
"""

import csv
import io
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from vitlab.data import decode

SPLITS = {  # folder or column value, lower case -> our word
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
MAX_MEMBER = 256 << 20  # bytes of one file inside a zip, against archives that explode


@dataclass(frozen=True, kw_only=True)
class Source:
    """Pictures and labels by index.

    `source[i]` is `(image, label)`: image [h, w, 3] uint8, label an index into `classes`; it
    raises `decode.Unreadable` for a file that is not a picture.
    """

    spec: str  # what the user named
    split: str  # train, val, test or all
    classes: tuple[str, ...]  # class names; labels index them
    labels: np.ndarray  # [N] int64
    ids: np.ndarray  # [N] bytes: each picture's path or number (one buffer, cheap to share)
    load: Callable[[int], np.ndarray]  # i -> [h, w, 3] uint8
    groups: np.ndarray | None = None  # [N] int64: pictures of one group stay in one split
    notes: tuple[str, ...] = ()  # what was ignored while reading, for people

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return self.load(i), int(self.labels[i])

    def id(self, i: int) -> str:
        return os.fsdecode(bytes(self.ids[i]))


@dataclass(frozen=True)
class Files:
    """Reads pictures from a folder."""

    root: str
    paths: np.ndarray  # [N] bytes, relative to root

    def __call__(self, i: int) -> np.ndarray:
        return decode.decode(os.path.join(self.root, os.fsdecode(bytes(self.paths[i]))))


@dataclass(frozen=True)
class Members:
    """Reads pictures from a zip, without unpacking it."""

    archive: str
    names: np.ndarray  # [N] bytes

    def __call__(self, i: int) -> np.ndarray:
        try:
            with _archive(self.archive, os.getpid()).open(os.fsdecode(bytes(self.names[i]))) as f:
                data = f.read(MAX_MEMBER + 1)
        except (zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError, EOFError) as e:
            raise decode.Unreadable(f"cannot be read from the zip: {e}") from e
        if len(data) > MAX_MEMBER:
            raise decode.Unreadable(f"larger than {MAX_MEMBER >> 20} MiB")
        return decode.decode(data)


@lru_cache(maxsize=8)
def _archive(path: str, process: int) -> zipfile.ZipFile:
    """One open handle a process: a forked worker must not share its parent's file offset."""
    return zipfile.ZipFile(path)


@dataclass(frozen=True)
class Images:
    """Pictures in memory."""

    images: Sequence[Any] | np.ndarray

    def __call__(self, i: int) -> np.ndarray:
        return decode.from_array(self.images[i])


@dataclass(frozen=True)
class Chosen:
    """A part of another reader."""

    load: Callable[[int], np.ndarray]
    rows: np.ndarray  # [N] int64

    def __call__(self, i: int) -> np.ndarray:
        return self.load(int(self.rows[i]))


def strings(values: Iterable[str]) -> np.ndarray:
    """Names in one buffer [N] of bytes: a list of a million strings costs every worker a copy."""
    encoded = [os.fsencode(v) for v in values]
    return np.array(encoded, dtype=f"S{max(map(len, encoded), default=1) or 1}")


def select(source: Source, rows: np.ndarray, split: str) -> Source:
    """The rows of a source, as a source of its own."""
    groups = None if source.groups is None else source.groups[rows]
    return replace(
        source, split=split, labels=source.labels[rows], ids=source.ids[rows],
        load=Chosen(source.load, rows), groups=groups,
    )  # fmt: skip


def hold_out(source: Source, share: float, seed: int) -> tuple[Source, Source]:
    """Split into (train, held out): `share` of each class, chosen by seed alone.

    At least one picture a class is held out where the class has two. With groups, whole groups
    are held out until the share is reached.
    """
    rng = np.random.default_rng([seed, 0])
    held = np.zeros(len(source), dtype=bool)
    if source.groups is not None:
        names = rng.permutation(np.unique(source.groups))
        sizes = np.array([(source.groups == g).sum() for g in names])
        count = max(1, int(np.searchsorted(sizes.cumsum(), share * len(source))))
        held = np.isin(source.groups, names[:count])
    else:
        for c in range(len(source.classes)):
            rows = np.flatnonzero(source.labels == c)
            count = max(int(len(rows) > 1), round(share * len(rows)))
            held[rng.permutation(rows)[:count]] = True
    if held.all() or not held.any():
        raise ValueError(f"{source.spec}: too few pictures to hold out {share:.0%} of them")
    train, val = np.flatnonzero(~held), np.flatnonzero(held)
    return select(source, train, "train"), select(source, val, "val")


def open_spec(spec: str) -> dict[str, Source]:
    """Open a spec: sources by split (`train`, `val`, `test`), or one under `all`.

    Raises FileNotFoundError if nothing is there, ValueError if it holds no usable classes.
    """
    from vitlab.data import named  # it builds sources, so it imports this module

    if spec.startswith("hf:"):
        return named.hugging_face(spec)
    if spec in named.NAMES:
        return named.open_named(spec)
    path = Path(spec).expanduser()
    if path.is_dir():
        return _from_folder(spec, path)
    if not path.exists():
        raise FileNotFoundError(
            f"{spec}: does not exist, and is none of the named sets ({', '.join(named.NAMES)})"
        )
    if path.suffix.lower() == ".zip":
        return _from_zip(spec, path)
    if path.suffix.lower() in (".csv", ".jsonl"):
        return _from_table(spec, path)
    raise ValueError(f"{spec}: not a folder, .zip, .csv or .jsonl")


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
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images but {len(labels)} labels")
    if all(isinstance(label, str) for label in labels):
        names = [str(label) for label in labels]
        order = tuple(classes or sorted(set(names)))
    else:
        indices = [int(label) for label in labels]
        order = tuple(classes or map(str, range(max(indices, default=-1) + 1)))
        if indices and not 0 <= min(indices) <= max(indices) < len(order):
            raise ValueError(f"labels must lie in 0 ... {len(order) - 1}")
        names = [order[i] for i in indices]
    rows = [(str(i), name, "all", "") for i, name in enumerate(names)]
    return _assemble("arrays", rows, lambda _: Images(images), order)["all"]


def _assemble(
    spec: str,
    rows: Iterable[tuple[str, str, str, str]],
    reader: Callable[[np.ndarray], Callable[[int], np.ndarray]],
    classes: tuple[str, ...] | None = None,
    notes: tuple[str, ...] = (),
) -> dict[str, Source]:
    """Sources from rows of (id, label, split, group)."""
    parts: dict[str, list[tuple[str, str, str, str]]] = {}
    for row in rows:
        parts.setdefault(row[2], []).append(row)
    deciding = parts.get("train") or [row for part in parts.values() for row in part]
    classes = classes or tuple(sorted({row[1] for row in deciding}))
    index = {name: i for i, name in enumerate(classes)}
    sources = {}
    for split, part in parts.items():
        unknown = sorted({row[1] for row in part} - index.keys())
        if unknown:
            raise ValueError(
                f"{spec}: {split} has classes that train has not: {', '.join(unknown[:5])}"
            )
        ids = strings(row[0] for row in part)
        names = sorted({row[3] for row in part})
        sources[split] = Source(
            spec=spec, split=split, classes=classes, ids=ids, load=reader(ids), notes=notes,
            labels=np.array([index[row[1]] for row in part], dtype=np.int64),
            groups=np.searchsorted(names, [row[3] for row in part]) if any(names) else None,
        )  # fmt: skip
    return sources


def match_classes(source: Source, classes: tuple[str, ...]) -> Source:
    """The same source with labels that index `classes`, matched by name.

    Raises ValueError naming the source's classes that are not among them.
    """
    unknown = [c for c in source.classes if c not in classes]
    if unknown:
        raise ValueError(
            f"{source.spec}: {len(unknown)} of its classes are unknown to the model: "
            f"{', '.join(unknown[:5])}; the model knows {', '.join(classes[:5])}"
            f"{', ...' if len(classes) > 5 else ''}"
        )
    where = np.array([classes.index(c) for c in source.classes], dtype=np.int64)
    return replace(source, classes=tuple(classes), labels=where[source.labels])


# Folders and zips ------------------------------------------------------------------------------


def _hidden(path: PurePosixPath) -> bool:
    """Leftovers of file managers and notebooks, in any part of a path."""
    return any(p.startswith(".") or p in ("__MACOSX", "Thumbs.db") for p in path.parts)


def _from_folder(spec: str, root: Path) -> dict[str, Source]:
    files, folders = _walk(root)
    return _from_tree(spec, files, folders, lambda ids: Files(str(root), ids))


def _walk(root: Path) -> tuple[list[str], list[str]]:
    """Relative paths of files and of folders, links followed, each folder once."""
    files: list[str] = []
    folders: list[str] = []
    seen: set[tuple[int, int]] = set()
    for at, inner, names in os.walk(root, followlinks=True):
        stat = os.stat(at)
        if (stat.st_dev, stat.st_ino) in seen:  # a link that leads back
            inner.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        here = PurePosixPath(Path(at).relative_to(root).as_posix())
        folders += [str(here / name) for name in inner]
        files += [str(here / name) for name in names]
    return files, folders


def _from_zip(spec: str, path: Path) -> dict[str, Source]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError) as e:
        raise ValueError(f"{spec}: not a readable zip ({e})") from e
    folders = {str(p) for n in names for p in PurePosixPath(n).parents}
    folders |= {n.rstrip("/") for n in names if n.endswith("/")}
    files = [n for n in names if not n.endswith("/")]
    # Archives are mostly made of one folder: look inside it.
    tops = {PurePosixPath(f).parts[0] for f in files if not _hidden(PurePosixPath(f))}
    top = tops.pop() + "/" if len(tops) == 1 and not (tops & SPLITS.keys()) else ""
    inside = [f.removeprefix(top) for f in files if f.startswith(top)]
    return _from_tree(
        spec, inside, [f.removeprefix(top) for f in folders if f.startswith(top)],
        lambda ids: Members(str(path), strings(top + os.fsdecode(bytes(i)) for i in ids)),
    )  # fmt: skip


def _from_tree(
    spec: str,
    files: Iterable[str],
    folders: Iterable[str],
    reader: Callable[[np.ndarray], Callable[[int], np.ndarray]],
) -> dict[str, Source]:
    """Class folders, below split folders where there are any: [split/]class/.../picture."""
    trees = [PurePosixPath(f) for f in folders]
    tops = {t.parts[0] for t in trees if len(t.parts) == 1 and not _hidden(t)}
    splits = {t: SPLITS[t.lower()] for t in tops if t.lower() in SPLITS}
    if "train" not in splits.values() and tops - splits.keys():
        splits = {}  # a class may be called "test"
    level = 1 if splits else 0
    empty = {
        t.parts[: level + 1] for t in trees
        if len(t.parts) == level + 1 and not _hidden(t) and (not level or t.parts[0] in splits)
    }  # fmt: skip
    rows, ignored = [], []
    for file in sorted(files):
        path = PurePosixPath(file)
        parts = path.parts
        picture = path.suffix.lower() in decode.EXTENSIONS
        placed = len(parts) > level + 1 and (not level or parts[0] in splits)
        if _hidden(path) or not picture or not placed:
            ignored.append(file)
            continue
        empty.discard(parts[: level + 1])
        rows.append((file, parts[level], splits[parts[0]] if level else "all", ""))
    if not rows:
        loose = " (pictures lie loose, not in a folder a class)" if ignored else ""
        raise ValueError(
            f"{spec}: no pictures in class folders{loose}; looked for "
            f"{' '.join(sorted(decode.EXTENSIONS))}"
        )
    missing = sorted("/".join(parts) for parts in empty if not level or splits[parts[0]] == "train")
    if missing:
        raise ValueError(
            f"{spec}: class folder without pictures: {', '.join(missing[:5])}; fill or remove it"
        )
    notes: tuple[str, ...] = ()
    if ignored:
        shown = ", ".join(ignored[:3]) + (", ..." if len(ignored) > 3 else "")
        notes = (f"{spec}: ignored {len(ignored)} files that are no pictures in a class: {shown}",)
    return _assemble(spec, rows, reader, notes=notes)


# Tables ----------------------------------------------------------------------------------------


def _from_table(spec: str, path: Path) -> dict[str, Source]:
    """CSV `path,label[,split][,group]`, or JSONL of the same keys; paths relative to the table."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"{spec}: not UTF-8 text ({e.reason} at byte {e.start})") from e
    records = _jsonl(spec, text) if path.suffix.lower() == ".jsonl" else _csv(spec, text)
    rows = []
    for line, record in records:
        file, label = record.get("path"), record.get("label")
        if not isinstance(file, str) or not file or label is None or not str(label):
            raise ValueError(f"{spec}: line {line} needs a path and a label")
        if "|" in str(label):
            raise ValueError(f"{spec}: line {line} has several labels ({label}); give one")
        split = str(record.get("split") or ("all" if "split" not in record else "train")).lower()
        if split not in SPLITS and split != "all":
            raise ValueError(f"{spec}: line {line}: split {split!r} is not train, val or test")
        rows.append((file, str(label), SPLITS.get(split, split), str(record.get("group") or "")))
    if not rows:
        raise ValueError(f"{spec}: no rows")
    return _assemble(spec, rows, lambda ids: Files(str(path.parent), ids))


def _csv(spec: str, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [h.strip() for h in reader.fieldnames or ()]
        if not {"path", "label"} <= set(header):
            raise ValueError(
                f"{spec}: the header must be path,label[,split][,group], found {','.join(header)}"
            )
        reader.fieldnames = header
        for record in reader:
            if None in record:
                raise ValueError(f"{spec}: line {reader.line_num} has more columns than the header")
            yield reader.line_num, record
    except csv.Error as e:
        raise ValueError(f"{spec}: line {reader.line_num}: {e}") from e


def _jsonl(spec: str, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{spec}: line {number} is not JSON ({e})") from e
        if not isinstance(record, dict):
            raise ValueError(f"{spec}: line {number} is not an object")
        yield number, record
