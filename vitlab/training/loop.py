"""The training loop: steps over an endless stream, evaluated, checkpointed, resumed bit by bit."""

import json
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from vitlab.data import loader
from vitlab.data.augment import Augment, mix
from vitlab.data.loader import Batch
from vitlab.data.preprocess import Preprocess, normalise
from vitlab.data.sources import Source
from vitlab.evaluation.scoring import Scores, score
from vitlab.models.zoo import Model
from vitlab.training import checkpoint
from vitlab.training.config import TrainConfig, seconds
from vitlab.training.optim import Average, clip_gradients, learning_rate
from vitlab.training.progress import Progress
from vitlab.weights.bundle import written

log = logging.getLogger("vitlab")
POINTS = 200  # lines of training loss in metrics.jsonl over a whole run
EVALUATIONS = 20  # at most, over a whole run


class Stopped(Exception):  # noqa: N818  it is no error
    """A signal asked the run to end; its checkpoint is written."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The automatic choices of a run, resolved; recorded in run.yaml and kept when resuming."""

    device: str  # cuda, mps or cpu
    precision: str  # float32 or bf16
    threads: int  # of torch in this process
    workers: int  # processes that decode
    in_memory: bool  # are all pictures decoded once, before the first step
    lr: float  # peak rate
    steps: int  # in all
    warmup_steps: int  # of these
    eval_every: int  # steps between evaluations; the last step is always evaluated


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that the loop works on."""

    config: TrainConfig
    plan: Plan
    model: Model  # on its device
    optimizer: torch.optim.Optimizer
    average: Average | None
    train: Source
    val: Source | None
    preprocess: Preprocess


@dataclass
class State:
    """What changes from step to step besides tensors; saved as JSON with each checkpoint."""

    step: int = 0  # updates done
    evaluated: int = 0  # the last step that was evaluated
    lines: int = 0  # lines of metrics.jsonl
    loss_sum: float = 0.0  # since the last line
    loss_steps: int = 0
    best: float | None = None  # of --select, the larger the better
    skipped: dict[str, str] = field(default_factory=dict)  # unreadable pictures and why


def run(job: Job, out: Path, unreadable: dict[str, str]) -> tuple[Scores | None, dict[str, str]]:
    """Train to the last step from wherever the run's checkpoints stand.

    `unreadable` names pictures already known to be unreadable, and why. Returns the scores of
    the weights that are kept (None without validation pictures) and all unreadable pictures;
    the model holds these weights afterwards. Raises Stopped, after saving, on SIGINT or SIGTERM;
    FloatingPointError when the loss is no longer finite; MemoryError when memory runs out.
    """
    state = _resume(job, out)
    state.skipped |= unreadable
    forward = torch.compile(job.model) if job.config.compile else job.model
    stream = batches(job, start=state.step, stop=job.plan.steps)
    save_every, saved = seconds(job.config.save_every), time.monotonic()
    every = max(1, job.plan.steps // POINTS)
    scores = None
    with _signals() as received, Progress(job.plan.steps, state.step, job.config.batch) as progress:
        job.model.train()
        try:
            while True:
                step, last = state.step, state.step == job.plan.steps
                if step > state.evaluated and (step % job.plan.eval_every == 0 or last):
                    scores = _evaluate(job, state, out, received, progress)
                if received:
                    raise Stopped(received[0])
                if last:
                    break
                if time.monotonic() - saved > save_every:
                    _save(job, state, out)
                    saved = time.monotonic()
                waited = time.monotonic()
                batch = next(stream)
                progress.waited(time.monotonic() - waited)
                state.skipped |= {job.train.id(row): why for row, why in batch.skipped}
                with out_of_memory(job):
                    loss, norm = update(job, forward, batch, step)
                state.step += 1
                state.loss_sum += loss
                state.loss_steps += 1
                progress.advance(loss)
                if state.step % every == 0 or state.step == job.plan.steps:
                    _log_train(job, state, out, norm, progress)
        except Stopped:
            _save(job, state, out)
            raise
    _save(job, state, out)
    best = checkpoint.load_best(out) if job.config.select != "last" and job.val else None
    job.model.load_state_dict(best or _kept_tensors(job))
    if job.val and (best or scores is None):  # None: resumed after the last evaluation
        scores = _score(job, [], lambda n: None)
    return scores, state.skipped


def batches(job: Job, start: int, stop: int) -> Iterator[Batch]:
    """The job's training batches of steps start ... stop - 1."""
    c = job.config
    augment = Augment(crop=c.crop, flip=c.flip, randaugment=c.randaugment, erase=c.erase)
    return loader.train_batches(
        job.train, augment, job.preprocess, batch=c.batch, seed=c.seed, start=start, stop=stop,
        workers=job.plan.workers, strict=c.strict,
    )  # fmt: skip


