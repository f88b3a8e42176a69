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

from vitlab.data.augment import Augment, augment, draw, random_box
from vitlab.data.decode import Unreadable
from vitlab.data.preprocess import Preprocess, fit, normalise
from vitlab.data.sources import Load, Source, load_region

MEMORY = 2 << 30  # bytes of decoded pictures that are kept in memory at most
TRIES = 100  # unreadable files in a row before training gives up


@dataclass(frozen=True)
class Batch:
    """What a loader yields."""

    images: Tensor  # [B, 3, H, W]: uint8 for training, float32 (normalised) for evaluation
    labels: Tensor  # [B] int64
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


def keys(n: int, batch: int, seed: int, start: int, stop: int) -> Iterator[np.ndarray]:
    """For each of steps start ... stop - 1 of the endless stream over n rows: [batch, 3] int64.

    A key is (epoch, position in it, row of the source).
    """
    for step in range(start, stop):
        epochs, positions = np.divmod(np.arange(step * batch, (step + 1) * batch), n)
        rows = [
            order(seed, epoch, n)[positions[epochs == epoch]]
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
) -> Iterator[Batch]:
    """Batches of steps start ... stop - 1, images uint8, always `batch` of them.

    An unreadable picture is listed, and the next readable one takes its place; with `strict`,
    or after TRIES of them in a row, it raises Unreadable.
    """
    make = partial(_train_batch, source, augment, preprocess, seed, strict)
    return _load(make, keys(len(source), batch, seed, start, stop), workers)


def eval_batches(
    source: Source, preprocess: Preprocess, *, batch: int, workers: int = 0
) -> Iterator[Batch]:
    """Every row once, in order, images float32; the last batch may be small.

    Unreadable pictures are left out and listed.
    """
    n = len(source)
    rows = [range(at, min(at + batch, n)) for at in range(0, n, batch)]
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
            box = partial(random_box, own, config.crop)
            load = partial(load_region, source.load, region=box, least=preprocess.size)
        image, row = _readable(source, load, row, 1 if strict else TRIES, skipped)
        images.append(image)
        rows.append(row)
    labels = torch.from_numpy(source.labels[rows])
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
    return Batch(images, torch.from_numpy(source.labels[list(kept)]), list(kept), skipped)


def _read(load: Load, row: int) -> np.ndarray | str:
    """A picture, or why it cannot be read."""
    try:
        return load(row)
    except Unreadable as e:
        return str(e)
    except OSError as e:
        return (e.strerror or str(e)).lower()


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
    return total < limit


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
