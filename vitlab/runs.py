"""Runs as people meet them: training that ends in a report, evaluation that leaves one."""

import json
from pathlib import Path
from typing import Any

import yaml

from vitlab import report
from vitlab.data import sources
from vitlab.data.writing import write_text
from vitlab.evaluation import scoring
from vitlab.evaluation.scoring import Scores
from vitlab.training import run, selection
from vitlab.training.config import TrainConfig
from vitlab.weights.bundle import Bundle


def train(source: run.Data, config: TrainConfig) -> Bundle:
    """Train as `config` says; the folder `config.out` becomes a run, `report.html` included.

    Args:
        source: a spec, a source, sources by split (train, val), or (images, labels).
        config: see `TrainConfig`. An unfinished run in `config.out` is resumed, a finished one
            is returned as it is. With `select="held-out"` or several `seeds` it holds several
            runs and their table, see `vitlab.training.selection`.

    Raises ValueError for options or data that do not fit, before anything is written.
    """
    several = config.select == "held-out" or config.seeds > 1
    return (selection if several else run).train(source, config, write_report)


def evaluate_into(bundle: Bundle, spec: str, split: str | None, out: Path, **how: Any) -> Scores:
    """Score as `vitlab.evaluate` does, leaving report.html and metrics.json in a folder.

    In a run's own folder the report keeps the curves and the configuration.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: is a file; choose another folder")
    source = scoring.match(scoring.choose(spec, split, bundle.card), bundle)
    how["thresholds"] = scoring.thresholds_of(bundle.card)
    scores = scoring.score(bundle.model, bundle.preprocess, source, **how)
    out.mkdir(parents=True, exist_ok=True)
    write_report(out, source, scores, dict(scores.skipped))
    write_text(out / "metrics.json", json.dumps(scores.metrics.summary(), indent=2) + "\n")
    return scores


def write_report(
    out: Path, source: sources.Source, scores: Scores, skipped: dict[str, str]
) -> None:
    """report.html, from scores and what the folder holds of a run."""
    history, record = out / "metrics.jsonl", out / "run.yaml"
    if not record.exists():  # the folder of a sweep
        record = out / selection.RECORD
    lines = history.read_text(encoding="utf-8").splitlines() if history.exists() else []
    report.write(
        out / "report.html",
        title=out.resolve().name,
        metrics=scores.metrics,
        history=[json.loads(line) for line in lines],
        settings=_settings(record) if record.exists() else {},
        mistakes=report.mistakes(source, scores),
        skipped=sorted(skipped.items()),
    )


def _settings(record: Path) -> dict[str, Any]:
    """What a run.yaml says. Raises ValueError, naming it, where it is damaged."""
    try:
        return dict(yaml.safe_load(record.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as e:
        why = " ".join(str(e).split())
        raise ValueError(f"{record}: damaged ({why}); restore it or give another --out") from e
