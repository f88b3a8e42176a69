"""vitlab: the Vision Transformer, complete. Public names load on first use, torch with them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitlab.evaluation.scoring import evaluate as evaluate
    from vitlab.models.zoo import create as create
    from vitlab.runs import train as train
    from vitlab.training.config import TrainConfig as TrainConfig
    from vitlab.weights.bundle import Bundle as Bundle
    from vitlab.weights.formats import convert as convert
    from vitlab.weights.formats import load as load
    from vitlab.weights.formats import save as save
    from vitlab.weights.predictor import predict as predict

_HOME = {
    "create": "vitlab.models.zoo",
    "load": "vitlab.weights.formats",
    "save": "vitlab.weights.formats",
    "convert": "vitlab.weights.formats",
    "Bundle": "vitlab.weights.bundle",
    "train": "vitlab.runs",
    "TrainConfig": "vitlab.training.config",
    "evaluate": "vitlab.evaluation.scoring",
    "predict": "vitlab.weights.predictor",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vitlab' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
