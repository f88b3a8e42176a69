"""Pictures that are the same picture, among any number of them: codes propose, a look decides.

A picture's code is 96 signs of random projections of its low frequencies, cut into four bands.
Encoding it again or at another size hardly moves these; a crop moves them, so each picture is also
coded as its crops would be. Two pictures are candidates where one's band equals the other's, up to
the signs that were least sure: looked up in a table, so that the work grows with the number of
pictures and not with its square. Candidates are then compared pixel by pixel, aligned.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from PIL import Image

GRID = 32  # pixels a side of what is coded and compared
FREQUENCIES = 8  # half waves across and down, from 0
BANDS, BITS = 4, 24  # of a code
WEAK = 4  # least sure signs of a band that a look-up tries both ways
# Where a picture that lost 5 % of each side may have been cut: nowhere, around, towards a corner.
EDGES = ((0.0, 1.0), (0.025, 0.975), (0.0, 0.95), (0.05, 1.0))
VIEWS = ((0, 0), (1, 1), (2, 2), (2, 3), (3, 2), (3, 3))  # rows, columns: which EDGES
CROWD = 32  # pictures of one band's value that a look-up returns: blank scans are all alike
FAR = 16  # differing signs of 96 from which two pictures are not even compared
FEW = 4  # pictures nearest to it that each is compared with
SAMPLE = 4096  # pictures that the average is of, and that are coded at once
LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
# Correlation of gradients, aligned, from which pictures are the same: first of ROUGH pixels a side,
# then of GRID. On Tiny-ImageNet copies have 0.9 and more, other pictures at most 0.88, rarely 0.8.
ROUGH = 16
ROUGHLY, LIKE = 0.65, 0.87
COLOUR = 24.0  # mean difference of colours, of 255, that a copy may have
FLAT = 3.0  # root mean square difference of pictures that hardly have gradients
LOST = (0.05 / 3, 0.1 / 3, 0.05)  # shares of a side that a crop may have lost, as compared
CORNERS = 4  # places of each of these along a side


def thumbnail(image: np.ndarray) -> np.ndarray:
    """A picture [h, w, 3] uint8, squashed to [GRID, GRID, 3] uint8 by averaging areas."""
    size = (GRID, GRID)
    small = Image.fromarray(image).resize(size, Image.Resampling.BOX, reducing_gap=2.0)
    return np.asarray(small)


def rough(thumbnails: np.ndarray) -> np.ndarray:
    """[N, GRID, GRID, 3] uint8 -> [N, ROUGH, ROUGH] uint8, luma: what is kept of each picture."""
    luma = thumbnails.astype(np.float32) @ LUMA
    blocks = luma.reshape(len(luma), ROUGH, GRID // ROUGH, ROUGH, GRID // ROUGH)
    return np.rint(blocks.mean(axis=(2, 4))).astype(np.uint8)


def codes(roughs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Code pictures and their crops: by what sets them apart from the average of them all.

    Args:
        roughs: [N, ROUGH, ROUGH] uint8.

    Returns:
        [N, views, BANDS] uint32, BITS signs each, view 0 the whole picture; and the places of
        the WEAK least sure signs, [N, views, BANDS, WEAK] uint8.
    """
    n = len(roughs)
    signs = np.zeros((n, len(VIEWS), BANDS), dtype=np.uint32)
    weak = np.zeros((n, len(VIEWS), BANDS, WEAK), dtype=np.uint8)
    if not n:
        return signs, weak
    known = _spectra(roughs[np.linspace(0, n - 1, min(n, SAMPLE)).astype(int)])[:, 0]
    mean, spread = known.mean(axis=0), known.std(axis=0)
    projection = _projection() / np.maximum(spread, 0.15 * spread.max() + 1e-6)[:, None]
    powers = np.uint32(1) << np.arange(BITS, dtype=np.uint32)
    for at in range(0, n, SAMPLE):
        part = slice(at, at + SAMPLE)
        projected = (_spectra(roughs[part]) - mean) @ projection
        projected = projected.reshape(-1, len(VIEWS), BANDS, BITS)
        signs[part] = ((projected > 0) * powers).sum(axis=-1, dtype=np.uint32)
        weak[part] = np.argpartition(np.abs(projected), WEAK, axis=-1)[..., :WEAK]
    return signs, weak


def _spectra(roughs: np.ndarray) -> np.ndarray:
    """Low frequencies of each view, of norm 1 together: [N, views, FREQUENCIES^2 - 1] float32."""
    luma = roughs.astype(np.float32)
    views = [_waves(*EDGES[y]) @ luma @ _waves(*EDGES[x]).T for y, x in VIEWS]
    waves = np.stack(views, axis=1).reshape(len(luma), len(VIEWS), -1)[:, :, 1:]  # not the mean
    return waves / np.maximum(np.linalg.norm(waves, axis=-1, keepdims=True), 0.1)


