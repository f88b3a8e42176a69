"""`vitlab.models.vit`: equations, numbers of the original code, every option, every refusal."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import originals
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlab.models import vit
from vitlab.models.vit import Block, ViT, ViTConfig

SMALL = ViTConfig(image=32, patch=8, width=48, depth=3, heads=3, mlp_width=96, classes=10)


def disturbed(config: ViTConfig, dtype: torch.dtype = torch.float64, scale: float = 0.1) -> ViT:
    """A model none of whose tensors sits at its initial value, in evaluation mode."""
    model = ViT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=scale)
    return model.to(dtype).eval()


def images(config: ViTConfig, n: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(n, 3, *config.image, dtype=dtype) * 2 - 1


def count(config: ViTConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in ViT(config).parameters())


# The paper, once more


def oracle(model: ViT, pictures: np.ndarray) -> np.ndarray:
    """Equations 1 to 8 in numpy, head by head; pictures [B, 3, H, W] -> logits [B, K]."""
    w = {k: v.detach().numpy() for k, v in model.state_dict().items()}
    (p, q), (h, width), d = model.config.patch, model.config.grid, model.config.width

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        x = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu(x: np.ndarray) -> np.ndarray:
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def attention(z: np.ndarray, name: str) -> np.ndarray:
        heads, size = model.config.heads, d // model.config.heads
        qkv = dense(z, f"{name}.qkv").reshape(len(z), 3, heads, size)
        outs = []
        for head in range(heads):
            query, key, value = qkv[:, 0, head], qkv[:, 1, head], qkv[:, 2, head]
            a = np.exp(query @ key.T / math.sqrt(size))
            outs.append(a / a.sum(1, keepdims=True) @ value)
        return dense(np.concatenate(outs, 1), f"{name}.out")

    logits = []
    for x in pictures:
        pieces = [x[:, p * i : p * (i + 1), q * j : q * (j + 1)].ravel()
                  for i in range(h) for j in range(width)]  # fmt: skip
        z = np.stack(pieces) @ w["patch.weight"].reshape(d, -1).T + w["patch.bias"]
        z = np.concatenate([w["class_token"][0], z]) + w["positions"][0]  # (1)
        for i in range(model.config.depth):
            name = f"blocks.{i}"
            z = attention(norm(z, f"{name}.norm1"), f"{name}.attention") + z  # (2)
            hidden = gelu(dense(norm(z, f"{name}.norm2"), f"{name}.mlp.up"))
            z = dense(hidden, f"{name}.mlp.down") + z  # (3)
        y = norm(z[0], "norm")  # (4)
        if "hidden.weight" in w:
            y = np.tanh(dense(y, "hidden"))
        logits.append(dense(y, "head"))
    return np.stack(logits)


@pytest.mark.parametrize(
    "change",
    [{}, {"head_hidden": 20}, {"image": (16, 48)}, {"patch": (16, 4)}, {"heads": 1}, {"depth": 1}],
)
def test_equations_1_to_8(change: dict[str, Any]) -> None:
    config = replace(SMALL, **change)
    model, x = disturbed(config), images(config)
    x[1] *= 0.01  # faint: epsilons show
    np.testing.assert_allclose(model(x).detach(), oracle(model, x.numpy()), rtol=0, atol=1e-11)


# The original code


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("vit_token", {}),
        ("vit_token_prelogits", {"head_hidden": 48}),
        ("bv_tok_learn", {"class_position": False}),
        ("bv_gap_learn", {"class_token": False, "pool": "mean", "head_hidden": 48}),
    ],
)
def test_parity_with_the_original_code(
    name: str, shape: dict[str, Any], dtype: torch.dtype
) -> None:
    case = originals.load(name)
    model, x = case.fill(ViT(replace(SMALL, **shape)), dtype)
    with torch.no_grad():
        z = list(model.layers(x))
        maps = []
        for block, entering in zip(model.blocks, z, strict=False):
            q, k, _ = block.attention.split(block.norm1(entering))
            maps.append((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1))
        y = model.represent(z[-1])
        case.check("embedding", model.patch(x).permute(0, 2, 3, 1))
        case.check("block_outputs", torch.stack(z[1:]))
        case.check("attention", torch.stack(maps))
        case.check("encoded", model.norm(z[-1]))
        case.check("pre_logits", y if model.hidden is None else torch.tanh(model.hidden(y)))
        case.check("logits", model.classify(y))
        case.check("logits", model(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parity_with_the_original_code_at_another_size(dtype: torch.dtype) -> None:
    case = originals.load("vit_token_interp64")
    model = ViT(SMALL)
    model.load_state_dict(case.weights)
    model.resize(64, resample="google")
    case.check("pos_embedding", model.positions.detach())
    x = case.expected["image"].to(dtype)
    model.to(dtype)
    with torch.no_grad():
        *_, z = model.layers(x)
        case.check("encoded", model.norm(z))
        case.check("pre_logits", model.represent(z))
        case.check("logits", model(x))


# Other implementations, weights carried over by hand


def from_timm(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "patch_embed.proj": "patch", "cls_token": "class_token", "pos_embed": "positions",
        "reg_token": "registers", "attn.qkv": "attention.qkv", "attn.proj": "attention.out",
        "mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down", "ls1.gamma": "scale1", "ls2.gamma": "scale2",
        "fc_norm": "norm",
    }  # fmt: skip
    ours = {}
    for name, tensor in theirs.items():
        for old, new in names.items():
            name = name.replace(old, new)
        ours[name] = tensor
    return ours


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, {}),
        ({"global_pool": "avg"}, {"pool": "mean", "norm": "after_pool"}),
        ({"global_pool": "avg", "fc_norm": False}, {"pool": "mean"}),
        ({"fc_norm": True}, {"norm": "after_pool"}),
        (
            {"class_token": False, "global_pool": "avg", "fc_norm": False},
            {"class_token": False, "pool": "mean"},
        ),
        (
            {"reg_tokens": 4, "no_embed_class": True},
            {"registers": 4, "class_position": False},
        ),
        ({"no_embed_class": True, "init_values": 0.1}, {"class_position": False, "layer_scale": 1}),
    ],
)
def test_parity_with_timm(options: dict[str, Any], shape: dict[str, Any]) -> None:
    import timm

    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=(32, 48), patch_size=8, depth=2, num_classes=10, **options
    )
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    theirs.double().eval()
    ours = ViT(
        ViTConfig(
            image=(32, 48), patch=8, width=192, depth=2, heads=3, mlp_width=768, classes=10,
            activation="gelu", **shape,
        )
    ).double().eval()  # fmt: skip
    ours.load_state_dict(from_timm(theirs.state_dict()))
    x = images(ours.config)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-9)


def test_parity_with_transformers() -> None:
    import transformers

    theirs = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=32, patch_size=8, hidden_size=48, num_hidden_layers=3,
            num_attention_heads=3, intermediate_size=96, num_labels=10,
        )
    )  # fmt: skip
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    theirs.double().eval()
    names = {
        "vit.embeddings.cls_token": "class_token",
        "vit.embeddings.position_embeddings": "positions",
        "vit.embeddings.patch_embeddings.projection": "patch", "vit.layernorm": "norm",
        "vit.layers": "blocks", "layernorm_before": "norm1", "layernorm_after": "norm2",
        "attention.o_proj": "attention.out", "mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down",
        "classifier": "head",
    }  # fmt: skip
    weights = dict(theirs.state_dict())
    for name in [n for n in weights if "q_proj" in n]:
        parts = [weights.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        weights[name.replace("q_proj", "qkv")] = torch.cat(parts)
    for old, new in names.items():
        weights = {k.replace(old, new): v for k, v in weights.items()}
    ours = ViT(replace(SMALL, activation="gelu", norm_eps=1e-12)).double().eval()
    ours.load_state_dict(weights)
    x = images(SMALL)
    torch.testing.assert_close(ours(x), theirs(x).logits, rtol=0, atol=1e-9)


# Sizes and initial values


def test_counts_without_class_token() -> None:
    assert count(ViTConfig(pool="mean", class_token=False)) == 86_566_120  # B/16-gap


def test_options_change_the_count_as_they_should() -> None:
    base, d = count(SMALL), SMALL.width
    assert count(replace(SMALL, classes=0)) == base - d * 10 - 10
    assert count(replace(SMALL, registers=4)) == base + 4 * d
    assert count(replace(SMALL, class_position=False)) == base - d
    assert count(replace(SMALL, layer_scale=1e-5)) == base + 3 * 2 * d
    assert count(replace(SMALL, head_hidden=d)) == base + d * d + d
    assert count(replace(SMALL, norm="after_pool", dropout=0.1, drop_path=0.1)) == base


@pytest.fixture(scope="module")
def fresh() -> ViT:
    torch.manual_seed(0)
    return ViT(ViTConfig(image=224, width=192, heads=3, mlp_width=768, depth=2, head_hidden=192))


def uniform_within(weight: Tensor, limit: float) -> None:
    assert 0.99 * limit < weight.abs().max() <= limit * (1 + 1e-6)
    assert weight.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.02)
    assert abs(weight.mean()) < 0.02 * limit


def test_initial_attention_and_mlp(fresh: ViT) -> None:
    d, m = 192, 768
    for block in fresh.blocks:
        thirds = block.attention.qkv.weight.chunk(3)
        for third in (*thirds, block.attention.out.weight):  # each as its own D x D
            uniform_within(third, math.sqrt(6 / (2 * d)))
        for dense in (block.mlp.up, block.mlp.down):
            uniform_within(dense.weight, math.sqrt(6 / (d + m)))
            assert dense.bias.std().item() == pytest.approx(1e-6, rel=0.2)
        for zero in (block.attention.qkv.bias, block.attention.out.bias):
            assert not zero.any()


def test_initial_tokens_norms_and_head(fresh: ViT) -> None:
    assert fresh.positions.std().item() == pytest.approx(0.02, rel=0.02)
    assert fresh.positions.abs().max() > 0.07  # normal, not cut
    for zero in (fresh.class_token, fresh.head.weight, fresh.head.bias, fresh.patch.bias):
        assert not zero.any()
    for module in fresh.modules():
        if isinstance(module, nn.LayerNorm):
            assert module.eps == 1e-6
            assert (module.weight == 1).all()
            assert not module.bias.any()


@pytest.mark.parametrize("name", ["patch", "hidden"])
def test_initial_lecun_normal(fresh: ViT, name: str) -> None:
    weight = getattr(fresh, name).weight
    std = math.sqrt(1 / weight[0].numel())
    cut = 2 * std / 0.87962566103423978
    assert weight.std().item() == pytest.approx(std, rel=0.02)
    assert 0.98 * cut < weight.abs().max() <= cut
    assert not getattr(fresh, name).bias.any()


def test_initial_logits_are_zero_and_features_are_not() -> None:
    model, x = ViT(SMALL), images(SMALL, dtype=torch.float32)
    assert not model(x).any()
    features = ViT(replace(SMALL, classes=0))(x)
    assert features.shape == (2, SMALL.features)
    assert features.any()


def test_registers_and_layer_scale_start_as_documented() -> None:
    model = ViT(replace(SMALL, registers=64, layer_scale=1e-4))
    assert model.registers.std().item() == pytest.approx(0.02, rel=0.1)
    for block in model.blocks:
        for scale in (block.scale1, block.scale2):
            assert torch.equal(scale, torch.full((48,), 1e-4))


# Options


def test_layers_yield_what_enters_each_block_and_what_leaves_the_last() -> None:
    model, x = disturbed(SMALL, torch.float32), images(SMALL, dtype=torch.float32)
    z = list(model.layers(x))
    assert len(z) == SMALL.depth + 1
    assert torch.equal(z[0], model.embed(x))
    assert torch.equal(z[1], model.blocks[0](z[0]))
    assert torch.equal(model.classify(model.represent(z[-1])), model(x))


def test_tokens_are_class_then_registers_then_patches_row_by_row() -> None:
    config = replace(SMALL, image=(16, 32), registers=2)
    model = disturbed(config)
    x = images(config, 1)
    z = model.embed(x)
    assert z.shape == (1, 1 + 2 + 2 * 4, 48)
    torch.testing.assert_close(z[0, 0], (model.class_token + model.positions[:, :1])[0, 0])
    torch.testing.assert_close(z[0, 1:3], model.registers[0])
    patch = (model.patch.weight * x[0, :, 8:16, 24:32]).sum((1, 2, 3)) + model.patch.bias
    torch.testing.assert_close(z[0, -1], patch + model.positions[0, -1])  # row 1, column 3


def test_class_token_without_position() -> None:
    model = disturbed(replace(SMALL, class_position=False))
    assert model.positions.shape == (1, 16, 48)
    torch.testing.assert_close(
        model.embed(images(SMALL))[:, :1], model.class_token.expand(2, 1, 48)
    )


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("norm", ["before_pool", "after_pool"])
def test_mean_pool_leaves_out_prefix_tokens(registers: int, norm: Any) -> None:
    """Report 052: prefix tokens of 1000 beside patches of 1 change nothing."""
    model = ViT(replace(SMALL, pool="mean", registers=registers, norm=norm, classes=0))
    model.blocks, model.norm = nn.ModuleList(), nn.Identity()
    with torch.no_grad():
        model.positions.zero_()
        model.patch.weight.zero_()
        model.patch.bias.fill_(1)
        model.class_token.fill_(1000)
        if registers:
            model.registers.fill_(1000)
    assert torch.equal(model(torch.rand(2, 3, 32, 32)), torch.ones(2, 48))


def test_norm_after_pool_normalises_the_mean() -> None:
    before, after = (
        disturbed(replace(SMALL, pool="mean", classes=0, norm=norm))
        for norm in ("before_pool", "after_pool")
    )
    after.load_state_dict(before.state_dict())
    z = torch.randn(2, 17, 48, dtype=torch.float64)
    torch.testing.assert_close(after.represent(z), after.norm(z[:, 1:].mean(1)))
    assert (before.represent(z) - after.represent(z)).abs().max() > 0.1


def test_layer_scale_multiplies_each_branch() -> None:
    block = Block(replace(SMALL, layer_scale=0.5), 0.0)
    with torch.no_grad():
        block.scale2.zero_()
    z = torch.randn(2, 17, 48)
    expected = z + 0.5 * block.attention(block.norm1(z))
    torch.testing.assert_close(block(z), expected)


def test_dropout_sites() -> None:
    """After E_pos, the attention's output, GELU and the MLP's output; nowhere else (B.1)."""
    model = ViT(replace(SMALL, dropout=0.5, head_hidden=48)).train()
    made: dict[int, str] = {}
    dropped: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            if isinstance(module, nn.Dropout):
                assert module.p == 0.5
                dropped.append(made.get(args[0].data_ptr(), "computed"))
            else:
                made[out.data_ptr()] = name.rpartition(".")[2]

        return hook

    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(watch(name))
    model(images(SMALL, dtype=torch.float32))
    assert len(dropped) == 1 + 3 * SMALL.depth
    assert [dropped[1 + 3 * i] for i in range(3)] == ["out"] * 3
    assert [dropped[3 + 3 * i] for i in range(3)] == ["down"] * 3


def test_dropout_and_drop_path_only_in_training() -> None:
    model = disturbed(replace(SMALL, dropout=0.3, drop_path=0.5))
    x = images(SMALL)
    assert torch.equal(model(x), model(x))
    plain = disturbed(SMALL)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), plain(x))
    model.train()
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize(("depth", "rates"), [(4, [0, 0.1, 0.2, 0.3]), (1, [0])])
def test_drop_path_grows_linearly(depth: int, rates: list[float]) -> None:
    model = ViT(replace(SMALL, depth=depth, drop_path=0.3))
    assert [block.drop_path for block in model.blocks] == pytest.approx(rates)


def test_drop_path_drops_whole_images_and_keeps_the_mean() -> None:
    block = Block(SMALL, 0.25).train()
    out = block.branch(torch.ones(8000, 3, 4), None)
    kept = out[:, 0, 0] != 0
    assert torch.equal(out, torch.where(kept[:, None, None], 1 / 0.75, 0).expand_as(out))
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.02)
    assert out.mean().item() == pytest.approx(1, abs=0.03)
    assert torch.equal(block.eval().branch(torch.ones(9, 3, 4), None), torch.ones(9, 3, 4))


def test_both_branches_drop_independently() -> None:
    block = Block(SMALL, 0.5).train()
    with torch.no_grad():
        z = torch.randn(64, 3, 48)
        attended = z + 2 * block.attention(block.norm1(z))
        out = block(z)
    untouched = (out == z).flatten(1).all(1)
    only_first = torch.isclose(out, attended, atol=1e-5).flatten(1).all(1)
    assert 4 < untouched.sum() < 32
    assert 4 < only_first.sum() < 32


def test_another_batch_size_changes_almost_nothing() -> None:
    config = replace(SMALL, width=192, mlp_width=768)
    model, x = disturbed(config, torch.float32, 0.02), images(config, 33, torch.float32)
    with torch.inference_mode():
        whole = model(x).softmax(1)
        assert torch.equal(whole, model(x).softmax(1))
        for size in (1, 2, 7, 32):
            parts = torch.cat([model(part).softmax(1) for part in x.split(size)])
            assert (parts - whole).abs().max() <= 1e-5
            assert torch.equal(parts.argmax(1), whole.argmax(1))


def test_export_keeps_the_batch_free() -> None:
    """No size of the batch is burnt into the traced graph."""
    model = disturbed(replace(SMALL, registers=1, depth=1), torch.float32)
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    example = images(SMALL, 2, torch.float32)
    traced = torch.export.export(model, (example,), dynamic_shapes=shapes).module()
    x = images(SMALL, 5, torch.float32)
    torch.testing.assert_close(traced(x), model(x))


def test_gradients_reach_every_parameter() -> None:
    model = disturbed(replace(SMALL, registers=2, layer_scale=0.5, head_hidden=24)).train()
    F.cross_entropy(model(images(SMALL)), torch.tensor([1, 2])).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.any(), name


# Other sizes


@pytest.mark.parametrize(("image", "grid"), [((32, 64), (4, 8)), ((64, 16), (8, 2))])
def test_rectangles(image: tuple[int, int], grid: tuple[int, int]) -> None:
    config = replace(SMALL, image=image)
    assert config.grid == grid
    assert ViT(config).positions.shape == (1, 1 + math.prod(grid), 48)
    assert ViT(config)(images(config, dtype=torch.float32)).shape == (2, 10)


def test_grid_is_height_first() -> None:
    """Report 066."""
    assert ViTConfig(image=(224, 448)).grid == (14, 28)


def test_resize_in_place() -> None:
    """Reports 054 and 069: one size, in one place; the class token's row stays."""
    model = disturbed(SMALL, torch.float32)
    first = model.positions[:, :1].clone()
    assert model.resize((48, 64)) is model
    assert (model.config.image, model.config.grid) == ((48, 64), (6, 8))
    assert model.positions.shape == (1, 49, 48)
    assert torch.equal(model.positions[:, :1], first)
    x = images(model.config, dtype=torch.float32)
    again = ViT(model.config).eval()  # what reading a saved model does
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))
    with pytest.raises(ValueError, match=r"48 x 64 .*got 32 x 32; model.resize\(\(32, 32\)\)"):
        model(images(SMALL, dtype=torch.float32))


