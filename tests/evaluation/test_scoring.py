"""Scoring: which pictures, each exactly once, whatever the batch."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch import nn

import vitlab
from vitlab.data import sources
from vitlab.evaluation import scoring
from vitlab.weights.bundle import Bundle, Card


class Oracle(nn.Module):
    """Right about pictures whose rows are listed: it reads the class from the brightness."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        said = ((images[:, 0, 0, 0] + 1) * 127.5).round().long()
        return torch.eye(self.classes)[said % self.classes] * 3


def telling(labels: list[int], said: list[int], classes: int = 2) -> sources.Source:
    """Pictures that let the oracle answer as `said`."""
    images = np.array(said, dtype=np.uint8)[:, None, None, None].repeat(16, 1).repeat(16, 2)
    names = toys.CLASSES[:classes]
    return sources.from_arrays(images.repeat(3, 3), labels, names)


def oracle(classes: int = 2) -> Any:
    """As much of a bundle as scoring needs."""
    bundle = toys.bundle(classes)
    fake = object.__new__(Bundle)
    for name, value in {**vars(bundle), "model": Oracle(classes)}.items():
        object.__setattr__(fake, name, value)
    return fake


@pytest.mark.parametrize("batch", [1, 3, 4, 10, 64])
def test_ten_pictures_are_ten_whatever_the_batch(batch: int) -> None:
    """Batches of 4 right 4, 4 and 0 of 2: 0.8, and not the mean of 1, 1, 0."""
    labels = [0, 1] * 5
    said = [*labels[:8], 1, 0]
    m = vitlab.evaluate(oracle(), telling(labels, said), batch=batch)
    assert (m.n, m.top1) == (10, 0.8)
    assert m.confusion.tolist() == [[4, 1], [1, 4]]
    right, wrong = np.log(1 + np.exp(-3)), np.log(1 + np.exp(3))
    assert m.loss == pytest.approx((8 * right + 2 * wrong) / 10, abs=1e-6)


def test_workers_do_not_change_the_score(photos: Path, bundle: Bundle) -> None:
    one, other = (vitlab.evaluate(bundle, str(photos), workers=w, batch=7) for w in (0, 2))
    assert one.summary() == other.summary()
    assert np.array_equal(one.confusion, other.confusion)
    assert one.n == 40


def test_batch_size_changes_the_loss_by_rounding_at_most(photos: Path, bundle: Bundle) -> None:
    first = vitlab.evaluate(bundle, str(photos), batch=1)
    for batch in (3, 40):
        other = vitlab.evaluate(bundle, str(photos), batch=batch)
        assert other.loss == pytest.approx(first.loss, abs=1e-5)
        assert np.array_equal(other.confusion, first.confusion)


def test_labels_match_by_name(bundle: Bundle) -> None:
    """A source that orders or lacks classes of the model scores as it should."""
    images, labels = toys.pictures()
    expected = vitlab.evaluate(bundle, sources.from_arrays(images, labels, toys.CLASSES))
    turned = vitlab.evaluate(bundle, sources.from_arrays(images, labels, toys.CLASSES[::-1]))
    assert turned.summary() == expected.summary()
    rows = [i for i, label in enumerate(labels) if label in ("dog", "fox")]
    part = sources.from_arrays(images[rows], [labels[i] for i in rows])
    m = vitlab.evaluate(bundle, part)
    assert m.classes == toys.CLASSES
    assert m.support.tolist() == [0, 10, 0, 10]
    assert m.recall[1] == expected.recall[1]


def test_numeric_names_are_names_and_no_indices() -> None:
    """Folders 0 ... 10 sort as text: 0, 1, 10, 2, ...; the bundle's own order counts."""
    bundle = oracle(11)
    object.__setattr__(bundle, "classes", tuple(map(str, range(11))))
    images = np.arange(11, dtype=np.uint8)[:, None, None, None].repeat(16, 1).repeat(16, 2)
    names = sorted(bundle.classes)
    assert names[2] == "10"
    source = sources.from_arrays(images.repeat(3, 3), list(map(str, range(11))), names)
    assert vitlab.evaluate(bundle, source).top1 == 1.0


def test_classes_that_the_model_does_not_know_are_refused(bundle: Bundle) -> None:
    images, labels = toys.pictures()
    source = sources.from_arrays(images, ["gnu" if v == "cat" else v for v in labels])
    with pytest.raises(ValueError, match=r"1 of its classes are unknown to the model: gnu"):
        vitlab.evaluate(bundle, source)


@pytest.mark.parametrize("options", [{"batch": 0}, {"batch": -1}, {"workers": -1}])
def test_counts_out_of_range(options: dict[str, int], bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="batch must be at least 1, workers 0"):
        vitlab.evaluate(bundle, toys.source(), **options)


