"""Pictures in tar shards, each found by its place: what `packing` writes, and any webdataset's.

The index of a packed set is arrays on disk that are mapped, not read: ten million pictures cost a
process 80 MB at most, of memory that all processes share. Order and split are as for any source.
"""

import hashlib
import io
import itertools
import json
import os
import re
import tarfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from vitlab.data import decode
from vitlab.data.named import cache_folder
from vitlab.data.sources import MAX_MEMBER, SPLITS, Source, Stored, check_classes, listing

FORMAT, VERSION = "vitlab-shards", 1
INDEX = "index.json"  # of a packed folder: written last, so that a folder with it is whole
BLOCK = 512  # bytes: a header, and what everything in a tar is a multiple of
COLUMNS: dict[str, tuple[Any, int]] = {  # of an index: its numbers, its axes
    "places": (np.uint32, 1),
    "labels": (np.int32, 1),
    "groups": (np.int32, 1),
    "many": (np.bool_, 2),
}
DIGITS = 5  # of a label that counts classes; longer numbers are names, such as a shop's
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}")


@dataclass(frozen=True)
class Shards(Stored):
    """Reads pictures from tar files, each opened for one read: no process shares an offset."""

    files: tuple[str, ...]  # paths of the shards
    starts: np.ndarray  # [shards + 1] int64: first row of each
    places: str | np.ndarray  # [N] uint32: BLOCKs before each picture's header; or its .npy
    sizes: np.ndarray | None = None  # [shards] int64: bytes of each, where an index says so

    def __call__(self, i: int) -> np.ndarray:
        return decode.decode(self.file(i))

    def file(self, i: int) -> bytes:
        """Its bytes."""
        _, data = self._read(i)
        return data

    def id(self, i: int) -> str:
        """Shard and name in it."""
        try:
            name, _ = self._read(i, with_data=False)
        except (decode.Unreadable, OSError):
            name = f"picture {i - self.starts[self._shard(i)]}"
        return f"{os.path.basename(self.files[self._shard(i)])}/{name}"

    def _shard(self, i: int) -> int:
        return int(np.searchsorted(self.starts, i, side="right")) - 1

    def _read(self, i: int, with_data: bool = True) -> tuple[str, bytes]:
        places = mapped(self.places) if isinstance(self.places, str) else self.places
        shard = self.files[self._shard(i)]
        try:
            with open(shard, "rb") as file:
                file.seek(int(places[i]) * BLOCK)
                name, size = header(shard, file.read(BLOCK))
                data = file.read(size) if with_data else b""
        except OSError as e:
            raise decode.Unreadable(f"cannot be read from {shard} ({e})") from e
        if with_data and len(data) < size:
            raise decode.Unreadable(f"truncated in {shard}")
        return name, data


def header(shard: str, block: bytes) -> tuple[str, int]:
    """(name, bytes) of a member of a shard, from its header. Raises Unreadable."""
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.TarError as e:
        raise decode.Unreadable(f"cannot be read from {shard} ({e})") from e
    if not 0 <= info.size <= MAX_MEMBER:  # a header can say -1: all the rest
        raise decode.Unreadable(f"{info.size:,} bytes long in {shard}, not 0 to {MAX_MEMBER:,}")
    return info.name, info.size


class Names:
    """Pictures' names as a source keeps them, but read from the shards when they are asked for."""

    def __init__(self, load: Shards, digest: bytes, rows: np.ndarray | None = None) -> None:
        self.load, self.digest, self.rows = load, digest, rows

    def __len__(self) -> int:
        return int(self.load.starts[-1]) if self.rows is None else len(self.rows)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, int | np.integer):
            if not -len(self) <= at < len(self):
                raise IndexError(at)
            at = int(at) % len(self)
            return os.fsencode(self.load.id(at if self.rows is None else int(self.rows[at])))
        rows = np.arange(len(self)) if self.rows is None else self.rows
        return Names(self.load, self.digest, rows[at])

    def tobytes(self) -> bytes:
        """What tells this set from another: the index's digest, and which rows of it."""
        return self.digest + (b"" if self.rows is None else self.rows.tobytes())


