"""`vitlab.train` as Python calls it: sources, splits, fine-tuning, choices, what is left alone."""

import hashlib
import json
import logging
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
import yaml

import vitlab
from vitlab.data import sources
from vitlab.training import loop, machine, plans
from vitlab.weights import bundle as bundles


def weights(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def plan(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "run.yaml").read_text())["plan"]


# Sources and splits ----------------------------------------------------------------------------


def test_fast_training_ends_with_exact_scores(photos: Path, tmp_path: Path) -> None:
    """What the report says is what `vitlab evaluate` will say."""
    config = toys.config(tmp_path / "run", precision="bf16")
    bundle = vitlab.train(str(photos), config)
    again = vitlab.evaluate(bundle, str(photos))
    assert again.summary()["loss"] == pytest.approx(bundle.card.metrics["loss"], abs=1e-6)


def test_a_held_out_share_is_recorded_and_scored_again(trained: Path, photos: Path) -> None:
    bundle = vitlab.load(trained)
    data = bundle.card.data
    assert data["spec"] == str(photos)
    assert (data["split"], data["seed"]) == ("stratified 0.2 of train", 0)
    assert len(data["held_out_ids"]) == 8
    assert len({name.split("/")[0] for name in data["held_out_ids"]}) == 4
    again = vitlab.evaluate(bundle, str(photos))
    assert again.scored_on == f"{photos} held-out"
    assert again.summary()["loss"] == pytest.approx(bundle.card.metrics["loss"], abs=1e-6)
    assert (again.n, again.top1) == (8, bundle.card.metrics["top1"])


def test_validation_pictures_are_never_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    plain = loop.update

    def update(job, forward, batch, step):
        seen.update(int(job.train.id(row)) for row in batch.rows)
        return plain(job, forward, batch, step)

    monkeypatch.setattr(loop, "update", update)
    bundle = vitlab.train(toys.pictures(), toys.config(tmp_path / "run"))
    held_out = {int(i) for i in bundle.card.data["held_out_ids"]}
    assert len(held_out) == 8
    assert seen == set(range(40)) - held_out


def test_sources_of_every_kind(tmp_path: Path, photos: Path) -> None:
    given: dict[str, Any] = {
        "arrays": toys.pictures(),
        "source": toys.source(),
        "parts": {"train": toys.source(), "val": toys.source(8)},
        "spec": str(photos),
    }
    for name, source in given.items():
        bundle = vitlab.train(source, toys.config(tmp_path / name))
        assert bundle.classes == toys.CLASSES
        assert bundle.card.metrics["n"] == 8
    parts = bundle = vitlab.load(tmp_path / "parts")
    assert (parts.card.data["split"], parts.card.data["held_out_ids"]) == ("val", [])
    assert weights(tmp_path / "arrays") == weights(tmp_path / "source")


