"""How far a run is: a line now and then, a bar on a terminal."""

import ast
import itertools
import json
import logging
import os
import sys
import time
from pathlib import Path

import pytest
import toys

import vitlab
from vitlab.training import checkpoint, plans, progress
from vitlab.training.progress import Progress


def test_rates_leave_evaluation_and_earlier_steps_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Progress(total=20, done=10, batch=8) as p:
        assert p.rate == 0
        for _ in range(4):
            now[0] += 0.25
            p.waited(0.25)
            now[0] += 0.75
            p.advance(1.0)
        with p.evaluating(5) as tick:
            now[0] += 50
            tick(5)
        assert p.rate == pytest.approx(8.0)
        assert p.waiting_share == pytest.approx(0.25)
        assert p.elapsed == pytest.approx(54)


def test_a_line_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "EVERY", -1.0)
    with caplog.at_level(logging.INFO, "vitlab"):
        vitlab.train(toys.pictures(), toys.config(tmp_path / "run"))
    said = [m for m in caplog.messages if m.startswith("step ")]
    assert len(said) == 12
    assert said[2].startswith("step 3 of 12, ")
    assert "% waiting for data, loss 1." in said[2]
    assert said[2].endswith(" s left")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a terminal to pretend")
def test_a_bar_on_a_terminal(photos: Path, tmp_path: Path) -> None:
    leader, follower = os.openpty()
    command = ["train", photos, *toys.FLAGS, "--batch", 8, "--steps", 30, "--out", tmp_path / "r"]
    with toys.start(*command, "--threads", 1, stderr=follower) as process:
        os.close(follower)
        seen = b""
        while True:
            try:
                piece = os.read(leader, 65536)
            except OSError:  # the other end was closed
                break
            if not piece:
                break
            seen += piece
    os.close(leader)
    assert process.returncode == 0
    text = seen.decode()
    assert "training" in text
    assert "30/30" in text
    assert "last weights: accuracy" in text, "lines stand above the bar"
    assert "Traceback" not in text


def test_only_the_first_process_reads_what_was_told(tmp_path: Path) -> None:
    history = tmp_path / "metrics.jsonl"
    history.write_text('{"kind": "train", "seconds": 60.0}\n{"kind": "eval", "seconds": 2.0}\n')
    with progress.Progress(20, 10, 8, run=tmp_path) as p:
        assert 60 <= p.seconds < 120
        assert p.elapsed < 60
    history.write_text('{"kind": "tra')  # a process was killed, the first has yet to cut this
    with progress.Progress(20, 10, 8, shown=False, run=tmp_path) as p:
        assert p.seconds < 60


def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a day, forwards and backwards: neither the plan, nor checkpoints, nor rates follow it."""
    plain, jumps = time.time, itertools.cycle([0, 86_400, -86_400])
    saved: list[int] = []
    save = checkpoint.save
    monkeypatch.setattr(time, "time", lambda: plain() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    monkeypatch.setattr(checkpoint, "save", lambda *a, **k: saved.append(a[1]) or save(*a, **k))
    monkeypatch.setattr(plans, "PLANNING", 0.1)
    monkeypatch.setattr(progress, "EVERY", -1.0)
    config = toys.config(tmp_path / "run", steps=None, budget="0.3s", save_every="1h")
    began = time.monotonic()
    with caplog.at_level(logging.INFO, "vitlab"):
        vitlab.train(toys.pictures(), config)
    took = time.monotonic() - began
    steps = toys.lines(tmp_path / "run")[-1]["step"]
    assert 2 <= steps <= 1000
    assert saved == [steps], "the last, and no other"
    left = [float(m.split()[-3]) for m in caplog.messages if m.startswith("step ")]
    assert all(0 <= seconds < 100 for seconds in left)
    history = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(0 <= json.loads(line)["seconds"] <= took for line in history)


def test_no_duration_is_measured_by_the_clock_on_the_wall() -> None:
    """Somebody sets it, and twice a year everybody does."""
    for path in Path(vitlab.__file__).parent.rglob("*.py"):
        called = {
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call)
        }
        assert not called & {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}, path
