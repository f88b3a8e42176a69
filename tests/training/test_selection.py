"""The paper's selection protocol: sweep on a held-out part, learn again, score test once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
import yaml

import vitlab
from vitlab.evaluation import scoring
from vitlab.training import folder, run, selection

RATES = (1e-6, 3e-3, 1e-3)


def parts() -> dict[str, Any]:
    whole = toys.source(48)
    return {"train": whole, "test": replace(toys.source(20), split="test")}


def config(out: Path, **changes: Any) -> vitlab.TrainConfig:
    return toys.config(out, **{"lr": RATES, "select": "held-out", "steps": 20, **changes})


def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, list[str], Any]]:
    """What each run inside was given: folder, pictures, parts, rate."""
    plain, seen = run.train, []

    def train(source, config, finish):
        names = {k: sorted(v.id(i) for i in range(len(v))) for k, v in source.items()}
        seen.append((Path(config.out).name, names, config.lr, config.held_out))
        return plain(source, config, finish)

    monkeypatch.setattr(run, "train", train)
    return seen


def test_the_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = trained(monkeypatch)
    scored = []
    plain = selection.score

    def score(model, preprocess, source, **how):
        scored.append(source.split)
        return plain(model, preprocess, source, **how)

    monkeypatch.setattr(selection, "score", score)
    out = tmp_path / "run"
    bundle = vitlab.train(parts(), config(out))
    assert [name for name, *_ in seen] == ["lr-1e-06", "lr-0.003", "lr-0.001", "seed-0"]
    whole = sorted(map(str, range(48)))
    for _, names, *_ in seen[:3]:
        assert not set(names["train"]) & set(names["val"])
        assert sorted(names["train"] + names["val"]) == whole
        assert names == seen[0][1], "the same part is held out for every rate"
    assert seen[3][1] == {"train": whole}
    assert seen[3][2] in (3e-3, 1e-3)
    assert scored == ["test"], "once, at the end"
    table = yaml.safe_load((out / "selection.yaml").read_text())
    assert [row["lr"] for row in table["sweep"]] == list(RATES)
    best = max(table["sweep"], key=lambda row: (row["top1"], -row["loss"]))["lr"]
    assert table["chosen"] == best == seen[3][2]
    assert bundle.card.metrics["scored_on"] == "arrays test"
    assert bundle.card.metrics["sweep"] == table["sweep"]
    again = scoring.evaluate(vitlab.load(out), parts()["test"])
    assert again.top1 == table["test"]["top1"] == bundle.card.metrics["top1"]
    assert (out / "report.html").exists()
    assert (out / "lr-0.003" / "report.html").exists(), "each run inside is one like any other"


def test_a_selection_goes_on_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vitlab.train(parts(), config(tmp_path / "whole", seeds=2))
    plain, died = run.train, []

    def train(source, config, finish):
        if Path(config.out).name == "seed-1" and not died:
            died.append(1)
            raise RuntimeError("killed")
        return plain(source, config, finish)

    with monkeypatch.context() as patch:
        patch.setattr(run, "train", train)
        with pytest.raises(RuntimeError, match="killed"):
            vitlab.train(parts(), config(tmp_path / "cut", seeds=2))
    assert not (tmp_path / "cut" / "config.json").exists()
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "cut").glob("lr-*/model.safetensors")}
    assert len(times) == 3
    vitlab.train(parts(), config(tmp_path / "cut", seeds=2))
    assert all(p.stat().st_mtime_ns == at for p, at in times.items()), "what was done stays"
    tables = [yaml.safe_load((tmp_path / n / "selection.yaml").read_text())
              for n in ("whole", "cut")]  # fmt: skip
    for table in tables:
        table.pop("asked")
    assert tables[0] == tables[1]
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("whole", "cut")]
    assert weights[0] == weights[1]
    with monkeypatch.context() as patch:
        patch.setattr(run, "train", None)  # a finished one is left alone
        assert vitlab.train(parts(), config(tmp_path / "cut", seeds=2)).card.metrics["seeds"]


def test_seeds_give_mean_and_interval(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = {"lr": 3e-3, "steps": 12, "seed": 5}
    bundle = vitlab.train(toys.pictures(), toys.config(out, seeds=3, **options))
    spread = bundle.card.metrics["seeds"]
    assert spread["seed"] == [5, 6, 7]
    alone = vitlab.train(toys.pictures(), toys.config(tmp_path / "alone", **{**options, "seed": 6}))
    assert spread["top1"][1] == alone.card.metrics["top1"]
    low, high = spread["interval"]
    assert low <= spread["mean"] <= high
    assert (out / "model.safetensors").read_bytes() == (
        out / "seed-5" / "model.safetensors"
    ).read_bytes()


def test_mean_and_interval_by_hand() -> None:
    mean, (low, high) = selection.mean_interval([0.8, 0.9, 1.0])
    assert mean == pytest.approx(0.9)
    assert (low, high) == pytest.approx((0.9 - 0.2484, 0.9 + 0.2484), abs=1e-4)
    many = [float(i % 2) for i in range(40)]
    mean, (low, high) = selection.mean_interval(many)
    assert (high - low) / 2 == pytest.approx(2.0227 * 0.50637 / 40**0.5, rel=0.01)


def test_a_rate_that_fails_is_a_row_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run.train

    def train(source, config, finish):
        if config.lr == 1e-3:
            raise FloatingPointError("step 3: loss nan")
        return plain(source, config, finish)

    monkeypatch.setattr(run, "train", train)
    vitlab.train(parts(), config(tmp_path / "run", steps=4))
    table = yaml.safe_load((tmp_path / "run" / "selection.yaml").read_text())
    assert table["sweep"][2] == {"lr": 1e-3, "failed": "step 3: loss nan"}
    assert table["chosen"] in (1e-6, 3e-3)


def test_selections_that_cannot_be(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="needs training pictures and a test or val part"):
        vitlab.train(toys.source(), config(tmp_path / "a"))
    with pytest.raises(FileNotFoundError):
        vitlab.train("nowhere/at/all", config(tmp_path / "a", seeds=2, select="last", lr=1e-3))
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="several rates are a sweep, which needs --select"):
        toys.config(out, lr=RATES)
    with pytest.raises(ValueError, match="--select held-out needs --held-out above 0"):
        config(out, held_out=0)
    vitlab.train(parts(), config(out, steps=2))
    with pytest.raises(ValueError, match=r"a selection with other options \(steps was 2, now 3"):
        vitlab.train(parts(), config(out, steps=3))
    vitlab.train(parts(), config(out, steps=3, overwrite=True))
    vitlab.train(toys.pictures(), toys.config(tmp_path / "b", steps=1))
    with pytest.raises(ValueError, match=r"holds other files .*choose another folder"):
        vitlab.train(parts(), config(tmp_path / "b", steps=2))


def test_overwriting_leaves_nothing_of_an_older_selection_and_all_else(tmp_path: Path) -> None:
    out = tmp_path / "run"
    vitlab.train(parts(), config(out, steps=2, seeds=2))
    foreign = [out / "notes.txt", out / "lr-plans/a.txt", out / "lr-1e-06/mine.txt"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    with pytest.raises(FileNotFoundError):  # nothing goes before the new one can be
        vitlab.train("nowhere/at/all", config(out, overwrite=True))
    assert (out / "seed-1/model.safetensors").exists()
    vitlab.train(parts(), config(out, steps=2, lr=(3e-3, 1e-2), overwrite=True))
    inner = sorted(path.name for path in out.iterdir() if path.is_dir())
    assert inner == ["lr-0.003", "lr-0.01", "lr-1e-06", "lr-plans", "seed-0"]
    assert all(path.read_text() == "mine" for path in foreign)
    assert [path.name for path in (out / "lr-1e-06").iterdir()] == ["mine.txt"]
    (out / "report.html").write_text("old")
    vitlab.train(parts(), config(out, steps=2, lr=1e-3, select="last", seeds=2, overwrite=True))
    inner = sorted(path.name for path in out.iterdir() if path.is_dir())
    assert inner == ["lr-1e-06", "lr-plans", "seed-0", "seed-1"]
    assert not (out / "report.html").exists(), "seeds have reports of their own"


def test_torchrun_does_not_overwrite_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that it starts again goes on with what was begun."""
    options = {"lr": 1e-3, "select": "last", "seeds": 2, "steps": 2, "overwrite": True}
    vitlab.train(parts(), config(tmp_path, **options))
    (tmp_path / "config.json").unlink()
    times = {p: p.stat().st_mtime_ns for p in tmp_path.glob("seed-*/model.safetensors")}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    vitlab.train(parts(), config(tmp_path, **options))
    assert (tmp_path / "config.json").exists()
    assert {p: p.stat().st_mtime_ns for p in times} == times


def test_one_selection_at_a_time(tmp_path: Path) -> None:
    with (
        folder.alone(tmp_path / "run"),
        pytest.raises(ValueError, match="run: another run is writing there"),
    ):
        vitlab.train(parts(), config(tmp_path / "run"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file: is a file; choose another folder"):
        vitlab.train(parts(), config(tmp_path / "file"))


@pytest.mark.parametrize("select", ["held-out", "last"])
def test_groups_of_train_in_another_part_are_told_once(
    select: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = replace(toys.source(48), groups=np.arange(48) // 4)
    test = replace(toys.source(20), split="test", groups=np.arange(20) // 4 + 10)
    options = {"steps": 1, "lr": 1e-3, "select": select}
    vitlab.train({"train": whole, "test": test}, config(tmp_path / "run", **options))
    told = [r.getMessage() for r in caplog.records if "groups in train" in r.getMessage()]
    assert len(told) == 1
    assert "8 of 20 pictures in test are of groups in train (groups: 2, such as that" in told[0]
    assert "of 0 and 40)" in told[0]
