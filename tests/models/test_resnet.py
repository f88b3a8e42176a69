"""`vitlab.models.resnet`: hybrids and BiT against the original code, timm and hand-made oracles."""

import json
import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import originals
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlab.models.resnet import BiT, BiTConfig, PostUnit, PreUnit, StdConv, StemConfig, pad_same
from vitlab.models.vit import ViT, ViTConfig

STEM = StemConfig(layers=(1, 1, 1), width=32)  # of the fixture
HYBRID = ViTConfig(
    image=64, patch=1, width=48, depth=2, heads=3, mlp_width=96, classes=10, stem=STEM
)
BIT = BiTConfig(image=64, layers=(2, 1), width=32, classes=5)


def disturbed(model: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model.to(dtype).eval()


# The original code


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hybrid_parity_with_the_original_code(dtype: torch.dtype) -> None:
    case = originals.load("hybrid_r111")
    model, x = case.fill(ViT(HYBRID), dtype)
    with torch.no_grad():
        features = model.stem(x)
        z = list(model.layers(x))
        maps = []
        for block, entering in zip(model.blocks, z, strict=False):
            q, k, _ = block.attention.split(block.norm1(entering))
            maps.append((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1))
        case.check("resnet_out", features.permute(0, 2, 3, 1))
        case.check("embedding", model.patch(features).permute(0, 2, 3, 1))
        case.check("block_outputs", torch.stack(z[1:]))
        case.check("attention", torch.stack(maps))
        case.check("encoded", model.norm(z[-1]))
        case.check("pre_logits", model.represent(z[-1]))
        case.check("logits", model(x))


# timm


@pytest.mark.parametrize(
    ("name", "layers", "patch"),
    [
        ("vit_base_r50_s16_224", (3, 4, 9), 1),
        ("vit_small_r26_s32_224", (2, 2, 2, 2), 1),
        ("vit_tiny_r_s16_p8_224", (), 8),
    ],
)
def test_hybrid_parity_with_timm(name: str, layers: tuple[int, ...], patch: int) -> None:
    import timm

    theirs = disturbed(timm.create_model(name, img_size=(64, 96), depth=1, num_classes=7))
    stem = StemConfig(layers=layers, norm_eps=1e-5, standardize="var", standardize_eps=1e-8)
    width = theirs.embed_dim
    ours = ViT(
        ViTConfig(
            image=(64, 96), patch=patch, width=width, depth=1, heads=width // 64,
            mlp_width=4 * width, classes=7, activation="gelu", stem=stem,
        )
    ).double().eval()  # fmt: skip
    names = {
        "patch_embed.proj": "patch", "patch_embed.backbone.stages": "stem.stages",
        "patch_embed.backbone.stem": "stem", "patch_embed.backbone": "stem",
        "downsample.conv": "project", "downsample.norm": "project_norm", ".blocks.": ".",
        "cls_token": "class_token", "pos_embed": "positions", "attn.qkv": "attention.qkv",
        "attn.proj": "attention.out", "mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down",
    }  # fmt: skip
    ours.load_state_dict(renamed(theirs.state_dict(), names))
    x = torch.rand(2, 3, 64, 96, dtype=torch.float64) * 2 - 1
    x[1] *= 0.01  # faint: epsilons show
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [(64, 64), (75, 62)])
def test_bit_parity_with_timm(size: tuple[int, int]) -> None:
    import timm

    theirs = disturbed(timm.create_model("resnetv2_50x1_bit", num_classes=7))
    ours = BiT(BiTConfig(classes=7, standardize_eps=1e-8)).double().eval()
    names = {
        "stem.conv": "conv", ".blocks.": ".", "downsample.conv": "project", "head.fc": "head",
    }  # fmt: skip
    weights = renamed(theirs.state_dict(), names)
    weights["head.weight"] = weights["head.weight"].flatten(1)
    ours.load_state_dict(weights)
    x = torch.rand(2, 3, *size, dtype=torch.float64) * 2 - 1
    x[1] *= 0.01
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-9)


