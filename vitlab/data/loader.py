"""Batches: an endless, resumable stream for training, one exact pass for evaluation.

Order is a function of (seed, epoch) alone, augmentation of (seed, epoch, position): neither
depends on the number of workers, and a stream may start at any step.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitlab.data import streams
from vitlab.data.augment import Augment, augment, draw, random_box, scramble
from vitlab.data.decode import Unreadable, why_skipped
from vitlab.data.preprocess import Preprocess, fit, normalise
from vitlab.data.sources import Load, Source, load_region

MEMORY = 2 << 30  # bytes of decoded pictures that are kept in memory at most
TRIES = 100  # unreadable files in a row before training gives up
LARGE = 1 << 20  # rows from which an epoch's order is computed where it is needed, not kept
ROUNDS = 8  # of the network that computes it


@dataclass(frozen=True)
class Batch:
    """What a loader yields."""

    images: Tensor  # [B, 3, H, W]: uint8 for training, float32 (normalised) for evaluation
    labels: Tensor  # [B] int64; [B, K] float32 where a picture may have several
    rows: list[int]  # [B] rows of the source
    skipped: list[tuple[int, str]]  # rows that could not be read, and why

    def pin_memory(self) -> "Batch":
        """What torch's DataLoader calls, to copy to a GPU while it computes."""
        return replace(self, images=self.images.pin_memory(), labels=self.labels.pin_memory())


@lru_cache(maxsize=2)
def order(seed: int, epoch: int, n: int) -> np.ndarray:
    """The rows of an epoch, shuffled: [n] int64, read-only."""
    rows = np.random.default_rng([seed, 1, epoch]).permutation(n)
    rows.flags.writeable = False
    return rows


def rows_at(seed: int, epoch: int, n: int, positions: np.ndarray) -> np.ndarray:
    """The rows at some positions [B] of an epoch's order: [B] int64.

    Up to LARGE rows they are looked up in `order`. Beyond, each is computed: a Feistel network
    permutes the numbers below the next power of two, and is walked until it is back below n, so
    that a set of any size costs neither memory nor time.
    """
    if n <= LARGE:
        return order(seed, epoch, n)[positions]
    words = np.random.default_rng([seed, 1, epoch]).integers(0, 2**64, ROUNDS, dtype=np.uint64)
    bits = (n - 1).bit_length()
    low = bits // 2

    def permute(x: np.ndarray) -> np.ndarray:
        one, other = x >> np.uint64(low), x & np.uint64((1 << low) - 1)
        masks = np.uint64((1 << bits - low) - 1), np.uint64((1 << low) - 1)
        for i in range(0, ROUNDS, 2):
            one = one ^ (scramble(other ^ words[i]) & masks[0])
            other = other ^ (scramble(one ^ words[i + 1]) & masks[1])
        return one << np.uint64(low) | other

    rows = permute(positions.astype(np.uint64))
    while (outside := rows >= n).any():
        rows[outside] = permute(rows[outside])
    return rows.astype(np.int64)


def keys(n: int, batch: int, seed: int, start: int, stop: int) -> Iterator[np.ndarray]:
    """For each of steps start ... stop - 1 of the endless stream over n rows: [batch, 3] int64.

    A key is (epoch, position in it, row of the source).
    """
    for step in range(start, stop):
        epochs, positions = np.divmod(np.arange(step * batch, (step + 1) * batch), n)
        rows = [
            rows_at(seed, epoch, n, positions[epochs == epoch])
            for epoch in range(int(epochs[0]), int(epochs[-1]) + 1)
        ]
        yield np.column_stack([epochs, positions, np.concatenate(rows)])


