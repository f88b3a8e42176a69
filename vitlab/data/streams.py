"""Packed shards anywhere that fsspec reaches (s3://, gs://, https://, file://), read in sequence.

Pictures are fetched in runs of RUN neighbours, so the order of an epoch is not free: shards are
shuffled as a whole, their rows laid end to end and cut into equal lanes; within a lane, each RUN
rows are shuffled. A batch takes equal parts from PARTS lanes, and batches take turns among GROUPS
of lanes: where numbers divide, each process and each of its workers has lanes of its own, and every
byte is fetched once. All of it is a function of (seed, epoch) and the batch: order and resuming are
the same on any number of processes.
"""

import hashlib
import os
import tarfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from vitlab.data import decode
from vitlab.data.named import cache_folder
from vitlab.data.shards import BLOCK, INDEX, Shards, indexed, mapped, read_index
from vitlab.data.sources import MAX_MEMBER, Source
from vitlab.data.writing import written

RUN = 64  # neighbours that are fetched, and shuffled, together
PARTS = 8  # parts of a batch, each from a lane of its own
GROUPS = 4  # of lanes, which take turns


@dataclass(frozen=True)
class Stream(Shards):
    """Reads pictures of remote shards, RUN neighbours at a time."""

    def _read(self, i: int, with_data: bool = True) -> tuple[str, bytes]:
        shard = self._shard(i)
        start, end = int(self.starts[shard]), int(self.starts[shard + 1])
        first = start + (i - start) // RUN * RUN
        places = mapped(cast(str, self.places))
        began = int(places[first]) * BLOCK
        stop = None if first + RUN >= end else int(places[first + RUN]) * BLOCK
        try:
            run = _fetch(self.files[shard], began, stop)
            at = int(places[i]) * BLOCK - began
            info = tarfile.TarInfo.frombuf(run[at : at + BLOCK], "utf-8", "surrogateescape")
        except (OSError, tarfile.TarError) as e:
            raise decode.Unreadable(f"cannot be read from {self.files[shard]} ({e})") from e
        if info.size > MAX_MEMBER:
            raise decode.Unreadable(f"larger than {MAX_MEMBER >> 20} MiB")
        return info.name, run[at + BLOCK : at + BLOCK + info.size]


_kept: "OrderedDict[tuple[str, int], bytes]" = OrderedDict()  # runs of this process, newest last


def _fetch(url: str, began: int, stop: int | None) -> bytes:
    """Bytes of a file; the last ones asked for are kept, two runs a lane."""
    run = _kept.pop((url, began), None)  # in one step: threads share them
    if run is None:
        system = _system(url.partition("://")[0], os.getpid())
        run = bytes(system.cat_file(url, start=began, end=stop))
    _kept[url, began] = run
    while len(_kept) > 2 * PARTS * GROUPS:
        _kept.popitem(last=False)
    return run


@lru_cache(maxsize=8)
def _system(protocol: str, process: int) -> Any:
    """fsspec's file system of a protocol, for each process its own (they do not bear forking).

    Raises ValueError naming what must be installed.
    """
    import fsspec

    try:
        return fsspec.filesystem(protocol, skip_instance_cache=True)
    except (ImportError, ValueError) as e:
        raise ValueError(f"{protocol}://: {e}") from None


def open_stream(spec: str) -> dict[str, Source]:
    """Sources by split of a folder that `vitlab data pack` wrote, wherever it lies.

    Its index is copied to the cache folder; pictures stay where they are. Raises ValueError where
    there is no index, OSError where the place cannot be reached.
    """
    root, system = spec.rstrip("/"), _system(spec.partition("://")[0], os.getpid())

    def copy(name: str, to: Path) -> None:
        if not to.exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            with written(to) as aside:
                aside.write_bytes(system.cat_file(f"{root}/{name}"))

    try:
        digest = hashlib.sha256(spec.encode() + system.cat_file(f"{root}/{INDEX}")).hexdigest()
    except FileNotFoundError:
        raise ValueError(f"{spec}: no {INDEX} there; `vitlab data pack` writes one") from None
    folder = cache_folder() / "streams" / digest[:32]
    copy(INDEX, folder / INDEX)
    index = read_index(folder)
    for split, part in index["splits"].items():
        for name in part["columns"]:
            copy(f"{split}.{name}.npy", folder / f"{split}.{name}.npy")
    return indexed(spec, folder, index, root, Stream)


# Order -------------------------------------------------------------------------------------------


def keys(starts: np.ndarray, batch: int, seed: int, start: int, stop: int) -> Iterator[np.ndarray]:
    """As `loader.keys`, for shards that begin at these rows: [batch, 3] int64 a step.

    A key is (epoch, position in it, row). Each lane goes through its own rows, epoch after epoch.
    """
    n = int(starts[-1])
    parts = PARTS if batch % PARTS == 0 else 1
    lanes = parts * GROUPS
    if n < lanes * RUN:
        parts = lanes = 1
    cuts = np.arange(lanes + 1) * n // lanes
    slots = np.arange(batch)
    for step in range(start, stop):
        group, visit = (step % GROUPS, step // GROUPS) if lanes > 1 else (0, step)
        share = batch // parts
        lane = slots // share * (lanes // parts) + group
        epochs, inside = np.divmod(visit * share + slots % share, (cuts[1:] - cuts[:-1])[lane])
        positions = cuts[lane] + inside
        rows = np.empty(batch, dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            rows[chosen] = _rows(starts, cuts, seed, int(epoch), lane[chosen], positions[chosen])
        yield np.column_stack([epochs, positions, rows])


def _rows(
    starts: np.ndarray, cuts: np.ndarray, seed: int, epoch: int, lane: np.ndarray,
    positions: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Rows at positions [B] of an epoch, each in its lane."""
    shards, ends = _shard_order(starts.tobytes(), seed, epoch)
    run = (positions - cuts[lane]) // RUN
    first = cuts[lane] + run * RUN
    length = np.minimum(first + RUN, cuts[lane + 1]) - first
    shuffled = np.array([
        at + _shuffle(seed, epoch, int(at), int(size))[position - at]
        for at, size, position in zip(first, length, positions, strict=True)
    ])  # fmt: skip
    where = np.searchsorted(ends, shuffled, side="right")
    counts = starts[shards + 1] - starts[shards]
    rows: np.ndarray = starts[shards[where]] + shuffled - (ends[where] - counts[where])
    return rows


@lru_cache(maxsize=4)
def _shard_order(starts: bytes, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The shards in an epoch's order, and where each ends when their rows are laid end to end."""
    at = np.frombuffer(starts, dtype=np.int64)
    shards = np.random.default_rng([seed, 6, epoch]).permutation(len(at) - 1)
    return shards, np.cumsum((at[1:] - at[:-1])[shards])


@lru_cache(maxsize=4 * PARTS * GROUPS)
def _shuffle(seed: int, epoch: int, first: int, size: int) -> np.ndarray:
    """How the `size` rows from position `first` on are shuffled."""
    return np.random.default_rng([seed, 7, epoch, first]).permutation(size)
