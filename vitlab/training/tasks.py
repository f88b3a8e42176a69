"""What a picture's labels ask of a model: the loss, weights of classes, balanced sampling."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitlab.data import multilabel, sources
from vitlab.data.loader import Decoded
from vitlab.data.sources import Source
from vitlab.training.config import TrainConfig


def loss(
    config: TrainConfig, logits: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """The mean loss of a batch, as the options say.

    Args:
        config: its task, loss and label_smoothing count.
        logits: [B, K] float.
        targets: [B] int64; or [B, K] float, where they are mixed or multi-label.
        weights: [K] of the classes; a mixed picture has the mean of its classes' weights.

    Softmax gives the cross-entropy, smoothed towards 1 / K. Sigmoid gives one binary
    cross-entropy a class, summed over classes as big_vision does; smoothed towards 1 / K, or for
    multi-label towards 1 / 2. The mean is over pictures, so a batch in parts gives the same.
    """
    smoothing = config.label_smoothing
    if config.loss == "softmax" and config.task == "single-label":
        if weights is None:
            return F.cross_entropy(logits, targets, label_smoothing=smoothing)
        each = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    else:
        soft = targets if targets.ndim == 2 else F.one_hot(targets, logits.shape[1])
        middle = 0.5 if config.task == "multi-label" else 1 / logits.shape[1]
        soft = soft.to(logits.dtype) * (1 - smoothing) + smoothing * middle
        each = F.binary_cross_entropy_with_logits(logits, soft, reduction="none").sum(dim=1)
    if weights is not None:
        own = weights[targets] if targets.ndim == 1 else targets.to(weights.dtype) @ weights
        each = each * own
    return each.mean()


def suit(config: TrainConfig, source: Source) -> Source:
    """The source with labels as the task has them; ValueError for several where it has one."""
    if config.task == "multi-label":
        return multilabel.as_many(source)
    if source.many is not None:
        raise ValueError(f"{source.spec}: has several labels a picture; give --task multi-label")
    return source


def class_weights(source: Source) -> Tensor:
    """[K] float32: in inverse proportion to each class's pictures, 1 in the mean over pictures."""
    counts = np.bincount(source.labels, minlength=len(source.classes))
    there = counts > 0
    weights = np.where(there, len(source) / (there.sum() * np.maximum(counts, 1)), 0.0)
    return torch.from_numpy(weights.astype(np.float32))


def balanced(source: Source, seed: int) -> Source:
    """The source with pictures of the smaller classes repeated, until all are as large.

    Every picture stays in every epoch; which are repeated once more depends on the seed alone.
    """
    rng = np.random.default_rng([seed, 5])
    by_class = [np.flatnonzero(source.labels == k) for k in range(len(source.classes))]
    most = max(map(len, by_class))
    rows = []
    for own in filter(len, by_class):
        times, more = divmod(most, len(own))
        rows += [np.tile(own, times), rng.permutation(own)[:more]]
    chosen = np.concatenate(rows)
    if isinstance(source.load, Decoded):  # one copy of each picture, whoever names it
        images = [source.load.images[row] for row in chosen.tolist()]
        return replace(sources.select(source, chosen, source.split), load=Decoded(images))
    return sources.select(source, chosen, source.split)
