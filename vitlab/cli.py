"""The command line: one thin command per verb. Torch is imported only once a verb runs."""

import contextlib
import difflib
import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import tyro

from vitlab.training.config import TrainConfig
from vitlab.training.machine import cores


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a small Vision Transformer on the embedded sample, and show what it learned."""

    out: str = "runs/demo"  # folder of the run; an older demo there is replaced
    budget: str = "150s"  # training time
    debug: bool = False  # show where an error comes from


@dataclass(frozen=True, kw_only=True)
class Models:
    """Names of models with parameters and multiply-accumulates."""

    pattern: tyro.conf.Positional[str] = "*"  # shell pattern, such as 'vit-b*'
    json: bool = False  # one JSON object a line
    debug: bool = False  # show where an error comes from


@dataclass(frozen=True, kw_only=True)
class Train(TrainConfig):
    """Train a model on labelled pictures; the same command resumes an unfinished run."""

    spec: tyro.conf.Positional[str]  # photos/, photos.zip, labels.csv, cifar10, hf:org/name, sample
    json: bool = False  # print the result as one JSON object
    debug: bool = False  # show where an error comes from


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Score a bundle or run on labelled pictures, each exactly once."""

    bundle: tyro.conf.Positional[str]  # folder of a bundle or run
    spec: tyro.conf.Positional[str]  # the pictures, as for train
    split: str | None = (
        None  # train, val or test; by default test, else val, else held-out, else all
    )
    out: str | None = None  # folder for report.html and metrics.json
    batch: int = 64  # pictures at once
    workers: int | None = None  # processes that decode
    device: str | None = None  # cuda, mps or cpu
    threads: int | None = None  # CPU threads
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
    device: str | None = None  # cuda, mps or cpu
    threads: int | None = None  # CPU threads
    json: bool = False  # one JSON object a line
    debug: bool = False  # show where an error comes from


def demo(options: Demo) -> int:
    from vitlab import runs

    config = TrainConfig(
        model="vit-ti16", size=(28,), patch=7, width=96, depth=4, heads=4, mlp_width=192,
        batch=128, lr=3e-3, crop=None, budget=options.budget, out=options.out, overwrite=True,
    )  # fmt: skip
    bundle = runs.train("sample", config)
    scores = runs.evaluate_into(bundle, "sample", "test", Path(options.out), batch=250)
    print(f"\n{scores.metrics.line()}")
    print(f"report: {options.out}/report.html\n\ntry next:")
    print(f"  vitlab predict {options.out} PICTURE...")
    print(f"  vitlab evaluate {options.out} fashion-mnist --out {options.out}-full")
    print("  vitlab train PHOTOS/ --model vit-ti16 --size 128 --budget 10min --out runs/mine")
    return 0


def models(options: Models) -> int:
    from fnmatch import fnmatch

    import torch

    from vitlab.models.vit import ViT, macs
    from vitlab.models.zoo import MODELS

    chosen = {name: c for name, c in MODELS.items() if fnmatch(name, options.pattern)}
    if not chosen:
        raise ValueError(f"no model matches {options.pattern!r}; `vitlab models` lists all")
    for name, config in chosen.items():
        with torch.device("meta"):
            parameters = sum(p.numel() for p in ViT(config).parameters())
        h, w = config.image
        row = {"name": name, "parameters": parameters, "macs": macs(config), "image": [h, w]}
        if options.json:
            print(json.dumps(row))
        else:
            print(f"{name:<12} {parameters:>12,} parameters {macs(config) / 1e9:>8.2f} GMACs"
                  f" at {h} x {w}")  # fmt: skip
    return 0


def train(options: Train) -> int:
    from vitlab import runs

    config = TrainConfig(**{f.name: getattr(options, f.name) for f in fields(TrainConfig)})
    bundle = runs.train(options.spec, config)
    if options.json:
        print(json.dumps({"out": options.out, "metrics": bundle.card.metrics}))
    else:
        print(f"{_score(bundle.card.metrics)}report: {options.out}/report.html")
    return 0


def _score(metrics: dict[str, Any]) -> str:
    if not metrics:
        return "trained without validation pictures; "
    low, high = metrics["top1_interval"]
    return (
        f"accuracy {metrics['top1']:.2%} on {metrics['n']:,} pictures of {metrics['scored_on']}"
        f" (95 % interval {low:.2%} to {high:.2%}); "
    )


