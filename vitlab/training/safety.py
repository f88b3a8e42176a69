"""When memory runs out, or a loss is not finite."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from vitlab.data.loader import Batch
from vitlab.data.writing import written

if TYPE_CHECKING:
    from vitlab.training.loop import Job

log = logging.getLogger("vitlab")
BAD_BATCH = "bad-batch.safetensors"  # in the folder of a run that ended for it


@contextmanager
def out_of_memory(job: Job) -> Iterator[None]:
    """Memory that ran out, as one line with what would help."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        if not isinstance(e, (torch.OutOfMemoryError, MemoryError)) and (
            "can't allocate memory" not in str(e)  # the CPU has no error class of its own
        ):
            raise
        c, (h, w), parts = job.config, job.preprocess.size, _finer(job)
        same = f"--accumulate {parts} (the same result), " if parts else ""
        raise MemoryError(
            f"out of memory: --batch {c.batch} in {c.accumulate} parts, images of {h} x {w},"
            f" precision {job.plan.precision}; start anew with {same}--precision bf16, or a smaller"
            " --batch or --size"
        ) from e


def more_parts(job: Job) -> int | None:
    """Into how many parts the batch is cut after memory ran out; None: into no more.

    With several processes all of them must agree, and one that ran out cannot ask the others.
    """
    return _finer(job) if job.ranks.world == 1 else None


def _finer(job: Job) -> int | None:
    """Twice as many parts of a process's share of a batch, or the next number that divides it."""
    share = job.config.batch // job.ranks.world
    enough = range(2 * job.config.accumulate, share + 1)
    return next((parts for parts in enough if share % parts == 0), None)


def cut(job: Job, parts: int) -> Job:
    """The job with its batch in so many parts: the same global batch in less memory."""
    log.warning("out of memory: each batch of %d goes in %d parts from here on", job.config.batch,
                parts)  # fmt: skip
    job.optimizer.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return replace(job, config=replace(job.config, accumulate=parts))


def keep_batch(job: Job, batch: Batch, step: int, out: Path) -> None:
    """Leave a batch for study: uint8 images, labels, and the names of its pictures."""
    about = {"step": str(step), "ids": json.dumps([job.train.id(row) for row in batch.rows])}
    with written(out / BAD_BATCH) as aside:
        save_file(
            {"images": batch.images.contiguous(), "labels": batch.labels.contiguous()}, aside, about
        )
