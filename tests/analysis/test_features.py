"""`vitlab.analysis.features`: against timm and transformers in float64; what is refused."""

from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from vitlab.analysis.features import Features, extract
from vitlab.models.resnet import BiT, BiTConfig, StemConfig
from vitlab.models.vit import ViT, ViTConfig
from vitlab.weights import formats

SMALL = ViTConfig(image=(16, 32), patch=8, width=24, depth=3, heads=2, mlp_width=48, classes=5)


def disturbed(module: nn.Module, seed: int = 0) -> nn.Module:
    """No tensor at its initial value, norms and LayerScale included; evaluating."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.empty(p.shape).normal_(std=0.1, generator=generator))
    return module.eval()


def model(**changes: Any) -> ViT:
    return disturbed(ViT(replace(SMALL, **changes))).double()


def images(size: tuple[int, int], n: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, *size, generator=generator, dtype=torch.float64)


def same(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 0.05, "all but constant: a comparison would say nothing"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


# Other libraries


TIMM: dict[str, tuple[str, dict[str, Any]]] = {  # architecture, what differs from it
    "plain": ("vit_tiny_patch16_224", {}),
    "registers": (
        "vit_tiny_patch16_224", {"reg_tokens": 3, "init_values": 0.1, "no_embed_class": True},
    ),
    "no class token": (
        "vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg", "fc_norm": False},
    ),
    "hybrid": ("vit_tiny_r_s16_p8_224", {}),
}  # fmt: skip


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("kind", TIMM)
def test_against_timm(kind: str, norm: bool, tmp_path: Path) -> None:
    """Their block i, counted from 0, is our layer i + 1."""
    name, changes = TIMM[kind]
    size, options = (64, 96), {} if kind == "hybrid" else {"patch_size": (8, 16)}
    theirs = disturbed(timm.create_model(name, img_size=size, depth=3, **options, **changes))
    tensors = {k: v.contiguous() for k, v in theirs.state_dict().items()}
    save_file(tensors, tmp_path / "a.safetensors")
    pool = {"pool": "mean"} if kind == "no class token" else {}
    bundle, _ = formats.read(tmp_path / "a.safetensors", heads=3, stored=size, **pool)
    x, ours, theirs = images(size), bundle.model.double(), theirs.double()
    with torch.no_grad():
        found = extract(ours, x, (1, 3), norm=norm)
        if kind == "no class token":
            maps = theirs.get_intermediate_layers(x, [0, 2], reshape=True, norm=norm)
            expected = [(m, None) for m in maps]
        else:
            expected = theirs.forward_intermediates(
                x, [0, 2], return_prefix_tokens=True, norm=norm, intermediates_only=True
            )
    grid = (2, 3) if kind == "hybrid" else (8, 6)
    assert [f.layer for f in found] == [1, 3]
    for f, (patches, prefix) in zip(found, expected, strict=True):
        assert f.patches.shape == (2, 192, *grid)
        same(f.patches, patches)
        assert f.registers.shape == (2, changes.get("reg_tokens", 0), 192)
        if prefix is None:
            assert f.class_token is None
        else:
            same(f.class_token, prefix[:, 0])
            torch.testing.assert_close(f.registers, prefix[:, 1:], rtol=0, atol=1e-9)


def test_against_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer i is `hidden_states[i]`; with the norm, the last is `last_hidden_state`."""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=3, image_size=32, patch_size=8,
        mlp_ratio=2, num_register_tokens=2,
    )  # fmt: skip
    theirs = disturbed(transformers.Dinov2WithRegistersModel(config))
    theirs.save_pretrained(tmp_path)
    ours = formats.read(tmp_path)[0].model.double()
    x = images((32, 32))
    with torch.no_grad():
        expected = theirs.double()(x, output_hidden_states=True)
        found = extract(ours, x, range(4), norm=False)
        (last,) = extract(ours, x)
    for f, z in zip(found, expected.hidden_states, strict=True):
        same(f.class_token, z[:, 0])
        same(f.registers, z[:, 1:3])
        same(f.patches, z[:, 3:].transpose(1, 2).reshape(2, 48, 4, 4))
    same(last.class_token, expected.last_hidden_state[:, 0])
    same(last.patches.flatten(2).mT, expected.last_hidden_state[:, 3:])


# What it promises