def test_resize_of_a_rectangle() -> None:
    """Report 065: the old grid is 4 x 8, not the root of 32."""
    model = ViT(replace(SMALL, image=(32, 64), class_token=False, pool="mean"))
    rows = torch.arange(4.0).repeat_interleave(8)[None, :, None]
    for size, grid in (((64, 128), (8, 16)), ((48, 48), (6, 6))):
        model.positions = nn.Parameter(rows.expand(1, 32, 48).clone())
        model.config = replace(SMALL, image=(32, 64), class_token=False, pool="mean")
        model.resize(size)
        table = model.positions.detach().unflatten(1, grid)
        assert (table - table[:, :, :1]).abs().max() < 1e-5  # constant along a row
        assert (table[0, 1:, 0, 0] > table[0, :-1, 0, 0]).all()


def test_resize_keeps_what_it_should() -> None:
    model = ViT(SMALL).requires_grad_(False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.resize(32)  # its own size: report 059
    assert torch.equal(model.positions, before["positions"])
    with pytest.raises(ValueError, match="nearest: 32 or 40"):
        model.resize((36, 32))
    assert model.config == SMALL  # a refused size changes nothing
    model.resize(64)
    assert not model.positions.requires_grad
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items() if k != "positions")


def test_resize_of_a_table_without_a_row_for_the_class_token() -> None:
    """Report 056: 196 rows are 14 x 14, none of them the class token's."""
    config = ViTConfig(width=24, heads=2, mlp_width=24, depth=1, classes=3, class_position=False)
    model = ViT(config)
    assert model.positions.shape == (1, 196, 24)
    model.resize(384)
    assert model.positions.shape == (1, 576, 24)
    assert model(torch.rand(1, 3, 384, 384)).isfinite().all()


