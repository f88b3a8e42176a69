"""The command line: one thin command per verb. Torch is imported only once a verb runs."""

import contextlib
import difflib
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

from vitlab.training.config import Text, TrainConfig, Whole, convert
from vitlab.training.machine import cores

POSITIONAL = get_args(tyro.conf.Positional[str])[1]  # how tyro marks what has no flag
SWITCH = {"true": True, "yes": True, "false": False, "no": False}


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a small Vision Transformer on the embedded sample, and show what it learned."""

    out: str = "runs/demo"  # folder of the run; an older demo there is replaced
    budget: str = "170s"  # training time
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


def demo(options: Demo) -> int:
    from vitlab import runs

    config = TrainConfig(
        model="vit-ti16", size=(28,), patch=7, width=96, depth=4, heads=3, mlp_width=192,
        batch=128, lr=3e-3, crop=None, held_out=0.05, budget=options.budget, out=options.out,
        overwrite=True,
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

    chosen = {name: c for name, c in MODELS.items() if fnmatch(name, options.pattern)}
    if not chosen:
        raise ValueError(f"no model matches {options.pattern!r}; `vitlab models` lists all")
    for name, config in chosen.items():
        h, w = config.image
        count, cost = parameters(config), macs(config)
        if options.json:
            print(json.dumps({"name": name, "parameters": count, "macs": cost, "image": [h, w]}))
        else:
            print(f"{name:<12} {count:>12,} parameters {cost / 1e9:>8.2f} GMACs at {h} x {w}")
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


VERBS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "demo": (Demo, demo),
    "models": (Models, models),
    "train": (Train, train),
    "evaluate": (Evaluate, evaluate),
    "predict": (Predict, predict),
}


def _load(options: Evaluate | Predict) -> Any:
    """The bundle, on its device."""
    import torch

    from vitlab.training import machine
    from vitlab.weights import bundle as bundles

    where = machine.device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    bundle = bundles.load(options.bundle)
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
            raise ValueError(f"unknown command {verb!r}: did you mean {_nearest(verb, VERBS)}?")
        kind, command = VERBS[verb]
        options = _parse(kind, verb, arguments)
        if options is None:  # help was shown
            return 0
        _settle(getattr(options, "threads", None))
    except ValueError as e:
        return _fail(e, 2)
    try:
        return command(options)
    except Exception as e:
        if options.debug:
            raise
        return _explain(e)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _nearest(word: str, known: Iterable[str]) -> str:
    return difflib.get_close_matches(word, known, n=1, cutoff=0)[0]


def _overview() -> str:
    lines = ["usage: vitlab COMMAND ...", "", "The Vision Transformer, complete.", "", "commands:"]
    for verb, (kind, _) in VERBS.items():
        lines.append(f"  {verb:<10} {(kind.__doc__ or '').splitlines()[0]}")
    return "\n".join([*lines, "", "`vitlab COMMAND --help` shows the options of one."])


def _parse(kind: type, verb: str, arguments: list[str]) -> Any:
    """Options from flags; None if help was asked for. Raises ValueError, in one line."""
    if any(word in ("-h", "--help") for word in arguments):
        with contextlib.suppress(SystemExit):
            tyro.cli(kind, prog=f"vitlab {verb}", args=["--help"], description=kind.__doc__,
                     config=(tyro.conf.PositionalMetavarFromFieldName,))  # fmt: skip
        return None
    hints = get_type_hints(kind)
    positional = [name for name, hint in get_type_hints(kind, include_extras=True).items()
                  if POSITIONAL in get_args(hint)]  # fmt: skip
    known = {f"--{name.rstrip('_').replace('_', '-')}": name for name in hints}
    known |= {f"--no-{o[2:]}": name for o, name in known.items() if hints[name] is bool}
    values: dict[str, Any] = {}
    loose: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        option = option.replace("_", "-")
        if word == "--":
            loose, words = loose + words, []
        elif not option.startswith("-"):
            loose.append(word)
        elif option not in known or known[option] in positional:
            near = _nearest(option, [o for o in known if known[o] not in positional])
            raise ValueError(f"unknown option {option}: did you mean {near}?")
        else:
            words = [value, *words] if equals else words
            try:
                values[known[option]] = _take(words, hints[known[option]], bool(equals))
            except ValueError as e:
                raise ValueError(f"{option} {e}") from None
            if option.startswith("--no-") and hints[known[option]] is bool:
                values[known[option]] = not values[known[option]]
    for name in positional:
        if loose:
            several = get_origin(hints[name]) is tuple
            values[name] = tuple(loose) if several else loose[0]
            loose = [] if several else loose[1:]
    if loose:
        raise ValueError(f"unexpected: {' '.join(loose)}")
    needed = [f.name for f in fields(kind) if f.default is MISSING]
    if not values.keys() >= set(needed):
        names = " ".join(needed).upper()
        raise ValueError(f"{verb} needs {names}; see vitlab {verb} --help")
    return kind(**values)


def _take(words: list[str], hint: Any, given: bool) -> Any:
    """The value of an option from the words that follow it, which are used up; `given` after =."""
    if hint is bool:
        if given and words[0].lower() not in SWITCH:
            raise ValueError(f"is on or off: true or false, not {words[0]!r}")
        return SWITCH[words.pop(0).lower()] if words and words[0].lower() in SWITCH else True
    if not words or (words[0].startswith("--") and not given):
        raise ValueError("needs a value")
    kind = next((k for k in get_args(hint) if k is not NoneType), hint)
    if words[0] == "none" and NoneType in get_args(hint) and kind is not str:
        words.pop(0)
        return None
    if get_origin(kind) is not tuple:
        return convert(words.pop(0), hint)
    _, *others = get_args(kind)
    following = list(takewhile(lambda w: not w.startswith("--"), words))
    if others == [...]:  # as many as can be read as one
        following = [following[0], *takewhile(lambda w: w.isdigit(), following[1:])]
    else:
        following = following[: 1 + len(others)]
    del words[: len(following)]
    return convert(following, hint)


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
    from vitlab.data.decode import Unreadable
    from vitlab.training.loop import Stopped

    if isinstance(error, Stopped):
        return _fail(f"{error}; the same command resumes", 128 + error.number)
    if isinstance(error, BrokenPipeError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  whoever read our output has gone
        return 1
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
