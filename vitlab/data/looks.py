"""One look at each of many pictures: what its file says, its pixels' digest, its code."""

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from vitlab.data import decode, duplicates
from vitlab.data.sources import Chosen, Source, Stored

CHUNK = 256  # pictures of a thread's piece of work
PAIRS = 8  # compared at once: larger arrays cost more in memory than they save in calls
HEADS = {b"\xff\xd8\xff": "JPEG", b"\x89PNG": "PNG", b"RIFF": "WEBP"}  # to try no other parser


@dataclass(kw_only=True)
class Looks:
    """What a look at each picture left: arrays over N pictures."""

    digests: np.ndarray  # [N] uint64: of its pixels
    sizes: np.ndarray  # [N, 2] int64: h, w; 0 where unreadable
    modes: list[str]  # how it is stored; empty for pictures in memory
    turned: np.ndarray  # [N] bool
    rough: np.ndarray  # see `duplicates.rough`
    why: dict[int, str]  # row -> why it cannot be read


def look(sources: Sequence[Source], threads: int, tick: Callable[[int], None]) -> Looks:
    """Read every picture of some sources, in a row; Pillow decodes outside the interpreter lock."""
    work = [
        (source, range(at, min(at + CHUNK, len(source))))
        for source in sources
        for at in range(0, len(source), CHUNK)
    ]
    found = []
    with ThreadPoolExecutor(threads) as pool:
        for looks in pool.map(_look, *zip(*work, strict=True)):
            tick(len(looks.digests))
            found.append(looks)
    starts = np.cumsum([0, *(len(looks.digests) for looks in found)]).tolist()
    return Looks(
        **{name: np.concatenate([getattr(looks, name) for looks in found])
           for name in ("digests", "sizes", "turned", "rough")},
        modes=[mode for looks in found for mode in looks.modes],
        why={at + i: why for at, looks in zip(starts, found, strict=False)
             for i, why in looks.why.items()},
    )  # fmt: skip


def _look(source: Source, rows: range) -> Looks:
    n, grid = len(rows), duplicates.GRID
    thumbnails = np.zeros((n, grid, grid, 3), dtype=np.uint8)
    looks = Looks(
        digests=np.zeros(n, dtype=np.uint64), sizes=np.zeros((n, 2), dtype=np.int64),
        modes=[""] * n, turned=np.zeros(n, dtype=bool), why={},
        rough=np.empty(0),
    )  # fmt: skip
    for at, row in enumerate(rows):
        try:
            data, image = _read(source.load, row)
        except (decode.Unreadable, OSError) as e:
            looks.why[at] = decode.why_skipped(e)
            continue
        if data is not None:
            looks.modes[at], looks.turned[at] = _header(data)
        looks.sizes[at] = image.shape[:2]
        digest = hashlib.blake2b(repr(image.shape).encode(), digest_size=8)
        digest.update(np.ascontiguousarray(image).data)
        looks.digests[at] = int.from_bytes(digest.digest(), "little")
        thumbnails[at] = duplicates.thumbnail(image)
    looks.rough = duplicates.rough(thumbnails)
    return looks


def _read(load: Any, row: int) -> tuple[bytes | None, np.ndarray]:
    """A picture's file, where it has one, and its pixels."""
    data = encoded(load, row)
    return data, load(row) if data is None else decode.decode(data)


def encoded(load: Any, row: int) -> bytes | None:
    """The file of a picture as it is stored; None for pictures that are not stored as files."""
    while isinstance(load, Chosen):
        load, row = load.load, int(load.rows[row])
    if not isinstance(load, Stored):
        return None
    data = load.file(row)
    if isinstance(data, str):
        if not os.path.isfile(data):  # a pipe or a device may never end
            decode.decode(data)  # it says why not
        with open(data, "rb") as file:
            data = file.read()
    return data


def _header(data: bytes) -> tuple[str, bool]:
    """(mode, is it turned by its EXIF tag) of a file that could be decoded."""
    known = [form for head, form in HEADS.items() if data.startswith(head)]
    with Image.open(io.BytesIO(data), formats=known or None) as image:
        mode = f"{image.mode}, with alpha" if image.has_transparency_data else image.mode
        try:
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
        except Exception:  # EXIF breaks in many ways, and the picture is still good
            turned = False
    return mode, turned


def same_pictures(
    sources: Sequence[Source], starts: np.ndarray, looks: Looks, threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """`first` and `near` of `Checked`."""
    readable = np.flatnonzero(looks.sizes[:, 0] > 0)
    first = np.arange(len(looks.sizes))
    _, at, inverse = np.unique(looks.digests[readable], return_index=True, return_inverse=True)
    first[readable] = readable[at][inverse]
    single = readable[at]  # of equal pictures, the first stands for all
    near = single[duplicates.candidates(*duplicates.codes(looks.rough[single]))]
    with ThreadPoolExecutor(threads) as pool:
        rough = looks.rough
        near = _chosen(
            pool, near, lambda p: duplicates.roughly_same(rough[p[:, 0]], rough[p[:, 1]])
        )
        wanted = np.unique(near).tolist()
        found = pool.map(partial(_thumbnail, sources, starts), wanted)
        thumbnails = dict(zip(wanted, found, strict=True))

        def compare(pairs: np.ndarray) -> np.ndarray:
            one, other = (np.stack([thumbnails[i] for i in side]) for side in pairs.T.tolist())
            return duplicates.same(one, other)

        return first, _chosen(pool, near, compare)


def _chosen(
    pool: ThreadPoolExecutor, pairs: np.ndarray, judge: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Those of the pairs [P, 2] that a judge of a few at once takes."""
    pieces = [pairs[at : at + PAIRS] for at in range(0, len(pairs), PAIRS)]
    kept = pool.map(judge, pieces)
    return np.concatenate([pairs[:0], *(p[k] for p, k in zip(pieces, kept, strict=True))])


def _thumbnail(sources: Sequence[Source], starts: np.ndarray, row: int) -> np.ndarray:
    part = int(np.searchsorted(starts, row, side="right")) - 1
    return duplicates.thumbnail(sources[part].load(row - int(starts[part])))
