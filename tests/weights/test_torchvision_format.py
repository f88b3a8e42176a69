"""`vitlab.weights.torchvision`: against torchvision itself, in float64, both ways."""

from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer

from vitlab.weights import formats
from vitlab.weights.report import Refused


def create(**changes: Any) -> nn.Module:
    options = {
        "image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 3, "hidden_dim": 48,
        "mlp_dim": 96, "num_classes": 5, **changes,
    }  # fmt: skip
    return checkpoints.disturb(VisionTransformer(**options))


def save(path: Path, tensors: dict[str, Tensor]) -> Path:
    torch.save(tensors, path)
    return path


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ""])
@pytest.mark.parametrize("hidden", [None, 24])
def test_both_ways(hidden: int | None, suffix: str, tmp_path: Path) -> None:
    theirs = create(representation_size=hidden)
    tensors = theirs.state_dict()
    bundle, report = formats.read(save(tmp_path / "theirs.pth", tensors), heads=3)
    assert len(report.read) == len(tensors)
    config = bundle.model.config
    assert (config.activation, config.norm_eps, config.head_hidden) == ("gelu", 1e-6, hidden or 0)
    p = bundle.preprocess
    assert (p.mean[0], p.std[0], p.crop, p.interpolation) == (0.485, 0.229, 0.875, "bilinear")
    out = tmp_path / f"ours{suffix}"
    assert formats.write(bundle, out, "torchvision").notes == ()
    found = checkpoints.tensors(out)
    checkpoints.same(dict(tensors), found)
    loaded = create(representation_size=hidden, num_classes=5)
    loaded.load_state_dict(found)
    x = torch.randn(2, 3, 32, 32).double()
    expected = checkpoints.run(theirs.double(), x)
    assert checkpoints.gap(expected, checkpoints.run(loaded.double(), x)) <= 1e-9
    back, _ = formats.read(out)  # heads, too, are told by what vitlab wrote
    checkpoints.same_state(bundle, back)
    assert checkpoints.gap(expected, checkpoints.run(bundle.model.double(), x)) <= 1e-9


def test_legacy_names_return_as_they_came(tmp_path: Path) -> None:
    tensors = create().state_dict()
    legacy = {
        k.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): v
        for k, v in tensors.items()
    }
    bundle, _ = formats.read(save(tmp_path / "old.pth", legacy), heads=3)
    plain, _ = formats.read(save(tmp_path / "new.pth", dict(tensors)), heads=3)
    checkpoints.same_state(bundle, plain)
    formats.write(bundle, tmp_path / "again.pth", "torchvision")
    checkpoints.same(legacy, checkpoints.tensors(tmp_path / "again.pth"))


def test_what_torchvision_computes_otherwise_is_said(tmp_path: Path) -> None:
    bundle = checkpoints.bundle(activation="gelu_tanh", norm_eps=1e-5)
    notes = formats.write(bundle, tmp_path / "x.pth", "torchvision").notes
    assert any("activation gelu, this model gelu_tanh" in note for note in notes)
    assert any("norm_eps 1e-06, this model 1e-05" in note for note in notes)
    checkpoints.same_state(bundle, formats.read(tmp_path / "x.pth")[0])
    with pytest.raises(TypeError):  # what is beside the tensors is no part of the state dict
        VisionTransformer.load_state_dict(tmp_path)
    state = torch.load(tmp_path / "x.pth", weights_only=True)
    create().load_state_dict(state)


def test_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    stem = [ConvStemConfig(8, 3, 2), ConvStemConfig(16, 3, 2), ConvStemConfig(24, 3, 2)]
    tensors = create(conv_stem_configs=stem).state_dict()
    with pytest.raises(ValueError, match="0 of"):
        formats.read(save(tmp_path / "stem.pth", tensors), heads=3)
    for changes, what in (
        ({"registers": 2}, "registers"),
        ({"layer_scale": 0.1}, "LayerScale"),
        ({"pool": "mean"}, "mean pooling"),
        ({"norm": "after_pool"}, "norm after pooling"),
        ({"image": (32, 64)}, "no squares"),
        ({"pool": "mean", "class_token": False}, "without class token"),
    ):
        with pytest.raises(Refused, match=what):
            formats.write(checkpoints.bundle(**changes), tmp_path / "x.pth", "torchvision")
    with pytest.raises(ValueError, match=r"torchvision is written to \.pth"):
        formats.write(checkpoints.bundle(), tmp_path / "x.npz", "torchvision")
