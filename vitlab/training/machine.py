"""What the machine offers, and the automatic choices that follow from it.

Torch is imported inside: `cores` is needed to set threads up before torch loads.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "max 100000", or microseconds of CPU in each period


def cores() -> int:
    """Cores this process may use: affinity and cgroup quota, shared among local processes."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        count = os.cpu_count() or 1
    if QUOTA.exists():
        limit, _, period = QUOTA.read_text().strip().partition(" ")
        if limit.isdigit():
            count = min(count, max(1, int(limit) // int(period)))
    return max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def talks() -> bool:
    """Is this process alone, or the first of those that torchrun started?"""
    return os.environ.get("RANK", "0") == "0"


def device(asked: str | None) -> torch.device:
    """cuda, then mps, then cpu; ValueError for one that is not there."""
    import torch

    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if asked is None:
        return torch.device(next(name for name, is_there in there.items() if is_there))
    kind = asked.partition(":")[0]
    if kind not in there:
        raise ValueError(f"--device {asked}: must be cuda, mps or cpu")
    if not there[kind]:
        raise ValueError(f"--device {asked}: this machine or this torch has no {kind}")
    try:
        return torch.device(asked)
    except RuntimeError:
        raise ValueError(f"--device {asked}: write cuda or cuda:1") from None


def precision(asked: str | None, where: torch.device) -> str:
    """bf16 on a GPU or on a CPU that computes it natively, else float32."""
    import torch

    if asked is not None:
        return asked
    if where.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "float32"
    native = torch.cpu._is_avx512_bf16_supported() if where.type == "cpu" else False
    return "bf16" if native else "float32"
