"""Scores where a picture may have several labels: average precision, and F1 at a threshold a class.

Thresholds are chosen where they are not given, each to give its class the best F1: on validation
pictures in training, whose bundle then carries them to every other evaluation and to prediction.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitlab.evaluation.metrics import Metrics, count


@dataclass(frozen=True, kw_only=True)
class MultiMetrics(Metrics):
    """Of a multi-label classifier. `top1`: is the most probable class one of the picture's;
    `loss`: binary cross-entropy, summed over classes; `confusion` counts a hit for that class, else
    a miss of the picture's first label."""

    mean_ap: float  # mean average precision, over classes with a picture
    f1: float  # mean over the same classes
    average_precision: np.ndarray  # [K]; NaN where the class has no picture
    class_f1: np.ndarray  # [K] at the thresholds
    thresholds: np.ndarray  # [K] probabilities from which a class is said to be there

    @property
    def headline(self) -> float:
        """What `--select top1` compares."""
        return self.mean_ap

    def curves(self) -> dict[str, float]:
        """What a line of metrics.jsonl has beyond accuracy and loss."""
        return {"map": self.mean_ap, "f1": self.f1}

    def summary(self) -> dict[str, Any]:
        """What config.json and --json carry."""
        columns = {
            "average_precision": self.average_precision, "f1_of": self.class_f1,
            "thresholds": self.thresholds,
        }  # fmt: skip
        plain = {
            name: {c: None if np.isnan(v) else float(v) for c, v in zip(self.classes, values,
                                                                        strict=True)}
            for name, values in columns.items()
        }  # fmt: skip
        return {**super().summary(), "map": self.mean_ap, "f1": self.f1, **plain}

    def line(self) -> str:
        """One line for people."""
        skipped = f", {self.skipped} unreadable" if self.skipped else ""
        return (
            f"mean average precision {self.mean_ap:.2%}, F1 {self.f1:.2%}, best guess right"
            f" {self.top1:.2%} of {self.n}{skipped}, on {self.scored_on}"
        )


def count_many(
    logits: np.ndarray, many: np.ndarray, classes: tuple[str, ...], scored_on: str, skipped: int,
    thresholds: Mapping[str, float] | None = None,
) -> MultiMetrics:  # fmt: skip
    """Metrics from logits [N, K] float32 and labels [N, K] (1 where a picture has the class).

    Args:
        thresholds: by class name; chosen from these pictures where not given.

    Raises ValueError without pictures, FloatingPointError for NaN or infinity.
    """
    truth = many > 0.5
    # Each picture's label that is most probable, or its first: what `count` takes for the truth.
    best = logits.argmax(axis=1) if len(logits) else np.zeros(0, dtype=np.int64)
    hit = truth[np.arange(len(truth)), best]
    other = np.where(truth.any(axis=1), truth.argmax(axis=1), (best + 1) % len(classes))
    plain = count(logits, np.where(hit, best, other), classes, scored_on, skipped)
    wide = logits.astype(np.float64)
    probabilities = 1 / (1 + np.exp(-wide))
    losses = np.logaddexp(0, wide) - wide * truth
    precision = np.array([average_precision(p, t) for p, t in zip(probabilities.T, truth.T,
                                                                  strict=True)])  # fmt: skip
    if thresholds is None:
        levels = np.array([best_threshold(p, t) for p, t in zip(probabilities.T, truth.T,
                                                                strict=True)])  # fmt: skip
    else:
        levels = np.array([thresholds.get(c, 0.5) for c in classes])
    said = probabilities >= levels
    right, wrong = (said & truth).sum(axis=0), (said ^ truth).sum(axis=0)
    f1 = 2 * right / np.maximum(2 * right + wrong, 1)
    there = truth.any(axis=0)
    fields = {k: v for k, v in vars(plain).items() if k != "loss"}
    return MultiMetrics(
        **fields, loss=float(losses.sum(axis=1).mean()), mean_ap=float(precision[there].mean()),
        f1=float(f1[there].mean()), average_precision=precision, class_f1=f1, thresholds=levels,
    )  # fmt: skip


def average_precision(scores: np.ndarray, truth: np.ndarray) -> float:
    """The area under the precision-recall steps of a class; scores that tie count as one step.

    NaN where no picture has the class.
    """
    precision, recall, _ = _steps(scores, truth)
    if not truth.any():
        return float("nan")
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def best_threshold(scores: np.ndarray, truth: np.ndarray) -> float:
    """The threshold of the best F1, midway between two scores; 0.5 where no picture has the class.

    Of equal ones the highest.
    """
    if not truth.any():
        return 0.5
    precision, recall, values = _steps(scores, truth)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    best = int(f1.argmax())
    below = values[best + 1] if best + 1 < len(values) else 0.0
    return float((values[best] + below) / 2)


def _steps(scores: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Precision and recall from each distinct score up, and the scores, falling."""
    order = np.argsort(-scores, kind="stable")
    values, right = scores[order], truth[order].cumsum()
    ends = np.append(np.flatnonzero(np.diff(values)), len(values) - 1)
    return right[ends] / (ends + 1), right[ends] / max(truth.sum(), 1), values[ends]
