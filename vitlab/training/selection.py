"""The paper's selection protocol (appendix B.1.1), and several seeds.

Rates are compared on a held-out part of the training set; the best one learns again from all of
it; the test part is scored once, at the very end. Each run lives in a folder of its own below
`--out` and is resumed like any other; the folder itself ends as a bundle with the table.
"""

import logging
import math
import os
import re
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from vitlab.data import doctor, sources
from vitlab.data.sources import Source
from vitlab.data.writing import write_text
from vitlab.evaluation.scoring import Scores, match, score
from vitlab.training import config as configs
from vitlab.training import folder, machine, parallel, run
from vitlab.training.config import TrainConfig
from vitlab.training.run import Data, Finish
from vitlab.weights import bundle as bundles
from vitlab.weights.bundle import Bundle

log = logging.getLogger("vitlab")
RECORD = "selection.yaml"  # what was asked, and the table
WRITTEN = ("config.json", "model.safetensors", "README.md", "report.html")  # beside it, when done
INNER = re.compile(r"lr-[\d.e+-]+|seed-\d+")  # folders of the runs inside
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # t, 95 %, 1 ... 9


def train(source: Data, config: TrainConfig, finish: Finish = lambda *_: None) -> Bundle:
    """Train as `run.train` does, with `--select held-out` and `--seeds`.

    Returns the bundle of the first seed; its metrics carry those of all. Raises ValueError
    where there is no part to score at the end.
    """
    if config.out is None:
        raise ValueError("give --out RUN, the folder of the run")
    out = Path(config.out)
    with parallel.processes() as ranks, parallel.lost(ranks), run.held(out, ranks):
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
            config = replace(config, overwrite=False)  # torchrun starts a lost process again
        if parallel.first_says(ranks, lambda: _finished(out, config)):
            log.info("%s: this selection is finished; --overwrite starts anew", out)
            return bundles.load(out)
        if isinstance(source, str):
            folder.refuse_inside(out, source)
        spec, parts = run.open_data(source)  # before an older selection goes
        parallel.first_says(ranks, lambda: _begin(out, config))
        table: dict[str, Any] = {"asked": configs.to_dict(config)}
        scores, test = None, None
        with _tidied(out, ranks):
            if config.select == "held-out":
                bundle, scores, test = _protocol(spec, parts, config, out, finish, table)
            else:
                each = _seeds(parts, config, out, finish)
                table["seeds"] = _spread([b.card.metrics.get("top1") for b in each], config)
                bundle = each[0]
        metrics = scores.metrics.summary() if scores else dict(bundle.card.metrics)
        metrics |= {k: table[k] for k in ("sweep", "seeds") if k in table}
        bundle = replace(bundle, card=replace(bundle.card, metrics=metrics))
        if ranks.first:
            write_text(out / RECORD, yaml.safe_dump(table, sort_keys=False))
            if scores and test:
                finish(out, test, scores, dict(scores.skipped))
            bundles.save(bundle, out)
        return bundle


def _protocol(
    spec: str, parts: Mapping[str, Source], config: TrainConfig, out: Path, finish: Finish,
    table: dict[str, Any],
) -> tuple[Bundle, Scores, Source]:  # fmt: skip
    """Sweep, learn again, score test."""
    if config.group is not None:
        parts = sources.regroup(parts, config.group)
    for line in doctor.shared_groups(parts):
        log.warning(line)
    whole = parts.get("train") or parts.get("all")
    test = parts.get("test") or parts.get("val")
    if whole is None or test is None:
        raise ValueError(
            f"{spec}: --select held-out needs training pictures and a test or val part to score"
            f" at the end; it has {', '.join(parts)}"
        )
    one = replace(config, select="last", seeds=1, lr=None)
    rate, thresholds = config.lr, {}
    if isinstance(rate, tuple):
        train_part, held_out = sources.hold_out(whole, config.held_out, config.seed)
        parts = {"train": train_part, "val": held_out}
        rows = [
            _tried(parts, replace(one, lr=lr, out=str(out / f"lr-{lr:g}")), finish) for lr in rate
        ]
        learned = [row for row in rows if "failed" not in row]
        if not learned:
            raise FloatingPointError(f"every --lr of the sweep failed; {rows[0]['failed']}")
        best = max(learned, key=lambda row: (row.get("map", row["top1"]), -row["loss"]))
        rate, thresholds = best["lr"], best.get("thresholds", {})
        table |= {"sweep": rows, "chosen": rate}
        log.info("lr %g is the best; learning again from all %s pictures", rate, f"{len(whole):,}")
    final = replace(one, lr=rate, seeds=config.seeds, held_out=0.0, patience=0)
    refits = _seeds({"train": whole}, final, out, finish)
    scores = [_tested(b, match(test, b), config, thresholds) for b in refits]
    if config.seeds > 1:
        table["seeds"] = _spread([s.metrics.top1 for s in scores], config)
    table["test"] = {"scored_on": scores[0].metrics.scored_on, "top1": scores[0].metrics.top1}
    return refits[0], scores[0], match(test, refits[0])


