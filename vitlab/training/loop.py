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
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from vitlab.data import loader
from vitlab.data.augment import Augment, mix
from vitlab.data.loader import Batch
from vitlab.data.preprocess import Preprocess, normalise
from vitlab.data.sources import Source
from vitlab.data.writing import written
from vitlab.evaluation.scoring import Scores, score
from vitlab.models.zoo import Model
from vitlab.training import checkpoint, parallel, safety, tasks, tracking
from vitlab.training.config import TrainConfig, seconds
from vitlab.training.optim import Average, clip_gradients, hold_back, learning_rate, set_rate
from vitlab.training.parallel import Ranks
from vitlab.training.progress import Progress
from vitlab.training.safety import out_of_memory

log = logging.getLogger("vitlab")
POINTS = 200  # lines of training loss in metrics.jsonl over a whole run


class Stopped(Exception):  # noqa: N818  it is no error
    """A signal asked the run to end; its checkpoint is written."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The automatic choices of a run, resolved; recorded in run.yaml and kept when resuming."""

    device: str  # cuda, mps or cpu
    precision: str  # float32, bf16 or float64
    processes: int  # that share each batch
    threads: int  # of torch in this process
    workers: int  # processes that decode
    in_memory: bool  # are all pictures decoded once, before the first step
    lr: float  # peak rate
    steps: int  # in all
    warmup_steps: int  # of these
    eval_every: int  # steps between evaluations; the last step is always evaluated
    head_steps: int = 0  # the first of these train the head alone


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that the loop works on."""

    config: TrainConfig
    plan: Plan
    model: Model  # on its device
    ranks: Ranks = field(default_factory=Ranks)  # which of the processes this one is
    optimizer: torch.optim.Optimizer
    average: Average | None
    train: Source
    val: Source | None
    preprocess: Preprocess
    weights: torch.Tensor | None = None  # [K] of the classes in the loss, on the device


@dataclass
class State:
    """What changes from step to step besides tensors; saved as JSON with each checkpoint."""

    step: int = 0  # updates done
    evaluated: int = 0  # the last step that was evaluated
    lines: int = 0  # lines of metrics.jsonl
    loss_sum: float = 0.0  # since the last line
    loss_steps: int = 0
    best: float | None = None  # of --select, the larger the better
    stale: int = 0  # evaluations since then
    nonfinite: int = 0  # steps skipped because of their loss
    parts: int = 0  # into which a batch is cut since memory ran out; 0: as asked
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
    if state.parts and job.ranks.world == 1:  # several have less of a batch each
        job = safety.cut(job, state.parts)
    copied = job.ranks.world > 1 and not job.config.shard
    forward: Any = parallel.copy_to_all(job.model) if copied else job.model
    if job.config.compile:
        forward = torch.compile(forward)
    stream = batches(job, start=state.step, stop=job.plan.steps)
    save_every, saved = seconds(job.config.save_every), time.monotonic()
    every = max(1, job.plan.steps // POINTS)
    scores = None
    with (
        _signals() as received,
        Progress(job.plan.steps, state.step, job.config.batch, job.ranks.first, out) as progress,
    ):
        job.model.train()
        try:
            while True:
                step, last = state.step, state.step == job.plan.steps
                if step > state.evaluated and (step % job.plan.eval_every == 0 or last):
                    scores = _evaluate(job, state, out, received, progress)
                late = job.ranks.first and time.monotonic() - saved > save_every
                asked, due = parallel.total(job.ranks, max([0, *received]), late)
                if asked:  # of any process
                    raise Stopped(received[0] if received else signal.SIGTERM)
                if last or 0 < job.config.patience <= state.stale:
                    break
                if due:
                    _save(job, state, out)
                    saved = time.monotonic()
                waited = time.monotonic()
                batch = next(stream)
                progress.waited(time.monotonic() - waited)
                state.skipped |= {job.train.id(row): why for row, why in batch.skipped}
                job, loss, norm = _attempt(job, state, forward, batch, out)
                state.step += 1
                if math.isfinite(loss):  # else it is skipped
                    state.loss_sum += loss
                    state.loss_steps += 1
                progress.advance(loss)
                due = state.step % every == 0 or state.step == job.plan.steps
                if due and state.loss_steps:
                    _log_train(job, state, out, norm, progress)
        except Stopped:
            _save(job, state, out)
            raise
    _save(job, state, out)
    if 0 < job.config.patience <= state.stale:
        log.info("step %d: no better for %d evaluations, so it ends here", state.step, state.stale)
    best = checkpoint.load_best(out) if job.config.select != "last" and job.val else None
    checkpoint.load(job.model, best or _kept_tensors(job))
    early = state.step < job.plan.steps
    if job.val and (best or early or scores is None):  # None: resumed after the last evaluation
        scores = _score(job, [], lambda n: None)
    return scores, state.skipped


def _attempt(
    job: Job, state: State, forward: Callable[[torch.Tensor], torch.Tensor], batch: Batch, out: Path
) -> tuple[Job, float, float]:
    """An update; memory that runs out is answered once, a loss that is not finite a few times."""
    parts = None
    try:
        try:
            with out_of_memory(job):
                return job, *update(job, forward, batch, state.step)
        except MemoryError:
            parts = None if state.parts else safety.more_parts(job)
            if parts is None:
                raise
        # Not in the handler: its trace holds on to the memory.
        state.parts, job = parts, safety.cut(job, parts)
        with out_of_memory(job):
            return job, *update(job, forward, batch, state.step)
    except FloatingPointError as e:
        job.optimizer.zero_grad()
        if state.nonfinite >= job.config.nonfinite:
            if job.ranks.first:
                safety.keep_batch(job, batch, state.step, out)
            raise
        state.nonfinite += 1
        why = str(e).partition(";")[0]
        log.warning("%s; skipped, %d of %d", why, state.nonfinite, job.config.nonfinite)
        _write_line(state, out, {"kind": "skipped", "step": state.step, "why": why})
        return job, math.nan, math.nan


def batches(job: Job, start: int, stop: int) -> Iterator[Batch]:
    """The job's training batches of steps start ... stop - 1."""
    c = job.config
    augment = Augment(
        crop=c.crop, flip=c.flip, randaugment=c.randaugment, erase=c.erase, law=c.augment_as
    )
    return loader.train_batches(
        job.train, augment, job.preprocess, batch=c.batch, seed=c.seed, start=start, stop=stop,
        workers=job.plan.workers, strict=c.strict, share=(job.ranks.rank, job.ranks.world),
    )  # fmt: skip


