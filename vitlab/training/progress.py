"""How far a run is: a bar on a terminal, a line every half minute elsewhere."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

log = logging.getLogger("vitlab")
EVERY = 30.0  # seconds between lines where there is no terminal


def told_seconds(run: Path) -> float:
    """How long the run has trained, as the last line of its metrics.jsonl tells; 0 before any."""
    path = run / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    trained = [line for line in map(json.loads, lines) if line["kind"] == "train"]
    return float(trained[-1]["seconds"]) if trained else 0.0


class Progress:
    """Counts steps; `rate` is in pictures a second of training, evaluation apart."""

    def __init__(
        self, total: int, done: int, batch: int, shown: bool = True, run: Path | None = None
    ) -> None:
        self.total, self.done, self.batch = total, done, batch
        # Seconds of the run before it was resumed. Only the process that tells reads them: it has
        # cut the lines to those that are kept, the others could meet one that is half written.
        self.earlier = told_seconds(run) if run and shown else 0.0
        self.first = done
        self.began = self.spoken = time.monotonic()
        self.paused = 0.0  # seconds in evaluation
        self.waiting = 0.0  # seconds that training waited for data
        self.bar = Bar(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
            console=Console(file=sys.stderr), disable=not (shown and sys.stderr.isatty()),
            transient=True,
        )  # fmt: skip
        self.task = self.bar.add_task("training", total=total, completed=done, note="")

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.bar.stop()

    @property
    def elapsed(self) -> float:
        """Seconds since the start or the resuming of the run."""
        return time.monotonic() - self.began

    @property
    def seconds(self) -> float:
        """Of the run, without what lies between a stop and its resuming."""
        return self.earlier + self.elapsed

    @property
    def rate(self) -> float:
        """Pictures a second so far."""
        return (self.done - self.first) * self.batch / max(1e-9, self.elapsed - self.paused)

    def waited(self, duration: float) -> None:
        """Time spent waiting for a batch: a large share means that data is the limit."""
        self.waiting += duration

    @property
    def waiting_share(self) -> float:
        """Share of the time in training that went into waiting for data."""
        return self.waiting / max(1e-9, self.elapsed - self.paused)

    def advance(self, loss: float) -> None:
        self.done += 1
        note = (
            f"{self.rate:,.0f} images/s, {self.waiting_share:.0%} waiting for data, loss {loss:.3f}"
        )
        self.bar.update(self.task, completed=self.done, note=note)
        if self.bar.disable and time.monotonic() - self.spoken > EVERY:
            self.spoken = time.monotonic()
            left = (self.total - self.done) * self.batch / max(1e-9, self.rate)
            log.info("step %d of %d, %s, %.0f s left", self.done, self.total, note, left)

    @contextmanager
    def evaluating(self, total: int) -> Iterator[Callable[[int], None]]:
        began = time.monotonic()
        task = self.bar.add_task("evaluating", total=total, note="")
        try:
            yield lambda n: self.bar.advance(task, n)
        finally:
            self.bar.remove_task(task)
            self.paused += time.monotonic() - began
