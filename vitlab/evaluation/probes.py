"""Probes: how good are a model's features, with nothing of it trained.

Few-shot as the paper has it (section 4.1): a linear map to targets of plus and minus 1 by
regularised least squares in closed form, after evaluators/fewshot_lsr.py of big_vision. Nearest
neighbours by cosine. A linear classifier by L-BFGS, its strength chosen on held-out pictures.
All of them work on features [N, D] and labels [N], in float64.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from vitlab.data import loader
from vitlab.data.sources import Source
from vitlab.data.writing import written
from vitlab.models.vit import ViT
from vitlab.weights.bundle import Bundle

RIDGE = 2.0**10  # the one value that the originals' configuration uses
CONSTANT = 100.0  # the bias as a feature, so large that the ridge hardly weighs on it
STRENGTHS = tuple(10.0**e for e in range(-4, 5))  # of the linear probe, as scikit-learn's C


@dataclass(frozen=True)
class Features:
    """What a model says of the pictures of a source."""

    x: np.ndarray  # [N, D] float32
    y: np.ndarray  # [N] int64

    def __len__(self) -> int:
        return len(self.y)


# Features ----------------------------------------------------------------------------------------


def features(
    bundle: Bundle, source: Source, *, layer: int | None = None, pool: str | None = None,
    batch: int = 64, workers: int = 0, cache: Path | None = None,
) -> Features:  # fmt: skip
    """Run the model over a source, without its head; unreadable pictures are left out.

    Args:
        layer: take the tokens that leave this block (1 ... L, or -1 for the last, 0 for those that
            enter the first), without the final norm. None: the representation that the head sees.
        pool: token or mean, for a `layer`; None: the model's own.
        cache: folder where features are kept and found again, by the sha256 of weights,
            configuration and pictures' names.

    Raises ValueError for a layer or token that the model does not have, or several labels.
    """
    if source.many is not None:
        raise ValueError(f"{source.spec}: has several labels a picture; probes take one")
    model = bundle.model
    if layer is not None or pool is not None:
        if not isinstance(model, ViT):
            raise ValueError("--layer and --pool need a Vision Transformer")
        depth = model.config.depth
        if layer is not None and not -depth - 1 <= layer <= depth:
            raise ValueError(f"--layer must lie between {-depth - 1} and {depth}, not {layer}")
        if pool == "token" and not model.config.class_token:
            raise ValueError("--pool token: the model has no class token")
    path = cache and cache / f"{_key(bundle, source, layer, pool)}.safetensors"
    if path and path.exists():
        try:
            kept = load_file(path)
            return Features(kept["x"], kept["y"])
        except (SafetensorError, OSError, KeyError):
            path.unlink()  # damaged: made again
    xs, ys = [], []
    for x, part in represented(bundle, source, layer, pool, batch=batch, workers=workers):
        xs.append(x)
        ys.append(part.labels.numpy())
    if not xs:
        raise ValueError(f"{source.spec} {source.split}: no readable picture")
    found = Features(np.concatenate(xs), np.concatenate(ys))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written(path) as aside:
            save_file({"x": found.x, "y": found.y}, aside)
    return found


@torch.inference_mode()
def represented(
    bundle: Bundle, source: Source, layer: int | None = None, pool: str | None = None, *,
    batch: int = 64, workers: int = 0,
) -> Iterator[tuple[np.ndarray, loader.Batch]]:  # fmt: skip
    """Features [B, D] float32 and whose they are, batch by batch; for the rest see `features`."""
    model = bundle.model.eval()
    weight = next(model.parameters())
    for part in loader.eval_batches(source, bundle.preprocess, batch=batch, workers=workers):
        if part.rows:
            out = _represent(model, part.images.to(weight.device, weight.dtype), layer, pool)
            yield out.float().cpu().numpy(), part


def _represent(model: nn.Module, images: Tensor, layer: int | None, pool: str | None) -> Tensor:
    """[B, D]: what the head sees, or one layer's tokens pooled."""
    if not isinstance(model, ViT):
        return model.represent(images)  # type: ignore[operator]
    if layer is None and pool is None:
        *_, z = model.layers(images)
        y = model.represent(z)
        return y if model.hidden is None else torch.tanh(model.hidden(y))  # the pre-logits
    index = -1 if layer is None else layer
    index += model.config.depth + 1 if index < 0 else 0
    z = next(z for i, z in enumerate(model.layers(images)) if i == index)
    token = (pool or model.config.pool) == "token"
    return z[:, 0] if token else z[:, model.config.prefix :].mean(dim=1)


def _key(bundle: Bundle, source: Source, layer: int | None, pool: str | None) -> str:
    digest = hashlib.sha256(
        repr((bundle.model.config, bundle.preprocess, source.spec, source.split, layer, pool,
              source.classes)).encode("utf-8", "surrogateescape")
    )  # fmt: skip
    for name, tensor in bundle.model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    for row in range(len(source)):
        digest.update(source.id(row).encode("utf-8", "surrogateescape"))
    digest.update(source.labels.tobytes())
    return digest.hexdigest()


