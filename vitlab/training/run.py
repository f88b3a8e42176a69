"""From a source and a configuration to a finished run: its folder is a bundle with its history."""

import copy
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from vitlab.data import loader, sources
from vitlab.data.decode import Unreadable
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources import Source
from vitlab.evaluation.scoring import Scores
from vitlab.models import zoo
from vitlab.models.vit import ViT, ViTConfig
from vitlab.training import config as configs
from vitlab.training import folder, machine
from vitlab.training.config import TrainConfig
from vitlab.training.loop import EVALUATIONS, Job, Plan, batches, run, update
from vitlab.training.optim import Average, make_optimizer
from vitlab.weights import bundle as bundles
from vitlab.weights.bundle import Bundle, Card

log = logging.getLogger("vitlab")
Data = str | Source | Mapping[str, Source] | tuple[Sequence[Any], Sequence[Any]]
PLANNING = 4.0  # seconds of trial steps that plan a --budget


Finish = Callable[[Path, Source, Scores, dict[str, str]], None]


def train(source: Data, config: TrainConfig, finish: Finish = lambda *_: None) -> Bundle:
    """Train as `config` says, into the folder `config.out`.

    `finish(out, validation part, its scores, unreadable pictures)` is called before the bundle
    is written: a folder with a config.json is a finished run. For the rest see `vitlab.train`.
    """
    if config.out is None:
        raise ValueError("give --out RUN, the folder of the run")
    out = Path(config.out)
    with folder.alone(out), torch.random.fork_rng(), _threads():
        record = None if config.overwrite else folder.recorded(out, config)
        if record and (out / "config.json").exists():
            log.info("%s: this run is finished; --overwrite starts anew", out)
            return bundles.load(out)
        spec, parts = _open(source)
        train_part, val_part, split = _split(spec, parts, config)
        start = bundles.load(config.from_) if config.from_ else None
        train_part, val_part = _match(start, train_part, val_part)
        fingerprint = _fingerprint(train_part)
        if record and record["data"] != fingerprint:
            raise ValueError(f"{out}: the pictures have changed since this run began")
        job = _prepare(config, train_part, val_part, start, record["plan"] if record else None)
        unreadable = _unreadable(job, config.strict)
        if not record:
            folder.clear(out)
            folder.write_record(out, config, job, fingerprint)
        _tell(job)
        scores, unreadable = run(job, out, unreadable)
        folder.write_skipped(out, unreadable)
        if job.val and scores:
            finish(out, job.val, scores, unreadable)
        held_out = val_part if val_part and split != "val" else None
        data = {
            "spec": spec, "split": split, "seed": config.seed,
            "held_out_ids": [held_out.id(i) for i in range(len(held_out))] if held_out else [],
        }  # fmt: skip
        finished = Bundle(
            model=job.model.to("cpu").eval(), preprocess=job.preprocess,
            classes=train_part.classes, card=_card(config, data, start, scores),
        )  # fmt: skip
        bundles.save(finished, out)
        return finished


# Data ------------------------------------------------------------------------------------------


def _open(source: Data) -> tuple[str, Mapping[str, Source]]:
    if isinstance(source, str):
        return source, sources.open_spec(source)
    if isinstance(source, Source):
        return source.spec, {source.split: source}
    if isinstance(source, Mapping):
        return next(iter(source.values())).spec, source
    return "arrays", {"all": sources.from_arrays(*source)}


def _split(
    spec: str, parts: Mapping[str, Source], config: TrainConfig
) -> tuple[Source, Source | None, str]:
    """(train, validation, the rule): val where there is one, else a held-out share of train."""
    for note in next(iter(parts.values())).notes:
        log.info(note)
    whole = parts.get("train") or parts.get("all")
    if whole is None:
        raise ValueError(f"{spec}: has no training part, only {', '.join(parts)}")
    if len(whole.classes) < 2:
        raise ValueError(
            f"{spec}: found 1 class ({whole.classes[0]}); need at least 2: is the path one level"
            " off?"
        )
    if "val" in parts:
        return whole, parts["val"], "val"
    if not config.held_out:
        return whole, None, "none"
    train_part, val_part = sources.hold_out(whole, config.held_out, config.seed)
    return train_part, val_part, f"stratified {config.held_out:g} of train"