def update(
    job: Job, forward: Callable[[torch.Tensor], torch.Tensor], batch: Batch, step: int
) -> tuple[float, float]:
    """One optimizer step; (mean loss, gradient norm before clipping)."""
    c, plan = job.config, job.plan
    device = torch.device(plan.device)
    images = normalise(job.preprocess, batch.images.to(device, non_blocking=True))
    images = images.to(next(job.model.parameters()).dtype)
    targets = batch.labels.to(device, non_blocking=True)
    if c.mixup or c.cutmix:
        classes = len(job.train.classes)
        images, targets = mix(images, targets, classes, c.mixup, c.cutmix, [c.seed, 3, step])
    # Dropout and stochastic depth depend on the step, not on what happened before it.
    key = [c.seed, 4, step, job.ranks.rank]
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
    total = torch.zeros((), device=device, dtype=images.dtype)
    pairs = zip(images.chunk(c.accumulate), targets.chunk(c.accumulate), strict=True)
    for part, (x, y) in enumerate(pairs, start=1):
        with parallel.syncing(forward, now=part == c.accumulate):
            with torch.autocast(device.type, torch.bfloat16, enabled=plan.precision == "bf16"):
                logits = forward(x)
            loss = tasks.loss(c, logits.to(total.dtype), y, job.weights)
            (loss / c.accumulate).backward()
        total += loss.detach() / c.accumulate
    rate = learning_rate(
        step, plan.steps, peak=plan.lr, warmup=plan.warmup_steps, schedule=c.schedule, end=c.lr_end
    )
    mean = parallel.total(job.ranks, float(total))[0] / job.ranks.world
    if step < plan.head_steps:
        hold_back(job.optimizer)
    norm = float(clip_gradients(job.model.parameters(), c.clip))
    if not (math.isfinite(mean) and math.isfinite(norm)):
        raise FloatingPointError(
            f"step {step}: loss {mean:.4g}, norm of the gradient {norm:.4g}, learning rate"
            f" {rate:.3g}; older checkpoints are intact; a lower --lr or a longer --warmup may"
            " help, with --overwrite"
        )
    set_rate(job.optimizer, rate)
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
        state = State(**{k: saved[k] for k in State.__dataclass_fields__ if k in saved})
        log.info("resuming at step %d of %d", state.step, job.plan.steps)
    if not job.ranks.first:
        return state
    for stray in (*out.glob(".*.part"), *out.glob("checkpoints/.*.part")):
        stray.unlink()  # of a process killed while it wrote
    # Lines that were written after the checkpoint are written again by the steps that follow.
    path = out / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)[: state.lines] if path.exists() else []
    with written(path) as aside:
        aside.write_bytes(b"".join(lines))
    return state


