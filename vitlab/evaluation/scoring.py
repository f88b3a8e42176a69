"""Score a bundle on a source: every picture exactly once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vitlab.data import loader, sources
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources import Source
from vitlab.evaluation.metrics import Metrics, count
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
    chosen = sources.match_classes(chosen, bundle.classes)
    return score(bundle.model, bundle.preprocess, chosen, batch=batch, workers=workers).metrics


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
) -> Scores:
    """Run a model over a whole source.

    Args:
        model: images [B, 3, H, W] -> logits [B, K]; left in the mode it came in.
        source: labels index the model's outputs.
        precision: torch.bfloat16 runs it under autocast.
        tick: called with the pictures done after each batch; may raise to stop.
    """
    if batch < 1 or workers < 0:
        raise ValueError(f"batch must be at least 1, workers 0, not {batch} and {workers}")
    weight = next(model.parameters())
    was_training = model.training
    model.eval()
    logits, labels, rows, skipped = [], [], [], []
    try:
        for part in loader.eval_batches(source, preprocess, batch=batch, workers=workers):
            with torch.autocast(weight.device.type, precision, precision != torch.float32):
                out = model(part.images.to(weight.device, weight.dtype))
            logits.append(out.float().cpu())
            labels.append(part.labels)
            rows += part.rows
            skipped += [(source.id(row), why) for row, why in part.skipped]
            tick(len(part.rows))
    finally:
        model.train(was_training)
    stacked = torch.cat(logits)
    metrics = count(
        stacked.numpy(), torch.cat(labels).numpy(), source.classes,
        f"{source.spec} {source.split}", len(skipped),
    )  # fmt: skip
    return Scores(
        metrics=metrics, rows=np.array(rows), skipped=skipped,
        probabilities=stacked.softmax(dim=1).numpy(),
    )  # fmt: skip