# Refusals


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 48, 48), r"images of 32 x 32 \(H x W\), got 48 x 48; model\.resize\(\(48, 48\)\)"),
        ((1, 3, 32, 64), "32 x 32 .* got 32 x 64"),
        ((3, 32, 32), r"rank 4, got \[3, 32, 32\]"),
        ((1, 4, 32, 32), r"expected 3 channels, got 4 in \[1, 4, 32, 32\]"),
        ((1, 3, 222, 222), "32 x 32 .* got 222 x 222"),  # report 061: nothing is cut in silence
    ],
)
def test_images_that_do_not_fit(shape: tuple[int, ...], message: str) -> None:
    """Report 062: what was expected and what came."""
    with pytest.raises(ValueError, match=message):
        ViT(SMALL)(torch.zeros(shape))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"image": 222, "patch": 16},
            "image height 222 is not a multiple of patch 16 (nearest: 208 or 224)",
        ),
        (
            {"image": (112, 110), "patch": 16},
            "image width 110 is not a multiple of patch 16 (nearest: 96 or 112)",
        ),
        (
            {"width": 100, "heads": 12},
            "width 100 is not divisible by heads 12 (nearest widths: 96 or 108)",
        ),
        (
            {"width": 8, "heads": 12},
            "width 8 is not divisible by heads 12 (nearest widths: 12)",
        ),
        ({"patch": 64}, "a patch of 64 does not fit an image height of 32"),
        ({"patch": 0}, "a patch of 0 does not fit"),
        ({"dropout": 1.5}, "dropout must lie in [0, 1), not 1.5"),
        ({"dropout": -0.1}, "dropout must lie in [0, 1), not -0.1"),
        ({"drop_path": 1.0}, "drop_path must lie in [0, 1), not 1.0"),
        ({"depth": 0}, "depth must be at least 1, not 0"),
        ({"classes": -1}, "classes must be at least 0, not -1"),
        ({"registers": -1}, "registers must be at least 0"),
        ({"heads": 0}, "heads must be at least 1"),
        ({"pool": "max"}, "pool must be token or mean, not max"),
        ({"norm": "never"}, "norm must be before_pool or after_pool, not never"),
        ({"activation": "relu"}, "activation must be gelu_tanh or gelu, not relu"),
        ({"class_token": False}, "pool token needs class_token"),
    ],
)
def test_configurations_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    """Reports 061 and 146: one line, with names, values and what would work."""
    with pytest.raises(ValueError) as error:
        replace(SMALL, **change)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_one_number_is_a_square_and_a_list_a_pair() -> None:
    assert ViTConfig(image=64, patch=[8, 16]).image == (64, 64)
    assert ViTConfig(image=64, patch=[8, 16]).patch == (8, 16)


def test_the_model_reads_beside_the_paper() -> None:
    lines = Path(vit.__file__).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 350


def test_activation_and_epsilon_follow_the_configuration() -> None:
    x = torch.linspace(-3, 3, 48)
    for activation, approximate in (("gelu_tanh", "tanh"), ("gelu", "none")):
        mlp = vit.MLP(replace(SMALL, activation=activation))
        mlp.up, mlp.down = nn.Identity(), nn.Identity()
        assert torch.equal(mlp(x), F.gelu(x, approximate=approximate))
    norms = [m for m in ViT(replace(SMALL, norm_eps=1e-3)).modules() if type(m) is nn.LayerNorm]
    assert len(norms) == 2 * SMALL.depth + 1
    assert {m.eps for m in norms} == {1e-3}
