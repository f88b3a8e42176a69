"""From a source and a configuration to a finished run: its folder is a bundle with its history."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from vitlab.data import doctor, loader, sources
from vitlab.data.decode import Unreadable
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources import Source
from vitlab.evaluation.scoring import Scores
from vitlab.models import zoo
from vitlab.training import adapters, folder, initial, machine, parallel, plans, tasks, tracking
from vitlab.training.config import TrainConfig
from vitlab.training.loop import Job, Plan, run
from vitlab.training.optim import Average, optimizer_of
from vitlab.weights import bundle as bundles
from vitlab.weights import formats, labels, shipped
from vitlab.weights.bundle import Bundle, Card

log = logging.getLogger("vitlab")
Data = str | Source | Mapping[str, Source] | tuple[Sequence[Any], Sequence[Any]]
Finish = Callable[[Path, Source, Scores, dict[str, str]], None]


def train(source: Data, config: TrainConfig, finish: Finish = lambda *_: None) -> Bundle:
    """Train as `config` says, into the folder `config.out`.

    `finish(out, validation part, its scores, unreadable pictures)` is called before the bundle
    is written: a folder with a config.json is a finished run. For the rest see `vitlab.train`.
    """
    if config.out is None:
        raise ValueError("give --out RUN, the folder of the run")
    out = Path(config.out)
    with parallel.processes() as ranks, parallel.lost(ranks), held(out, ranks):
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
            config = replace(config, overwrite=False)  # torchrun starts a lost process again
        record = parallel.first_says(ranks, lambda: folder.recorded(out, config))
        if record and parallel.first_says(ranks, (out / "config.json").exists):
            log.info("%s: this run is finished; --overwrite starts anew", out)
            return bundles.load(out)
        where = machine.device(record["plan"]["device"] if record else config.device)
        generators = [where] if where.type == "cuda" else []
        with torch.random.fork_rng(generators), _threads():
            return _train(source, config, out, record, where, finish, ranks)


@contextmanager
def held(out: Path, ranks: parallel.Ranks) -> Iterator[None]:
    """The folder, held by the first process for all."""
    with ExitStack() as stack:
        parallel.first_says(ranks, lambda: stack.enter_context(folder.alone(out)))
        yield


def _train(
    source: Data, config: TrainConfig, out: Path, record: dict[str, Any] | None,
    where: torch.device, finish: Finish, ranks: parallel.Ranks,
) -> Bundle:  # fmt: skip
    start = _start(config, out)
    if isinstance(source, str):
        folder.refuse_inside(out, source)
    spec, parts = open_data(source)
    train_part, val_part, split = _split(spec, parts, config)
    train_part, val_part = _match(start, train_part, val_part)
    train_part = tasks.suit(config, train_part)
    val_part = val_part and tasks.suit(config, val_part)
    fingerprint = _fingerprint(train_part, val_part)
    if record and record["data"] != fingerprint:
        raise ValueError(f"{out}: the pictures have changed since this run began; --overwrite")
    held_out = val_part if val_part and split != "val" else None
    card = Card(
        task="classification" if config.task == "single-label" else config.task,
        source=_origin(config, start),
        data={
            "spec": spec, "split": split, "seed": config.seed,
            "held_out_ids": [held_out.id(i) for i in range(len(held_out))] if held_out else [],
        },
    )  # fmt: skip
    plan = record["plan"] if record else None
    job = _prepare(config, where, train_part, val_part, start, plan, ranks)
    unreadable = _unreadable(job, config.strict)
    if not record:
        parallel.first_says(ranks, lambda: folder.begin(out, config, job, fingerprint))
    if ranks.first:
        plans.tell(job)
    scores, unreadable = run(job, out, unreadable)
    if config.lora:
        adapters.merge(job.model)
    model = parallel.gathered(job.model)
    if ranks.first:
        folder.write_skipped(out, unreadable)
    if job.val and scores:
        predicted, true = (scores.metrics.confusion.any(axis=axis).sum() for axis in (0, 1))
        if predicted == 1 < true:
            log.warning("every picture is taken for the same class: a lower --lr may help")
        if ranks.first:
            finish(out, job.val, scores, unreadable)
    finished = Bundle(
        model=model, preprocess=job.preprocess, classes=train_part.classes,
        card=replace(card, metrics=scores.metrics.summary() if scores else {}),
    )  # fmt: skip
    parallel.first_says(ranks, lambda: bundles.save(finished, out))
    return finished


# Data ------------------------------------------------------------------------------------------


def open_data(source: Data) -> tuple[str, Mapping[str, Source]]:
    """(spec, sources by split) of whatever `train` takes."""
    if isinstance(source, str):
        return source, sources.open_spec(source)
    if isinstance(source, Source):
        return source.spec, {source.split: source}
    if not source or not len(source[0] if isinstance(source, tuple) else source):
        raise ValueError("no pictures to train on")
    if isinstance(source, Mapping):
        return next(iter(source.values())).spec, source
    return "arrays", {"all": sources.from_arrays(*source)}


def training_part(spec: str, parts: Mapping[str, Source]) -> Source:
    """What of a set is learned from. Raises ValueError where there is nothing."""
    part = parts.get("train") or parts.get("all")
    if part is None:
        raise ValueError(f"{spec}: has no training part, only {', '.join(parts)}")
    return part


def _split(
    spec: str, parts: Mapping[str, Source], config: TrainConfig
) -> tuple[Source, Source | None, str]:
    """(train, validation, the rule): val where there is one, else a held-out share of train."""
    if config.group is not None:
        parts = sources.regroup(parts, config.group)
    for note in next(iter(parts.values())).notes:
        log.info(note)
    for line in doctor.shared_groups(parts):
        log.warning(line)
    whole = training_part(spec, parts)
    if len(whole.classes) < 2:
        raise ValueError(
            f"{spec}: found 1 class ({whole.classes[0]}); need at least 2: is the path one level"
            " off?"
        )
    if "val" in parts:
        return whole, parts["val"], "val"
    if not config.held_out:
        if config.select != "last":
            raise ValueError(f"--select {config.select} needs validation pictures")
        if config.patience:
            raise ValueError(f"--patience {config.patience} needs validation pictures")
        return whole, None, "none"
    train_part, val_part = sources.hold_out(whole, config.held_out, config.seed)
    return train_part, val_part, f"stratified {config.held_out:g} of train"


def _match(
    start: Bundle | None, train_part: Source, val_part: Source | None
) -> tuple[Source, Source | None]:
    """With a bundle that knows the same classes, labels follow its order and its head is kept."""
    val_part = val_part and sources.match_classes(val_part, train_part.classes)
    if start is None:
        return train_part, val_part
    known, words = start.classes, labels.translate(train_part.classes, start.classes)

    def renamed(part: Source) -> Source:
        return sources.match_classes(replace(part, classes=words), known)

    if set(words) == set(known):
        return renamed(train_part), val_part and renamed(val_part)
    return train_part, val_part


def _fingerprint(*parts: Source | None) -> str:
    """What a resumed run must find again: the pictures' names and labels, in order."""
    digest = hashlib.sha256()
    for part in parts:
        if part is not None:
            digest.update("\0".join(part.classes).encode("utf-8", "surrogateescape"))
            digest.update(part.ids.tobytes())
            digest.update(part.labels.tobytes())
            digest.update(b"" if part.many is None else part.many.tobytes())
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


