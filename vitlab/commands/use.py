"""`vitlab evaluate` and `vitlab predict`: a bundle put to work."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from vitlab.training.config import Text, Whole


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Score a bundle or run on labelled pictures, each exactly once."""

    bundle: tyro.conf.Positional[str]  # folder of a bundle or run
    spec: tyro.conf.Positional[str]  # the pictures, as for train
    split: Text = None  # train, val or test; by default test, else val, else held-out, else all
    out: Text = None  # folder for report.html and metrics.json
    batch: int = 64  # pictures at once
    workers: int = 0  # processes that decode
    device: Text = None  # cuda, mps or cpu
    threads: Whole = None  # CPU threads
    json: bool = False  # print the metrics as one JSON object
    debug: bool = False  # show where an error comes from


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Classify pictures: a line each, in input order, failures included."""

    bundle: tyro.conf.Positional[str]  # folder of a bundle or run
    images: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="IMAGES...")]
    """files and folders"""
    top: int = 5  # classes listed with --json
    batch: int = 32  # pictures at once
    device: Text = None  # cuda, mps or cpu
    threads: Whole = None  # CPU threads
    json: bool = False  # one JSON object a line
    debug: bool = False  # show where an error comes from


def evaluate(options: Evaluate) -> int:
    from vitlab import runs
    from vitlab.evaluation import scoring

    bundle = load(options)
    how = {"batch": options.batch, "workers": options.workers}
    if options.out:
        metrics = runs.evaluate_into(
            bundle, options.spec, options.split, Path(options.out), **how
        ).metrics
    else:
        metrics = scoring.evaluate(bundle, options.spec, split=options.split, **how)
    print(json.dumps(metrics.summary()) if options.json else metrics.line())
    return 0


def predict(options: Predict) -> int:
    from vitlab.weights.predictor import stream

    bundle = load(options)
    failed = 0
    for p in stream(bundle, options.images, top=options.top, batch=options.batch):
        failed += p.error is not None
        if options.json:
            answer: dict[str, Any] = {"file": p.file, "error": p.error}
            if p.error is None:
                top = [{"label": label, "probability": share} for label, share in p.top]
                answer = {
                    "file": p.file,
                    "label": p.label,
                    "probability": p.probability,
                    "top": top,
                }
                if p.labels:
                    answer["labels"] = list(p.labels)
            print(json.dumps(answer), flush=True)
        elif p.error is None:
            print(f"{p.file}: {' | '.join(p.labels) or p.label} ({p.probability:.1%})", flush=True)
        else:
            print(f"{p.file}: error: {p.error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


def load(options: Any) -> Any:
    """The bundle, on its device."""
    import torch

    from vitlab.training import machine
    from vitlab.weights import formats

    where = machine.device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    bundle = formats.load(options.bundle)
    bundle.model.to(where)
    return bundle
