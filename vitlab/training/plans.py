"""The automatic choices of a run, made once, printed and recorded."""

import copy
import logging
import statistics
import time
from dataclasses import asdict, replace

import torch

from vitlab.data import loader
from vitlab.data.sources import Source
from vitlab.models.zoo import Model
from vitlab.training import machine, parallel
from vitlab.training.config import TrainConfig, seconds
from vitlab.training.loop import Job, Plan, batches, update
from vitlab.training.optim import Average, optimizer_of
from vitlab.training.safety import out_of_memory

log = logging.getLogger("vitlab")
EVALUATIONS = 20  # at most, over a whole run
PLANNING = 20.0  # seconds of trial steps that plan a --budget, at most a twentieth of it
HIGH = {"adamw": 5e-3, "sgd": 0.5}  # rates above which Vision Transformers tend to collapse


def choose(
    config: TrainConfig, model: Model, device: torch.device, train_part: Source,
    val_part: Source | None,
) -> Plan:  # fmt: skip
    """What does not depend on the number of steps."""
    in_memory = loader.fits_memory(*(part for part in (train_part, val_part) if part is not None))
    lr = {"adamw": 1e-3, "sgd": 0.03}[config.optimizer] * (0.1 if config.from_ else 1.0)
    if isinstance(config.lr, tuple):
        raise ValueError("one run has one --lr")
    return Plan(
        device=str(device),
        precision=machine.precision(config.precision, device),
        processes=parallel.current().world,
        threads=config.threads or torch.get_num_threads(),
        workers=0 if in_memory else max(1, machine.cores() - (device.type == "cpu")),
        in_memory=in_memory,
        lr=lr if config.lr is None else config.lr,
        steps=0, warmup_steps=0, eval_every=0,
    )  # fmt: skip


def moved(plan: Plan, auto: Plan) -> Plan:
    """A recorded plan on another number of processes: what they learn stays, how they work not."""
    log.info("%d processes instead of %d", auto.processes, plan.processes)
    own = ("processes", "threads", "workers", "in_memory")
    return replace(plan, **{name: getattr(auto, name) for name in own})


def length(job: Job) -> Job:
    """The job with its number of steps, of warm-up, and between evaluations."""
    c, n = job.config, len(job.train)
    steps = c.steps or (_budget_steps(job) if c.budget else _epoch_steps(c, n))
    warmup = round(c.warmup * steps if c.warmup < 1 else c.warmup)
    if warmup >= steps and warmup:
        raise ValueError(f"--warmup {warmup} is not less than the {steps} steps of the run")
    head = round(c.head_first * steps if c.head_first < 1 else c.head_first)
    if head > steps:
        raise ValueError(f"--head-first {head} is more than the {steps} steps of the run")
    epochs = steps * c.batch / n
    every = max(1, round(epochs / EVALUATIONS)) * n / c.batch
    plan = replace(
        job.plan, steps=steps, warmup_steps=warmup, eval_every=max(1, round(every)), head_steps=head
    )
    return replace(job, plan=plan)


def _epoch_steps(config: TrainConfig, n: int) -> int:
    default = 10 if config.from_ else 30
    images = config.images or (default if config.epochs is None else config.epochs) * n
    return max(1, round(images / config.batch))


def _budget_steps(job: Job) -> int:
    """Steps that fit --budget, from the speed of trial steps on a copy of the model."""
    budget = seconds(job.config.budget or "")
    model = copy.deepcopy(job.model)
    own = job.config.batch // job.ranks.world  # each process tries its share, alone
    trial = replace(
        job, model=model, plan=replace(job.plan, steps=1), ranks=parallel.Ranks(),
        config=replace(job.config, batch=own),
        optimizer=optimizer_of(job.config, job.plan.lr, model),
        average=Average(model, job.config.ema) if job.average else None,
    )  # fmt: skip
    stream = batches(trial, start=0, stop=10**9)
    forward = torch.compile(model) if job.config.compile else model
    durations: list[float] = []
    with out_of_memory(job):
        for step in range(2):  # warming up: allocation, compilation, the first batches
            update(trial, forward, next(stream), step)
        began = time.perf_counter()
        while len(durations) < 3 or time.perf_counter() - began < min(PLANNING, budget / 20):
            before = time.perf_counter()
            update(trial, forward, next(stream), 2 + len(durations))
            durations.append(time.perf_counter() - before)
    step_time = statistics.median(durations)  # one hiccup must not halve a run
    step_time = parallel.total(job.ranks, step_time)[0] / job.ranks.world
    # A pass over the validation part costs a third of training on as many pictures.
    share = len(job.val) / len(job.train) / 3 * (2 if job.average else 1) if job.val else 0.0
    steps = max(1, round(budget / step_time / (1 + share)))
    log.info("budget %s: %.1f images/s, %d steps", job.config.budget,
             job.config.batch / step_time, steps)  # fmt: skip
    return steps


def tell(job: Job) -> None:
    """The automatic choices, once, resolved; and what looks like a mistake."""
    c, plan = job.config, job.plan
    log.info(
        "%s parameters, images of %d x %d, %d classes, %s training pictures, %s validation",
        f"{sum(p.numel() for p in job.model.parameters()):,}", *job.preprocess.size,
        len(job.train.classes), f"{len(job.train):,}", f"{len(job.val):,}" if job.val else "no",
    )  # fmt: skip
    log.info("%s", ", ".join(f"{k} {v}" for k, v in asdict(plan).items()))
    h, w = getattr(job.model.config, "grid", (16, 16))
    if h * w < 16:
        log.warning("only %d patches an image: a smaller --patch or larger --size sees more", h * w)
    if c.layer_decay != 1 or plan.head_steps:
        shares = [group["lr_scale"] for group in job.optimizer.param_groups if group["params"]]
        log.info("rates of %d groups: %.3g of the peak at the bottom, %.3g at the head;"
                 " the head alone for %d steps",
                 len(shares), min(shares), max(shares), plan.head_steps)  # fmt: skip
    if c.balanced:
        log.info("--balanced: an epoch is %s pictures", f"{len(job.train):,}")
    if plan.lr > HIGH[c.optimizer]:
        log.warning("--lr %g is high for %s: above %g, training often fails",
                    plan.lr, c.optimizer, HIGH[c.optimizer])  # fmt: skip
    if plan.workers > machine.cores():
        log.warning("--workers %d is more than the %d cores", plan.workers, machine.cores())
    if (c.mixup or c.cutmix) and c.batch == 1:
        log.warning("--batch 1: a picture has no partner, so --mixup and --cutmix do nothing")