def update(
    job: Job, forward: Callable[[torch.Tensor], torch.Tensor], batch: Batch, step: int
) -> tuple[float, float]:
    """One optimizer step; (mean loss, gradient norm before clipping)."""
    c, plan = job.config, job.plan
    device = torch.device(plan.device)
    images = normalise(job.preprocess, batch.images.to(device, non_blocking=True))
    targets = batch.labels.to(device, non_blocking=True)
    if c.mixup or c.cutmix:
        classes = len(job.train.classes)
        images, targets = mix(images, targets, classes, c.mixup, c.cutmix, [c.seed, 3, step])
    # Dropout and stochastic depth depend on the step, not on what happened before it.
    torch.manual_seed(int(np.random.SeedSequence([c.seed, 4, step]).generate_state(1)[0]))
    total = torch.zeros((), device=device)
    for x, y in zip(images.chunk(c.accumulate), targets.chunk(c.accumulate), strict=True):
        with torch.autocast(device.type, torch.bfloat16, enabled=plan.precision == "bf16"):
            logits = forward(x)
        loss = F.cross_entropy(logits.float(), y, label_smoothing=c.label_smoothing)
        (loss / c.accumulate).backward()
        total += loss.detach() / c.accumulate
    rate = learning_rate(
        step, plan.steps, peak=plan.lr, warmup=plan.warmup_steps, schedule=c.schedule, end=c.lr_end
    )
    mean, norm = float(total), float(clip_gradients(job.model.parameters(), c.clip))
    if not (math.isfinite(mean) and math.isfinite(norm)):
        raise FloatingPointError(
            f"step {step}: loss {mean:.4g}, norm of the gradient {norm:.4g}, learning rate"
            f" {rate:.3g}; older checkpoints are intact; a lower --lr or a longer --warmup may"
            " help, with --overwrite"
        )
    for group in job.optimizer.param_groups:
        group["lr"] = rate
    job.optimizer.step()
    job.optimizer.zero_grad()
    if job.average:
        job.average.update(job.model)
    return mean, norm


def _resume(job: Job, out: Path) -> State:
    tensors, saved, notes = checkpoint.newest(out / "checkpoints")
    for note in notes:
        log.warning(note)
    state = State()
    if tensors:
        checkpoint.restore(tensors, saved, job.model, job.optimizer, job.average)
        state = State(**{k: saved[k] for k in State.__dataclass_fields__})
        log.info("resuming at step %d of %d", state.step, job.plan.steps)
    for stray in (*out.glob(".*.part"), *out.glob("checkpoints/.*.part")):
        stray.unlink()  # of a process killed while it wrote
    # Lines that were written after the checkpoint are written again by the steps that follow.
    path = out / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)[: state.lines] if path.exists() else []
    with written(path) as aside:
        aside.write_bytes(b"".join(lines))
    return state


def _save(job: Job, state: State, out: Path) -> None:
    checkpoint.save(
        out / "checkpoints", state.step, vars(state), job.model, job.optimizer, job.average
    )