@lru_cache(maxsize=64)
def mapped(path: str) -> np.ndarray:
    """An array in a .npy, mapped: read-only, and read where it is used."""
    return np.lib.format.open_memmap(path, mode="r")


def meant(spec: str) -> bool:
    """Does a spec name shards: `.tar`, braces, a packed folder, or one of nothing but .tar?"""
    path = Path(os.path.expanduser(spec))
    if not path.is_dir():
        return spec.lower().endswith(".tar")
    if (path / INDEX).is_file() and any(path.glob("*.places.npy")):
        return True
    with os.scandir(path) as entries:
        names = [(e.name, e.is_dir()) for e in entries if not e.name.startswith(".")]
    return not any(folder for _, folder in names) and any(n.endswith(".tar") for n, _ in names)


def open_shards(spec: str) -> dict[str, Source]:
    """Sources by split of a spec that names shards; their names may begin with the split's.

    Raises FileNotFoundError for a shard that is missing, ValueError for what is no shard or has
    no labels.
    """
    path = Path(os.path.expanduser(spec))
    if path.is_dir():
        if (path / INDEX).is_file():
            return _packed(spec, path)
        files = sorted(str(p) for p in path.glob("*.tar"))
    else:
        files = expand(os.path.expanduser(spec))
    missing = [f for f in files if not os.path.isfile(f)]
    if missing or not files:
        raise FileNotFoundError(f"{spec}: no file {listing(missing, 3) or 'of such a name'}")
    return _scanned(spec, files)


def expand(spec: str) -> list[str]:
    """`a-{000..127}.tar` and `{train,val}.tar` -> all names, in order."""
    match = _BRACES.search(spec)
    if match is None:
        return [spec]
    if match[3] is not None:
        middle: Iterable[str] = match[3].split(",")
    else:
        low, high = int(match[1]), int(match[2])
        middle = (f"{i:0{len(match[1])}d}" for i in range(low, high + 1))
    ends = expand(spec[match.end() :])
    return [spec[: match.start()] + part + end for part in middle for end in ends]


# Packed: with an index -------------------------------------------------------------------------


def read_index(folder: Path) -> dict[str, Any]:
    """index.json of a packed folder. Raises ValueError for another file of that name."""
    return parse_index((folder / INDEX).read_bytes(), str(folder / INDEX))


def parse_index(text: bytes, where: str) -> dict[str, Any]:
    """An index, which anybody may have written. Raises ValueError for what cannot be one."""
    try:
        index = json.loads(text)
        good = index["format"] == FORMAT
        newer = good and index["version"] > VERSION
        if good and not newer:
            _refuse_impossible(index)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{where}: not an index of shards ({e})") from e
    if not good or newer:
        why = "of a newer vitlab" if newer else "not an index of shards"
        raise ValueError(f"{where}: {why}")
    return dict(index)


def _refuse_impossible(index: dict[str, Any]) -> None:
    check_classes("classes", index["classes"])
    if not index["splits"]:
        raise ValueError("no pictures")
    for split, part in index["splits"].items():
        for name in (split, *part["columns"], *(shard["file"] for shard in part["shards"])):
            os.fsencode(name)  # a ValueError where no file can be called so
            if os.path.basename(name) != name or not name.strip("."):
                raise ValueError(f"{name!r} is no name of a file in it")
        if not {"places", "labels"} <= set(part["columns"]) <= COLUMNS.keys():
            raise ValueError(f"{split} has the columns {', '.join(part['columns'])}")
        counts = [shard[key] for shard in part["shards"] for key in ("pictures", "bytes")]
        if not counts or not all(type(n) is int and 0 < n <= BLOCK << 32 for n in counts):
            raise ValueError(f"{split} has shards of impossible sizes")


def _packed(spec: str, folder: Path) -> dict[str, Source]:
    index = read_index(folder)
    for part in index["splits"].values():
        for shard in part["shards"]:
            file = folder / shard["file"]
            if not os.path.isfile(file):
                raise FileNotFoundError(f"{spec}: no file {file}, which its index names")
            if os.path.getsize(file) != shard["bytes"]:
                raise ValueError(f"{spec}: {file} is not as long as its index says; copy it again")
    return indexed(spec, folder, index, str(folder), Shards)