def test_each_patch_lies_where_it_lies_in_the_image() -> None:
    """A map of 2 x 4: what is changed at row 1, column 2 is found there, in z_0."""
    ours, x = model(), images((16, 32))
    changed = x.clone()
    changed[:, :, 8:16, 16:24] += 1
    (one,), (other,) = (extract(ours, y, 0, norm=False) for y in (x, changed))
    assert one.patches.shape == (2, 24, 2, 4)
    moved = (one.patches != other.patches).any(dim=(0, 1)).nonzero()
    assert moved.tolist() == [[1, 2]]


@pytest.mark.parametrize("changes", [
    {}, {"registers": 2}, {"class_token": False, "pool": "mean"}, {"pool": "mean", "registers": 1},
    {"norm": "after_pool", "pool": "mean"}, {"classes": 0},
    {"stem": StemConfig(layers=(1,), width=32), "patch": 2},
])  # fmt: skip
def test_all_tokens_are_there_once_and_lead_to_the_output(changes: dict[str, Any]) -> None:
    ours, x = model(**changes), images((16, 32))
    (f,) = extract(ours, x, norm=False)
    parts = [] if f.class_token is None else [f.class_token[:, None]]
    z = torch.cat([*parts, f.registers, f.patches.flatten(2).mT], dim=1)
    assert torch.equal(ours.classify(ours.represent(z)), ours(x))
    (normed,) = extract(ours, x)
    assert torch.equal(normed.patches.flatten(2).mT, ours.norm(z)[:, ours.config.prefix :])


def test_layers_are_numbered_as_a_sequence_is() -> None:
    ours, x = model(), images((16, 32))
    z = list(ours.layers(x))
    for asked in range(-4, 4):
        (f,) = extract(ours, x, asked, norm=False)
        assert f.layer == asked % 4
        assert torch.equal(f.class_token, z[asked][:, 0])
    several = extract(ours, x, (3, 0, -1, 3))
    assert [f.layer for f in several] == [3, 0, 3, 3]


def test_nothing_is_computed_behind_the_last_layer() -> None:
    ours, x, run = model(), images((16, 32)), []
    for i, block in enumerate(ours.blocks):
        block.register_forward_hook(lambda *_, i=i: run.append(i))
    extract(ours, x, (2, 0))
    assert run == [0, 1]  # each once
    extract(ours, x, 0)
    assert run == [0, 1]
    extract(ours, x, (-1, 1))
    assert run == [0, 1, 0, 1, 2]


def test_gradients_flow_and_stop_where_they_should() -> None:
    ours, x = model(), images((16, 32)).requires_grad_()
    head = nn.Conv2d(48, 4, 1).double()
    maps = torch.cat([f.patches for f in extract(ours, x, (1, 2))], dim=1)
    head(maps).square().mean().backward()
    assert x.grad is not None
    assert x.grad.any()
    got = {name for name, p in ours.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"patch.weight", "positions", "blocks.1.mlp.up.weight", "norm.weight"} <= got
    assert not any(name.startswith(("blocks.2.", "head.")) for name in got)


def test_mode_dtype_and_randomness_are_the_callers() -> None:
    ours, x = model(dropout=0.5).to(torch.bfloat16), images((16, 32)).to(torch.bfloat16)
    (f,) = extract(ours, x)
    assert f.patches.dtype == torch.bfloat16
    assert not ours.training
    assert torch.equal(extract(ours, x)[0].patches, f.patches)
    ours.train()
    one, other = (extract(ours, x)[0].patches for _ in range(2))
    assert ours.training
    assert not torch.equal(one, other)
    with pytest.raises(FrozenInstanceError):
        f.layer = 0  # type: ignore[misc]
    assert isinstance(f, Features)


# What is refused


def test_a_resnet_has_no_tokens() -> None:
    with pytest.raises(ValueError, match="those of a Vision Transformer, not of a BiT"):
        extract(BiT(BiTConfig(layers=(1,), width=32)), torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize(("layers", "said"), [
    (4, r"no layer 4: the model has 0 to 3, or -4 to -1"),
    ((0, -5), r"no layer -5"),
    ((), "no layer is asked for"),
])  # fmt: skip
def test_layers_that_there_are_not(layers: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        extract(model(), images((16, 32)), layers)


def test_images_of_another_size() -> None:
    with pytest.raises(ValueError, match=r"16 x 32 .*got 32 x 32; model\.resize\(\(32, 32\)\)"):
        extract(model(), images((32, 32)))