def _start(config: TrainConfig, out: Path) -> Bundle | None:
    """The bundle to start from; options that cannot shape a model are refused here, early."""
    if config.from_ is None:
        _shape(config, classes=2)
        return None
    if Path(config.from_).resolve() == out.resolve():
        raise ValueError(f"--out {out}: is the bundle to start from; choose another folder")
    fixed = ("model", "patch", "width", "depth", "heads", "mlp_width", "pool")
    clash = [f"--{name.replace('_', '-')}" for name in fixed if getattr(config, name) is not None]
    if clash:
        raise ValueError(f"{', '.join(clash)} cannot change the model of --from {config.from_}")
    return formats.load(config.from_)


def _origin(config: TrainConfig, start: Bundle | None) -> dict[str, Any]:
    """Where the weights came from."""
    if start is None or config.from_ is None:
        return {"format": "vitlab", "sha256": None, "licence": None}
    came, where = start.card.source, shipped.find(config.from_) or Path(config.from_)
    weights = where / "model.safetensors"
    if weights.is_file() and (weights.parent / "config.json").is_file() and "file" not in came:
        came = {**came, "format": "vitlab", "sha256": bundles.sha256(weights)}
    return {"format": None, "sha256": None, "licence": None, **came}


def _prepare(
    config: TrainConfig, where: torch.device, train_part: Source, val_part: Source | None,
    start: Bundle | None, recorded: dict[str, Any] | None,
    ranks: parallel.Ranks = parallel.ALONE,
) -> Job:  # fmt: skip
    """Build model and optimizer, make the automatic choices or take the recorded ones."""
    torch.manual_seed(config.seed)
    if start:
        model, preprocess = _continue(config, start, train_part)
    else:
        model = zoo.build(_shape(config, len(train_part.classes)))
        preprocess = Preprocess(size=model.config.image)
    preprocess = initial.with_preprocess(config, preprocess)
    initial.prepare(config, model, start is None or start.classes != train_part.classes)
    if config.tensorboard:
        tracking.require()
    if config.shard and not torch.distributed.is_initialized():
        raise ValueError("--shard needs several processes: torchrun -m vitlab train ...")
    if config.shard and config.budget:
        raise ValueError("--budget cannot be planned with --shard; give --epochs or --steps")
    if config.shard and config.lora:
        raise ValueError("--lora trains few parameters; leave --shard out")
    if config.batch % (config.accumulate * ranks.world):
        raise ValueError(
            f"--batch {config.batch} cannot be cut into {ranks.world} processes x"
            f" --accumulate {config.accumulate}"
        )
    if ranks.world > 1 and (config.mixup or config.cutmix) and config.batch // ranks.world % 2:
        raise ValueError(
            f"--batch {config.batch}: mixing pairs pictures, and {ranks.world} processes have odd"
            f" shares of it; give a multiple of {2 * ranks.world}"
        )
    if not config.shard:
        model.to(where)
    choice = Plan(**recorded) if recorded else None
    if choice is None or choice.processes != ranks.world:
        auto = plans.choose(config, model, where, train_part, val_part)
        choice = plans.moved(choice, auto) if choice else auto
    if choice.precision == "float64":
        model.double()
    if config.workers is not None:
        choice = replace(choice, workers=config.workers)
    torch.set_num_threads(choice.threads)
    if choice.in_memory:
        train_part = loader.in_memory(train_part, choice.threads)
        val_part = val_part and loader.in_memory(val_part, choice.threads)
    if config.balanced:
        train_part = tasks.balanced(train_part, config.seed)
    weights = tasks.class_weights(train_part).to(where) if config.class_weights else None
    if config.recompute:
        parallel.recompute(model)
    if config.shard:
        parallel.shard(model, where)
    job = Job(
        config=config, plan=choice, model=model, preprocess=preprocess, train=train_part,
        val=val_part, optimizer=optimizer_of(config, choice.lr, model), weights=weights,
        average=Average(model, config.ema) if config.ema else None, ranks=ranks,
    )  # fmt: skip
    return job if recorded else plans.length(job)


