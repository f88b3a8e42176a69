"""The command line: one thin command per verb. Torch is imported only once a verb runs."""

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vitlab.flags import nearest, parse
from vitlab.training.config import Text, TrainConfig, Whole
from vitlab.training.machine import cores


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a small Vision Transformer on the embedded sample, and show what it learned."""

    out: str = "runs/demo"  # folder of the run; an older demo there is replaced
    epochs: float = 28  # passes over the training part
    debug: bool = False  # show where an error comes from


@dataclass(frozen=True, kw_only=True)
class Models:
    """Names of models with parameters and multiply-accumulates, and of published weights."""

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


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Tell what a file of weights is: format, model, grid, classes, an all-zero head."""

    file: tyro.conf.Positional[str]  # weights of any public format, a bundle or run
    json: bool = False  # everything, every tensor's shape included, as one JSON object
    debug: bool = False  # show where an error comes from


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Read weights of one format and write them in another, without loss."""

    source: tyro.conf.Positional[str]  # weights of any public format, a bundle or run
    destination: tyro.conf.Positional[str]  # a file, by its suffix, or else a folder
    to: Literal["vitlab", "google", "big_vision", "timm", "huggingface", "torchvision"]
    """format to write"""
    drop: Text = None  # pattern of tensors to do without, such as 'head.*'
    heads: Whole = None  # attention heads, where the file does not say
    json: bool = False  # print both reports as one JSON object
    debug: bool = False  # show where an error comes from


@dataclass(frozen=True, kw_only=True)
class Push:
    """Upload a bundle or run to the Hugging Face hub."""

    bundle: tyro.conf.Positional[str]  # folder of a bundle or run
    repository: tyro.conf.Positional[str]  # org/name
    private: bool = False  # do not show it to everybody
    debug: bool = False  # show where an error comes from


def demo(options: Demo) -> int:
    from vitlab import runs

    config = TrainConfig(
        model="vit-ti16", size=(28,), patch=7, width=96, depth=4, heads=4, mlp_width=192,
        batch=128, lr=3e-3, weight_decay=0.1, crop=None, mixup=0.1, cutmix=1.0, held_out=0.02,
        epochs=options.epochs, out=options.out, overwrite=True,
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

    from vitlab.models.cost import macs, parameters
    from vitlab.models.zoo import MODELS
    from vitlab.weights import public

    chosen = {name: c for name, c in MODELS.items() if fnmatch(name, options.pattern)}
    published = [p for p in public.TABLE.values() if fnmatch(p.name, options.pattern)]
    if not chosen and not published:
        raise ValueError(f"no model matches {options.pattern!r}; `vitlab models` lists all")
    for name, config in chosen.items():
        h, w = config.image
        count, cost = parameters(config), macs(config)
        if options.json:
            print(json.dumps({"name": name, "parameters": count, "macs": cost, "image": [h, w]}))
        else:
            print(f"{name:<12} {count:>12,} parameters {cost / 1e9:>8.2f} GMACs at {h} x {w}")
    if published and not options.json:
        print("\npublished weights, for --from, inspect and convert:")
    for p in published:
        if options.json:
            print(json.dumps(asdict(p)))
        else:
            score = f"top-1 {p.top1:g} % ({p.by})" if p.top1 else ""
            print(f"{p.name}  {p.image} px, {p.classes:,} classes, {p.licence}  {score}".rstrip())
    return 0


def train(options: Train) -> int:
    from vitlab import runs

    config = TrainConfig(**{f.name: getattr(options, f.name) for f in fields(TrainConfig)})
    bundle = runs.train(options.spec, config)
    if options.json:
        print(json.dumps({"out": options.out, "metrics": bundle.card.metrics}))
    else:
        print(_score(bundle.card.metrics, options.out))
    return 0


def _score(metrics: dict[str, Any], out: str | None) -> str:
    if not metrics:
        return f"trained without validation pictures: {out}"
    low, high = metrics["top1_interval"]
    return (
        f"accuracy {metrics['top1']:.2%} on {metrics['n']:,} pictures of {metrics['scored_on']}"
        f" (95 % interval {low:.2%} to {high:.2%}); report: {out}/report.html"
    )


def evaluate(options: Evaluate) -> int:
    from vitlab import runs
    from vitlab.evaluation import scoring

    bundle = _load(options)
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

    bundle = _load(options)
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


def inspect(options: Inspect) -> int:
    from vitlab.weights import formats

    found = formats.inspect(options.file)
    if options.json:
        print(json.dumps(found))
        return 1 if "reason" in found else 0
    if "reason" in found:
        raise ValueError(found["reason"])
    model, classes = found["model"], found["classes"]
    shown = {
        "format": found["format"],
        "sha256": found["sha256"],
        "parameters": f"{found['parameters']:,} in {len(found['tensors'])} tensors",
        "model": ", ".join(f"{k} {v}" for k, v in model.items() if v not in (None, 0, False)),
        "grid": found["grid"] and "{} x {} patches".format(*found["grid"]),
        "preprocess": ", ".join(f"{k} {v}" for k, v in found["preprocess"].items()),
        "classes": f"{len(classes)}: {', '.join(classes[:5])}{', ...' if len(classes) > 5 else ''}",
        "licence": found["source"].get("licence"),
        "dropped": ", ".join(found["dropped"]),
        "notes": "; ".join(found["notes"]),
    }
    for name, value in shown.items():
        if value:
            print(f"{name:<11} {value}")
    return 0


def convert(options: Convert) -> int:
    from vitlab.weights import formats

    how = {} if options.heads is None else {"heads": options.heads}
    came, went = formats.convert(
        options.source, options.destination, options.to, drop=options.drop or (), **how
    )
    if options.json:
        print(json.dumps({"read": came.to_dict(), "written": went.to_dict()}))
    else:
        print(
            "\n".join(["read", *came.lines(), f"written to {options.destination}", *went.lines()])
        )
    return 0


def push(options: Push) -> int:
    from vitlab.weights import hub

    print(hub.push(Path(options.bundle), options.repository, options.private))
    return 0


VERBS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "demo": (Demo, demo),
    "models": (Models, models),
    "train": (Train, train),
    "evaluate": (Evaluate, evaluate),
    "predict": (Predict, predict),
    "inspect": (Inspect, inspect),
    "convert": (Convert, convert),
    "push": (Push, push),
}


def _load(options: Evaluate | Predict) -> Any:
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code: 0 done, 1 the work failed, 2 the call was wrong."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file's name need not be text
            stream.reconfigure(errors="backslashreplace")
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
            raise ValueError(f"unknown command {verb!r}: did you mean {nearest(verb, VERBS)}?")
        kind, command = VERBS[verb]
        options = parse(kind, verb, arguments)
        if options is None:  # help was shown
            return 0
        _settle(getattr(options, "threads", None))
    except ValueError as e:
        return _fail(e, 2)
    except BrokenPipeError as e:
        return _explain(e)
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


def _settle(threads: int | None) -> None:
    """Threads of this process and how they wait, before torch loads."""
    if threads is not None and threads < 1:
        raise ValueError(f"--threads must be at least 1, not {threads}")
    # Spinning threads cost 7 x when anything else runs on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(cores()))
    handler = logging.Handler()
    handler.emit = lambda record: print(record.getMessage(), file=sys.stderr)  # type: ignore[method-assign]
    logger = logging.getLogger("vitlab")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


def _explain(error: Exception) -> int:
    """One line for an error, and the exit code."""
    if isinstance(error, BrokenPipeError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  whoever read our output has gone
        return 1

    from vitlab.data.decode import Unreadable
    from vitlab.training.loop import Stopped

    if isinstance(error, Stopped):
        return _fail(f"{error}; the same command resumes", 128 + error.number)
    if type(error).__name__ == "OutOfMemoryError":  # torch's; training says more
        return _fail("out of memory; a smaller --batch needs less", 1)
    wrong_call = isinstance(error, (ValueError, FileNotFoundError))
    return _fail(error, 2 if wrong_call and not isinstance(error, Unreadable) else 1)


def _fail(error: object, code: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    known = isinstance(error, (str, ValueError, OSError, FloatingPointError, MemoryError))
    print(f"vitlab: {text}{'' if known else ' (--debug shows where)'}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
