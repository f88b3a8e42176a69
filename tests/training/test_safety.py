"""Skipped steps, memory that runs out once, early stopping, TensorBoard."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from safetensors import safe_open

import vitlab
from vitlab.training import loop, safety, tracking


def spoil(monkeypatch: pytest.MonkeyPatch, steps: set[int], how: Any) -> list[tuple[int, int]]:
    """Let `how` loose before some updates; returns the (step, parts) of all of them."""
    plain, seen = loop.update, []

    def update(job, forward, batch, step):
        seen.append((step, job.config.accumulate))
        return plain(job, how(forward, job) if step in steps else forward, batch, step)

    monkeypatch.setattr(loop, "update", update)
    return seen


def not_a_number(forward: Any, job: Any) -> Any:
    return lambda x: forward(x) * float("nan")


def test_a_loss_that_is_not_finite_is_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(monkeypatch, {4, 7}, not_a_number)
    with caplog.at_level(logging.WARNING, "vitlab"):
        bundle = vitlab.train(toys.pictures(), toys.config(tmp_path / "run", ema=0.9))
    assert "step 4: loss nan" in caplog.text
    assert "skipped, 2 of 3" in caplog.text
    assert all(bool(t.isfinite().all()) for t in bundle.model.state_dict().values())
    lines = toys.lines(tmp_path / "run")
    assert [line["step"] for line in lines if line["kind"] == "skipped"] == [4, 7]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [
        1, 2, 3, 4, 6, 7, 9, 10, 11, 12,
    ]  # fmt: skip
    checkpoint = sorted((tmp_path / "run/checkpoints").glob("*.safetensors"))[-1]
    with safe_open(checkpoint, framework="pt") as f:
        assert json.loads(f.metadata()["state"])["nonfinite"] == 2
        assert int(f.get_tensor("optimizer.0.step")) == 10, "a skipped step is none"


def test_a_skipped_step_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors before it and after it are the same, gradients are gone."""
    before: dict[str, torch.Tensor] = {}

    def how(forward: Any, job: Any) -> Any:
        before.update({k: v.clone() for k, v in job.model.state_dict().items()})
        before.update({f"average.{k}": v.clone() for k, v in job.average.tensors.items()})
        return not_a_number(forward, job)

    plain_batches = loop.batches

    def batches(job, start, stop):
        for step, batch in enumerate(plain_batches(job, start, stop)):
            if step == 6:
                now = {**job.model.state_dict(),
                       **{f"average.{k}": v for k, v in job.average.tensors.items()}}  # fmt: skip
                assert all(torch.equal(before[k], now[k]) for k in now)
                assert all(p.grad is None for p in job.model.parameters())
            yield batch

    monkeypatch.setattr(loop, "batches", batches)
    spoil(monkeypatch, {5}, how)
    vitlab.train(toys.pictures(), toys.config(tmp_path / "run", ema=0.9))


@pytest.mark.parametrize("allowed", [0, 2])
def test_too_many_end_the_run_and_leave_the_batch(
    allowed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, {3, 5, 9, 10}, not_a_number)
    config = toys.config(tmp_path / "run", nonfinite=allowed)
    step = 9 if allowed else 3
    with pytest.raises(FloatingPointError, match=f"step {step}: loss nan.*learning rate"):
        vitlab.train(toys.pictures(), config)
    with safe_open(tmp_path / "run" / safety.BAD_BATCH, framework="pt") as f:
        assert f.get_tensor("images").shape == (8, 3, 16, 16)
        assert f.get_tensor("labels").shape == (8,)
        assert f.metadata()["step"] == str(step)
        ids = json.loads(f.metadata()["ids"])
        assert set(ids) <= set(map(str, range(40)))
        assert len(ids) == 8
    monkeypatch.undo()
    vitlab.train(toys.pictures(), replace(config, overwrite=True))
    assert not (tmp_path / "run" / safety.BAD_BATCH).exists()


