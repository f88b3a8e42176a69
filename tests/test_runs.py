"""Training that ends in a report, evaluation that leaves one."""

import csv
import json
import os
from pathlib import Path

import pytest
import toys
import yaml

import vitlab
from vitlab import report, runs
from vitlab.data import sources
from vitlab.evaluation import scoring

FILES = {
    "model.safetensors", "config.json", "README.md", "run.yaml", "metrics.jsonl", "skipped.csv",
    "report.html", "checkpoints",
}  # fmt: skip


def test_a_run_holds_what_it_should_and_nothing_else(trained: Path) -> None:
    assert {p.name for p in trained.iterdir()} == FILES
    kept = sorted(p.name for p in (trained / "checkpoints").iterdir())
    assert kept == ["000000060.safetensors"]
    page = (trained / "report.html").read_text()
    assert "100.00%" in page or "100.00 %" in page or "100%" in page
    with open(trained / "skipped.csv", newline="") as f:
        assert list(csv.reader(f)) == [["file", "reason"]]


def test_a_run_is_a_bundle(trained: Path, photos: Path) -> None:
    bundle = vitlab.load(trained)
    for path in photos.glob("*/*.png"):
        assert bundle.predict(path)[0].label == path.parent.name
    assert yaml.safe_load((trained / "run.yaml").read_text())["asked"]["steps"] == 60


def test_training_reports_the_weights_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[scoring.Scores] = []
    plain = runs.write_report
    monkeypatch.setattr(runs, "write_report", lambda *a: given.append(a[2]) or plain(*a))
    bundle = vitlab.train(toys.pictures(), toys.config(tmp_path / "run", ema=0.9))
    assert len(given) == 1
    assert given[0].metrics.summary() == bundle.card.metrics


def test_a_report_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(report, "write", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            vitlab.train(toys.pictures(), toys.config(tmp_path / "run"))
    assert not (tmp_path / "run" / "config.json").exists()
    vitlab.train(toys.pictures(), toys.config(tmp_path / "run"))
    vitlab.train(toys.pictures(), toys.config(tmp_path / "whole"))
    toys.same_run(tmp_path / "whole", tmp_path / "run")


def test_evaluation_leaves_a_report(trained: Path, photos: Path, tmp_path: Path) -> None:
    bundle = vitlab.load(trained)
    scores = runs.evaluate_into(bundle, str(photos), "all", tmp_path / "a" / "b", batch=7)
    assert {p.name for p in (tmp_path / "a" / "b").iterdir()} == {"report.html", "metrics.json"}
    summary = json.loads((tmp_path / "a" / "b" / "metrics.json").read_text())
    assert summary == scores.metrics.summary()
    assert summary == vitlab.evaluate(bundle, str(photos), split="all", batch=7).summary()


def test_evaluation_into_a_run_keeps_its_curves(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    bundle = vitlab.train(str(photos), toys.config(out))
    before = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}
    runs.evaluate_into(bundle, str(photos), "all", out)
    after = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}
    assert after.keys() - before.keys() == {"metrics.json"}
    assert [n for n in before if before[n] != after[n]] == ["report.html"]
    assert b"<svg" in after["report.html"], "the curves"
    assert vitlab.load(out).classes == bundle.classes


def test_a_file_is_in_the_way_before_the_work_begins(
    trained: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(scoring, "score", lambda *a, **k: pytest.fail("it began"))
    with pytest.raises(ValueError, match=r"--out .*file: is a file"):
        runs.evaluate_into(vitlab.load(trained), str(photos), None, tmp_path / "file")


def test_names_of_files_that_are_no_text(tmp_path: Path) -> None:
    """Bytes that are not UTF-8, in the name of a file that is skipped."""
    photos = toys.write_folder(tmp_path / "photos")
    try:
        (photos / "cat" / os.fsdecode(b"c\xfft.png")).write_bytes(b"no picture")
    except OSError:
        pytest.skip("this file system wants UTF-8")
    vitlab.train(str(photos), toys.config(tmp_path / "run"))
    assert "cat/c\\udcfft.png" in (tmp_path / "run" / "skipped.csv").read_text()
    runs.evaluate_into(vitlab.load(tmp_path / "run"), str(photos), "all", tmp_path / "scores")


def test_mistakes_name_pictures(trained: Path, photos: Path, tmp_path: Path) -> None:
    """With labels turned round every picture is a mistake, and the page shows some."""
    images, labels = toys.pictures()
    wrong = sources.from_arrays(images, labels[1:] + labels[:1])
    scores = scoring.score(vitlab.load(trained).model, vitlab.load(trained).preprocess, wrong)
    runs.write_report(tmp_path, wrong, scores, {"a.png": "empty file"})
    page = (tmp_path / "report.html").read_text()
    assert "data:image/" in page
    assert "a.png" in page


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"asked: [1, \xff")
    photos = toys.write_folder(tmp_path / "photos")
    with pytest.raises(ValueError, match=r"run\.yaml: damaged .* give another --out"):
        runs.evaluate_into(toys.bundle(), str(photos), None, tmp_path)
