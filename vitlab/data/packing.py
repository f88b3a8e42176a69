"""Write a set into tar shards with an index, the same bytes each time.

A sample is `KEY.jpg` (or `.png`), `KEY.cls` with its label as a number, and `KEY.json` with what
else is known, as webdataset has it. Files that are JPEG or PNG keep their bytes; anything else
becomes a PNG of the pixels that vitlab decodes. A shard is written aside and renamed, so that a
packing may be interrupted anywhere and finished later.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from array import array
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitlab.data import decode
from vitlab.data.looks import encoded
from vitlab.data.shards import BLOCK, FORMAT, INDEX, VERSION, read_index
from vitlab.data.sources import Source
from vitlab.data.writing import written

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20,
         "gib": 2**30}  # fmt: skip
MOST = 1 << 40  # bytes of a shard: its places count BLOCKs in 32 bits
AHEAD = 16  # pictures a thread that are read before they are written
PLAN = "packing.json"  # what an unfinished packing was asked for
KINDS = {b"\xff\xd8\xff": "jpg", b"\x89PNG\r\n\x1a\n": "png"}  # what keeps its bytes, by its head


@dataclass
class Packed:
    """What was written."""

    pictures: int = 0
    shards: int = 0
    bytes: int = 0  # of all shards
    left_out: list[tuple[str, str]] = field(default_factory=list)  # (id, why)


@dataclass
class _Shard:
    """Of one shard: which pictures of the order it holds, and where."""

    file: str
    bytes: int
    positions: array[int] = field(default_factory=lambda: array("q"))
    places: array[int] = field(default_factory=lambda: array("I"))


def size(text: str) -> int:
    """`256MB`, `1.5GB`, `1GiB`, `5000` -> bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = UNITS.get(match[2]) if match else None
    if match is None or unit is None or not 0 < float(match[1]) * unit <= MOST:
        raise ValueError(f"--shard-size {text}: write 256MB, 1GB or 1GiB, up to 1TiB")
    return max(1, int(float(match[1]) * unit))


def pack(
    parts: Mapping[str, Source], folder: Path, *, shard_size: int, seed: int = 0,
    verify: bool = True, threads: int = 1, tick: Callable[[int], None] = lambda n: None,
) -> Packed:  # fmt: skip
    """Pack a set by split, in an order that the seed shuffles; or finish an earlier call.

    Args:
        parts: sources by split.
        folder: of the shards, `SPLIT-000000.tar` and so on.
        shard_size: bytes from which a shard is full.
        verify: decode each picture; those that cannot be are left out, as are those that cannot
            be read, without.
        threads: that read and decode.
        tick: called with the number of pictures after each shard.

    Raises ValueError for a folder that holds anything else.
    """
    plan = {
        "shard_size": shard_size, "seed": seed, "verify": verify,
        "sets": {split: _fingerprint(source) for split, source in parts.items()},
    }  # fmt: skip
    _claim(folder, plan)
    done = Packed()
    splits = {}
    if (folder / INDEX).exists():
        splits = read_index(folder)["splits"]
        done.left_out = [tuple(pair) for part in splits.values() for pair in part["left_out"]]
    else:
        for split, source in parts.items():
            left_out: list[tuple[str, str]] = []
            splits[split] = _split(folder, split, source, plan, threads, left_out, tick)
            done.left_out += left_out
        classes = next(iter(parts.values())).classes
        index = {"format": FORMAT, "version": VERSION, "classes": classes, "splits": splits,
                 "packing": plan}  # fmt: skip
        with written(folder / INDEX) as aside:
            aside.write_text(json.dumps(index) + "\n", encoding="utf-8")
        (folder / PLAN).unlink()
    for part in splits.values():
        done.shards += len(part["shards"])
        done.pictures += sum(shard["pictures"] for shard in part["shards"])
        done.bytes += sum(shard["bytes"] for shard in part["shards"])
    return done