def _write_line(state: State, out: Path, line: dict[str, Any]) -> None:
    path = out / "metrics.jsonl"
    try:
        with open(path, "a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")
    except OSError as e:
        raise OSError(f"{path}: could not be written ({e.strerror})") from e
    state.lines += 1


def _log_train(job: Job, state: State, out: Path, norm: float, progress: Progress) -> None:
    rate = job.optimizer.param_groups[0]["lr"]
    _write_line(state, out, {
        "kind": "train", "step": state.step, "epoch": _epoch(job, state),
        "loss": state.loss_sum / state.loss_steps, "lr": rate, "grad_norm": norm,
        "images_per_second": round(progress.rate, 1), "seconds": round(progress.elapsed, 1),
        "waiting": round(progress.waiting_share, 3),
    })  # fmt: skip
    state.loss_sum, state.loss_steps = 0.0, 0


def _epoch(job: Job, state: State) -> float:
    return round(state.step * job.config.batch / len(job.train), 4)


def _evaluate(
    job: Job, state: State, out: Path, received: list[int], progress: Progress
) -> Scores | None:
    """Score the validation part, with the average's weights too; the scores of those kept."""
    if job.val is None:
        state.evaluated = state.step
        return None
    began, results = time.monotonic(), {}
    with progress.evaluating(len(job.val)) as tick:
        results["last"] = _score(job, received, tick)
    if job.average:
        with _weights(job, job.average.tensors), progress.evaluating(len(job.val)) as tick:
            results["ema"] = _score(job, received, tick)
    for weights, scores in results.items():
        m = scores.metrics
        _write_line(state, out, {
            "kind": "eval", "step": state.step, "epoch": _epoch(job, state), "weights": weights,
            "loss": m.loss, "top1": m.top1, "top5": m.top5, "n": m.n,
            "seconds": round(time.monotonic() - began, 1),
        })  # fmt: skip
        state.skipped |= dict(scores.skipped)
        log.info("epoch %.2f, %s weights: %s", _epoch(job, state), weights, m.line())
    kept = results["ema" if job.average else "last"]
    if job.config.select != "last":
        value = kept.metrics.top1 if job.config.select == "top1" else -kept.metrics.loss
        if state.best is None or value > state.best:
            state.best = value
            checkpoint.save_best(out, _kept_tensors(job))
    state.evaluated = state.step
    return kept


def _score(job: Job, received: list[int], tick: Any) -> Scores:
    assert job.val is not None

    def count(n: int) -> None:
        if received:
            raise Stopped(received[0])
        tick(n)

    precision = torch.bfloat16 if job.plan.precision == "bf16" else torch.float32
    with out_of_memory(job):
        return score(
            job.model, job.preprocess, job.val, batch=job.config.batch, workers=job.plan.workers,
            precision=precision, tick=count,
        )  # fmt: skip


def _kept_tensors(job: Job) -> dict[str, torch.Tensor]:
    return job.average.tensors if job.average else job.model.state_dict()


@contextmanager
def _weights(job: Job, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """The model with other weights for a while."""
    own = {k: v.clone() for k, v in job.model.state_dict().items()}
    job.model.load_state_dict(tensors)
    try:
        yield
    finally:
        job.model.load_state_dict(own)


@contextmanager
def out_of_memory(job: Job) -> Iterator[None]:
    """Memory that ran out, as one line with what would help."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        if not isinstance(e, (torch.OutOfMemoryError, MemoryError)) and (
            "can't allocate memory" not in str(e)  # the CPU has no error class of its own
        ):
            raise
        c, (h, w) = job.config, job.preprocess.size
        raise MemoryError(
            f"out of memory: --batch {c.batch} in {c.accumulate} parts, images of {h} x {w},"
            f" precision {job.plan.precision}; start anew with --accumulate {2 * c.accumulate}"
            " (the same result), --precision bf16, or a smaller --batch or --size"
        ) from e


@contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are noted, to stop between two steps; a second SIGINT stops at once."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