def indexed(
    spec: str, folder: Path, index: dict[str, Any], root: str, reader: type[Shards]
) -> dict[str, Source]:
    """Sources by split from an index and its arrays in a folder, for shards below a root."""
    mapped.cache_clear()  # the folder may hold other files than when it was last opened
    sources = {}
    classes = tuple(index["classes"])
    for split, part in index["splits"].items():
        files = tuple(f"{root}/{shard['file']}" for shard in part["shards"])
        paths = {name: str(folder / f"{split}.{name}.npy") for name in part["columns"]}
        starts = np.cumsum([0, *(shard["pictures"] for shard in part["shards"])])
        sizes = np.array([shard["bytes"] for shard in part["shards"]])
        load = reader(files, starts, paths["places"], sizes)
        try:
            columns: dict[str, Any] = {name: mapped(path) for name, path in paths.items()}
            for name, column in columns.items():
                shape = (starts[-1], len(classes))[: COLUMNS[name][1]]
                if column.dtype != COLUMNS[name][0] or column.shape != shape:
                    raise ValueError(f"{name} are not those of its shards")
            if not 0 <= columns["labels"].min() <= columns["labels"].max() < len(classes):
                raise ValueError("labels that are none of its classes")
            del columns["places"]  # for its reader alone
            ids = cast(np.ndarray, Names(load, bytes.fromhex(part["sha256"])))
            sources[split] = Source(
                spec=spec, split=split, classes=classes, load=load, ids=ids, **columns
            )
        except Exception as e:  # damaged arrays raise everything from EOFError to TokenError
            why = str(e) or type(e).__name__
            raise ValueError(f"{spec}: its index is damaged ({why}); pack it again") from e
    return sources


# Others: scanned once --------------------------------------------------------------------------


def _scanned(spec: str, files: Sequence[str]) -> dict[str, Source]:
    """Sources of shards without an index. Headers and labels are read, once; pictures are not."""
    parts: dict[str, list[str]] = {}
    for file in files:
        words = re.split(r"[-_.]", os.path.basename(file).lower())
        split = next((SPLITS[word] for word in words if word in SPLITS), "")
        parts.setdefault(split, []).append(file)
    if "" in parts:  # one without: the others' words may be part of a name
        parts = {"all": list(files)}
    scans = {split: _cached(spec, own) for split, own in parts.items()}
    deciding = scans.get("train")
    named = [deciding] if deciding else list(scans.values())
    classes = _classes({label for scan in named for label in scan["names"]})
    check_classes(spec, classes)
    index = {name: i for i, name in enumerate(classes)}
    sources = {}
    for split, scan in scans.items():
        unknown = sorted(set(scan["names"]) - index.keys())
        if unknown:
            raise ValueError(f"{spec}: {split} has classes that train has not: {listing(unknown)}")
        load = Shards(tuple(parts[split]), scan["starts"], scan["places"])
        where = np.array([index[name] for name in scan["names"]], dtype=np.int64)
        sources[split] = Source(
            spec=spec, split=split, classes=classes, labels=where[scan["labels"]], load=load,
            ids=cast(np.ndarray, Names(load, scan["digest"])), notes=tuple(scan["notes"]),
        )  # fmt: skip
    return sources


def _classes(labels: set[str]) -> tuple[str, ...]:
    """Numbers stand for all up to the highest, words and long numbers for themselves."""
    if all(len(x) <= DIGITS and x.isdecimal() and x == str(int(x)) for x in labels):
        return tuple(map(str, range(max(map(int, labels)) + 1)))
    return tuple(sorted(labels))


