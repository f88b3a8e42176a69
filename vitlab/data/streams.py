"""Packed shards anywhere that fsspec reaches (s3://, gs://, https://, file://), read in sequence.

Pictures are fetched in runs of RUN neighbours, so the order of an epoch is not free: shards are
shuffled as a whole, their rows laid end to end and cut into equal lanes; within a lane, each RUN
rows are shuffled. A batch takes equal parts from PARTS lanes, and batches take turns among GROUPS
of lanes: where numbers divide, each process and each of its workers has lanes of its own, and every
byte is fetched once. All of it is a function of (seed, epoch) and the batch: order and resuming are
the same on any number of processes.
"""

import hashlib
import logging
import os
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np

from vitlab.data import decode
from vitlab.data.named import TIMEOUT, cache_folder
from vitlab.data.shards import BLOCK, INDEX, Shards, header, indexed, mapped, parse_index
from vitlab.data.sources import Source

log = logging.getLogger("vitlab")
RUN = 64  # neighbours that are fetched, and shuffled, together
PARTS = 8  # parts of a batch, each from a lane of its own
GROUPS = 4  # of lanes, which take turns
MOST = 1 << 30  # bytes of a run; some are kept in memory
PAUSES = (1.0, 2.0, 4.0)  # seconds, until what did not come is asked for again


@dataclass(frozen=True)
class Stream(Shards):
    """Reads pictures of remote shards, RUN neighbours at a time."""

    def _read(self, i: int, with_data: bool = True) -> tuple[str, bytes]:
        shard, places = self._shard(i), mapped(cast(str, self.places))
        file, sizes = self.files[shard], cast(np.ndarray, self.sizes)
        start, end = int(self.starts[shard]), int(self.starts[shard + 1])
        first = start + (i - start) // RUN * RUN
        began = int(places[first]) * BLOCK
        stop = int(sizes[shard]) if first + RUN >= end else int(places[first + RUN]) * BLOCK
        at = int(places[i]) * BLOCK - began
        if not 0 <= at < stop - began <= MOST:
            raise decode.Unreadable(f"among {stop - began:,} bytes of {file}; {MOST:,} can be kept")
        try:
            run = _fetch(file, began, stop)
        except FileNotFoundError as e:
            raise decode.Unreadable(f"cannot be read from {file} (no such file)") from e
        name, size = header(file, run[at : at + BLOCK])
        data = run[at + BLOCK : at + BLOCK + size]
        if len(data) < size:
            raise decode.Unreadable(f"truncated in {file}")
        return name, data


_kept: "OrderedDict[tuple[str, int], bytes]" = OrderedDict()  # runs of this process, newest last


def _fetch(url: str, began: int, stop: int) -> bytes:
    """Bytes of a file; the last ones asked for are kept, two runs a lane."""
    run = _kept.pop((url, began), None)  # in one step: threads share them
    _kept[url, began] = run = _get(url, began, stop) if run is None else run
    while len(_kept) > 2 * PARTS * GROUPS:
        _kept.popitem(last=False)
    return run


def _get(url: str, began: int | None = None, stop: int | None = None) -> bytes:
    """A remote file, or bytes of it; asked for again where they do not come, or not all of them.

    Raises FileNotFoundError where there is no such file, decode.Away where it cannot be read.
    """
    system, why = _system(url.partition("://")[0], os.getpid()), ""
    for pause in (0.0, *PAUSES):
        if why:
            log.warning("%s: %s; asked again in %g s", url, why, pause)
            time.sleep(pause)
        try:
            data = bytes(system.cat_file(url, start=began, end=stop))
        except FileNotFoundError:
            raise FileNotFoundError(f"{url}: no such file") from None
        except Exception as e:  # each file system has errors of its own
            why = _said(e)
            continue
        if began is None or stop is None or len(data) == stop - began:
            return data
        why = f"{len(data):,} bytes came, not {stop - began:,}"
        if len(data) > stop - began:
            why += "; can its server send parts of files (HTTP Range)?"
    raise decode.Away(
        f"{url}: cannot be read ({why}), asked {1 + len(PAUSES)} times;"
        " check address, network and access"
    )


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@lru_cache(maxsize=8)
def _system(protocol: str, process: int) -> Any:
    """fsspec's file system of a protocol, for each process its own (they do not bear forking).

    Raises ValueError naming what must be installed.
    """
    import fsspec

    options: dict[str, Any] = {}
    try:
        if protocol in ("http", "https"):  # which wait for five minutes otherwise
            from fsspec.implementations import http

            patience = http.aiohttp.ClientTimeout(sock_connect=TIMEOUT, sock_read=TIMEOUT)
            options["get_client"] = partial(http.get_client, timeout=patience)
        return fsspec.filesystem(protocol, skip_instance_cache=True, **options)
    except Exception as e:
        package = isinstance(e, ImportError) and getattr(e.__cause__ or e, "name", None)
        how = f": pip install {package}" if package else ""
        raise ValueError(f"{protocol}://: {_said(e)}{how}") from e


def open_stream(spec: str) -> dict[str, Source]:
    """Sources by split of a folder that `vitlab data pack` wrote, wherever it lies.

    Its index is copied to the cache folder; pictures stay where they are. Raises ValueError where
    there is no index, OSError where the place cannot be reached.
    """
    root = spec.rstrip("/")
    try:
        text = _get(f"{root}/{INDEX}")
    except FileNotFoundError:
        raise ValueError(f"{spec}: no {INDEX} there; `vitlab data pack` writes one") from None
    index = parse_index(text, f"{root}/{INDEX}")
    digest = hashlib.sha256(os.fsencode(spec) + text).hexdigest()
    folder = cache_folder() / "streams" / digest[:32]
    if not folder.exists():
        aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
        aside.mkdir(parents=True)
        try:
            for split, part in index["splits"].items():
                for name in part["columns"]:
                    file = f"{split}.{name}.npy"
                    (aside / file).write_bytes(_get(f"{root}/{file}"))
            with suppress(OSError):  # another process was first
                aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    try:
        return indexed(spec, folder, index, root, Stream)
    except ValueError:
        shutil.rmtree(folder, ignore_errors=True)  # it may be whole the next time
        raise


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