def renamed(weights: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    for old, new in names.items():
        weights = {k.replace(old, new): v for k, v in weights.items()}
    return weights


# Parts


@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [(8, 9), (7, 7), (5, 12), (1, 2)])
def test_same_padding(kernel: int, stride: int, size: tuple[int, int]) -> None:
    """As TensorFlow documents it: ceil(n / stride) windows, the odd zero at the end."""
    x = torch.rand(2, 3, *size)
    expected = x.numpy()
    for axis, n in ((2, size[0]), (3, size[1])):
        left = n % stride or stride  # of the input, under the last window
        total = max(kernel - left, 0)
        widths = [(0, 0)] * 4
        widths[axis] = (total // 2, total - total // 2)
        expected = np.pad(expected, widths)
    found = pad_same(x, kernel, stride)
    np.testing.assert_array_equal(found, expected)
    if kernel >= stride:
        out = F.max_pool2d(found, kernel, stride)
        assert out.shape[2:] == tuple(math.ceil(n / stride) for n in size)


def test_same_padding_is_asymmetric_at_even_sizes() -> None:
    for kernel, before, after in ((7, 2, 3), (3, 0, 1)):
        row = pad_same(torch.ones(1, 1, 1, 8), kernel, 2).amax(2)[0, 0]
        assert torch.equal(row, torch.tensor([0.0] * before + [1.0] * 8 + [0.0] * after))


@pytest.mark.parametrize(
    ("form", "eps"), [("std", 1e-5), ("var", 1e-10), ("std", 0.3), ("var", 0.3)]
)
def test_standardised_kernels(form: Any, eps: float) -> None:
    config = StemConfig(standardize=form, standardize_eps=eps)
    conv = StdConv(4, 6, 3, config).double()
    with torch.no_grad():
        conv.weight.mul_(torch.rand(6, 1, 1, 1)).add_(0.5)
    w = conv.weight.detach().numpy().reshape(6, -1)
    w = w - w.mean(1, keepdims=True)
    var = (w**2).mean(1, keepdims=True)  # of the population
    w = w / (np.sqrt(var) + eps if form == "std" else np.sqrt(var + eps))
    x = torch.rand(2, 4, 5, 6, dtype=torch.float64)
    expected = F.conv2d(x, torch.from_numpy(w).reshape(6, 4, 3, 3), padding=1)
    torch.testing.assert_close(conv(x), expected, rtol=0, atol=1e-12)
    assert conv.bias is None


def test_the_two_forms_are_not_the_same() -> None:
    std, var = (
        StdConv(4, 6, 3, StemConfig(standardize=form, standardize_eps=0.01))
        for form in ("std", "var")
    )
    var.load_state_dict(std.state_dict())
    x = torch.rand(2, 4, 5, 6)
    assert (std(x) - var(x)).abs().max() > 1e-3


def test_a_fresh_unit_of_a_hybrid_passes_its_input_on() -> None:
    """The last scale of each unit starts at 0."""
    model = ViT(HYBRID)
    units = [m for m in model.modules() if isinstance(m, PostUnit)]
    assert len(units) == 3
    for unit in units:
        assert not unit.norm3.weight.any()
    unit = PostUnit(128, 32, 1, STEM)
    x = torch.rand(2, 128, 5, 6)
    assert unit.project is None
    assert torch.equal(unit(x), x)


def test_initial_norms_and_kernels() -> None:
    for model in (ViT(HYBRID), BiT(BIT)):
        last = {m.norm3 for m in model.modules() if isinstance(m, PostUnit)}
        for module in model.modules():
            if isinstance(module, nn.GroupNorm):
                assert module.num_groups == 32
                assert not module.bias.any()
                assert module in last or (module.weight == 1).all()
            if isinstance(module, StdConv) and module.weight.numel() > 4000:
                std = math.sqrt(1 / module.weight[0].numel())
                assert module.weight.std().item() == pytest.approx(std, rel=0.05)


def test_units_of_bit_project_the_activated_input() -> None:
    unit = disturbed(PreUnit(32, 16, 2, replace(BIT, groups=16)))
    x = torch.randn(2, 32, 6, 8, dtype=torch.float64)
    active = F.relu(unit.norm1(x))
    y = F.relu(unit.norm2(unit.conv1(active)))
    y = unit.conv3(F.relu(unit.norm3(unit.conv2(y))))
    torch.testing.assert_close(unit(x), unit.project(active) + y)
    assert unit(x).shape == (2, 64, 3, 4)
    assert not hasattr(unit, "project_norm")


def test_bit_pads_its_pool_with_zeros() -> None:
    """No ReLU stands before the pool: a border of -inf would give other numbers."""
    model = BiT(BIT)
    seen: list[Tensor] = []
    model.stages.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(-torch.rand(1, 3, 64, 64))
    root = model.conv(-torch.rand(1, 3, 64, 64))
    assert root.min() < 0
    assert seen[0][..., 0, :].min() >= 0
    assert seen[0][..., 1:, 1:].min() < 0


def test_epsilons_follow_the_configuration() -> None:
    stem = replace(STEM, norm_eps=1e-3, standardize_eps=1e-2)
    for model in (ViT(replace(HYBRID, stem=stem)), BiT(replace(BIT, norm_eps=1e-3))):
        norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
        assert {m.eps for m in norms} == {1e-3}
    convs = [m for m in ViT(replace(HYBRID, stem=stem)).modules() if isinstance(m, StdConv)]
    assert {m.eps for m in convs} == {1e-2}


def test_defaults_are_those_of_the_originals() -> None:
    stem, bit = StemConfig(), BiTConfig()
    assert (stem.norm_eps, stem.standardize, stem.standardize_eps) == (1e-6, "std", 1e-5)
    assert (bit.norm_eps, bit.standardize, bit.standardize_eps) == (1e-5, "var", 1e-10)


# Models


@pytest.mark.parametrize(
    ("layers", "stride", "channels"),
    [((), 4, 64), ((1,), 4, 256), ((3, 4, 9), 16, 1024), ((2, 2, 2, 2), 32, 2048)],
)
def test_stride_and_channels(layers: tuple[int, ...], stride: int, channels: int) -> None:
    stem = StemConfig(layers=layers)
    assert (stem.stride, stem.channels) == (stride, channels)
    model = ViT(
        ViTConfig(image=(64, 96), patch=1, width=24, depth=1, heads=1, mlp_width=24, stem=stem)
    )
    x = torch.rand(1, 3, 64, 96)
    assert model.stem(x).shape == (1, channels, 64 // stride, 96 // stride)
    assert model.config.grid == (64 // stride, 96 // stride)
    assert model.config.footprint == (stride, stride)
    assert model(x).shape == (1, 1000)


def test_patches_are_cells_of_the_feature_map() -> None:
    config = replace(HYBRID, image=(64, 128), patch=(2, 1))
    assert config.grid == (2, 8)
    model = ViT(config)
    assert model.patch.weight.shape == (48, 512, 2, 1)
    assert model(torch.rand(1, 3, 64, 128)).shape == (1, 10)
    model.resize((96, 64))
    assert model.config.grid == (3, 4)
    assert model(torch.rand(1, 3, 96, 64)).shape == (1, 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"image": 72},
            "height 72 is not a multiple of patch 1 x stride 16 of the stem (nearest: 64 or 80)",
        ),
        (
            {"image": (64, 90), "patch": 2},
            "width 90 is not a multiple of patch 2 x stride 16 of the stem (nearest: 64 or 96)",
        ),
        ({"image": 8}, "patch of 1 x stride 16 of the stem does not fit an image height of 8"),
    ],
)
def test_sizes_that_do_not_fit_a_hybrid(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        replace(HYBRID, **change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 40}, "width 40 is not a multiple of groups 32 (nearest: 32 or 64)"),
        ({"width": 8}, "width 8 is not a multiple of groups 32 (nearest: 32)"),
        ({"groups": 0}, "groups 0"),
        ({"layers": (1, 0)}, "every stage needs a unit"),
        ({"standardize": "mean"}, "standardize must be std or var, not mean"),
    ],
)
@pytest.mark.parametrize("config", [STEM, BIT])
def test_configurations_that_do_not_fit(config: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        replace(config, **change)
    assert message in str(error.value)


@pytest.mark.parametrize("config", [HYBRID, BIT])
def test_configurations_survive_json(config: Any) -> None:
    assert type(config)(**json.loads(json.dumps(asdict(config)))) == config
    assert hash(config)


def test_bit_takes_any_size() -> None:
    model = disturbed(BiT(BIT), torch.float32)
    for size in ((64, 64), (33, 70), (1, 1)):
        assert model(torch.rand(2, 3, *size)).shape == (2, 5)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert model.resize((48, 80)) is model
    assert model.config.image == (48, 80)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_bit_starts_at_zero_and_gives_features() -> None:
    x = torch.rand(2, 3, 64, 64)
    assert not BiT(BIT)(x).any()
    features = BiT(replace(BIT, classes=0))
    assert features(x).shape == (2, BIT.features)
    assert BIT.features == 32 * 4 * 2
    assert features(x).min() >= 0  # a mean after ReLU


@pytest.mark.parametrize(
    ("shape", "message"),
    [((3, 64, 64), "rank 4"), ((1, 1, 64, 64), "expected 3 channels, got 1")],
)
def test_images_that_do_not_fit_bit(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BiT(BIT)(torch.zeros(shape))


@pytest.mark.parametrize("model", [ViT(HYBRID), BiT(BIT)], ids=["hybrid", "bit"])
def test_gradients_reach_every_parameter(model: nn.Module) -> None:
    disturbed(model).train()
    F.cross_entropy(
        model(torch.rand(2, 3, 64, 64, dtype=torch.float64)), torch.tensor([1, 2])
    ).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.any(), name


def test_bfloat16_runs_where_autocast_does() -> None:
    """Kernels are standardised in float32, whatever the product's precision."""
    model, x = disturbed(BiT(BIT), torch.float32), torch.rand(2, 3, 64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(x)
    assert rough.isfinite().all()
    assert (rough - model(x)).abs().max() < 0.2
