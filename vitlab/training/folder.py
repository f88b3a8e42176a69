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
from typing import Any

import torch
import yaml

from vitlab.training import config as configs
from vitlab.training.config import TrainConfig
from vitlab.training.loop import Job, Plan
from vitlab.weights.bundle import write_text

log = logging.getLogger("vitlab")
FREE = {"out", "overwrite", "workers", "save_every"}  # options that do not change the result


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Make the folder and hold it, so that one run at a time writes there."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: is a file")
    out.mkdir(parents=True, exist_ok=True)
    handle = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--out {out}: another run is writing there") from None
        yield
    finally:
        os.close(handle)
        with suppress(OSError):  # what was refused before the first file leaves nothing behind
            out.rmdir()


def recorded(out: Path, config: TrainConfig) -> dict[str, Any] | None:
    """run.yaml of the run to resume; refuses another run's folder, naming what differs."""
    path = out / "run.yaml"
    if not path.exists():
        if (out / "config.json").exists():
            raise ValueError(f"--out {out}: holds a bundle that is no run; choose another folder")
        return None
    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8"))
        asked = configs.to_dict(configs.from_dict(record["asked"], str(path)))
        Plan(**record["plan"])
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError) as e:
        raise ValueError(f"{path}: damaged ({e}); --overwrite starts anew") from e
    now = configs.to_dict(config)
    changed = [
        f"{key} was {asked[key]}, now {now[key]}"
        for key in now if key not in FREE and asked[key] != now[key]
    ]  # fmt: skip
    if changed:
        raise ValueError(
            f"--out {out}: holds a run with other options ({'; '.join(changed)}); give the same,"
            " another folder, or --overwrite"
        )
    return dict(record)


def write_record(out: Path, config: TrainConfig, job: Job, fingerprint: str) -> None:
    record = {
        "asked": configs.to_dict(config),
        "plan": asdict(job.plan),
        "model": _plain(asdict(job.model.config)),
        "preprocess": _plain(asdict(job.preprocess)),
        "data": fingerprint,
        "torch": torch.__version__.partition("+")[0],
    }
    write_text(out / "run.yaml", yaml.safe_dump(record, sort_keys=False))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def clear(out: Path) -> None:
    """Remove an older run; config.json first, so that what is left is never taken for whole."""
    for name in ("config.json", "run.yaml", "model.safetensors", "metrics.jsonl", "skipped.csv",
                 "report.html", "README.md"):  # fmt: skip
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)


def write_skipped(out: Path, unreadable: dict[str, str]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", "reason"])
    writer.writerows(sorted(unreadable.items()))
    write_text(out / "skipped.csv", text.getvalue())
    if unreadable:
        log.warning("%d files skipped, see %s", len(unreadable), out / "skipped.csv")