def _save(job: Job, state: State, out: Path) -> None:
    for own in parallel.gather(job.ranks, state.skipped):  # a resumed run starts from the first's
        state.skipped |= own
    checkpoint.save(
        out / "checkpoints", state.step, vars(state), job.model, job.optimizer, job.average,
        write=job.ranks.first,
    )  # fmt: skip


def _write_line(state: State, out: Path, line: dict[str, Any]) -> None:
    state.lines += 1
    if not parallel.current().first:
        return
    path = out / "metrics.jsonl"
    try:
        with open(path, "a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")
    except OSError as e:
        raise OSError(f"{path}: could not be written ({e.strerror})") from e


def _log_train(job: Job, state: State, out: Path, norm: float, progress: Progress) -> None:
    rate = job.optimizer.param_groups[0]["lr"]
    _write_line(state, out, {
        "kind": "train", "step": state.step, "epoch": _epoch(job, state),
        "loss": state.loss_sum / state.loss_steps, "lr": rate,
        "grad_norm": norm if math.isfinite(norm) else None,  # of a step that was skipped
        "images_per_second": round(progress.rate, 1), "seconds": round(progress.seconds, 1),
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
        results["last"] = _score(job, received, tick, state.step)
    if job.average:
        with _weights(job, job.average.tensors), progress.evaluating(len(job.val)) as tick:
            results["ema"] = _score(job, received, tick, state.step)
    for weights, scores in results.items():
        m = scores.metrics
        _write_line(state, out, {
            "kind": "eval", "step": state.step, "epoch": _epoch(job, state), "weights": weights,
            "loss": m.loss, "top1": m.top1, "top5": m.top5, "n": m.n, **m.curves(),
            "seconds": round(time.monotonic() - began, 1),
        })  # fmt: skip
        state.skipped |= dict(scores.skipped)
        log.info("epoch %.2f, %s weights: %s", _epoch(job, state), weights, m.line())
    kept = results["ema" if job.average else "last"]
    if job.config.select != "last" or job.config.patience:
        value = kept.metrics.headline if job.config.select == "top1" else -kept.metrics.loss
        state.stale += 1
        if state.best is None or value > state.best:
            state.best, state.stale = value, 0
            if job.config.select != "last":
                checkpoint.save_best(out, _kept_tensors(job), write=job.ranks.first)
    if job.config.tensorboard and job.ranks.first:
        tracking.write_events(out)
    state.evaluated = state.step
    return kept


def _score(job: Job, received: list[int], tick: Any, step: int | None = None) -> Scores:
    """The validation part's scores; at the end in float32, as `vitlab evaluate` will find them."""
    assert job.val is not None

    def count(n: int) -> None:
        if received and job.ranks.world == 1:  # several must agree, between two steps
            raise Stopped(received[0])
        tick(n)

    fast = job.plan.precision == "bf16" and step not in (None, job.plan.steps)
    precision = torch.bfloat16 if fast else torch.float32
    ranks = job.ranks
    with out_of_memory(job):
        return score(
            job.model, job.preprocess, job.val, batch=max(1, job.config.batch // ranks.world),
            workers=job.plan.workers, precision=precision, tick=count,
            share=(ranks.rank, ranks.world), gather=partial(parallel.gather, ranks),
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
