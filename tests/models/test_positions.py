"""Resampling of position tables against scipy, numpy and torch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from vitlab.models.positions import RESAMPLES, learned, resample

Grid = tuple[int, int]
GRIDS = [
    ((14, 14), (24, 24)), ((24, 24), (14, 14)), ((7, 7), (12, 12)), ((4, 8), (8, 16)),
    ((4, 8), (6, 6)), ((2, 4), (4, 8)), ((1, 1), (3, 2)), ((5, 3), (1, 1)), ((3, 7), (7, 3)),
]  # fmt: skip
grids = st.tuples(st.integers(1, 9), st.integers(1, 9))


def table(
    grid: Grid, width: int = 5, prefix: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    torch.manual_seed(math.prod(grid))
    return torch.randn(1, prefix + math.prod(grid), width, dtype=dtype)


def linear(new: int, old: int) -> np.ndarray:
    """[new, old] weights of linear interpolation with aligned corners."""
    at = np.linspace(0, old - 1, new) if new > 1 else np.zeros(1)
    return np.stack([np.interp(at, np.arange(old), row) for row in np.eye(old)], axis=1)


def cubic(new: int, old: int) -> np.ndarray:
    """[new, old] weights of Keys' cubic, a = -0.75, half-pixel centres, edges repeated."""

    def kernel(x: float, a: float = -0.75) -> float:
        x = abs(x)
        if x <= 1:
            return (a + 2) * x**3 - (a + 3) * x**2 + 1
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0

    weights = np.zeros((new, old))
    for i in range(new):
        centre = (i + 0.5) * old / new - 0.5
        for j in range(math.floor(centre) - 1, math.floor(centre) + 3):
            weights[i, min(max(j, 0), old - 1)] += kernel(centre - j)
    return weights


def oracle(rows: Tensor, old: Grid, new: Grid, how: str) -> np.ndarray:
    """Interpolation as two small matrices, one a side."""
    weights = {"google": linear, "bicubic": cubic}[how]
    grid = rows.numpy().reshape(*old, -1)
    out = np.einsum("ij,jkd,lk->ild", weights(new[0], old[0]), grid, weights(new[1], old[1]))
    return out.reshape(1, -1, rows.shape[2])


@pytest.mark.parametrize(("old", "new"), GRIDS[:7])
def test_google_is_the_zoom_of_scipy(old: Grid, new: Grid) -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    rows = table(old, prefix=1)
    factors = (new[0] / old[0], new[1] / old[1], 1)
    zoomed = ndimage.zoom(rows[0, 1:].numpy().reshape(*old, -1), factors, order=1)
    found = resample(rows, old, new, "google")[0, 1:]
    np.testing.assert_allclose(found.numpy().reshape(*new, -1), zoomed, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", RESAMPLES)
@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_against_matrices(old: Grid, new: Grid, how: str) -> None:
    rows = table(old)
    found = resample(rows, old, new, how)
    np.testing.assert_allclose(found, oracle(rows, old, new, how), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_bicubic_is_that_of_torch(old: Grid, new: Grid) -> None:
    rows = table(old, dtype=torch.float32)
    picture = rows.reshape(*old, -1).permute(2, 0, 1)[None]
    expected = F.interpolate(picture, new, mode="bicubic", align_corners=False, antialias=False)
    found = resample(rows, old, new).reshape(*new, -1).permute(2, 0, 1)[None]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@given(old=grids, new=grids, prefix=st.integers(0, 3), how=st.sampled_from(RESAMPLES))
@settings(max_examples=60, deadline=None)
def test_any_grid(old: Grid, new: Grid, prefix: int, how: str) -> None:
    rows = table(old, 2, prefix)
    found = resample(rows, old, new, how)
    assert found.shape == (1, prefix + math.prod(new), 2)
    assert found.dtype == rows.dtype
    assert torch.equal(found[:, :prefix], rows[:, :prefix])  # prefix rows are not touched
    expected = oracle(rows[:, prefix:], old, new, how)
    np.testing.assert_allclose(found[:, prefix:], expected, rtol=0, atol=1e-12)
    turned = resample(_turn(rows, prefix, old), old[::-1], new[::-1], how)
    torch.testing.assert_close(turned, _turn(found, prefix, new))  # sides are not exchanged
    ones = resample(torch.ones_like(rows), old, new, how)
    torch.testing.assert_close(ones, torch.ones_like(ones))
    assert resample(rows, old, old, how) is rows


def _turn(rows: Tensor, prefix: int, grid: Grid) -> Tensor:
    patches = rows[:, prefix:].unflatten(1, grid).transpose(1, 2).flatten(1, 2)
    return torch.cat([rows[:, :prefix], patches], 1)


@pytest.mark.parametrize("how", RESAMPLES)
def test_own_grid_gives_the_same_table(how: str) -> None:
    """Report 059."""
    rows = table((14, 14), prefix=1, dtype=torch.float32)
    assert torch.equal(resample(rows, (14, 14), (14, 14), how), rows)


@pytest.mark.parametrize(
    ("old", "patch", "sizes"),
    [
        (14, 16, (976, 1840, 1952)),
        (14, 14, (854, 1610, 1708)),
        (37, 14, (546, 602, 1092, 1204, 1610, 1722)),
    ],
)
def test_sizes_that_a_scale_factor_gets_wrong(old: int, patch: int, sizes: tuple[int, ...]) -> None:
    """Report 055: 14 * (61 / 14) floors to 60."""
    rows = table((old, old), 1, 1)
    for size in sizes:
        new = size // patch
        for how in RESAMPLES:
            assert resample(rows, (old, old), (new, new), how).shape == (1, 1 + new * new, 1)


def test_height_and_width_of_the_report() -> None:
    """Report 066: value 4 * row + column on 2 x 4; the first column at 4 x 8 rises by rows."""
    rows = torch.arange(8.0, dtype=torch.float64).reshape(1, 8, 1)
    found = resample(rows, (2, 4), (4, 8)).reshape(4, 8)
    expected = oracle(rows, (2, 4), (4, 8), "bicubic").reshape(4, 8)
    np.testing.assert_allclose(found[:, 0], expected[:, 0], atol=1e-12)
    wrong = resample(rows, (4, 2), (4, 8)).reshape(4, 8)
    assert (found[:, 0] - wrong[:, 0]).abs().max() > 1
    aligned = resample(rows, (2, 4), (4, 8), "google").reshape(4, 8)
    np.testing.assert_allclose(aligned[:, 0], [0, 4 / 3, 8 / 3, 4], atol=1e-12)


def test_half_precision_keeps_its_dtype() -> None:
    rows = table((4, 4), prefix=1, dtype=torch.bfloat16)
    for how in RESAMPLES:
        found = resample(rows, (4, 4), (6, 6), how)
        assert found.dtype == torch.bfloat16
        wide = resample(rows.float(), (4, 4), (6, 6), how)
        assert (found.float() - wide).abs().max() < 0.05


def test_refusals() -> None:
    with pytest.raises(ValueError, match="bicubic, google, not 'linear'"):
        resample(table((4, 4)), (4, 4), (5, 5), "linear")
    with pytest.raises(ValueError, match=r"table of 16 rows does not hold a grid of \(5, 5\)"):
        resample(table((4, 4)), (5, 5), (4, 4))


def test_learned_table() -> None:
    rows = learned(197, 192)
    assert rows.shape == (1, 197, 192)
    assert rows.requires_grad
    assert rows.std().item() == pytest.approx(0.02, rel=0.02)
