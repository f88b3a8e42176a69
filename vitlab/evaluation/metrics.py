"""Honest numbers: counts over all pictures, with intervals."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The score of a classifier on one split, each picture counted once."""

    scored_on: str  # which pictures: spec and split
    n: int  # pictures scored
    skipped: int  # pictures that could not be read
    loss: float  # mean cross-entropy, nats
    top1: float  # share of right answers
    top1_interval: tuple[float, float]  # Wilson's, 95 %
    top5: float | None  # share with the right class among five; None for fewer than six classes
    classes: tuple[str, ...]
    confusion: np.ndarray  # [K, K] int64: rows the truth, columns the prediction

    @property
    def support(self) -> np.ndarray:
        """[K] pictures of each class."""
        return self.confusion.sum(axis=1)

    @property
    def recall(self) -> np.ndarray:
        """[K] share of each class found; NaN where the class has no picture."""
        return _ratio(self.confusion.diagonal(), self.support)

    @property
    def precision(self) -> np.ndarray:
        """[K] share of right answers among those that name the class; NaN where none does."""
        return _ratio(self.confusion.diagonal(), self.confusion.sum(axis=0))

    @property
    def headline(self) -> float:
        """What `--select top1` compares."""
        return self.top1

    def curves(self) -> dict[str, float]:
        """What a line of metrics.jsonl has beyond accuracy and loss."""
        return {}

    def summary(self) -> dict[str, Any]:
        """What config.json and --json carry: plain numbers, NaN as None."""
        return {
            "scored_on": self.scored_on, "n": self.n, "skipped": self.skipped, "loss": self.loss,
            "top1": self.top1, "top1_interval": list(self.top1_interval), "top5": self.top5,
            "recall": dict(zip(self.classes, _plain(self.recall), strict=True)),
            "precision": dict(zip(self.classes, _plain(self.precision), strict=True)),
        }  # fmt: skip

    def line(self) -> str:
        """One line for people."""
        low, high = self.top1_interval
        right = int(self.confusion.trace())
        top5 = "" if self.top5 is None else f", top-5 {self.top5:.2%}"
        skipped = f", {self.skipped} unreadable" if self.skipped else ""
        return (
            f"accuracy {self.top1:.2%} ({right}/{self.n}; 95 % interval {low:.2%} to {high:.2%})"
            f"{top5}{skipped}, on {self.scored_on}"
        )


def wilson(right: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's score interval of a share, 95 % by default (Wilson 1927)."""
    if n == 0:
        return 0.0, 1.0
    share = right / n
    centre = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return max(0.0, min(share, low)), min(1.0, max(share, high))  # rounding aside


def count(
    logits: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], scored_on: str, skipped: int
) -> Metrics:
    """Metrics from logits [N, K] float32 and labels [N] int64.

    Raises ValueError without pictures, FloatingPointError for NaN or infinity.

    Ties are broken towards the first class, as `argmax` does; in top-5 a tie counts against the
    right class, so that equal logits score 0.
    """
    n, k = logits.shape[0], len(classes)
    if n == 0:
        raise ValueError(f"{scored_on}: no readable pictures to score")
    if not np.isfinite(logits).all():
        raise FloatingPointError(f"{scored_on}: the model's outputs are not finite")
    wide = logits.astype(np.float64)
    predicted = wide.argmax(axis=1)
    confusion = np.bincount(labels * k + predicted, minlength=k * k).reshape(k, k)
    right = int(confusion.trace())
    own = np.take_along_axis(wide, labels[:, None], axis=1)
    above = (wide >= own).sum(axis=1)  # how many are at least as probable, itself included
    peak = wide.max(axis=1, keepdims=True)
    losses = peak[:, 0] + np.log(np.exp(wide - peak).sum(axis=1)) - own[:, 0]
    return Metrics(
        scored_on=scored_on, n=n, skipped=skipped, loss=float(losses.mean()), top1=right / n,
        top1_interval=wilson(right, n), top5=float((above <= 5).mean()) if k > 5 else None,
        classes=classes, confusion=confusion,
    )  # fmt: skip


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)


def _plain(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(v) else float(v) for v in values]
