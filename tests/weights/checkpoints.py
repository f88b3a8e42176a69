"""What the tests of foreign weights share: small models, files of theirs, comparisons."""

from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitlab.data.preprocess import Preprocess
from vitlab.models import zoo
from vitlab.models.vit import ViTConfig
from vitlab.weights.bundle import Bundle

FILES = {  # of each format, the forms it is written in
    "vitlab": ["a"],
    "google": ["a.npz", "a"],
    "big_vision": ["a.npz", "a"],
    "timm": ["a.safetensors", "a.pth", "a"],
    "huggingface": ["a"],
    "torchvision": ["a.pth", "a.safetensors", "a"],
}
EVERYWHERE = [(name, file) for name, files in FILES.items() for file in files]
SMALL: dict[str, Any] = {
    "image": 32, "patch": 8, "width": 48, "depth": 2, "heads": 3, "mlp_width": 96, "classes": 5,
}  # fmt: skip


def disturb(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every tensor moved away from its initial value, norms and LayerScale included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.empty(p.shape).normal_(std=0.1, generator=generator))
    return module.eval()


def bundle(dtype: torch.dtype = torch.float32, **changes: Any) -> Bundle:
    """A small bundle, none of whose tensors sits at its initial value."""
    return wrap(ViTConfig(**{**SMALL, **changes}), dtype)


def wrap(config: zoo.Config, dtype: torch.dtype = torch.float32) -> Bundle:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = disturb(zoo.build(config)).to(dtype)
    classes = tuple(f"class {i}" for i in range(config.classes))
    return Bundle(model=model, preprocess=Preprocess(size=config.image), classes=classes)


def images(bundle: Bundle, n: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    dtype = next(bundle.model.parameters()).dtype
    size = bundle.model.config.image
    return torch.randn(n, 3, *size, generator=generator, dtype=torch.float64).to(dtype)


@torch.no_grad()
def run(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def gap(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    assert one.std() > 0.05, "all but constant: a comparison would say nothing"
    return (one.double() - other.double()).abs().max().item()


def tensors(path: Path) -> dict[str, Any]:
    """What a file holds, read without vitlab: name -> array or tensor."""
    if path.is_dir():
        path = next(path / n for n in ("model.safetensors", "model.npz", "model.pth")
                    if (path / n).exists())  # fmt: skip
    if path.suffix == ".npz":
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    if path.suffix == ".safetensors":
        return dict(load_file(path))
    return dict(torch.load(path, weights_only=True))


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same names, and of each the same bytes, type and shape."""
    assert set(one) == set(other)
    for name, value in one.items():
        found = other[name]
        assert value.dtype == found.dtype, name
        assert value.shape == found.shape, name
        if isinstance(value, Tensor):
            value, found = (t.contiguous().view(torch.uint8).numpy() for t in (value, found))
        assert value.tobytes() == found.tobytes(), name


def same_state(one: Bundle, other: Bundle) -> None:
    """Two models with the same configuration and the same bits."""
    assert one.model.config == other.model.config
    same(one.model.state_dict(), other.model.state_dict())


# timm's models, and files of theirs

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}


def timm_model(name: str = "vit_base_patch16_224", **changes: Any) -> nn.Module:
    options = changes if name != "vit_base_patch16_224" else {**TINY, "num_classes": 5, **changes}
    return disturb(timm.create_model(name, **options))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.contiguous() for k, v in model.state_dict().items()}


def save(path: Path, tensors: dict[str, Any]) -> Path:
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    return path