def _shape(config: TrainConfig, classes: int) -> zoo.Config:
    """The shape of a model trained from scratch."""
    if config.model is None:
        raise ValueError("give --model NAME (see `vitlab models`) or --from BUNDLE")
    shape = zoo.configure(
        config.model, classes=classes, image=initial.image_size(config), patch=config.patch,
        width=config.width, depth=config.depth, heads=config.heads, mlp_width=config.mlp_width,
        pool=config.pool, class_token=None if config.pool is None else config.pool == "token",
        dropout=config.dropout, drop_path=config.drop_path,
    )  # fmt: skip
    return initial.with_head(config, shape)


def _continue(config: TrainConfig, start: Bundle, source: Source) -> tuple[zoo.Model, Preprocess]:
    """A bundle's model at another size, with a new zero head where the classes are others."""
    shape: dict[str, Any] = {"classes": len(source.classes)}
    tensors = start.model.state_dict()
    if source.classes != start.classes:
        shape["head_hidden"] = 0  # the whole head goes (B.1.1)
        tensors = {k: v for k, v in tensors.items() if not k.startswith(("head.", "hidden."))}
        log.info("%d new classes: the head starts anew, at zero", len(source.classes))
    shape |= {"dropout": config.dropout, "drop_path": config.drop_path}
    old = start.model.config
    known = {f.name for f in fields(old)}
    model = zoo.build(
        replace(old, **{k: v for k, v in shape.items() if v is not None and k in known})
    )
    model.load_state_dict({**model.state_dict(), **tensors})
    size = initial.image_size(config) or old.image
    if size != old.image:
        model.resize(size)
        log.info("images of %d x %d instead of %d x %d: positions resampled", *size, *old.image)
    return model, replace(start.preprocess, size=size)


@contextmanager
def _threads() -> Iterator[None]:
    """Whatever the run sets, the caller finds the number of threads as it was."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