def train_batches(
    source: Source,
    augment: Augment,
    preprocess: Preprocess,
    *,
    batch: int,
    seed: int,
    start: int,
    stop: int,
    workers: int = 0,
    strict: bool = False,
    share: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Batches of steps start ... stop - 1, images uint8, always `batch` of them.

    With `share` (rank, number of processes), that process's part of each batch.

    An unreadable picture is listed, and the next readable one takes its place; with `strict`,
    or after TRIES of them in a row, it raises Unreadable.
    """
    make = partial(_train_batch, source, augment, preprocess, seed, strict)
    rank, world = share
    own = slice(rank * batch // world, (rank + 1) * batch // world)
    if isinstance(source.load, streams.Stream):
        found = streams.keys(source.load.starts, batch, seed, start, stop)
    else:
        found = keys(len(source), batch, seed, start, stop)
    return _load(make, (k[own] for k in found), workers)


def eval_batches(
    source: Source, preprocess: Preprocess, *, batch: int, workers: int = 0,
    share: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:  # fmt: skip
    """Every row once, in order, images float32; the last batch may be small.

    Unreadable pictures are left out and listed. With `share` (rank, n), every n-th row from
    `rank` on; all processes get as many batches, the last of some may be empty.
    """
    rank, world = share
    if batch < 1 or workers < 0:
        raise ValueError(f"batch must be at least 1, workers 0, not {batch} and {workers}")
    own = range(rank, len(source), world)
    most = -(-len(source) // world)  # rows of the first process
    rows = [own[at : at + batch] for at in range(0, most, batch)]
    return _load(partial(_eval_batch, source, preprocess), rows, workers)


def _train_batch(
    source: Source, config: Augment, preprocess: Preprocess, seed: int, strict: bool,
    keys: np.ndarray,
) -> Batch:  # fmt: skip
    draws = draw(seed, keys[:, :2])
    images, rows = [], []
    skipped: list[tuple[int, str]] = []
    for row, own in zip(keys[:, 2].tolist(), draws, strict=True):
        load = source.load
        if config.crop:
            box = partial(random_box, own, config.crop, law=config.law)
            load = partial(load_region, source.load, region=box, least=preprocess.size)
        image, row = _readable(source, load, row, 1 if strict else TRIES, skipped)
        images.append(image)
        rows.append(row)
    labels = _labels(source, rows)
    return Batch(augment(config, preprocess, images, draws), labels, rows, skipped)


def _readable(
    source: Source, load: Load, row: int, tries: int, skipped: list[tuple[int, str]]
) -> tuple[np.ndarray, int]:
    """The picture of a row, or of the next readable one: batches stay whole."""
    tries = min(tries, len(source))
    for at in range(row, row + tries):
        row = at % len(source)
        image = _read(load, row)
        if not isinstance(image, str):
            return image, row
        skipped.append((row, image))
    many = f"{source.spec}: {tries} unreadable pictures in a row, the last of them "
    raise Unreadable(f"{many if tries > 1 else ''}{source.id(row)}: {image}")


def _eval_batch(source: Source, preprocess: Preprocess, rows: Iterable[int]) -> Batch:
    found = {row: _read(source.load, row) for row in rows}
    kept = {row: image for row, image in found.items() if not isinstance(image, str)}
    skipped = [(row, why) for row, why in found.items() if isinstance(why, str)]
    images = torch.empty(0, 3, *preprocess.size)
    if kept:
        images = normalise(preprocess, fit(preprocess, list(kept.values())))
    labels = _labels(source, list(kept))
    return Batch(images, labels, list(kept), skipped)


def _labels(source: Source, rows: list[int]) -> Tensor:
    if source.many is not None:
        return torch.from_numpy(source.many[rows]).float()
    return torch.from_numpy(np.asarray(source.labels[rows], dtype=np.int64))


def _read(load: Load, row: int) -> np.ndarray | str:
    """A picture, or why it cannot be read."""
    try:
        return load(row)
    except (Unreadable, OSError) as e:
        return why_skipped(e)


@dataclass(frozen=True)
class _Batches(Dataset[Any]):
    """What torch's DataLoader takes: a map from keys to a batch.

    An error travels as a value; a worker's would come back with a page of trace around its line.
    """

    make: Callable[[Any], Batch]

    def __getitems__(self, keys: Any) -> Batch | Exception:
        try:
            return self.make(keys)
        except (ValueError, OSError) as e:
            return e


def _load(make: Callable[[Any], Batch], keys: Iterable[Any], workers: int) -> Iterator[Batch]:
    loader: DataLoader[Any] = DataLoader(
        _Batches(make), batch_sampler=keys, num_workers=workers, collate_fn=_same,
        pin_memory=torch.cuda.is_available(), prefetch_factor=4 if workers else None,
        worker_init_fn=_detach, generator=torch.Generator(),  # not the caller's
    )  # fmt: skip
    for batch in loader:
        if isinstance(batch, Exception):
            raise batch
        yield batch


def _same(batch: Any) -> Any:
    return batch


def _detach(worker: int) -> None:
    """Signals to the process group are for the main process, which may still want its batches."""
    if hasattr(os, "setsid"):  # not on Windows
        os.setsid()


# Sets that fit in memory -----------------------------------------------------------------------


@dataclass(frozen=True)
class Decoded:
    """Pictures decoded once; a string stands for one that could not be, and says why."""

    images: list[np.ndarray | str]

    def __call__(self, i: int) -> np.ndarray:
        image = self.images[i]
        if isinstance(image, str):
            raise Unreadable(image)
        return image


def fits_memory(*sources: Source) -> bool:
    """Would all pictures, decoded, stay below MEMORY and a quarter of the machine's?"""
    rng = np.random.default_rng(0)
    total = 0.0
    for source in sources:
        rows = rng.choice(len(source), size=min(32, len(source)), replace=False)
        found = [_read(source.load, row) for row in rows.tolist()]
        sizes = [image.nbytes for image in found if not isinstance(image, str)]
        total += float(np.mean(sizes or [0])) * len(source)
    limit = MEMORY
    if hasattr(os, "sysconf"):
        limit = min(limit, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    return total * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < limit


def in_memory(source: Source, threads: int) -> Source:
    """The same source with every picture decoded; it behaves as before, only faster.

    (Random crops of large JPEGs apart: in memory they are cut from the fully decoded picture.)
    """
    parts = np.array_split(np.arange(len(source)), 16 * threads)

    def read(rows: np.ndarray) -> list[np.ndarray | str]:
        return [_read(source.load, row) for row in rows.tolist()]

    with ThreadPoolExecutor(threads) as pool:  # Pillow decodes outside the interpreter lock
        images = [image for part in pool.map(read, parts) for image in part]
    return replace(source, load=Decoded(images))