def _match(
    start: Bundle | None, train_part: Source, val_part: Source | None
) -> tuple[Source, Source | None]:
    """With a bundle that knows the same classes, labels follow its order and its head is kept."""
    if start and set(start.classes) == set(train_part.classes):
        train_part = sources.match_classes(train_part, start.classes)
    return train_part, val_part and sources.match_classes(val_part, train_part.classes)


def _fingerprint(source: Source) -> str:
    """What a resumed run must find again: the pictures' names and labels, in order."""
    digest = hashlib.sha256("\0".join(source.classes).encode())
    digest.update(source.ids.tobytes())
    digest.update(source.labels.tobytes())
    return digest.hexdigest()


def _unreadable(job: Job, strict: bool) -> dict[str, str]:
    """Pictures known to be unreadable before the first step: those of sets held in memory."""
    found: dict[str, str] = {}
    for part in (job.train, job.val):
        if part is not None and isinstance(part.load, loader.Decoded):
            found |= {part.id(i): x for i, x in enumerate(part.load.images) if isinstance(x, str)}
    if found and strict:
        file, why = min(found.items())
        raise Unreadable(f"{file}: {why} (--strict)")
    return found


# The job ---------------------------------------------------------------------------------------


def _prepare(
    config: TrainConfig, train_part: Source, val_part: Source | None, start: Bundle | None,
    recorded: dict[str, Any] | None,
) -> Job:  # fmt: skip
    """Build model and optimizer, make the automatic choices or take the recorded ones."""
    device = machine.device(recorded["device"] if recorded else config.device)
    torch.manual_seed(config.seed)
    if start:
        model, preprocess = _continue(config, start, len(train_part.classes), train_part)
    else:
        model = ViT(_shape(config, len(train_part.classes)))
        preprocess = Preprocess(size=model.config.image)
    model.to(device)
    job = Job(
        config=config, model=model, preprocess=preprocess, train=train_part, val=val_part,
        optimizer=make_optimizer(model, config.optimizer, config.weight_decay),
        average=Average(model, config.ema) if config.ema else None,
        plan=Plan(**recorded) if recorded else _plan(config, model, device, train_part, val_part),
    )  # fmt: skip
    if config.workers is not None:
        job = replace(job, plan=replace(job.plan, workers=config.workers))
    torch.set_num_threads(job.plan.threads)
    if job.plan.in_memory:
        job = replace(
            job, train=loader.in_memory(train_part, job.plan.threads),
            val=val_part and loader.in_memory(val_part, job.plan.threads),
        )  # fmt: skip
    if recorded:
        return job
    steps = config.steps or (_budget_steps(job) if config.budget else _epoch_steps(job))
    warmup = round(config.warmup * steps if config.warmup < 1 else config.warmup)
    epochs = steps * config.batch / len(train_part)
    every = max(1, round(epochs / EVALUATIONS)) * len(train_part) / config.batch
    plan = replace(job.plan, steps=steps, warmup_steps=warmup, eval_every=max(1, round(every)))
    return replace(job, plan=plan)


def _shape(config: TrainConfig, classes: int) -> ViTConfig:
    """The shape of a model trained from scratch."""
    if config.model is None:
        raise ValueError("give --model NAME (see `vitlab models`) or --from BUNDLE")
    return zoo.configure(
        config.model, classes=classes, image=_size(config), patch=config.patch,
        width=config.width, depth=config.depth, heads=config.heads, mlp_width=config.mlp_width,
        pool=config.pool, class_token=None if config.pool is None else config.pool == "token",
        dropout=config.dropout, drop_path=config.drop_path,
    )  # fmt: skip


def _size(config: TrainConfig) -> tuple[int, int] | None:
    return None if config.size is None else (config.size[0], config.size[-1])


def _continue(
    config: TrainConfig, start: Bundle, classes: int, source: Source
) -> tuple[ViT, Preprocess]:
    """A bundle's model at another size, with a new zero head where the classes are others."""
    fixed = ("model", "patch", "width", "depth", "heads", "mlp_width", "pool")
    clash = [f"--{name.replace('_', '-')}" for name in fixed if getattr(config, name) is not None]
    if clash:
        raise ValueError(f"{', '.join(clash)} cannot change the model of --from {config.from_}")
    kept = source.classes == start.classes
    shape = replace(
        start.model.config, classes=classes,
        head_hidden=start.model.config.head_hidden if kept else 0,  # the whole head goes (B.1.1)
        dropout=start.model.config.dropout if config.dropout is None else config.dropout,
        drop_path=start.model.config.drop_path if config.drop_path is None else config.drop_path,
    )  # fmt: skip
    model = ViT(shape)
    tensors = start.model.state_dict()
    if not kept:
        tensors = {k: v for k, v in tensors.items() if not k.startswith(("head.", "hidden."))}
        log.info("%d new classes: the head starts anew, at zero", classes)
    model.load_state_dict({**model.state_dict(), **tensors})
    size = _size(config) or start.model.config.image
    if size != start.model.config.image:
        log.info(
            "position table: grid %s -> %s", start.model.config.grid, model.resize(size).config.grid
        )
    return model, replace(start.preprocess, size=size)


