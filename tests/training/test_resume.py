"""Runs that are killed, stopped or lose a file, and end with the same bits as if nothing was."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import crash
import pytest
import toys

import vitlab
from vitlab.training import loop, progress

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
DEATHS = [
    "best:1", "update:3", "evaluating:3", "update:7", "writing:1", "saving:3", "saved:2",
    "line:25", "file:9", "file:30", "finishing:1", "reporting:1", "bundling:1",
]  # fmt: skip


def run_and_die(out: Path, deaths: list[str]) -> list[str]:
    """What became of each child: killed, ended or FAILED."""
    environment = toys.environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    command = [sys.executable, crash.__file__, str(out), *deaths]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "FAILED" not in done.stdout, done.stdout + done.stderr
    return [line.split()[1] for line in done.stdout.splitlines()]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    crash.train(out)
    return out


def test_a_run_is_what_it_should_be(whole: Path) -> None:
    """Else the tests below would compare little."""
    assert vitlab.load(whole).card.metrics["n"] == 8
    lines = toys.lines(whole)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(
        range(1, crash.STEPS + 1)
    )
    assert {line["weights"] for line in lines if line["kind"] == "eval"} == {"last", "ema"}
    assert len(lines) > crash.STEPS + 10


def test_killed_at_each_kind_of_moment(whole: Path, tmp_path: Path) -> None:
    states = run_and_die(tmp_path / "run", DEATHS)
    assert states == ["killed"] * len(DEATHS) + ["ended"], "each death came"
    toys.same_run(whole, tmp_path / "run")


def test_killed_at_random_moments(whole: Path, tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    rng = random.Random(seed)
    deaths = [f"time:{rng.uniform(0.05, 0.6):.3f}" for _ in range(3)]
    print(f"seed {seed}: {' '.join(deaths)}")  # shown where the test fails
    assert "killed" in run_and_die(tmp_path / "run", deaths)
    toys.same_run(whole, tmp_path / "run")


@pytest.mark.slow
def test_killed_fifty_times(whole: Path, tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    rng = random.Random(seed)
    killed = 0
    while killed < 50:
        deaths = [f"time:{rng.uniform(0.01, 0.5):.3f}" for _ in range(12)]
        out = tmp_path / f"{killed}"
        killed += run_and_die(out, deaths).count("killed")
        toys.same_run(whole, out)
        print(f"seed {seed}: {killed} kills")


@pytest.mark.slow
def test_killed_at_fifty_random_operations(whole: Path, tmp_path: Path) -> None:
    """Above, most kills come while it trains; here while it writes, evaluates or reports."""
    seed = int.from_bytes(os.urandom(4), "big")
    rng = random.Random(seed)
    moments = [
        lambda: f"file:{rng.randrange(1, 200)}", lambda: f"file:{rng.randrange(1, 40)}",
        lambda: f"evaluating:{rng.randrange(1, 9)}", lambda: f"writing:{rng.randrange(1, 5)}",
        lambda: f"saving:{rng.randrange(1, 20)}", lambda: f"line:{rng.randrange(1, 60)}",
        lambda: "reporting:1", lambda: "finishing:1", lambda: "bundling:1",
    ]  # fmt: skip
    killed: dict[str, int] = {}
    while sum(killed.values()) < 50 or len(killed) < 8:
        deaths = [rng.choice(moments)() for _ in range(10)]
        out = tmp_path / f"{sum(killed.values())}"
        for death, state in zip(deaths, run_and_die(out, deaths)[:-1], strict=True):
            if state == "killed":
                point = death.partition(":")[0]
                killed[point] = killed.get(point, 0) + 1
        toys.same_run(whole, out)
        print(f"seed {seed}: {killed}")


@pytest.mark.slow
def test_killed_before_each_operation_on_a_file_of_the_end(whole: Path, tmp_path: Path) -> None:
    """From the last checkpoint on: the report, skipped.csv, and each file of the bundle."""
    start = tmp_path / "start"
    assert run_and_die(start, ["finishing:1"]) == ["killed", "ended"]
    for name in ("config.json", "README.md", "model.safetensors", "report.html", "skipped.csv"):
        (start / name).unlink()
    for n in range(1, 1000):
        out = tmp_path / "run"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(start, out)
        state, end = run_and_die(out, [f"file:{n}"])
        assert end == "ended"
        toys.same_run(whole, out)
        if state == "ended":  # there are no more
            break
    assert n > 20


# Faults inside this process, to be quick -------------------------------------------------------


class Fault(BaseException):
    """Passes through whatever catches errors."""


def fail_at(step: int, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until an update fails."""
    plain = loop.update

    def update(job, forward, batch, now):
        if now == step:
            raise Fault
        return plain(job, forward, batch, now)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", update)
        with pytest.raises(Fault):
            crash.train(out, save_every="0.000001s")


