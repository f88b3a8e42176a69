"""Trains in child processes that die in the middle; run by test_resume.py, one process a scenario.

`python crash.py OUT DEATH...` forks a child for each DEATH, lets it train until it kills itself
there (SIGKILL: no handler, no cleaning up), then a last child that trains to the end. Forking a
process that has imported everything is what makes many deaths cheap.

A DEATH is `point:n`, the n-th time that the point is reached; `time:s` kills after s seconds from
outside; `none:0` lets the child finish.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import toys

import vitlab
from vitlab import report
from vitlab.evaluation import scoring
from vitlab.training import checkpoint, loop
from vitlab.training import run as runs
from vitlab.weights import bundle

STEPS = 40


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(function: Callable[..., Any], n: int, when: str) -> Callable[..., Any]:
    """The function, that dies before or after its n-th call."""
    calls = iter(range(1, 10**9))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        last = next(calls) == n
        if last and when == "before":
            die()
        result = function(*args, **kwargs)
        if last and when == "after":
            die()
        return result

    return wrapped


def half_a_line(n: int) -> None:
    plain = loop._write_line

    def write(state: Any, out: Path, line: dict[str, Any]) -> None:
        if state.lines >= n:
            with open(out / "metrics.jsonl", "a", encoding="utf-8") as f:
                f.write('{"kind": "tra')
            die()
        plain(state, out, line)

    loop._write_line = write


def arm(point: str, n: int, out: Path) -> None:
    """Let this process die at the n-th passing of a point."""
    if point == "update":
        loop.update = dying(loop.update, n, "after")
    elif point == "line":
        half_a_line(n)
    elif point == "saving":  # the checkpoint is written aside, whole, but not renamed
        os.replace = dying(os.replace, n, "before")
    elif point == "saved":  # renamed, and the oldest not yet removed
        checkpoint.checkpoints = dying(checkpoint.checkpoints, n + 1, "before")
    elif point == "writing":  # half of it is on the disk
        plain = checkpoint.save_file

        def save_file(tensors: Any, path: Path, metadata: Any = None) -> None:
            plain(tensors, path, metadata)
            os.truncate(path, path.stat().st_size // 2)
            die()

        checkpoint.save_file = save_file
    elif point == "evaluating":
        loader = scoring.loader.eval_batches

        def eval_batches(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            for batch in loader(*args, **kwargs):
                if calls[0] == n:
                    die()
                yield batch

        calls = [0]
        scoring.loader.eval_batches = eval_batches
    elif point == "best":
        checkpoint.save_best = dying(checkpoint.save_best, n, "after")
    elif point == "finishing":  # trained, no bundle yet
        runs.folder.write_skipped = dying(runs.folder.write_skipped, n, "after")
    elif point == "reporting":  # half of the page is on the disk

        def half(path: Path, text: str) -> None:
            path.with_name(f".{path.name}.part").write_text(text[: len(text) // 2])
            die()

        report.write_text = half
    elif point == "file":  # before the n-th time that something in the run's folder is touched
        events = {"open", "os.rename", "os.remove", "os.mkdir", "os.chmod"}
        passed = iter(range(1, 10**9))

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event in events and str(args[0]).startswith(str(out)) and next(passed) == n:
                die()

        sys.addaudithook(hook)
    elif point == "bundling":  # weights are there, config.json is not
        bundle.model_card = dying(bundle.model_card, n, "before")
    elif point != "none":
        raise ValueError(point)


def train(out: Path, save_every: str = "0.02s") -> None:
    config = toys.config(
        out, steps=STEPS, save_every=save_every, select="loss", held_out=0.15, **toys.RICH
    )
    vitlab.train(toys.pictures(45), config)


def child(out: Path, death: str) -> None:
    """Fork; the child trains and dies there, or ends with exit code 0."""
    point, _, number = death.partition(":")
    pid = os.fork()
    if not pid:
        if point != "time":
            arm(point, int(number), out)
        train(out)
        os._exit(0)
    if point == "time":
        time.sleep(float(number))
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    ended = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
    print(f"{death} {'killed' if killed else 'ended' if ended else 'FAILED'}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a child of a process with OpenMP threads would hang
    with tempfile.TemporaryDirectory() as folder:  # torch imports much when it is first used
        vitlab.train(toys.pictures(), toys.config(Path(folder) / "run", steps=1, **toys.RICH))
    for death in [*sys.argv[2:], "none:0"]:
        child(Path(sys.argv[1]), death)