def _claim(folder: Path, plan: Mapping[str, Any]) -> None:
    """Take an empty folder, or one of the same packing."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--to {folder}: is a file; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    strays = list(folder.glob(".*.part"))  # of a process killed while it wrote
    there = sorted(p.name for p in folder.iterdir() if p not in strays)
    if not there:
        with written(folder / PLAN) as aside:
            aside.write_text(json.dumps(plan) + "\n", encoding="utf-8")
        return
    try:
        known = INDEX if INDEX in there else PLAN
        record = json.loads((folder / known).read_text(encoding="utf-8"))
        same = (record["packing"] if known == INDEX else record) == plan
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"--to {folder}: holds {there[0]}; choose an empty folder") from None
    if not same:
        raise ValueError(
            f"--to {folder}: holds shards of other pictures or options; choose another folder"
        )
    for stray in strays:
        stray.unlink()


def _fingerprint(source: Source) -> str:
    """Of what is packed: names, labels, groups."""
    digest = hashlib.sha256("\0".join(source.classes).encode("utf-8", "surrogateescape"))
    digest.update(source.ids.tobytes())
    digest.update(np.asarray(source.labels, dtype=np.int64).tobytes())
    if source.groups is not None:
        digest.update(np.asarray(source.groups, dtype=np.int64).tobytes())
    if source.many is not None:
        digest.update(source.many.tobytes())
    return digest.hexdigest()


def _split(
    folder: Path, split: str, source: Source, plan: Mapping[str, Any], threads: int,
    left_out: list[tuple[str, str]], tick: Callable[[int], None],
) -> dict[str, Any]:  # fmt: skip
    """Write one split's shards and columns; what the index says of it."""
    n = len(source)
    key = [plan["seed"], int.from_bytes(split.encode(), "little")]
    order = np.random.default_rng(key).permutation(n)
    shards: list[_Shard] = []
    at = 0
    with ThreadPoolExecutor(threads) as pool:
        while at < n and (folder / _file(split, len(shards))).exists():  # of an earlier call
            shards.append(_again(folder, _file(split, len(shards))))
            end = shards[-1].positions[-1] + 1
            gone = sorted(set(range(at, end)) - set(shards[-1].positions))
            left_out += [(source.id(int(order[i])), "left out earlier") for i in gone]
            at = end
        samples = _samples(pool, source, order, at, plan["verify"], AHEAD * threads)
        while (shard := _write(folder, split, len(shards), source, order, samples,
                               plan["shard_size"], left_out)) is not None:  # fmt: skip
            shards.append(shard)
            tick(len(shard.positions))
    places = np.concatenate([np.empty(0, np.uint32), *(s.places for s in shards)])
    rows = order[np.concatenate([np.empty(0, np.int64), *(s.positions for s in shards)])]
    if not len(rows):
        raise ValueError(f"{source.spec}: {split} has no readable picture to pack")
    columns = {"places": places.astype(np.uint32), "labels": source.labels[rows].astype(np.int32)}
    if source.groups is not None:
        columns["groups"] = source.groups[rows].astype(np.int32)
    if source.many is not None:
        columns["many"] = source.many[rows]
    digest = hashlib.sha256()
    for name, column in columns.items():
        digest.update(column.tobytes())
        with written(folder / f"{split}.{name}.npy") as aside, open(aside, "wb") as file:
            np.save(file, column, allow_pickle=False)
    return {
        "columns": list(columns), "sha256": digest.hexdigest(), "left_out": left_out,
        "shards": [{"file": s.file, "pictures": len(s.positions), "bytes": s.bytes}
                   for s in shards],
    }  # fmt: skip


def _file(split: str, shard: int) -> str:
    return f"{split}-{shard:06d}.tar"


def _samples(
    pool: ThreadPoolExecutor, source: Source, order: np.ndarray, at: int, verify: bool, ahead: int
) -> Iterator[tuple[int, str, bytes]]:
    """(position, kind, bytes) from position `at` on; an empty kind where bytes say why not."""

    def read(row: int) -> tuple[str, bytes]:
        try:
            return _encode(source, row, verify)
        except (decode.Unreadable, OSError) as e:
            return "", decode.why_skipped(e).encode()

    for start in range(at, len(order), ahead):
        rows = order[start : start + ahead].tolist()
        for position, (kind, data) in enumerate(pool.map(read, rows), start=start):
            yield position, kind, data


def _encode(source: Source, row: int, verify: bool) -> tuple[str, bytes]:
    """(kind, bytes) of a picture: its own file, or a PNG of its pixels."""
    data = encoded(source.load, row)
    kind = next((k for head, k in KINDS.items() if data and data.startswith(head)), None)
    if data is not None and kind is not None:
        if verify:
            decode.decode(data)
        return kind, data
    pixels = source.load(row) if data is None else decode.decode(data)
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    return "png", png.getvalue()


def _write(
    folder: Path, split: str, number: int, source: Source, order: np.ndarray,
    samples: Iterator[tuple[int, str, bytes]], full: int, left_out: list[tuple[str, str]],
) -> _Shard | None:  # fmt: skip
    """The next shard, of samples until it is full; None when there are no more."""
    shard = _Shard(_file(split, number), 0)
    with written(folder / shard.file) as aside:
        with tarfile.open(aside, "w", format=tarfile.USTAR_FORMAT) as tar:
            for position, kind, data in samples:
                row = int(order[position])
                if not kind:
                    left_out.append((source.id(row), data.decode()))
                    continue
                shard.positions.append(position)
                shard.places.append(tar.offset // BLOCK)
                label = int(source.labels[row])
                record: dict[str, Any] = {"id": source.id(row), "label": source.classes[label]}
                if source.groups is not None:
                    record["group"] = int(source.groups[row])
                if source.many is not None:
                    own = np.flatnonzero(source.many[row]).tolist()
                    record["labels"] = [source.classes[k] for k in own]
                for suffix, content in (
                    (kind, data), ("cls", str(label).encode()),
                    ("json", json.dumps(record).encode()),
                ):  # fmt: skip
                    info = tarfile.TarInfo(f"{position:09d}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep each
                if tar.offset >= full:
                    break
        if not shard.positions:
            aside.unlink()
            return None
        shard.bytes = aside.stat().st_size
    return shard


def _again(folder: Path, file: str) -> _Shard:
    """A shard that an earlier call finished, from its headers."""
    shard = _Shard(file, (folder / file).stat().st_size)
    with tarfile.open(folder / file, "r:") as tar:
        for member in tar:
            key, _, kind = member.name.partition(".")
            if kind in KINDS.values():
                shard.positions.append(int(key))
                shard.places.append(member.offset_data // BLOCK - 1)
            tar.members.clear()  # type: ignore[attr-defined]
    return shard
