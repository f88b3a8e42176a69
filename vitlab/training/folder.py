"""The folder of a run: held by one process, recorded in run.yaml, resumed only as it was asked."""

import csv
import fcntl
import io
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

import torch
import yaml

from vitlab.data.sources import printable
from vitlab.data.writing import write_text
from vitlab.training import config as configs
from vitlab.training.config import TrainConfig
from vitlab.training.loop import Job, Plan

log = logging.getLogger("vitlab")
# Options that do not change the result, but for its last bits.
FREE = {"out", "overwrite", "workers", "save_every", "shard", "recompute", "tensorboard"}


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Make the folder and hold it, so that one run at a time writes there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as e:
        why = "is a file" if out.is_file() else (e.strerror or str(e)).lower()
        raise ValueError(f"--out {out}: {why}; choose another folder") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--out {out}: another run is writing there") from None
        except OSError:
            pass  # a file system without locks
        try:
            if not os.access(out, os.W_OK):
                raise ValueError(f"--out {out}: cannot be written to; choose another folder")
            yield
        finally:
            with suppress(OSError):  # what was refused before the first file leaves nothing behind
                out.rmdir()
    finally:
        os.close(handle)


def recorded(out: Path, config: TrainConfig) -> dict[str, Any] | None:
    """run.yaml of the run to resume; refuses a folder of anything else, naming what differs.

    With --overwrite nothing is resumed, but only a run is ever overwritten.
    """
    path = out / "run.yaml"
    if not path.exists():
        others = [p.name for p in out.iterdir() if not p.name.startswith(".")]
        if others:
            what = "a bundle that is no run" if "config.json" in others else "other files"
            raise ValueError(f"--out {out}: holds {what} ({min(others)}); choose another folder")
        return None
    if config.overwrite:
        return None
    content = path.read_bytes()
    try:
        record = dict(yaml.safe_load(content.decode("utf-8")))
        asked = configs.to_dict(configs.from_dict(dict(record["asked"]), str(path)))
        record["plan"] = _plan(record["plan"])
        then, _ = str(record["torch"]), record["data"]
    except Exception as e:  # YAML raises everything from IndexError to RecursionError
        why = " ".join(str(e).split())[:200] or type(e).__name__
        raise ValueError(f"{path}: damaged ({why}); --overwrite starts anew") from e
    if what := differences(asked, configs.to_dict(config)):
        raise ValueError(
            f"--out {out}: holds a run with other options ({what}); give the same,"
            " another folder, or --overwrite"
        )
    if then != _torch():
        log.warning("began with torch %s, this is %s: the last bits may differ", then, _torch())
    return record


def differences(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Options that are others and change the result, in one line; empty where there are none."""
    return printable("; ".join(
        f"{key} was {then[key]}, now {now[key]}"
        for key in now if key not in FREE and then[key] != now[key]
    ))  # fmt: skip


def _plan(values: dict[str, Any]) -> dict[str, Any]:
    """A recorded plan, each value of its type and possible."""
    hints = get_type_hints(Plan)
    plan = Plan(**{name: configs.convert(value, hints[name]) for name, value in values.items()})
    if min(plan.threads, plan.steps, plan.eval_every) < 1 or min(plan.workers, plan.lr) < 0:
        raise ValueError("the plan holds impossible numbers")
    return asdict(plan)


def refuse_inside(out: Path, spec: str) -> None:
    """A run among class folders would be taken for one of them; beside train/ it may stand."""
    photos = Path(spec).expanduser().resolve()
    if not photos.is_dir() or photos not in out.resolve().parents:
        return
    if not any(p.is_dir() and p.name.lower().startswith("train") for p in photos.iterdir()):
        raise ValueError(f"--out {out}: lies among the class folders of {spec}")


def begin(out: Path, config: TrainConfig, job: Job, fingerprint: str) -> None:
    """Put a new run in the place of an older one: run.yaml has all that was asked and chosen."""
    clear(out)
    record = {
        "asked": configs.to_dict(config),
        "plan": asdict(job.plan),
        "model": asdict(job.model.config),
        "preprocess": asdict(job.preprocess),
        "data": fingerprint,
        "torch": _torch(),
    }
    write_text(out / "run.yaml", yaml.safe_dump(record, sort_keys=False))


def _torch() -> str:
    return torch.__version__.partition("+")[0]


def clear(out: Path) -> None:
    """Remove an older run.

    config.json goes first, so that what is left is never taken for whole; run.yaml last, so that
    it is still known as a run.
    """
    (out / "config.json").unlink(missing_ok=True)
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("model.safetensors", "metrics.jsonl", "metrics.json", "skipped.csv",
                 "bad-batch.safetensors", "report.html", "README.md", "run.yaml"):  # fmt: skip
        (out / name).unlink(missing_ok=True)


def write_skipped(out: Path, unreadable: dict[str, str]) -> None:
    """skipped.csv: unreadable pictures and why, sorted by name."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", "reason"])
    writer.writerows(sorted(unreadable.items()))
    write_text(out / "skipped.csv", text.getvalue())
    if unreadable:
        log.warning("%d skipped as unreadable, see %s", len(unreadable), out / "skipped.csv")