@pytest.mark.parametrize("at", [0, 6, crash.STEPS - 1])
def test_a_fault_at_any_step(
    at: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(at, tmp_path / "run", monkeypatch)
    crash.train(tmp_path / "run")
    toys.same_run(whole, tmp_path / "run")


@pytest.mark.parametrize("left", [0.5, 0], ids=["half", "nothing"])
def test_a_truncated_checkpoint_falls_back_to_the_one_before(
    left: float, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    out = tmp_path / "run"
    fail_at(30, out, monkeypatch)
    _, newest = sorted((out / "checkpoints").glob("*.safetensors"))
    os.truncate(newest, int(newest.stat().st_size * left))
    crash.train(out)
    assert f"{newest}: damaged (" in caplog.text
    assert "going back to the one before it" in caplog.text
    toys.same_run(whole, out)


def test_what_a_kill_left_half_written_is_removed(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    fail_at(6, out, monkeypatch)
    strays = [out / ".report.html.part", out / "checkpoints" / ".000000099.safetensors.part"]
    for stray in strays:
        stray.write_bytes(b"half")
    crash.train(out)
    assert not any(stray.exists() for stray in strays)
    toys.same_run(whole, out)


def test_without_any_checkpoint_it_starts_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    fail_at(30, out, monkeypatch)
    for path in (out / "checkpoints").iterdir():
        path.write_bytes(b"")
    crash.train(out)
    toys.same_run(whole, out)


@pytest.mark.parametrize(
    ("number", "where"),
    [(signal.SIGINT, "update"), (signal.SIGTERM, "score"), (signal.SIGTERM, "_write_line")],
)
def test_a_signal_is_obeyed_between_two_steps(
    number: int, where: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = getattr(loop, where), iter(range(100))
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]

    def signalled(*args, **kwargs):
        if next(calls) == 5:
            os.kill(os.getpid(), number)
        return plain(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, where, signalled)
        with pytest.raises(loop.Stopped, match=signal.Signals(number).name) as caught:
            crash.train(tmp_path / "run", save_every="1h")  # what there is, stopping saved
    assert caught.value.number == number
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert list((tmp_path / "run" / "checkpoints").glob("*.safetensors"))
    crash.train(tmp_path / "run")
    toys.same_run(whole, tmp_path / "run")


def test_a_resumed_run_counts_its_seconds_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = property(lambda self: 10.0 * (self.done - self.first))  # ten seconds a step
    monkeypatch.setattr(progress.Progress, "elapsed", slow)
    fail_at(6, tmp_path / "run", monkeypatch)
    crash.train(tmp_path / "run")
    history = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    trained = [line for line in history if line["kind"] == "train"]
    assert [line["seconds"] for line in trained] == [10.0 * line["step"] for line in trained]


def test_a_second_interrupt_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = loop.update

    def update(job, forward, batch, step):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return plain(job, forward, batch, step)

    monkeypatch.setattr(loop, "update", update)
    with pytest.raises(KeyboardInterrupt):
        crash.train(tmp_path / "run")


def test_another_thread_may_train(whole: Path, tmp_path: Path) -> None:
    """Signals cannot be caught there; the rest is the same."""
    thread = threading.Thread(target=crash.train, args=(tmp_path / "run",))
    thread.start()
    thread.join()
    toys.same_run(whole, tmp_path / "run")


# The command line ------------------------------------------------------------------------------


def wait_for_lines(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until metrics.jsonl has so many lines."""
    history, end = run / "metrics.jsonl", time.monotonic() + 60
    while time.monotonic() < end:
        if history.exists() and len(history.read_bytes().splitlines()) >= count:
            return
        assert process.poll() is None, "it ended before: " + process.communicate()[1]
        time.sleep(0.002)
    raise TimeoutError


def test_the_same_command_resumes(photos: Path, tmp_path: Path) -> None:
    flags = [
        "train", photos, *toys.FLAGS, "--steps", 160, "--batch", 8, "--held-out", 0.2, "--ema", 0.9,
        "--dropout", 0.1, "--drop-path", 0.1, "--mixup", 0.2, "--randaugment", 2, 9,
        "--accumulate", 2, "--threads", 1, "--save-every", "0.2s",
    ]  # fmt: skip
    changes = {"dropout": 0.1, "drop_path": 0.1, "mixup": 0.2, "randaugment": (2, 9), "ema": 0.9}
    vitlab.train(str(photos), toys.config(tmp_path / "whole", steps=160, accumulate=2, **changes))
    run = tmp_path / "run"
    moments = [  # a signal, workers, exit code, what it says last
        (signal.SIGINT, 2, 130, "vitlab: stopped by SIGINT; the same command resumes"),
        (signal.SIGTERM, 0, 143, "vitlab: stopped by SIGTERM; the same command resumes"),
    ]
    for i, (number, workers, code, said) in enumerate(moments, start=1):
        arguments = [*flags, "--out", run, "--workers", workers]
        with toys.start(*arguments, start_new_session=True) as process:
            wait_for_lines(run, 40 * i, process)
            os.killpg(process.pid, number)  # as from the keyboard: to the workers, too
            _, err = process.communicate(timeout=60)
        assert process.returncode == code
        assert err.strip().splitlines()[-1].startswith(said)
        assert "Traceback" not in err
    code, out, err = toys.vitlab(*flags, "--out", run)
    assert code == 0
    assert "resuming at step" in err
    assert out.startswith("accuracy ")
    toys.same_run(tmp_path / "whole", run)
