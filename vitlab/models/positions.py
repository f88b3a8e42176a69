"""Position tables: learned 1-D, and the resampling of a table to another grid (section 3.2)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RESAMPLES = ("bicubic", "google")


def learned(tokens: int, width: int) -> nn.Parameter:
    """A learned 1-D table [1, tokens, width], N(0, 0.02) as in the original code (after BERT)."""
    return nn.Parameter(torch.empty(1, tokens, width).normal_(std=0.02))


def resample(
    table: Tensor, old: tuple[int, int], new: tuple[int, int], how: str = "bicubic"
) -> Tensor:
    """Carry a table over to another grid by 2-D interpolation; prefix rows stay as they are.

    Args:
        table: [1, prefix + h * w, D]; rows before the grid (the class token's) are prefix.
        old: grid (h, w) of the table.
        new: grid (h, w) wanted.
        how: "bicubic" (half-pixel centres, no antialias) or "google": bilinear with aligned
            corners, which is exactly the `zoom(order=1)` of google-research/vision_transformer.

    Returns:
        [1, prefix + new_h * new_w, D], the dtype of `table`; the same tensor when old == new.
    """
    if how not in RESAMPLES:
        raise ValueError(f"resample must be one of {', '.join(RESAMPLES)}, not {how!r}")
    prefix = table.shape[1] - old[0] * old[1]
    if prefix < 0:
        raise ValueError(f"a table of {table.shape[1]} rows does not hold a grid of {old}")
    if old == new:
        return table
    grid = table[:, prefix:].unflatten(1, old).permute(0, 3, 1, 2)  # [1, D, h, w]
    # Always a size, never a scale factor: 14 * (61 / 14) floors to 60 in floating point.
    if how == "google":
        grid = F.interpolate(grid, size=new, mode="bilinear", align_corners=True)
    else:
        grid = F.interpolate(grid, size=new, mode="bicubic", align_corners=False)
    return torch.cat([table[:, :prefix], grid.flatten(2).transpose(1, 2)], dim=1)