def _waves(low: float, high: float) -> np.ndarray:
    """Cosines over the part low ... high of a side: [FREQUENCIES, ROUGH] float32."""
    edges = np.clip(np.arange(ROUGH + 1) / ROUGH, low, high)
    share = np.diff(edges)
    middle = ((edges[1:] + edges[:-1]) / 2 - low) / (high - low)
    waves = np.cos(np.pi * np.arange(FREQUENCIES)[:, None] * middle) * share
    waves[1:] -= share * waves[1:].sum(axis=1, keepdims=True) / share.sum()
    return (waves / share.sum()).astype(np.float32)


def _projection() -> np.ndarray:
    """[FREQUENCIES^2 - 1, BANDS * BITS] float32, random.

    The highest frequencies count less, as they move most where a picture was cut.
    """
    y, x = np.mgrid[:FREQUENCIES, :FREQUENCIES]
    weights = 1 / (1 + (np.hypot(y, x).ravel()[1:] / FREQUENCIES) ** 2)
    random = np.random.default_rng(0).standard_normal((len(weights), BANDS * BITS))
    return (weights[:, None] * random).astype(np.float32)


def candidates(signs: np.ndarray, weak: np.ndarray) -> np.ndarray:
    """Pairs worth comparing, [P, 2] int64, each once, the lower row first; from `codes`."""
    n = len(signs)
    bits = min(BITS, max(8, n.bit_length() + 5))
    drop = np.uint32(BITS - bits)
    flips = [subset for k in range(WEAK + 1) for subset in combinations(range(WEAK), k)]
    found = [np.empty(0, dtype=np.int64)]
    for band in range(BANDS):
        keys = signs[:, 0, band]
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        starts = np.zeros((1 << bits) + 1, dtype=np.int64)
        np.cumsum(np.bincount(ordered >> drop, minlength=1 << bits), out=starts[1:])
        for view in range(len(VIEWS)):
            places = np.uint32(1) << weak[:, view, band].astype(np.uint32)
            for subset in flips:
                wanted = signs[:, view, band] ^ places[:, list(subset)].sum(axis=1, dtype=np.uint32)
                one, at = _look_up(starts, wanted >> drop)
                other = order[at]
                keep = (ordered[at] == wanted[one]) & (one != other)
                one, other = one[keep], other[keep]
                apart = np.bitwise_count(signs[one, view] ^ signs[other, 0]).sum(
                    axis=1, dtype=np.int64
                )
                pair = np.minimum(one, other) * n + np.maximum(one, other)
                found.append(np.unique((pair * FAR + apart)[apart < FAR]))
    pair, apart = np.divmod(np.unique(np.concatenate(found)), FAR)
    first = np.flatnonzero(np.diff(pair, prepend=-1))  # of several ways, the nearest
    return _nearest(np.stack(np.divmod(pair[first], max(n, 1)), axis=1), apart[first])


def _nearest(pairs: np.ndarray, apart: np.ndarray) -> np.ndarray:
    """Of each row the FEW pairs [P, 2] that are least apart.

    Where all pictures look alike, as X-rays do, it is this that keeps the work in bounds.
    """
    rows, both = pairs.T.ravel(), np.tile(np.arange(len(pairs)), 2)
    order = np.lexsort((np.tile(apart, 2), rows))
    starts = np.flatnonzero(np.diff(rows[order], prepend=-1))
    rank = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    return pairs[np.unique(both[order[rank < FEW]])]


