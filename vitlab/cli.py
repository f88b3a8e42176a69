"""The command line: one thin command per verb. Torch is imported only once a verb runs."""

import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from vitlab.commands import data, probe, train, use, weights
from vitlab.flags import nearest, parse
from vitlab.training.machine import cores, talks

# Two words name a command of a group, such as `data check`.
VERBS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "demo": (train.Demo, train.demo),
    "models": (weights.Models, weights.models),
    "data check": (data.Check, data.check),
    "data preview": (data.Preview, data.preview),
    "data pack": (data.Pack, data.pack),
    "train": (train.Train, train.train),
    "evaluate": (use.Evaluate, use.evaluate),
    "probe": (probe.Probe, probe.probe),
    "predict": (use.Predict, use.predict),
    "inspect": (weights.Inspect, weights.inspect),
    "convert": (weights.Convert, weights.convert),
    "push": (weights.Push, weights.push),
}


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
    if arguments and f"{verb} {arguments[0]}" in VERBS:
        verb = f"{verb} {arguments.pop(0)}"
    group = [name for name in VERBS if name.startswith(f"{verb} ")]
    if group and (not arguments or arguments[0] in ("-h", "--help")):
        print(_overview(f"{verb} "))
        return 0 if arguments else 2
    try:
        if verb not in VERBS:
            verb = f"{verb} {arguments[0]}" if group else verb
            known = group or sorted({name.split()[0] for name in VERBS})
            raise ValueError(f"unknown command {verb!r}: did you mean {nearest(verb, known)}?")
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


def _overview(group: str = "") -> str:
    """What `--help` prints: the commands, or those of a group."""
    head = [] if group else ["The Vision Transformer, complete.", ""]
    lines = [f"usage: vitlab {group}COMMAND ...", "", *head, "commands:"]
    for verb, (kind, _) in VERBS.items():
        if verb.startswith(group):
            lines.append(f"  {verb:<12} {(kind.__doc__ or '').splitlines()[0]}")
    return "\n".join([*lines, "", f"`vitlab {group}COMMAND --help` shows the options of one."])


def _settle(threads: int | None) -> None:
    """Threads of this process and how they wait, before torch loads."""
    if threads is not None and threads < 1:
        raise ValueError(f"--threads must be at least 1, not {threads}")
    # Threads that spin for long cost 7 x when anything else runs on the machine; threads that
    # sleep at once cost a small model 1.5 x. So: some microseconds of spinning, then sleep.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if threads is not None or "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun sets 1 for all
        os.environ["OMP_NUM_THREADS"] = str(threads or cores())
    os.environ.setdefault("OMP_NUM_THREADS", str(cores()))
    handler = logging.Handler()
    handler.emit = lambda record: print(record.getMessage(), file=sys.stderr)  # type: ignore[method-assign]
    logger = logging.getLogger("vitlab")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if talks() else logging.ERROR)


def _explain(error: Exception) -> int:
    """One line for an error, and the exit code."""
    if isinstance(error, BrokenPipeError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  whoever read our output has gone
        return 1

    from vitlab.data.decode import Unreadable
    from vitlab.training.loop import Stopped
    from vitlab.training.parallel import Followed

    if isinstance(error, Followed):
        return 1
    if isinstance(error, Stopped) and not talks():
        return 128 + error.number
    if isinstance(error, Stopped):
        return _fail(f"{error}; the same command resumes", 128 + error.number)
    if type(error).__name__ == "OutOfMemoryError":  # torch's; training says more
        return _fail("out of memory; a smaller --batch needs less", 1)
    wrong = isinstance(error, ValueError) and not isinstance(error, Unreadable)
    same = wrong or isinstance(error, FloatingPointError)  # in every process
    if same and not talks():
        return 2 if wrong else 1
    return _fail(error, 2 if wrong or isinstance(error, FileNotFoundError) else 1)


def _fail(error: object, code: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    known = isinstance(error, (str, ValueError, OSError, FloatingPointError, MemoryError))
    print(f"vitlab: {text}{'' if known else ' (--debug shows where)'}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
