"""Batches: an endless, resumable stream for training, one exact pass for evaluation.

Order is a function of (seed, epoch) alone, augmentation of (seed, epoch, position): neither
depends on the number of workers, and a stream may start at any step.
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitlab.data.augment import Augment, augment
from vitlab.data.decode import Unreadable
from vitlab.data.preprocess import Preprocess, apply
from vitlab.data.sources import Source

MEMORY = 2 << 30  # bytes of decoded pictures that are kept in memory at most
TRIES = 100  # unreadable files in a row before training gives up
Key = tuple[int, int, int]  # epoch, position within it, row of the source


@dataclass(frozen=True)
class Batch:
    """What a loader yields."""

    images: Tensor  # [B, 3, H, W]: uint8 for training, float32 (normalised) for evaluation
    labels: Tensor  # [B] int64
    rows: list[int]  # [B] rows of the source
    skipped: list[tuple[int, str]]  # rows that could not be read, and why


@lru_cache(maxsize=2)
def order(seed: int, epoch: int, n: int) -> np.ndarray:
    """The rows of an epoch, shuffled: [n] int64."""
    return np.random.default_rng([seed, 1, epoch]).permutation(n)


def keys(n: int, batch: int, seed: int, start: int, stop: int) -> Iterator[list[Key]]:
    """Keys of the batches of steps start ... stop - 1 of the endless stream over n rows."""
    for step in range(start, stop):
        places = [divmod(at, n) for at in range(step * batch, (step + 1) * batch)]
        yield [(epoch, at, int(order(seed, epoch, n)[at])) for epoch, at in places]


@dataclass(frozen=True)
class _Training:
    """A map from lists of keys to batches, for torch's DataLoader."""

    source: Source
    augment: Augment
    preprocess: Preprocess
    seed: int
    strict: bool

    def __getitems__(self, batch: list[Key]) -> Batch:
        images: list[Tensor] = []
        rows: list[int] = []
        skipped: list[tuple[int, str]] = []
        for epoch, position, row in batch:
            image, row = self.read(row, skipped)
            key = [self.seed, 2, epoch, position]
            images.append(augment(self.augment, self.preprocess, image, key))
            rows.append(row)
        labels = torch.from_numpy(self.source.labels[rows])
        return Batch(torch.stack(images), labels, rows, skipped)

    def read(self, row: int, skipped: list[tuple[int, str]]) -> tuple[np.ndarray, int]:
        """The picture of a row, or of the next readable one: batches stay whole."""
        for at in range(row, row + TRIES):
            at %= len(self.source)
            try:
                return self.source.load(at), at
            except (Unreadable, OSError) as e:
                if self.strict:
                    raise Unreadable(f"{self.source.id(at)}: {e}") from None
                skipped.append((at, str(e)))
        raise Unreadable(f"{self.source.spec}: {TRIES} unreadable pictures in a row")


@dataclass(frozen=True)
class _Evaluation:
    """A map from lists of rows to batches; unreadable rows are left out and listed."""

    source: Source
    preprocess: Preprocess

    def __getitems__(self, rows: list[int]) -> Batch:
        images, kept, skipped = [], [], []
        for row in rows:
            try:
                images.append(apply(self.preprocess, self.source.load(row)))
                kept.append(row)
            except (Unreadable, OSError) as e:
                skipped.append((row, str(e)))
        h, w = self.preprocess.size
        stacked = torch.stack(images) if images else torch.empty(0, 3, h, w)
        return Batch(stacked, torch.from_numpy(self.source.labels[kept]), kept, skipped)


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
    """Batches of steps start ... stop - 1, images uint8, always `batch` of them."""
    data = _Training(source, augment, preprocess, seed, strict)
    return _load(data, keys(len(source), batch, seed, start, stop), workers)


def eval_batches(
    source: Source, preprocess: Preprocess, *, batch: int, workers: int = 0
) -> Iterator[Batch]:
    """Every row once, in order, images float32; the last batch may be small."""
    n = len(source)
    rows = [list(range(at, min(at + batch, n))) for at in range(0, n, batch)]
    return _load(_Evaluation(source, preprocess), rows, workers)


def _load(data: Any, batches: Iterable[Any], workers: int) -> Iterator[Batch]:
    yield from DataLoader(
        data, batch_sampler=batches, num_workers=workers, collate_fn=_same,
        pin_memory=torch.cuda.is_available(), prefetch_factor=4 if workers else None,
    )  # fmt: skip


def _same(batch: Any) -> Any:
    return batch


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


def fits_memory(source: Source) -> bool:
    """Would all pictures, decoded, stay below MEMORY and a quarter of the machine's?"""
    rng = np.random.default_rng(0)
    sizes = []
    for row in rng.choice(len(source), size=min(32, len(source)), replace=False):
        try:
            sizes.append(source.load(int(row)).nbytes)
        except (Unreadable, OSError):
            continue
    limit = MEMORY
    if hasattr(os, "sysconf"):
        limit = min(limit, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    return float(np.mean(sizes or [0])) * len(source) < limit


def in_memory(source: Source, threads: int) -> Source:
    """The same source with every picture decoded; it behaves as before, only faster."""

    def read(row: int) -> np.ndarray | str:
        try:
            return source.load(row)
        except (Unreadable, OSError) as e:
            return str(e)

    with ThreadPoolExecutor(threads) as pool:  # Pillow decodes outside the interpreter lock
        return replace(source, load=Decoded(list(pool.map(read, range(len(source))))))