def out_of_memory(forward: Any, job: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def test_memory_that_runs_out_is_answered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From there on in twice as many parts; the result is that of the whole batch."""
    calls = []

    def once(forward: Any, job: Any) -> Any:
        calls.append(job.config.accumulate)
        return out_of_memory(forward, job) if len(calls) == 1 else forward

    seen = spoil(monkeypatch, {4}, once)
    options = {"precision": "float64", "optimizer": "sgd", "steps": 8, "drop_path": 0.0}
    bundle = vitlab.train(toys.pictures(), toys.config(tmp_path / "run", **options))
    assert seen == [(s, 1) for s in range(5)] + [(s, 2) for s in range(4, 8)]
    monkeypatch.undo()
    plain = vitlab.train(toys.pictures(), toys.config(tmp_path / "plain", **options))
    for one, other in zip(bundle.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_the_smaller_parts_are_kept_after_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def death(forward: Any, job: Any) -> Any:
        if job.config.accumulate == 1:
            out_of_memory(forward, job)
        raise RuntimeError("killed")

    config = toys.config(tmp_path / "run", save_every="0.000001s", steps=8)
    calls = []

    def how(forward: Any, job: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            out_of_memory(forward, job)
        if len(calls) == 4:
            raise RuntimeError("killed")
        return forward

    with monkeypatch.context() as patch:
        spoil(patch, {2, 3, 4}, how)
        with pytest.raises(RuntimeError, match="killed"):
            vitlab.train(toys.pictures(), config)
    seen = spoil(monkeypatch, set(), death)
    vitlab.train(toys.pictures(), config)
    assert seen == [(4, 2), (5, 2), (6, 2), (7, 2)]


def test_memory_that_runs_out_again_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = spoil(monkeypatch, {2}, out_of_memory)
    with pytest.raises(MemoryError, match=r"--batch 6 in 2 parts, .*--accumulate 6"):
        vitlab.train(toys.pictures(), toys.config(tmp_path / "run", batch=6))
    assert seen[-2:] == [(2, 1), (2, 2)]


# Early stopping --------------------------------------------------------------------------------


def rated(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Let evaluations report these accuracies, in turn."""
    plain, left = loop._score, list(values)

    def score(job, received, tick, step=None):
        scores = plain(job, received, tick, step)
        if step is None:  # once more, exactly, at the end
            return scores
        value = left.pop(0)
        return replace(scores, metrics=replace(scores.metrics, top1=value, loss=1 - value))

    monkeypatch.setattr(loop, "_score", score)


@pytest.mark.parametrize("select", ["top1", "loss", "last"])
def test_a_run_ends_when_it_gets_no_better(
    select: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    rated(monkeypatch, [0.5, 0.7, 0.6, 0.7, 0.7, 0.9, 0.9])
    config = toys.config(tmp_path / "run", steps=40, patience=3, select=select)
    with caplog.at_level(logging.INFO, "vitlab"):
        vitlab.train(toys.pictures(), config)
    scored = [line["top1"] for line in toys.lines(tmp_path / "run") if line["kind"] == "eval"]
    assert scored == [0.5, 0.7, 0.6, 0.7, 0.7]
    assert "step 20: no better for 3 evaluations" in caplog.text
    vitlab.train(toys.pictures(), config)  # a finished run
    assert (tmp_path / "run" / "config.json").exists()


def test_patience_survives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toys.config(tmp_path / "run", steps=40, patience=2, save_every="0.000001s")
    plain = loop.update

    def update(job, forward, batch, step):
        if step == 10:
            raise RuntimeError
        return plain(job, forward, batch, step)

    rated(monkeypatch, [0.9, 0.5, 0.5, 0.5])
    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", update)
        with pytest.raises(RuntimeError):
            vitlab.train(toys.pictures(), config)
    vitlab.train(toys.pictures(), config)
    lines = toys.lines(tmp_path / "run")
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [4, 8, 12]
    with pytest.raises(ValueError, match="--patience 2 needs validation pictures"):
        vitlab.train(toys.pictures(), toys.config(tmp_path / "b", patience=2, held_out=0))


# Tracking --------------------------------------------------------------------------------------


def test_tensorboard_shows_what_the_lines_say(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    vitlab.train(toys.pictures(), toys.config(tmp_path / "run", tensorboard=True, ema=0.9))
    files = list((tmp_path / "run" / tracking.FOLDER).iterdir())
    assert len(files) == 1
    events = EventAccumulator(str(files[0]))
    events.Reload()
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for tag, kind, weights, key in (("train/loss", "train", None, "loss"),
                                    ("eval-ema/top1", "eval", "ema", "top1")):  # fmt: skip
        expected = [(line["step"], line[key]) for line in lines
                    if (line["kind"], line.get("weights")) == (kind, weights)]  # fmt: skip
        found = [(e.step, e.value) for e in events.Scalars(tag)]
        assert [s for s, _ in found] == [s for s, _ in expected]
        assert [v for _, v in found] == pytest.approx([v for _, v in expected], rel=1e-6)


def test_a_missing_tensorboard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install 'vitlab\[track\]'"):
        vitlab.train(toys.pictures(), toys.config(tmp_path / "run", tensorboard=True))
    assert not (tmp_path / "run").exists()
