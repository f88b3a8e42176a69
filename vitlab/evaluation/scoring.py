"""Score a bundle on a source: every picture exactly once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitlab.data import loader, multilabel, sources
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources import Source
from vitlab.evaluation.metrics import Metrics, count
from vitlab.evaluation.multilabel import count_many
from vitlab.weights import labels
from vitlab.weights.bundle import Bundle, Card


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a pass over a source leaves, row by row, besides the metrics."""

    metrics: Metrics
    rows: np.ndarray  # [N] rows of the source that were scored
    probabilities: np.ndarray  # [N, K] float32
    skipped: list[tuple[str, str]]  # ids of unreadable pictures, and why


def evaluate(
    bundle: Bundle,
    source: str | Source,
    *,
    split: str | None = None,
    batch: int = 64,
    workers: int = 0,
) -> Metrics:
    """Score a bundle on a spec or source; labels are matched by class name.

    Args:
        bundle: what `vitlab.load` gives.
        source: a spec (then test, else val, else the run's held-out pictures, else all are
            scored) or a source, scored whole.
        split: score this split of the spec instead.
        batch: pictures at once. workers: processes that decode.

    Raises ValueError for an unknown split or classes the model does not know.
    """
    chosen = choose(source, split, bundle.card) if isinstance(source, str) else source
    return score(
        bundle.model, bundle.preprocess, match(chosen, bundle), batch=batch, workers=workers,
        thresholds=thresholds_of(bundle.card),
    ).metrics  # fmt: skip


def match(source: Source, bundle: Bundle) -> Source:
    """The source with labels as the bundle's model gives them: its classes, one or several.

    Raises ValueError for classes that the model does not know, or several labels where it has one.
    """
    source = replace(source, classes=labels.translate(source.classes, bundle.classes))
    source = sources.match_classes(source, bundle.classes)
    if bundle.card.task == "multi-label":
        return multilabel.as_many(source)
    if source.many is not None:
        raise ValueError(f"{source.spec}: has several labels a picture, the model gives one")
    return source


def thresholds_of(card: Card) -> Mapping[str, float] | None:
    """Of a multi-label bundle, by class: chosen in training, on validation pictures."""
    return card.metrics.get("thresholds", {}) if card.task == "multi-label" else None


def choose(spec: str, split: str | None, card: Card) -> Source:
    """The part of a spec that an evaluation scores."""
    parts = sources.open_spec(spec)
    if split is not None:
        if split not in parts:
            raise ValueError(f"{spec}: has no split {split}; it has {', '.join(parts)}")
        return parts[split]
    for name in ("test", "val"):
        if name in parts:
            return parts[name]
    source = parts.get("train") or next(iter(parts.values()))
    held_out = set(card.data.get("held_out_ids") or ())
    if held_out and _name(spec) == _name(str(card.data.get("spec"))):
        rows = [i for i in range(len(source)) if source.id(i) in held_out]
        if rows:
            return sources.select(source, np.array(rows), "held-out")
    return source


def _name(spec: str) -> str:
    """What a spec names, from wherever it is looked at: photos, photos/ and ../photos agree."""
    return Path(spec).expanduser().resolve().name


@torch.inference_mode()
def score(
    model: nn.Module,
    preprocess: Preprocess,
    source: Source,
    *,
    batch: int = 64,
    workers: int = 0,
    precision: torch.dtype = torch.float32,
    tick: Callable[[int], None] = lambda n: None,
    share: tuple[int, int] = (0, 1),
    gather: Callable[[Any], list[Any]] = lambda own: [own],
    thresholds: Mapping[str, float] | None = None,
) -> Scores:
    """Run a model over a whole source.

    Args:
        model: images [B, 3, H, W] -> logits [B, K]; left in the mode it came in.
        source: labels index the model's outputs.
        precision: torch.bfloat16 runs it under autocast.
        tick: called with the pictures done after each batch; may raise to stop.
        share: (rank, number of processes): each scores every n-th row, and all get all scores.
        gather: a value -> the values of all processes.
        thresholds: of a multi-label model, by class; chosen from these pictures where not given.
    """
    weight = next(model.parameters())
    was_training = model.training
    model.eval()
    logits, labels, rows, skipped = [], [], [], []
    try:
        for part in loader.eval_batches(
            source, preprocess, batch=batch, workers=workers, share=share
        ):
            with torch.autocast(weight.device.type, precision, precision != torch.float32):
                out = model(part.images.to(weight.device, weight.dtype))
            logits.append(out.float().cpu())
            labels.append(part.labels)
            rows += part.rows
            skipped += [(source.id(row), why) for row, why in part.skipped]
            tick(len(part.rows))
    finally:
        model.train(was_training)
    found = gather((torch.cat(logits), torch.cat(labels), rows, skipped))
    rows = [row for part in found for row in part[2]]
    skipped = [row for part in found for row in part[3]]
    in_order = torch.from_numpy(np.argsort(rows, kind="stable"))
    stacked = torch.cat([part[0] for part in found])[in_order]
    truth = torch.cat([part[1] for part in found])[in_order].numpy()
    about = (source.classes, f"{source.spec} {source.split}", len(skipped))
    if source.many is None:
        metrics, probabilities = count(stacked.numpy(), truth, *about), stacked.softmax(dim=1)
    else:
        metrics = count_many(stacked.numpy(), truth, *about, thresholds)
        probabilities = stacked.sigmoid()
    return Scores(
        metrics=metrics, rows=np.array(rows)[in_order], skipped=skipped,
        probabilities=probabilities.numpy(),
    )  # fmt: skip