def evaluate(options: Evaluate) -> int:
    from vitlab import runs
    from vitlab.evaluation import scoring

    bundle = _load(options.bundle, options.device)
    how = {"batch": options.batch, "workers": options.workers or 0}
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

    bundle = _load(options.bundle, options.device)
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
            print(json.dumps(answer), flush=True)
        elif p.error is None:
            print(f"{p.file}: {p.label} ({p.probability:.1%})", flush=True)
        else:
            print(f"{p.file}: error: {p.error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


VERBS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "demo": (Demo, demo),
    "models": (Models, models),
    "train": (Train, train),
    "evaluate": (Evaluate, evaluate),
    "predict": (Predict, predict),
}


def _load(path: str, device: str | None) -> Any:
    from vitlab.training import machine
    from vitlab.weights import bundle as bundles

    bundle = bundles.load(path)
    bundle.model.to(machine.device(device))
    return bundle


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code: 0 done, 1 the work failed, 2 the call was wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"vitlab {version('vitlab')}")
        return 0
    verb = arguments.pop(0)
    try:
        if verb not in VERBS:
            near = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0)[0]
            raise ValueError(f"unknown command {verb!r}: did you mean {near}?")
        kind, command = VERBS[verb]
        options = _parse(kind, verb, arguments)
    except ValueError as e:
        return _fail(e, 2)
    _settle(getattr(options, "threads", None))
    try:
        return command(options)
    except Exception as e:
        if options.debug:
            raise
        return _explain(e)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _overview() -> str:
    lines = ["usage: vitlab COMMAND ...", "", "The Vision Transformer, complete.", "", "commands:"]
    for verb, (kind, _) in VERBS.items():
        lines.append(f"  {verb:<10} {(kind.__doc__ or '').splitlines()[0]}")
    return "\n".join([*lines, "", "`vitlab COMMAND --help` shows the options of one."])


def _parse(kind: type, verb: str, arguments: list[str]) -> Any:
    """Options from flags; what tyro draws as a box becomes one line."""
    words = {"true": "--{}", "yes": "--{}", "false": "--no-{}", "no": "--no-{}"}
    switches = {f.name.replace("_", "-") for f in fields(kind) if f.type in (bool, "bool")}
    given: list[str] = []
    for word in arguments:  # `--flip False` and `--crop none` mean what they say
        last = given[-1].removeprefix("--") if given else ""
        if last in switches and word.lower() in words:
            given[-1] = words[word.lower()].format(last)
        else:
            given.append(
                "None" if word == "none" and given[-1:] and given[-1][:2] == "--" else word
            )
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(kind, prog=f"vitlab {verb}", args=given, description=kind.__doc__)
    except SystemExit as e:
        if e.code == 0:
            raise
        raise ValueError(_one_line(box.getvalue())) from None


def _one_line(box: str) -> str:
    text = " ".join(re.findall(r"│ (.*?) *│", box)) or box
    text = re.sub(r"\s*For full helptext.*", "", re.sub(r"─+", ";", text))
    return re.sub(r"\s*;\s*", "; ", re.sub(r"\s+", " ", text)).strip(" ;")


def _settle(threads: int | None) -> None:
    """Threads of this process and how they wait, before torch loads."""
    # Spinning threads cost 7 x when anything else runs on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads or cores()))
    handler = logging.Handler()
    handler.emit = lambda record: print(record.getMessage(), file=sys.stderr)  # type: ignore[method-assign]
    logger = logging.getLogger("vitlab")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


def _explain(error: Exception) -> int:
    """One line for an error, and the exit code."""
    from vitlab.data.decode import Unreadable
    from vitlab.training.loop import Stopped

    if isinstance(error, Stopped):
        return _fail(f"{error}; the same command resumes", 128 + error.number)
    if isinstance(error, BrokenPipeError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  whoever read our output has gone
        return 1
    wrong_call = isinstance(error, (ValueError, FileNotFoundError))
    return _fail(error, 2 if wrong_call and not isinstance(error, Unreadable) else 1)


def _fail(error: object, code: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    known = isinstance(error, (str, ValueError, OSError, FloatingPointError))
    print(f"vitlab: {text}{'' if known else ' (--debug shows where)'}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