def _look_up(starts: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(which key, place in the sorted table) of all that lies under each key, CROWD at most."""
    first = starts[keys]
    counts = np.minimum(starts[keys.astype(np.int64) + 1] - first, CROWD)
    who = np.repeat(np.arange(len(keys)), counts)
    within = np.arange(len(who)) - np.repeat(np.cumsum(counts) - counts, counts)
    return who, first[who] + within


# Comparing -------------------------------------------------------------------------------------


def roughly_same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Is it worth a look, whether two pictures are the same? [P] bool, of `rough` ones."""
    one, other = a.astype(np.float32), b.astype(np.float32)
    best = np.maximum(_fit(one, other, _ROUGH_CUTS)[0], _fit(other, one, _ROUGH_CUTS)[0])
    flat = np.abs(one - other).mean(axis=(1, 2)) < FLAT
    return (best > ROUGHLY) | flat


def same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Is b the same picture as a, or is one a crop of the other? Both [P, GRID, GRID, 3] uint8.

    Returns [P] bool.
    """
    one, other = a.astype(np.float32), b.astype(np.float32)
    return _crop_of(one, other) | _crop_of(other, one)


def _crop_of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Is b a crop of a, in any of the ways tried? [P] bool."""
    like, y, x = _fit(a @ LUMA, b @ LUMA, _CUTS, fine=True)
    aligned = np.einsum("pij,pjkc,plk->pilc", _CUTS[y], a, _CUTS[x], optimize=True)
    difference = aligned - b  # of colours, in the view that fits best
    colour = np.abs(difference).mean(axis=(1, 2, 3))
    flat = np.sqrt((difference**2).mean(axis=(1, 2, 3))) < FLAT
    return ((like > LIKE) & (colour < COLOUR)) | flat


def _fit(
    a: np.ndarray, b: np.ndarray, cuts: np.ndarray, fine: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How well b fits the best of a's crops, and which: three [P], of luma [P, g, g] float32."""
    rows, columns = _pairs(len(cuts))
    views = (cuts @ a[:, None])[:, rows] @ cuts[columns].transpose(0, 2, 1)  # [P, ways, g, g]
    whole = b[:, None]
    if fine:
        views, whole = _blurred(views), _blurred(whole)
    one, other = _gradients(views), _gradients(whole)
    if fine:  # one strong outline must not decide alone
        one, other = (np.copysign(np.sqrt(np.abs(g)), g) for g in (one, other))
    like = _correlation(one, other)
    best = like.argmax(axis=1)
    return like.max(axis=1), rows[best], columns[best]


def _pairs(cuts: int) -> tuple[np.ndarray, np.ndarray]:
    """Which cuts of rows and of columns are tried together: of one size, or of one side alone."""
    y, x = np.divmod(np.arange(cuts**2), cuts)
    size = (np.arange(cuts) + CORNERS - 1) // CORNERS  # 0: the whole side
    tried = (size[y] == size[x]) | (y == 0) | (x == 0)
    return y[tried], x[tried]


def _blurred(luma: np.ndarray) -> np.ndarray:
    """By 1 2 1, down and across: what a shift of half a pixel leaves alike."""
    rows = luma[..., :-2, :] + 2 * luma[..., 1:-1, :] + luma[..., 2:, :]
    return (rows[..., :-2] + 2 * rows[..., 1:-1] + rows[..., 2:]) / 16


def _gradients(luma: np.ndarray) -> np.ndarray:
    """Differences down and across, [..., g, g] -> [..., 2 (g - 1)^2]."""
    down = np.diff(luma, axis=-2)[..., :-1]
    across = np.diff(luma, axis=-1)[..., :-1, :]
    shape = (*luma.shape[:-2], -1)
    return np.concatenate([down.reshape(shape), across.reshape(shape)], axis=-1)


def _correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of the last axis; 0 where there is nothing to compare."""
    product = (a * b).sum(axis=-1)
    norms = np.sqrt((a * a).sum(axis=-1) * (b * b).sum(axis=-1))
    return product / np.maximum(norms, 1e-6)


def _cuts(parts: Sequence[tuple[float, float]], grid: int) -> np.ndarray:
    """[parts, grid, grid] float32: each takes a part of a side and stretches it to the whole."""
    cells = np.arange(grid + 1) / grid
    cuts = np.zeros((len(parts), grid, grid), dtype=np.float32)
    for cut, (low, high) in zip(cuts, parts, strict=True):
        edges = (low + (high - low) * cells)[:, None]
        overlap = np.minimum(edges[1:], cells[1:]) - np.maximum(edges[:-1], cells[:-1])
        cut[:] = np.maximum(overlap, 0)
        cut /= cut.sum(axis=1, keepdims=True)
    return cuts


_ROUGH_CUTS = _cuts(EDGES, ROUGH)
_CUTS = _cuts(
    [
        (0.0, 1.0),
        *((low, low + 1 - lost) for lost in LOST for low in np.linspace(0, lost, CORNERS)),
    ],
    GRID,
)


def groups(pairs: np.ndarray) -> Iterator[list[int]]:
    """The connected sets of rows that pairs [P, 2] make, each in rising order."""
    root: dict[int, int] = {}

    def find(i: int) -> int:
        while root.get(i, i) != i:
            root[i] = root.get(root[i], root[i])
            i = root[i]
        return i

    for i, j in pairs.tolist():
        one, other = sorted((find(i), find(j)))
        root[other] = root.setdefault(one, one)
    sets: dict[int, list[int]] = {}
    for i in sorted(root):
        sets.setdefault(find(i), []).append(i)
    yield from sets.values()
