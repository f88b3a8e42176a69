"""Several labels a picture: tables of them, scores by hand, thresholds, a run from end to end."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import toys
from PIL import Image

import vitlab
from vitlab.data import sources
from vitlab.data.augment import mix
from vitlab.evaluation.multilabel import average_precision, best_threshold, count_many

NAMES = ("blue", "green", "red")


def write_table(root: Path, n: int = 60) -> Path:
    """Pictures of a left and a right colour, each a label; some of one colour."""
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    colours = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}
    rows = ["path,label"]
    for i in range(n):
        left, right = rng.choice(NAMES, 2)
        pixels = np.zeros((16, 16, 3), np.uint8)
        pixels[:, :8], pixels[:, 8:] = colours[left], colours[right]
        noisy = (pixels + rng.integers(-30, 30, pixels.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(root / f"{i}.png")
        rows.append(f"{i}.png,{left}" if left == right else f"{i}.png,{left} | {right}")
    (root / "labels.csv").write_text("\n".join(rows) + "\n")
    return root / "labels.csv"


def test_a_table_of_several_labels(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("path,label,split\na,dog|cat,train\nb,cat,train\nc,eel,train\nd,cat|eel,val\n")
    parts = sources.open_spec(str(table))
    train, val = parts["train"], parts["val"]
    assert train.classes == val.classes == ("cat", "dog", "eel")
    assert train.many.tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert train.labels.tolist() == [1, 0, 2], "the first of each"
    assert val.many.tolist() == [[1, 0, 1]], "together they need not be in training"
    chosen = sources.select(train, np.array([2, 0]), "val")
    assert chosen.many.tolist() == [[0, 0, 1], [1, 1, 0]]
    wider = sources.match_classes(train, ("eel", "fox", "dog", "cat"))
    assert wider.many.tolist() == [[0, 0, 1, 1], [0, 0, 0, 1], [1, 0, 0, 0]]
    table.write_text("path,label,split\na,dog|cat,train\nd,cat|fox,val\n")
    with pytest.raises(ValueError, match="val has classes that train has not: fox"):
        sources.open_spec(str(table))


def test_average_precision_by_hand() -> None:
    truth = np.array([True, False, True, False])
    assert average_precision(np.array([0.9, 0.8, 0.7, 0.1]), truth) == pytest.approx(
        (1 + 2 / 3) / 2
    )
    assert average_precision(np.array([0.5] * 4), truth) == pytest.approx(0.5), "a tie is no order"
    assert np.isnan(average_precision(np.array([0.5, 0.2]), np.array([False, False])))


def test_thresholds_by_hand() -> None:
    truth = np.array([True, True, False, True, False])
    assert best_threshold(np.array([0.9, 0.8, 0.5, 0.4, 0.1]), truth) == pytest.approx(0.25)
    assert best_threshold(np.array([0.9, 0.8, 0.5, 0.01, 0.02]), truth) == pytest.approx(0.65)
    assert best_threshold(np.array([0.9, 0.8]), np.array([True, True])) == pytest.approx(0.4)
    assert best_threshold(np.array([0.9, 0.8]), np.array([False, False])) == 0.5


def test_scores_are_those_of_every_threshold_tried() -> None:
    """Average precision and F1 anew, by going through all thresholds one by one."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(200, 5)).round(1).astype(np.float32)  # with ties
    many = (rng.random((200, 5)) < 0.3) | (logits > 1.2)
    m = count_many(logits, many.astype(np.float32), tuple("abcde"), "x", 0)
    half = count_many(logits, many, tuple("abcde"), "x", 0, thresholds={})
    chances = 1 / (1 + np.exp(-logits.astype(np.float64)))
    for k in range(5):
        p, t = chances[:, k], many[:, k]
        area, before, best = 0.0, 0.0, 0.0
        for level in sorted(set(p), reverse=True):
            right, said = int((t & (p >= level)).sum()), int((p >= level).sum())
            area += right / said * (right / t.sum() - before)
            before = right / t.sum()
            best = max(best, 2 * right / (said + t.sum()))
        assert m.average_precision[k] == pytest.approx(area)
        assert m.class_f1[k] == pytest.approx(best), "no threshold is better"
        right = int((t & (p >= 0.5)).sum())
        assert half.class_f1[k] == pytest.approx(2 * right / ((p >= 0.5).sum() + t.sum()))
    assert (m.mean_ap, m.f1) == pytest.approx((m.average_precision.mean(), m.class_f1.mean()))
    assert half.thresholds.tolist() == [0.5] * 5
    bce = -(np.log(chances) * many + np.log(1 - chances) * ~many).sum(axis=1).mean()
    assert m.loss == pytest.approx(bce, abs=1e-5)
    assert m.top1 == np.mean([many[i, row.argmax()] for i, row in enumerate(logits)])


def test_labels_of_several_are_mixed() -> None:
    labels = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    images = torch.stack([torch.zeros(3, 4, 4), torch.ones(3, 4, 4)])
    mixed, targets = mix(images, labels, 3, 0.5, 0.0, [0, 3, 1])
    share = float(1 - mixed[0, 0, 0, 0])
    assert targets[0].tolist() == pytest.approx([share, 1.0, 1 - share])


def test_a_run_from_table_to_prediction(tmp_path: Path) -> None:
    table = write_table(tmp_path / "pictures")
    options = {"steps": 250, "lr": 3e-3, "label_smoothing": 0.0, "held_out": 0.25, "depth": 1}
    with pytest.raises(ValueError, match="has several labels a picture; give --task multi-label"):
        vitlab.train(str(table), toys.config(tmp_path / "no", **options))
    config = toys.config(tmp_path / "run", task="multi-label", select="top1", crop=None, **options)
    bundle = vitlab.train(str(table), config)
    metrics = bundle.card.metrics
    assert (bundle.card.task, bundle.classes) == ("multi-label", NAMES)
    assert metrics["map"] > 0.95
    assert metrics["f1"] > 0.9
    again = vitlab.load(tmp_path / "run")
    assert again.card.metrics["thresholds"].keys() == set(NAMES)
    scored = vitlab.evaluate(again, str(table))
    assert scored.summary()["thresholds"] == pytest.approx(metrics["thresholds"])
    assert scored.summary()["map"] == pytest.approx(metrics["map"])
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {"map", "f1"} <= lines[-1].keys()
    source = sources.open_spec(str(table))["all"]
    answers = again.predict([str(tmp_path / "pictures" / source.id(i)) for i in range(30)])
    right = [
        set(a.labels) == {NAMES[j] for j in np.flatnonzero(source.many[i])}
        for i, a in enumerate(answers)
    ]
    assert np.mean(right) > 0.8
    assert any(sum(p for _, p in a.top) > 1.2 for a in answers), "each class has its own yes or no"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Mean average precision" in page
    assert "Threshold" in page


def test_the_other_task_is_refused_or_widened(tmp_path: Path, photos: Path, trained: Path) -> None:
    table = write_table(tmp_path / "pictures", 20)
    single = vitlab.load(trained)
    few = sources.open_spec(str(table))["all"]
    named = toys.CLASSES[:3]
    with pytest.raises(ValueError, match="has several labels a picture, the model gives one"):
        vitlab.evaluate(single, sources.replace(few, classes=named))
    config = toys.config(tmp_path / "run", task="multi-label", steps=3)
    bundle = vitlab.train(str(photos), config)
    assert bundle.card.metrics["map"] > 0, "one label a picture is a case of several"
