"""Metrics by hand: every number that a report shows, from logits small enough to follow."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitlab.evaluation.metrics import Metrics, count, wilson

NAMES = ("a", "b", "c", "d", "e", "f", "g")


def logits_for(predicted: list[int], classes: int) -> np.ndarray:
    return np.eye(classes, dtype=np.float32)[predicted] * 5


def counted(truth: list[int], predicted: list[int], classes: int = 3) -> Metrics:
    labels = np.array(truth, dtype=np.int64)
    return count(logits_for(predicted, classes), labels, NAMES[:classes], "here", 0)


def test_rows_are_the_truth_and_no_class_is_forgotten() -> None:
    m = counted([0, 0, 2], [0, 2, 2])
    assert m.confusion.tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 1]]
    assert m.top1 == pytest.approx(2 / 3)
    assert m.support.tolist() == [2, 0, 1]
    assert m.recall.tolist() == pytest.approx([0.5, math.nan, 1.0], nan_ok=True)
    assert m.precision.tolist() == pytest.approx([1.0, math.nan, 0.5], nan_ok=True)
    assert m.summary()["recall"] == {"a": 0.5, "b": None, "c": 1.0}
    assert m.confusion.dtype == np.int64


def test_loss_by_hand() -> None:
    logits = np.array([[2, 0, -1], [0, 0, 0]], dtype=np.float32)
    m = count(logits, np.array([0, 1]), NAMES[:3], "here", 0)
    assert m.loss == pytest.approx((0.16985 + math.log(3)) / 2, abs=1e-5)
    huge = count(logits * 1e30, np.array([0, 1]), NAMES[:3], "here", 0)
    assert math.isfinite(huge.loss)


@pytest.mark.parametrize("classes", [2, 5])
def test_no_top5_of_five_classes_or_fewer(classes: int) -> None:
    m = counted([0, 1], [0, 0], classes)
    assert m.top5 is None
    assert "top-5" not in m.line()


def test_top5_counts_the_five_most_probable() -> None:
    rising = np.arange(7, dtype=np.float32)[None].repeat(7, axis=0)
    m = count(rising, np.arange(7), NAMES, "here", 0)
    assert m.top5 == pytest.approx(5 / 7)
    assert m.top1 == pytest.approx(1 / 7)
    assert ", top-5 71.43%" in m.line()


def test_equal_logits_are_no_success() -> None:
    m = count(np.zeros((7, 7), dtype=np.float32), np.arange(7), NAMES, "here", 0)
    assert m.top5 == 0
    assert m.top1 == pytest.approx(1 / 7), "as argmax has it: the first"


def test_line_and_summary_agree() -> None:
    m = counted([0] * 10, [0] * 8 + [1] * 2)
    assert m.line().startswith("accuracy 80.00% (8/10; 95 % interval 49.02% to 94.33%)")
    assert m.line().endswith(", on here")
    summary = json.loads(json.dumps(m.summary(), allow_nan=False))
    assert (summary["top1"], summary["n"], summary["skipped"]) == (0.8, 10, 0)
    labels = np.zeros(1, dtype=np.int64)
    assert ", 2 unreadable, on" in count(logits_for([0], 3), labels, NAMES[:3], "here", 2).line()


def test_without_pictures_there_is_no_number() -> None:
    with pytest.raises(ValueError, match="here: no readable pictures to score"):
        counted([], [])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_outputs_that_are_not_finite_have_no_score(bad: float) -> None:
    logits = logits_for([0, 1], 3)
    logits[1, 2] = bad
    with pytest.raises(FloatingPointError, match="here: the model's outputs are not finite"):
        count(logits, np.array([0, 1]), NAMES[:3], "here", 0)


@given(
    st.integers(2, 7).flatmap(
        lambda k: st.lists(st.tuples(st.integers(0, k - 1), st.integers(0, k - 1)), min_size=1).map(
            lambda pairs: (k, pairs)
        )
    )
)
def test_counts_hold_together(case: tuple[int, list[tuple[int, int]]]) -> None:
    k, pairs = case
    m = counted([t for t, _ in pairs], [p for _, p in pairs], k)
    assert m.confusion.shape == (k, k)
    assert m.confusion.sum() == m.n == len(pairs)
    assert m.top1 == sum(t == p for t, p in pairs) / len(pairs)
    assert m.top1_interval[0] <= m.top1 <= m.top1_interval[1]
    for c in range(k):
        mine = [p == c for t, p in pairs if t == c]
        assert m.recall[c] == (sum(mine) / len(mine)) if mine else math.isnan(m.recall[c])


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [  # roots of (share - p)^2 = z^2 p (1 - p) / n, computed with 40 digits
        (0, 10, 0.0, 0.27753280), (10, 10, 0.72246720, 1.0), (8, 10, 0.49016247, 0.94331785),
        (1, 1, 0.20654931, 1.0), (50, 100, 0.40383153, 0.59616847),
        (9975, 10000, 0.99631192, 0.99830600),
    ],
)  # fmt: skip
def test_wilson_by_hand(right: int, n: int, low: float, high: float) -> None:
    assert wilson(right, n) == pytest.approx((low, high), abs=1e-8)


def test_wilson_of_nothing_is_everything() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@given(st.integers(1, 10**6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_solves_its_equation(case: tuple[int, int]) -> None:
    """Each bound p lies 1.96 standard errors of p from the share seen: that is its definition."""
    right, n = case
    low, high = wilson(right, n)
    assert 0 <= low <= right / n <= high <= 1
    for bound in (low, high):
        if 0 < bound < 1:
            distance = abs(right / n - bound) / math.sqrt(bound * (1 - bound) / n)
            assert distance == pytest.approx(1.959963984540054, rel=1e-4)