def test_validation_labels_follow_the_names_of_training(tmp_path: Path) -> None:
    images, labels = toys.pictures()
    other = sources.from_arrays(images, labels, tuple(reversed(toys.CLASSES)))
    config = toys.config(tmp_path / "run", steps=60, lr=3e-3)
    bundle = vitlab.train({"train": toys.source(), "val": other}, config)
    assert bundle.card.metrics["top1"] == 1.0


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (([], []), "no pictures to train on"),
        ({}, "no pictures to train on"),
        (toys.pictures(classes=1), "found 1 class"),
        ({"test": toys.source()}, "no training part, only test"),
        ({"train": toys.source(classes=2), "val": toys.source(8, classes=3)}, "unknown"),
        ("nowhere/at/all", "nowhere/at/all: does not exist"),
    ],
)
def test_sources_that_cannot_be_used(source: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        vitlab.train(source, toys.config(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_without_validation_pictures(tmp_path: Path) -> None:
    bundle = vitlab.train(toys.pictures(), toys.config(tmp_path / "run", held_out=0))
    assert bundle.card.metrics == {}
    assert vitlab.load(tmp_path / "run").card.data["split"] == "none"
    assert not (tmp_path / "run" / "report.html").exists()
    with pytest.raises(ValueError, match="--select top1 needs validation pictures"):
        vitlab.train(toys.pictures(), toys.config(tmp_path / "b", held_out=0, select="top1"))


def test_unreadable_files_are_skipped_or_end_it(tmp_path: Path) -> None:
    photos = toys.write_folder(tmp_path / "photos")
    (photos / "cat" / "000.png").write_bytes(b"no picture")
    (photos / "dog" / "001.png").write_bytes(b"")
    vitlab.train(str(photos), toys.config(tmp_path / "run"))
    listed = (tmp_path / "run" / "skipped.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in listed] == ["file", "cat/000.png", "dog/001.png"]
    with pytest.raises(vitlab.data.decode.Unreadable, match=r"cat/000.png: .* \(--strict\)"):
        vitlab.train(str(photos), toys.config(tmp_path / "strict", strict=True))


def test_unreadable_files_are_known_after_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those met before the kill, and not again after it."""
    monkeypatch.setattr("vitlab.data.loader.MEMORY", 0)  # nothing is decoded before its time
    photos = toys.write_folder(tmp_path / "photos")
    for name in ("cat/000.png", "cat/004.png", "dog/001.png", "eel/002.png", "fox/003.png"):
        (photos / name).write_bytes(b"no picture")
    config = {"workers": 0, "steps": 4, "save_every": "0.000001s"}
    vitlab.train(str(photos), toys.config(tmp_path / "whole", **config))
    plain = loop.update

    def update(job, forward, batch, step):
        if step == 3:
            raise RuntimeError
        return plain(job, forward, batch, step)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", update)
        with pytest.raises(RuntimeError):
            vitlab.train(str(photos), toys.config(tmp_path / "cut", **config))
    vitlab.train(str(photos), toys.config(tmp_path / "cut", **config))
    listed = [(tmp_path / run / "skipped.csv").read_text() for run in ("whole", "cut")]
    assert listed[0] == listed[1]
    assert len(listed[0].splitlines()) > 3


# Choices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"epochs": 3.0}, 12), ({"epochs": 0.5}, 2), ({"epochs": 0.001}, 1), ({"images": 80}, 10),
        ({}, 120), ({"steps": 7}, 7),
    ],
)  # fmt: skip
def test_number_of_steps(changes: dict[str, Any], steps: int, tmp_path: Path) -> None:
    vitlab.train(toys.pictures(), toys.config(tmp_path / "run", **{"steps": None, **changes}))
    assert plan(tmp_path / "run")["steps"] == steps
    assert toys.lines(tmp_path / "run")[-1]["step"] == steps


@pytest.mark.parametrize(
    ("warmup", "steps", "expected"),
    [(0.05, 200, 10), (0.5, 3, 2), (0.0, 9, 0), (4.0, 9, 4), (0.05, 1, 0)],
)
def test_warmup_is_a_share_or_a_number(
    warmup: float, steps: int, expected: int, tmp_path: Path
) -> None:
    vitlab.train(toys.pictures(), toys.config(tmp_path / "r", warmup=warmup, steps=steps))
    assert plan(tmp_path / "r")["warmup_steps"] == expected


def test_rates_given_are_taken_as_they_are(tmp_path: Path) -> None:
    """No hidden rule scales them by the batch or its parts."""
    for changes in ({"batch": 8}, {"batch": 16}, {"batch": 8, "accumulate": 4}):
        out = tmp_path / str(changes)
        vitlab.train(toys.pictures(), toys.config(out, lr=5e-4, steps=2, warmup=0, **changes))
        assert toys.lines(out)[0]["lr"] == 5e-4


def test_budget_plans_steps_and_changes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "PLANNING", 0.1)
    changes = {**toys.RICH, "steps": None, "budget": "0.4s"}
    vitlab.train(toys.pictures(), toys.config(tmp_path / "budget", **changes))
    steps = plan(tmp_path / "budget")["steps"]
    assert 3 <= steps <= 400
    vitlab.train(toys.pictures(), toys.config(tmp_path / "steps", **toys.RICH, steps=steps))
    toys.same_run(tmp_path / "budget", tmp_path / "steps")


def test_steps_of_a_budget_follow_the_measured_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "PLANNING", 0.1)
    monkeypatch.setattr(plans, "update", lambda *job: time.sleep(0.02))
    for ema, budget in ((0.0, "1s"), (0.9, "1s"), (0.0, "2s")):
        out = tmp_path / f"{ema}{budget}"
        vitlab.train(toys.pictures(), toys.config(out, steps=None, budget=budget, ema=ema))
        evaluating = (2 if ema else 1) * 8 / 32 / 3
        expected = int(budget[:1]) / 0.02 / (1 + evaluating)
        assert 0.6 * expected < plan(out)["steps"] <= expected, "never more than fits"


def test_workers_do_not_change_the_result(tmp_path: Path, photos: Path) -> None:
    runs = []
    for workers in (0, 2):
        runs.append(tmp_path / f"{workers}")
        vitlab.train(str(photos), toys.config(runs[-1], steps=9, workers=workers, **toys.RICH))
    toys.same_run(*runs)


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        torch.manual_seed(ord(name))
        vitlab.train(toys.pictures(), toys.config(tmp_path / name, seed=seed, **toys.RICH))
    toys.same_run(tmp_path / "a", tmp_path / "b")
    assert weights(tmp_path / "a") != weights(tmp_path / "c")


def test_what_belongs_to_the_caller_is_left_alone(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    vitlab.train(toys.pictures(), toys.config(tmp_path / "run", threads=threads + 1, **toys.RICH))
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert torch.get_num_threads() == threads
    assert plan(tmp_path / "run")["threads"] == threads + 1


def test_recorded_threads_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On resuming, those that the run began with, whatever the caller has by then."""
    at_work: list[int] = []
    plain = loop.update

    def update(job, forward, batch, step):
        at_work.append(torch.get_num_threads())
        if len(at_work) == 3:
            raise RuntimeError
        return plain(job, forward, batch, step)

    monkeypatch.setattr(loop, "update", update)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(RuntimeError):
            vitlab.train(toys.pictures(), toys.config(tmp_path / "run", threads=None))
        torch.set_num_threads(1)
        vitlab.train(toys.pictures(), toys.config(tmp_path / "run", threads=None))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert set(at_work) == {2}
    assert len(at_work) == 15


def test_bf16_trains(tmp_path: Path) -> None:
    config = toys.config(tmp_path / "run", steps=60, lr=3e-3, precision="bf16")
    bundle = vitlab.train(toys.pictures(), config)
    assert bundle.card.metrics["top1"] == 1.0
    assert {p.dtype for p in bundle.model.parameters()} == {torch.float32}
    assert plan(tmp_path / "run")["precision"] == "bf16"


def test_the_defaults_learn_two_colours(tmp_path: Path) -> None:
    config = toys.config(tmp_path / "run", steps=None, epochs=20.0, batch=8, held_out=0.5)
    bundle = vitlab.train(toys.pictures(64, classes=2), config)
    assert toys.lines(tmp_path / "run")[0]["loss"] == pytest.approx(np.log(2), rel=0.1)
    assert (bundle.card.metrics["top1"], bundle.card.metrics["top5"]) == (1.0, None)
    record = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert record["asked"]["lr"] is None
    assert record["plan"]["warmup_steps"] >= 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_compiled_model_is_saved_under_its_own_names(tmp_path: Path) -> None:
    config = toys.config(tmp_path / "run", compile=True, accumulate=2, ema=0.9)
    vitlab.train(toys.pictures(), config)
    vitlab.train(toys.pictures(), toys.config(tmp_path / "plain", accumulate=2, ema=0.9))
    one, other = (vitlab.load(tmp_path / n).model.state_dict() for n in ("run", "plain"))
    assert all(torch.allclose(one[k], other[k], atol=1e-4) for k in other)
    assert not any("_orig_mod" in k for k in one)


# The best weights ------------------------------------------------------------------------------


def rated(monkeypatch: pytest.MonkeyPatch, values: dict[int, float]) -> None:
    """Let evaluation after a step report these accuracies, and losses of 1 - accuracy."""
    plain = loop._score

    def score(job, *how):
        scores = plain(job, *how)
        step = int(next(iter(job.optimizer.state.values()))["step"])
        value = values[step]
        metrics = replace(scores.metrics, top1=value, loss=1 - value)
        return replace(scores, metrics=metrics)

    monkeypatch.setattr(loop, "_score", score)


@pytest.mark.parametrize("select", ["top1", "loss"])
@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_best_weights_stay_the_best_after_resuming(
    select: str, ema: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rated(monkeypatch, {4: 0.9, 8: 0.5, 12: 0.9})
    plain, kept = loop.update, {}

    def update(job, forward, batch, step):
        if step == 4:
            tensors = job.average.tensors if ema else job.model.state_dict()
            kept.update({k: v.clone() for k, v in tensors.items()})
        if step == 6 and not kept.pop("resumed", False):
            raise RuntimeError
        return plain(job, forward, batch, step)

    monkeypatch.setattr(loop, "update", update)
    config = toys.config(tmp_path / "run", select=select, ema=ema, save_every="0.000001s")
    with pytest.raises(RuntimeError):
        vitlab.train(toys.pictures(), config)
    kept["resumed"] = True
    bundle = vitlab.train(toys.pictures(), config)
    kept.pop("resumed", None)
    assert all(torch.equal(bundle.model.state_dict()[k], v) for k, v in kept.items())
    assert len(kept) > 10, "of equals, the first"


def test_the_last_weights_are_kept_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rated(monkeypatch, {4: 0.9, 8: 0.5, 12: 0.1})
    bundle = vitlab.train(toys.pictures(), toys.config(tmp_path / "run"))
    assert bundle.card.metrics["top1"] == 0.1
    assert not (tmp_path / "run" / "checkpoints" / "best").exists()


# From a bundle ---------------------------------------------------------------------------------


def fine_tune(start: Path, out: Path, source: Any = None, **changes: Any) -> vitlab.Bundle:
    given = {"model": None, "size": None, "from_": str(start), "threads": 1, "batch": 8}
    shape = dict.fromkeys(toys.SHAPE)
    config = toys.config(out, **{**given, **shape, **changes})
    return vitlab.train(source or toys.pictures(), config)


def test_other_classes_get_a_new_zero_head_and_the_rest_is_kept(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vitlab"):
        new = fine_tune(trained, tmp_path / "run", toys.pictures(classes=3), lr=0.0)
    old = vitlab.load(trained)
    for name, tensor in new.model.state_dict().items():
        if name.startswith("head."):
            assert not tensor.any()
        else:
            assert torch.equal(tensor, old.model.state_dict()[name]), name
    assert "3 new classes: the head starts anew, at zero" in caplog.text
    assert new.classes == toys.CLASSES[:3]
    assert new.preprocess == old.preprocess


def test_a_new_head_learns(trained: Path, tmp_path: Path) -> None:
    new = fine_tune(trained, tmp_path / "run", toys.pictures(classes=3), steps=40, lr=3e-3)
    assert new.card.metrics["top1"] == 1.0


def test_the_same_classes_keep_the_head_and_their_order(trained: Path, tmp_path: Path) -> None:
    images, labels = toys.pictures()
    shuffled = sources.from_arrays(images, labels, ("fox", "dog", "cat", "eel"))
    new = fine_tune(trained, tmp_path / "run", shuffled, lr=0.0)
    old = vitlab.load(trained)
    assert new.classes == old.classes
    assert torch.equal(new.model.head.weight, old.model.head.weight)
    assert new.card.metrics["top1"] == 1.0


def test_another_size(trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vitlab"):
        new = fine_tune(trained, tmp_path / "run", size=(24, 32), lr=0.0, ema=0.9)
    assert new.model.config.image == new.preprocess.size == (24, 32)
    old = vitlab.load(trained)
    expected = old.model.resize((24, 32)).state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in new.model.state_dict().items())
    assert "images of 24 x 32 instead of 16 x 16" in caplog.text
    again = vitlab.load(tmp_path / "run")
    assert again.predict(toys.pictures()[0][:1])[0].label == "cat"


def test_where_the_weights_came_from(trained: Path, tmp_path: Path) -> None:
    start = vitlab.load(trained)
    start.card.source["licence"] = "CC0-1.0"
    vitlab.save(start, tmp_path / "start")
    new = fine_tune(tmp_path / "start", tmp_path / "run")
    digest = hashlib.sha256((tmp_path / "start" / "model.safetensors").read_bytes()).hexdigest()
    assert new.card.source == {"format": "vitlab", "sha256": digest, "licence": "CC0-1.0"}
    assert json.loads((tmp_path / "run" / "config.json").read_text())["source"] == new.card.source
    assert plan(tmp_path / "run")["lr"] == pytest.approx(1e-4), "a tenth"


def test_the_tanh_layer_of_pre_training_goes_with_the_head(tmp_path: Path) -> None:
    vitlab.save(toys.bundle(head_hidden=12), tmp_path / "start")
    kept = fine_tune(tmp_path / "start", tmp_path / "kept")
    assert kept.model.config.head_hidden == 12
    new = fine_tune(tmp_path / "start", tmp_path / "new", toys.pictures(classes=2))
    assert new.model.config.head_hidden == 0
    assert new.model.hidden is None


def test_dropout_may_change_and_the_shape_may_not(trained: Path, tmp_path: Path) -> None:
    new = fine_tune(trained, tmp_path / "run", dropout=0.2, drop_path=0.1)
    assert (new.model.config.dropout, new.model.config.drop_path) == (0.2, 0.1)
    for name, value in {**toys.SHAPE, "model": "vit-b16", "pool": "mean"}.items():
        option = f"--{name.replace('_', '-')} cannot change the model of --from"
        with pytest.raises(ValueError, match=option):
            fine_tune(trained, tmp_path / "no", **{name: value})
    with pytest.raises(ValueError, match="not a multiple of patch"):
        fine_tune(trained, tmp_path / "no", size=(20,))
    assert not (tmp_path / "no").exists()


def test_a_resnet_is_trained_saved_and_fine_tuned(tmp_path: Path) -> None:
    start = toys.resnet()
    vitlab.save(start, tmp_path / "start")
    new = fine_tune(tmp_path / "start", tmp_path / "run", toys.pictures(classes=2), size=(24,))
    again = vitlab.load(tmp_path / "run")
    assert type(again.model) is type(start.model)
    assert again.model.config.image == (24, 24)
    assert all(
        torch.equal(v, again.model.state_dict()[k]) for k, v in new.model.state_dict().items()
    )


def test_the_start_may_not_be_where_the_run_goes(trained: Path) -> None:
    before = weights(trained)
    for overwrite in (False, True):
        with pytest.raises(ValueError):
            fine_tune(trained, trained, overwrite=overwrite)
    assert weights(trained) == before


@pytest.mark.parametrize("what", ["nothing", "unfinished"])
def test_a_start_that_is_no_bundle(what: str, tmp_path: Path) -> None:
    if what == "unfinished":
        (tmp_path / what).mkdir()
        (tmp_path / what / "run.yaml").touch()
    with pytest.raises(FileNotFoundError, match=what if what == "unfinished" else "no bundle"):
        fine_tune(tmp_path / what, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# The machine -----------------------------------------------------------------------------------


def test_a_device_that_is_not_there_is_refused() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--device cuda: this machine or this torch has no"):
            machine.device("cuda")
    for nonsense in ("tpu", "", "cpu:x"):
        with pytest.raises(ValueError, match=f"--device {nonsense}"):
            machine.device(nonsense)
    assert machine.device("cpu") == torch.device("cpu")


def test_cores_are_those_that_the_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert machine.cores() == 8
    for text, expected in {"max 100000": 8, "300000 100000": 3, "50000 100000": 1}.items():
        (tmp_path / "cpu.max").write_text(text + "\n")
        assert machine.cores() == expected
    (tmp_path / "cpu.max").write_text("max 100000\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert machine.cores() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "99")
    assert machine.cores() == 1


def test_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for native in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda n=native: n)
        assert machine.precision(None, cpu) == ("bf16" if native else "float32")
        assert machine.precision("bf16", cpu) == "bf16"
        assert machine.precision("float32", cpu) == "float32"


def test_bundle_of_a_run_is_what_is_returned(tmp_path: Path) -> None:
    bundle = vitlab.train(toys.pictures(), toys.config(tmp_path / "run"))
    again = bundles.load(tmp_path / "run")
    assert (again.classes, again.card, again.preprocess) == (
        bundle.classes, bundle.card, bundle.preprocess,
    )  # fmt: skip
    assert not bundle.model.training
    assert not again.model.training
    assert all(
        torch.equal(v, again.model.state_dict()[k]) for k, v in bundle.model.state_dict().items()
    )