def test_unreadable_pictures_are_counted_apart(tmp_path: Path, bundle: Bundle) -> None:
    photos = toys.write_folder(tmp_path / "photos")
    for name in ("cat/000.png", "fox/003.png"):
        (photos / name).write_bytes(b"no picture")
    m = vitlab.evaluate(bundle, str(photos), batch=3)
    assert (m.n, m.skipped, int(m.confusion.sum())) == (38, 2, 38)
    scores = scoring.score(bundle.model, bundle.preprocess, sources.open_spec(str(photos))["all"])
    assert [name for name, _ in scores.skipped] == ["cat/000.png", "fox/003.png"]
    assert len(scores.rows) == len(scores.probabilities) == 38
    assert len(set(scores.rows.tolist())) == 38
    for path in photos.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="no readable pictures to score"):
        vitlab.evaluate(bundle, str(photos))


def test_a_model_in_training_is_scored_without_dropout() -> None:
    bundle = toys.bundle(dropout=0.5, drop_path=0.5)
    expected = vitlab.evaluate(bundle, toys.source()).summary()
    bundle.model.train()
    assert vitlab.evaluate(bundle, toys.source()).summary() == expected


def test_the_model_is_as_it_was_afterwards(bundle: Bundle) -> None:
    for mode in (True, False):
        bundle.model.train(mode)
        vitlab.evaluate(bundle, toys.source())
        assert bundle.model.training is mode
    bundle.model.train()
    broken = replace(toys.source(), load=lambda i: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        vitlab.evaluate(bundle, broken)
    assert bundle.model.training


def test_bf16(bundle: Bundle) -> None:
    source = toys.source()
    plain = scoring.score(bundle.model, bundle.preprocess, source)
    half = scoring.score(bundle.model, bundle.preprocess, source, precision=torch.bfloat16)
    assert half.probabilities.dtype == np.float32
    assert np.abs(half.probabilities - plain.probabilities).max() < 0.05
    assert half.metrics.loss != plain.metrics.loss


def test_results_hold_no_graph(bundle: Bundle) -> None:
    scores = scoring.score(bundle.model, bundle.preprocess, toys.source())
    assert isinstance(scores.probabilities, np.ndarray)
    assert np.allclose(scores.probabilities.sum(axis=1), 1, atol=1e-5)
    assert type(scores.metrics.loss) is float


# Which pictures --------------------------------------------------------------------------------


def part(spec: str, card: Card = Card(), split: str | None = None) -> str:  # noqa: B008
    return scoring.choose(spec, split, card).split


def test_test_before_val_before_held_out_before_all(tmp_path: Path) -> None:
    photos = toys.write_folder(tmp_path / "photos", 8)
    card = Card(data={"spec": str(photos), "held_out_ids": ["cat/000.png", "dog/001.png"]})
    assert part(str(photos)) == "all"
    assert part(str(photos), card) == "held-out"
    toys.write_folder(tmp_path / "sets" / "train", 8)
    sets = str(tmp_path / "sets")
    assert part(sets) == "train"
    toys.write_folder(tmp_path / "sets" / "val", 8)
    assert part(sets, card) == "val"
    toys.write_folder(tmp_path / "sets" / "test", 8)
    assert part(sets, card) == "test"
    assert part(sets, card, "train") == "train"
    with pytest.raises(ValueError, match="has no split held; it has t"):
        part(sets, card, "held")


def test_held_out_pictures_are_found_from_wherever_they_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else pictures that were trained on would be scored, and nobody told."""
    photos = toys.write_folder(tmp_path / "photos", 8)
    monkeypatch.chdir(tmp_path)
    card = Card(data={"spec": "photos", "held_out_ids": ["cat/000.png", "dog/001.png"]})
    (tmp_path / "other").mkdir()
    for here, specs in {
        tmp_path: ["photos", "photos/", "./photos", str(photos)],
        tmp_path / "other": ["../photos", str(photos)],
        photos: [".", "../photos"],
    }.items():
        monkeypatch.chdir(here)
        for spec in specs:
            chosen = scoring.choose(spec, None, card)
            assert (chosen.split, len(chosen)) == ("held-out", 2), spec
    toys.write_folder(tmp_path / "others", 8)
    assert part(str(tmp_path / "others"), card) == "all"


def test_what_was_scored_is_said(
    trained: Path, photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vitlab"):
        m = vitlab.evaluate(vitlab.load(trained), str(photos))
    assert m.line().endswith(f"on {photos} held-out")
    assert m.summary()["scored_on"] == f"{photos} held-out"