def _cached(spec: str, files: Sequence[str]) -> dict[str, Any]:
    """The scan of some shards, from the cache folder where they have not changed since."""
    stats = [(os.path.abspath(f), os.path.getsize(f), os.stat(f).st_mtime_ns) for f in files]
    digest = hashlib.sha256(repr((VERSION, stats)).encode("utf-8", "surrogateescape"))
    cache = cache_folder() / "shards" / f"{digest.hexdigest()[:32]}.npz"
    scan: dict[str, Any] | None = None
    with suppress(OSError, ValueError, KeyError), np.load(cache, allow_pickle=False) as kept:
        scan = {name: kept[name] for name in ("starts", "places", "labels")}
        scan |= json.loads(str(kept["words"]))
    if scan is None:
        scan = _scan(spec, files)
        words = json.dumps({"names": scan["names"], "notes": scan["notes"]})
        arrays = {name: scan[name] for name in ("starts", "places", "labels")}
        with suppress(OSError):  # a cache folder that cannot be written costs time alone
            cache.parent.mkdir(parents=True, exist_ok=True)
            data = io.BytesIO()
            np.savez(data, words=np.array(words), **arrays)
            aside = cache.with_name(f"{cache.name}.{os.getpid()}")
            aside.write_bytes(data.getvalue())
            os.replace(aside, cache)
    return {**scan, "digest": digest.digest()}


def _scan(spec: str, files: Sequence[str]) -> dict[str, Any]:
    starts, places, labels = [0], array("I"), array("i")
    names: dict[str, int] = {}
    ignored: list[str] = []
    for file in files:
        try:
            for key, picture, label in _samples(file):
                if picture is None or label is None:
                    what = "no picture" if picture is None else "no label (.cls or .json)"
                    ignored.append(f"{os.path.basename(file)}/{key} ({what})")
                    continue
                places.append(picture)
                labels.append(names.setdefault(label, len(names)))
        except Exception as e:  # hostile ones raise everything from OverflowError to IndexError
            why = str(e) or type(e).__name__
            raise ValueError(f"{spec}: {file} is not a readable tar ({why})") from e
        starts.append(len(places))
    if not places:
        found = f"; found {listing(ignored, 2)}" if ignored else ""
        raise ValueError(f"{spec}: no pictures with labels{found}")
    notes = [f"{spec}: ignored {len(ignored):,} samples: {listing(ignored, 3)}"] if ignored else []
    return {
        "starts": np.array(starts), "places": np.array(places, dtype=np.uint32),
        "labels": np.array(labels, dtype=np.int32), "names": list(names), "notes": notes,
    }  # fmt: skip


def _samples(file: str) -> Iterator[tuple[str, int | None, str | None]]:
    """(key, place of its picture, label) of each sample: members that share a name to the dot."""
    with tarfile.open(file, "r:") as tar:
        for key, members in itertools.groupby(_members(tar), key=lambda m: _key(m.name)[0]):
            picture, number, word = None, None, None
            for member in members:
                kind = _key(member.name)[1]
                if picture is None and os.path.splitext(f"x.{kind}")[1] in decode.EXTENSIONS:
                    picture = member.offset_data // BLOCK - 1
                elif kind in ("cls", "json") and member.size <= 1 << 20:
                    data = tar.extractfile(member)
                    text = data.read().decode("utf-8", "replace").strip() if data else ""
                    number = text if kind == "cls" else number
                    word = _word(text) if kind == "json" else word
            yield key, picture, word or number or None


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Plain files; raises ValueError where one would end before it begins, or for other bytes."""
    file, end = cast(BinaryIO, tar.fileobj), 0
    for member in tar:
        tar.members.clear()  # type: ignore[attr-defined]  # it would keep each
        if tar.offset <= end:  # sizes below 0 lead back, for ever
            raise ValueError(f"damaged at byte {end:,}")
        end = tar.offset
        if member.isreg() and not member.issparse():
            yield member
    file.seek(end)  # where tarfile stops without a word
    if file.read(BLOCK).strip(b"\0"):
        raise ValueError(f"damaged at byte {end:,}")


def _key(name: str) -> tuple[str, str]:
    """(what a sample's members share, the rest in lower case) of a member's name."""
    folder, _, file = name.rpartition("/")
    key, _, kind = file.partition(".")
    return f"{folder}/{key}", kind.lower()


def _word(text: str) -> str | None:
    """The label that a sample's JSON gives."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    label = record.get("label") if isinstance(record, dict) else None
    return str(label) if isinstance(label, str | int) and not isinstance(label, bool) else None