# Few shots ---------------------------------------------------------------------------------------


def few_shot_rows(labels: np.ndarray, seed: int, shots: Sequence[int]) -> dict[int, np.ndarray]:
    """Which training rows each number of shots takes: the first ones of a shuffle of each class.

    A class with fewer gives what it has. One generator serves all classes in turn, so that more
    shots contain the fewer.
    """
    rng = np.random.default_rng(seed)
    shuffled = [rng.permutation(np.flatnonzero(labels == c)) for c in range(labels.max() + 1)]
    return {k: np.concatenate([rows[:k] for rows in shuffled]) for k in shots}


def few_shot(train: Features, rows: np.ndarray, classes: int, ridge: float = RIDGE) -> "Linear":
    """Regularised least squares on some rows, solved exactly.

    Each feature is standardised by the mean and std (+ 1e-5) of these rows, a constant feature
    carries the bias, targets are +1 for the class and -1 for the others.
    """
    x = train.x[rows].astype(np.float64)
    mean, std = x.mean(axis=0), x.std(axis=0) + 1e-5
    x = np.column_stack([(x - mean) / std, np.full(len(x), CONSTANT)])
    y = 2 * np.eye(classes)[train.y[rows]] - 1
    if x.shape[0] >= x.shape[1]:
        weights = np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ y)
    else:
        weights = x.T @ np.linalg.solve(x @ x.T + ridge * np.eye(x.shape[0]), y)
    return Linear(mean=mean, std=std, weights=weights[:-1], bias=CONSTANT * weights[-1])


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A classifier on standardised features."""

    mean: np.ndarray  # [D] float64
    std: np.ndarray  # [D] float64
    weights: np.ndarray  # [D, K] float64
    bias: np.ndarray  # [K] float64

    def scores(self, x: np.ndarray) -> np.ndarray:
        """[N, D] -> [N, K]."""
        scores: np.ndarray = (x.astype(np.float64) - self.mean) / self.std @ self.weights
        return scores + self.bias

    def accuracy(self, test: Features) -> float:
        """Share of the features whose highest score is their label's."""
        return float((self.scores(test.x).argmax(axis=1) == test.y).mean())


# Nearest neighbours ------------------------------------------------------------------------------


def nearest(train: Features, x: np.ndarray, k: int, chunk: int = 1024) -> np.ndarray:
    """Rows of the k training features of largest cosine: [N, D] -> [N, k] int64, nearest first."""
    if not 1 <= k <= len(train):
        raise ValueError(f"--k must lie between 1 and the {len(train)} pictures, not {k}")
    base = _unit(train.x)
    found = []
    for at in range(0, len(x), chunk):
        cosine = _unit(x[at : at + chunk]) @ base.T
        best = np.argpartition(-cosine, k - 1, axis=1)[:, :k]
        order = np.argsort(-np.take_along_axis(cosine, best, axis=1), axis=1, kind="stable")
        found.append(np.take_along_axis(best, order, axis=1))
    return np.concatenate(found)


def knn(train: Features, test: Features, k: int, classes: int) -> float:
    """Accuracy of the majority among the k nearest; the first class of those that tie."""
    votes = train.y[nearest(train, test.x, k)]
    counts = np.apply_along_axis(np.bincount, 1, votes, minlength=classes)
    return float((counts.argmax(axis=1) == test.y).mean())


def _unit(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


# Linear ------------------------------------------------------------------------------------------


def linear(train: Features, classes: int, strength: float) -> Linear:
    """Multinomial logistic regression by L-BFGS on standardised features.

    Minimises `strength` * sum of cross entropies + |weights|^2 / 2, bias free: the objective of
    scikit-learn's LogisticRegression with C = strength.
    """
    mean, std = train.x.mean(axis=0, dtype=np.float64), train.x.std(axis=0, dtype=np.float64) + 1e-5
    x, y = torch.from_numpy((train.x - mean) / std), torch.from_numpy(train.y)
    weights = torch.zeros(x.shape[1], classes, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights, bias], max_iter=1000, tolerance_grad=1e-9, tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    scale = 1 / (strength * len(train))

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(x @ weights + bias, y) + weights.square().sum() * scale / 2
        value.backward()
        return value

    optimizer.step(loss)
    return Linear(mean=mean, std=std, weights=weights.detach().numpy(), bias=bias.detach().numpy())


def choose_strength(
    train: Features, classes: int, seed: int, strengths: Sequence[float] = STRENGTHS
) -> float:
    """The strength that scores best on a random tenth held out of the training features."""
    rows = np.random.default_rng([seed, 5]).permutation(len(train))
    cut = max(1, len(rows) // 10)
    held_out, rest = (Features(train.x[r], train.y[r]) for r in (rows[:cut], rows[cut:]))
    found = [linear(rest, classes, s).accuracy(held_out) for s in strengths]
    return strengths[int(np.argmax(found))]
