"""How far a run is: a line now and then, a bar on a terminal."""

import logging
import os
import sys
import time
from pathlib import Path

import pytest
import toys

import vitlab
from vitlab.training import progress
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