def _plan(
    config: TrainConfig, model: ViT, device: torch.device, train_part: Source,
    val_part: Source | None,
) -> Plan:  # fmt: skip
    cores = machine.cores()
    together = [part for part in (train_part, val_part) if part is not None]
    in_memory = all(map(loader.fits_memory, together))
    lr = {"adamw": 1e-3, "sgd": 0.03}[config.optimizer] * (0.1 if config.from_ else 1.0)
    return Plan(
        device=str(device),
        precision=machine.precision(config.precision, device, model.config.width),
        threads=config.threads or torch.get_num_threads(),
        workers=0 if in_memory else max(1, cores - (device.type == "cpu")),
        in_memory=in_memory,
        lr=lr if config.lr is None else config.lr,
        steps=0, warmup_steps=0, eval_every=0,
    )  # fmt: skip


def _epoch_steps(job: Job) -> int:
    c = job.config
    default = 10 if c.from_ else 30
    images = c.images or (default if c.epochs is None else c.epochs) * len(job.train)
    return max(1, round(images / c.batch))


def _budget_steps(job: Job) -> int:
    """Steps that fit --budget, from the speed of trial steps on a copy of the model."""
    budget = configs.seconds(job.config.budget or "")
    model = copy.deepcopy(job.model)
    trial = replace(
        job, model=model, plan=replace(job.plan, steps=1),
        optimizer=make_optimizer(model, job.config.optimizer, job.config.weight_decay),
        average=Average(model, job.config.ema) if job.average else None,
    )  # fmt: skip
    stream = batches(trial, start=0, stop=10**9)
    forward = torch.compile(model) if job.config.compile else model
    for step in range(2):  # warming up: allocation, compilation, the first batches
        update(trial, forward, next(stream), step)
    durations: list[float] = []
    began = time.perf_counter()
    while len(durations) < 3 or time.perf_counter() - began < min(PLANNING, budget / 10):
        before = time.perf_counter()
        update(trial, forward, next(stream), 2 + len(durations))
        durations.append(time.perf_counter() - before)
    step_time = sum(durations) / len(durations)
    # A pass over the validation part costs a third of training on as many pictures.
    share = len(job.val) / len(job.train) / 3 * (2 if job.average else 1) if job.val else 0.0
    steps = round(budget / step_time / (1 + share))
    log.info("budget %s: %.1f images/s, %d steps", job.config.budget,
             job.config.batch / step_time, steps)  # fmt: skip
    return max(1, steps)


def _tell(job: Job) -> None:
    """The automatic choices, once, resolved."""
    model, plan = job.model, job.plan
    parameters = sum(p.numel() for p in model.parameters())
    h, w = model.config.grid
    log.info(
        "%s parameters, %d x %d patches, %d classes, %s training pictures, %s validation",
        f"{parameters:,}", h, w, len(job.train.classes), f"{len(job.train):,}",
        f"{len(job.val):,}" if job.val else "no",
    )  # fmt: skip
    if h * w < 16:
        log.warning("only %d patches an image: a smaller --patch or larger --size sees more", h * w)
    log.info("%s", ", ".join(f"{k} {v}" for k, v in asdict(plan).items()))


@contextmanager
def _threads() -> Iterator[None]:
    """Whatever the run sets, the caller finds the number of threads as it was."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _card(
    config: TrainConfig, data: dict[str, Any], start: Bundle | None, scores: Scores | None
) -> Card:
    source = {"format": "vitlab", "sha256": None, "licence": None}
    if start and config.from_:
        source["sha256"] = bundles.sha256(Path(config.from_) / "model.safetensors")
        source["licence"] = start.card.source.get("licence")
    return Card(source=source, data=data, metrics=scores.metrics.summary() if scores else {})