def _tested(
    bundle: Bundle, test: Source, config: TrainConfig, thresholds: dict[str, float]
) -> Scores:
    """The test part's scores, by all processes on their devices; the bundle stays on the CPU."""
    ranks = parallel.current()
    bundle.model.to(machine.device(config.device))
    scores = score(
        bundle.model, bundle.preprocess, test, batch=config.batch, thresholds=thresholds,
        share=(ranks.rank, ranks.world), gather=partial(parallel.gather, ranks),
    )  # fmt: skip
    bundle.model.cpu()
    return scores


def _tried(source: Data, config: TrainConfig, finish: Finish) -> dict[str, Any]:
    """A row of the sweep's table; a rate whose loss is not finite has failed, and no more."""
    row: dict[str, Any] = {"lr": config.lr}
    try:
        found = run.train(source, config, finish).card.metrics
    except FloatingPointError as e:
        log.warning("lr %g: %s", config.lr, e)
        return {**row, "failed": str(e)}
    log.info("lr %g: accuracy %.2f %% on %d held-out pictures",
             config.lr, 100 * found["top1"], found["n"])  # fmt: skip
    return row | {k: found[k] for k in ("top1", "loss", "n", "map", "thresholds") if k in found}


def _seeds(source: Data, config: TrainConfig, out: Path, finish: Finish) -> list[Bundle]:
    """The same run from each seed."""
    return [
        run.train(
            source, replace(config, seed=seed, seeds=1, out=str(out / f"seed-{seed}")), finish
        )
        for seed in range(config.seed, config.seed + config.seeds)
    ]


def _spread(scores: list[Any], config: TrainConfig) -> dict[str, Any]:
    """Mean and 95 % interval of several seeds' accuracies, and the accuracies."""
    found = {"seed": list(range(config.seed, config.seed + len(scores))), "top1": scores}
    if None in scores:
        return found
    mean, interval = mean_interval(scores)
    log.info("accuracy of %d seeds: %.2f %% (95 %% interval %.2f to %.2f)",
             len(scores), 100 * mean, 100 * interval[0], 100 * interval[1])  # fmt: skip
    return {**found, "mean": mean, "interval": list(interval)}


def mean_interval(values: list[float]) -> tuple[float, tuple[float, float]]:
    """The mean of a few values and its 95 % interval by Student's t; all there is for one value."""
    mean, freedom = statistics.fmean(values), len(values) - 1
    if not freedom:
        return mean, (-math.inf, math.inf)
    t = STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.7 / freedom
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return mean, (mean - half, mean + half)


@contextmanager
def _tidied(out: Path, ranks: parallel.Ranks) -> Iterator[None]:
    """What was refused before the first run leaves nothing behind."""
    try:
        yield
    except BaseException:
        if ranks.first and [path.name for path in out.iterdir()] == [RECORD]:
            (out / RECORD).unlink()
        raise


def _finished(out: Path, config: TrainConfig) -> bool:
    """Is this selection? Raises ValueError for a folder of anything else, naming what differs."""
    path = out / RECORD
    if not path.exists():
        if others := [p.name for p in out.iterdir() if not p.name.startswith(".")]:
            raise ValueError(
                f"--out {out}: holds other files ({min(others)}); choose another folder"
            )
        return False
    if config.overwrite:
        return False
    try:
        then = configs.to_dict(
            configs.from_dict(yaml.safe_load(path.read_text(encoding="utf-8"))["asked"])
        )
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, ValueError) as e:
        why = " ".join(str(e).split())
        raise ValueError(f"{path}: damaged ({why}); --overwrite starts anew") from e
    if what := folder.differences(then, configs.to_dict(config)):
        raise ValueError(
            f"--out {out}: holds a selection with other options ({what}); give"
            " the same, another folder, or --overwrite"
        )
    return (out / "config.json").exists()


def _begin(out: Path, config: TrainConfig) -> None:
    """Write the record; an older selection is removed, and nothing else that lies there."""
    if (out / RECORD).exists() and not config.overwrite:
        return  # it goes on
    for name in WRITTEN:
        (out / name).unlink(missing_ok=True)
    for inner in [p for p in out.iterdir() if INNER.fullmatch(p.name) and p.is_dir()]:
        with folder.alone(inner):  # which removes it where nothing is left
            if (inner / "run.yaml").exists():
                folder.clear(inner)
    write_text(out / RECORD, yaml.safe_dump({"asked": configs.to_dict(config)}, sort_keys=False))
