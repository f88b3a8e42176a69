"""From pictures of any kind to class probabilities. Torch and Pillow alone."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.data import decode
from vitlab.data.preprocess import apply

if TYPE_CHECKING:
    from vitlab.weights.bundle import Bundle


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The answer for one picture: a label, or the reason why there is none."""

    file: str  # the path, or "image 0", "image 1", ... for pictures in memory
    label: str | None = None  # the most probable class
    probability: float | None = None  # of that class
    top: tuple[tuple[str, float], ...] = ()  # the best classes, best first
    labels: tuple[str, ...] = ()  # of a multi-label model: all classes above their thresholds
    error: str | None = None  # why the picture could not be read


def predict(bundle: Bundle, images: Any, *, top: int = 5, batch: int = 32) -> list[Prediction]:
    """Classify pictures; one entry a picture, in input order, failures included.

    Args:
        bundle: what `vitlab.load` gives; its model runs where it is (CPU or GPU).
        images: one picture or an iterable of them: a path, a folder (all pictures below it, in
            sorted order), a PIL image, an array or tensor (see `decode.from_array`; a batch
            [B, 3, H, W] or [B, H, W, 3] counts as B pictures).
        top: how many of the best classes each entry lists (at most all of them).
        batch: pictures that go through the model at once.

    Raises ValueError for a model without classes; a picture that cannot be read is an entry, as is
    a folder without pictures.
    """
    return list(stream(bundle, images, top=top, batch=batch))


def stream(bundle: Bundle, images: Any, *, top: int = 5, batch: int = 32) -> Iterator[Prediction]:
    """As `predict`, entry by entry: a folder of any size needs the memory of one batch."""
    if not bundle.classes:
        raise ValueError("the model has no classes to predict: it gives features")
    if top < 1 or batch < 1:
        raise ValueError("top and batch must be at least 1")
    pictures = _named(images)
    while chunk := list(islice(pictures, batch)):
        tensors: list[Tensor] = []
        errors: dict[int, str] = {}
        for i, (_, picture) in enumerate(chunk):
            try:
                tensors.append(apply(bundle.preprocess, pixels(picture)))
            except (ValueError, OSError) as e:
                errors[i] = getattr(e, "strerror", None) or str(e)
        rows = iter(probabilities(bundle, torch.stack(tensors)).tolist() if tensors else [])
        for i, (name, _) in enumerate(chunk):
            if i in errors:
                yield Prediction(file=name, error=errors[i])
            else:
                row = next(rows)
                yield replace(_rank(name, row, bundle.classes, top), labels=_above(bundle, row))


def _rank(name: str, row: list[float], classes: tuple[str, ...], top: int) -> Prediction:
    if not all(map(math.isfinite, row)):
        return Prediction(file=name, error="the model's output is not finite")
    best = sorted(range(len(row)), key=lambda c: -row[c])[:top]
    ranked = tuple((classes[c], row[c]) for c in best)
    return Prediction(file=name, label=ranked[0][0], probability=ranked[0][1], top=ranked)


def _above(bundle: Bundle, row: list[float]) -> tuple[str, ...]:
    """Classes whose threshold, chosen in training, a multi-label model's answer reaches."""
    if bundle.card.task != "multi-label":
        return ()
    least = bundle.card.metrics.get("thresholds", {})
    return tuple(c for c, p in zip(bundle.classes, row, strict=True) if p >= least.get(c, 0.5))


@torch.inference_mode()
def probabilities(bundle: Bundle, images: Tensor) -> Tensor:
    """Preprocessed images [B, 3, H, W] -> probabilities [B, K], float32 on the CPU.

    They sum to 1, but for a multi-label model, where each class has its own yes or no.
    """
    model = bundle.model
    weight = next(model.parameters())
    was_training = model.training
    try:
        logits = model.eval()(images.to(weight.device, weight.dtype))
    finally:
        model.train(was_training)
    logits = logits.float()
    several = bundle.card.task == "multi-label"
    return (logits.sigmoid() if several else logits.softmax(dim=1)).cpu()


def pixels(picture: Any) -> np.ndarray:
    """Any one picture -> [h, w, 3] uint8."""
    if isinstance(picture, Exception):
        raise picture
    if isinstance(picture, (str, os.PathLike, bytes)):
        return decode.decode(picture)
    if isinstance(picture, Image.Image):
        return decode.to_rgb(picture)
    return decode.from_array(picture)


def _named(images: Any) -> Iterator[tuple[str, Any]]:
    """(name, picture) for each picture; folders are walked, batches taken apart."""
    count = 0
    for item in _each(images):
        if isinstance(item, (str, os.PathLike)):
            found: Sequence[Any] = _pictures(Path(item)) if os.path.isdir(item) else [item]
            yield from ((str(p), p) for p in found)
            if not found:
                yield str(item), ValueError("no pictures in this folder")
        else:
            yield f"image {count}", item
            count += 1


def _each(images: Any) -> Iterable[Any]:
    if isinstance(images, (str, os.PathLike, bytes, Image.Image)):
        return [images]
    if hasattr(images, "shape"):  # an array or tensor: a picture, or a batch of them
        return images if len(images.shape) == 4 else [images]
    return images


def _pictures(folder: Path) -> list[Path]:
    return sorted(
        p for p in folder.rglob("*")
        if p.suffix.lower() in decode.EXTENSIONS
        and not any(part.startswith(".") for part in p.relative_to(folder).parts)
    )  # fmt: skip
