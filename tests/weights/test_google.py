"""`vitlab.weights.google` and `big_vision`: the originals' own files and numbers."""

import json
import os
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch

from vitlab.models.resnet import BiTConfig, StemConfig
from vitlab.weights import formats
from vitlab.weights.report import Refused

DATA = Path(os.environ.get("VITLAB_TEST_DATA", Path(__file__).parents[2] / "../shared"))
FOLDER = DATA / "fixtures" / "original-code"
CASES = [
    "vit_token", "vit_token_prelogits", "hybrid_r111", "vit_token_interp64", "bv_tok_learn",
    "bv_gap_learn",
]  # fmt: skip
FILES = ["vit_token", "vit_token_prelogits", "hybrid_r111", "bv_tok_learn", "bv_gap_learn"]


def manifest(name: str) -> dict[str, Any]:
    file = FOLDER / "manifest.json"
    if not file.is_file():
        pytest.skip(f"no parity fixtures in {FOLDER} (VITLAB_TEST_DATA names their folder)")
    return next(c for c in json.loads(file.read_text())["cases"] if c["name"] == name)


def fixture(name: str = "vit_token") -> dict[str, np.ndarray]:
    return checkpoints.tensors(FOLDER / manifest(name)["checkpoint"])


def save(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_original_code(name: str, dtype: torch.dtype) -> None:
    case = manifest(name)
    bundle, report = formats.read(
        FOLDER / case["checkpoint"], image=tuple(case["config"]["image_size"]), resample="google"
    )
    with np.load(FOLDER / case["io"]) as file:
        expected = {k: torch.from_numpy(file[k]) for k in file.files}
    x = expected["image"].permute(0, 3, 1, 2).to(dtype)
    with torch.no_grad():
        *_, tokens = bundle.model.to(dtype).layers(x)
        logits = bundle.model(x)
    key = "logits" if dtype == torch.float32 else "logits_float64"
    assert (logits - expected[key]).abs().max() <= case["tolerance"][key]
    encoded = bundle.model.norm(tokens)
    assert (encoded - expected["encoded"]).abs().max() <= case["tolerance"]["encoded"]
    assert not report.new
    assert not report.dropped
    assert bool(report.interpolated) == ("interp" in name)


@pytest.mark.parametrize("name", FILES)
def test_files_of_the_original_code_return_byte_by_byte(name: str, tmp_path: Path) -> None:
    path = FOLDER / manifest(name)["checkpoint"]
    bundle, report = formats.read(path)
    assert set(report.read) <= {n.removeprefix("params/") for n in fixture(name)}
    assert bundle.card.source["sha256"] == manifest(name)["sha256"][path.name] == report.sha256
    formats.write(bundle, tmp_path / "out.npz", report.format)
    checkpoints.same(fixture(name), checkpoints.tensors(tmp_path / "out.npz"))


def test_facts_follow_the_original_code() -> None:
    bundle, report = formats.read(FOLDER / manifest("vit_token")["checkpoint"])
    config = bundle.model.config
    assert (config.activation, config.norm_eps, config.heads) == ("gelu_tanh", 1e-6, 3)
    p = bundle.preprocess
    assert (p.mean, p.std, p.resize, p.size) == ((0.5,) * 3, (0.5,) * 3, "squash", (32, 32))
    assert (p.interpolation, p.antialias) == ("bilinear", False)
    assert any("no names" in note for note in report.notes)
    stem = formats.read(FOLDER / manifest("hybrid_r111")["checkpoint"])[0].model.config.stem
    assert stem == StemConfig(layers=(1, 1, 1), width=32)


# Generations of names


def linen(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    swaps = {
        "LayerNorm_2": "LayerNorm_1", "MultiHeadDotProductAttention_1/":
        "MultiHeadDotProductAttention_0/", "MlpBlock_3": "MlpBlock_0",
    }  # fmt: skip
    renamed = {}
    for name, array in arrays.items():
        for old, new in swaps.items():
            name = name.replace(old, new)
        renamed[name] = array
    return renamed


def stacked(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    blocks = [n for n in arrays if "encoderblock_0/" in n]
    out = {n: a for n, a in arrays.items() if "encoderblock_" not in n}
    for name in blocks:
        layers = [arrays[name.replace("block_0/", f"block_{i}/")] for i in range(3)]
        out[name.replace("block_0/", "block/")] = np.stack(layers)
    return out


def flat_norms(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {n: a.flatten() if "gn" in n else a for n, a in arrays.items()}


def prefixed(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {prefix + n: a for n, a in arrays.items()}


def bfloat16(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As numpy reads JAX's bfloat16: two bytes without a type."""
    return {
        n: torch.from_numpy(a).bfloat16().contiguous().view(torch.int16).numpy().view("V2")
        for n, a in arrays.items()
    }


GENERATIONS = {
    "linen": ("vit_token", linen),
    "stacked": ("vit_token", stacked),
    "stacked big_vision": ("bv_tok_learn", stacked),
    "linen stacked": ("vit_token", lambda a: stacked(linen(a))),
    "optimizer": ("vit_token", lambda a: prefixed("opt/target/", a)),
    "params": ("vit_token", lambda a: prefixed("params/", a)),
    "tower": (
        "bv_tok_learn",
        lambda a: prefixed("params/img/", {n.removeprefix("params/"): v for n, v in a.items()}),
    ),
    "flat norms": ("hybrid_r111", flat_norms),
    "bfloat16": ("vit_token", bfloat16),
    "old big_vision": (
        "bv_tok_learn",
        lambda a: {n.replace("params/pos_", "params/Transformer/pos_"): v for n, v in a.items()},
    ),
}


@pytest.mark.parametrize("kind", GENERATIONS)
def test_generations_of_names_are_read_and_return(kind: str, tmp_path: Path) -> None:
    name, change = GENERATIONS[kind]
    plain, _ = formats.read(FOLDER / manifest(name)["checkpoint"])
    arrays = change(fixture(name))
    assert set(arrays) != set(fixture(name)) or kind in ("flat norms", "bfloat16")
    bundle, report = formats.read(save(tmp_path / "in.npz", arrays))
    x = checkpoints.images(plain)
    difference = checkpoints.gap(checkpoints.run(plain.model, x), checkpoints.run(bundle.model, x))
    assert difference == 0 if kind != "bfloat16" else 0 < difference < 0.1
    assert bundle.model.positions.dtype == torch.float32
    formats.write(bundle, tmp_path / "out.npz", report.format)
    checkpoints.same(arrays, checkpoints.tensors(tmp_path / "out.npz"))
    # By way of another format and back: what is needed for that travels along.
    formats.convert(tmp_path / "in.npz", tmp_path / "hop.safetensors", "timm")
    formats.convert(tmp_path / "hop.safetensors", tmp_path / "back.npz", report.format)
    checkpoints.same(arrays, checkpoints.tensors(tmp_path / "back.npz"))


def test_the_state_of_an_optimizer_is_told_of_and_left(tmp_path: Path) -> None:
    arrays = prefixed("opt/target/", fixture())
    arrays |= prefixed("opt/state/grad_ema/", fixture())
    bundle, report = formats.read(save(tmp_path / "sam.npz", arrays))
    assert len(report.dropped) == 56
    assert any("opt/state" in note for note in report.notes)
    assert bundle.model.config.depth == 3


def test_a_class_slot_of_old_big_vision_files_is_kept(tmp_path: Path) -> None:
    """17 rows with a class token are 1 + 16: the slot is the token's."""
    arrays = fixture("bv_tok_learn")
    table = arrays["params/pos_embedding"]
    slot = np.full((1, 1, 48), 0.25, np.float32)
    arrays["params/pos_embedding"] = np.concatenate([slot, table], axis=1)
    arrays["params/cls"] = arrays["params/cls"] - slot
    plain, _ = formats.read(FOLDER / manifest("bv_tok_learn")["checkpoint"])
    bundle, _ = formats.read(save(tmp_path / "old.npz", arrays))
    assert bundle.model.config.class_position
    x = checkpoints.images(plain)
    assert checkpoints.gap(checkpoints.run(plain.model, x), checkpoints.run(bundle.model, x)) < 1e-6
    formats.write(bundle, tmp_path / "out.npz", "big_vision")  # as it came
    checkpoints.same(arrays, checkpoints.tensors(tmp_path / "out.npz"))


def test_writing_to_big_vision_folds_the_class_slot(tmp_path: Path) -> None:
    bundle, _ = formats.read(FOLDER / manifest("vit_token")["checkpoint"])
    report = formats.write(bundle, tmp_path / "bv.npz", "big_vision")
    assert any("class_token" in note for note in report.notes)
    arrays = checkpoints.tensors(tmp_path / "bv.npz")
    assert arrays["params/pos_embedding"].shape == (1, 16, 48)
    back, _ = formats.read(tmp_path / "bv.npz")
    x = checkpoints.images(bundle)
    with torch.no_grad():
        for one, other in zip(bundle.model.layers(x), back.model.layers(x), strict=True):
            assert (one - other).abs().max() <= 1e-6
    formats.write(back, tmp_path / "google.npz", "google")  # everything but the slot returns
    old, new = fixture(), checkpoints.tensors(tmp_path / "google.npz")
    moved = {"cls", "Transformer/posembed_input/pos_embedding"}
    assert {n for n in old if old[n].tobytes() != new[n].tobytes()} == moved


# Pre-logits, heads, kernels


def test_pre_logits_by_hand() -> None:
    """Report 040: N classes use the tanh layer, another number starts anew, 0 gives features."""
    path = FOLDER / manifest("vit_token_prelogits")["checkpoint"]
    arrays = fixture("vit_token_prelogits")
    bundle, _ = formats.read(path)
    x = checkpoints.images(bundle)
    with torch.no_grad():
        *_, z = bundle.model.layers(x)
        y = bundle.model.represent(z).numpy()
    hidden = np.tanh(y @ arrays["pre_logits/kernel"] + arrays["pre_logits/bias"])
    by_hand = hidden @ arrays["head/kernel"] + arrays["head/bias"]
    logits = checkpoints.run(bundle.model, x).numpy()
    assert np.abs(logits - by_hand).max() <= 1e-5
    new, report = formats.read(path, classes=7)
    assert checkpoints.run(new.model, x).shape == (2, 7)
    assert new.model.hidden is None
    assert report.new == ("head.weight", "head.bias")
    assert set(report.dropped) == {
        "head.weight", "head.bias", "hidden.weight", "hidden.bias",
    }  # fmt: skip
    assert any("head is new" in note for note in report.notes)
    features, _ = formats.read(path, classes=0)
    assert torch.equal(checkpoints.run(features.model, x), torch.from_numpy(y))
    assert features.classes == ()
    named, report = formats.read(path, classes=[f"digit {i}" for i in range(10)])
    assert torch.equal(checkpoints.run(named.model, x), torch.from_numpy(logits))
    assert named.classes[3] == "digit 3"
    assert not report.new


def test_a_dropped_head_leaves_features() -> None:
    path = FOLDER / manifest("vit_token_prelogits")["checkpoint"]
    bundle, report = formats.read(path, drop=("head.*", "pre_logits/*"))
    assert (bundle.model.config.classes, bundle.model.config.head_hidden) == (0, 0)
    assert set(report.dropped) == {
        "head/kernel", "head/bias", "pre_logits/kernel", "pre_logits/bias",
    }  # fmt: skip


def test_an_all_zero_head_is_recognised(tmp_path: Path) -> None:
    arrays = fixture()
    arrays |= {n: np.zeros_like(arrays[n]) for n in ("head/kernel", "head/bias")}
    _, report = formats.read(save(tmp_path / "2020.npz", arrays))
    assert any("all zeros" in note for note in report.notes)
    _, report = formats.read(FOLDER / manifest("vit_token")["checkpoint"])
    assert not any("all zeros" in note for note in report.notes)


def test_kernels_of_patches_are_transposed(tmp_path: Path) -> None:
    """Report 053: HWIO to OIHW, also where the sizes would hide a mistake."""
    arrays = fixture()
    y, x, c, d = np.meshgrid(*map(np.arange, (8, 8, 3, 48)), indexing="ij")
    arrays["embedding/kernel"] = (y * 1000 + x * 100 + c * 10 + d / 100).astype(np.float32)
    bundle, _ = formats.read(save(tmp_path / "k.npz", arrays))
    weight = bundle.model.patch.weight.detach()
    d, c, y, x = torch.meshgrid(*map(torch.arange, (48, 3, 8, 8)), indexing="ij")
    assert torch.equal(weight, (y * 1000 + x * 100 + c * 10 + d / 100).float())


def test_heads_come_from_the_shapes_of_projections(tmp_path: Path) -> None:
    """Width 40 is nobody's; 5 heads of 8 are read from [D, k, D_h]."""
    formats.write(checkpoints.bundle(width=40, heads=5), tmp_path / "a.npz", "google")
    arrays = checkpoints.tensors(tmp_path / "a.npz")
    bundle, _ = formats.read(save(tmp_path / "bare.npz", arrays))
    assert bundle.model.config.heads == 5
    wrong = {n: a.reshape(40, 2, 20) if "/query/kernel" in n else a for n, a in arrays.items()}
    with pytest.raises(Refused, match=r"key/kernel has shape \[40, 5, 8\], but \[40, 2, 20\]"):
        formats.read(save(tmp_path / "wrong.npz", wrong))


# What is refused


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("params/MAPHead_0/probe", "a MAP head"),
        ("params/MAPHead_0/LayerNorm_0/scale", "a MAP head"),
        ("params/Transformer/encoderblock_0/Gate_0/kernel", "Gate_0"),
    ],
)
def test_other_parts_are_refused_by_name(name: str, what: str, tmp_path: Path) -> None:
    arrays = {**fixture("bv_gap_learn"), name: np.zeros((1, 1, 48), np.float32)}
    path = save(tmp_path / "map.npz", arrays)
    with pytest.raises(Refused, match=what) as caught:
        formats.read(path)
    assert caught.value.report.refused == (name.removeprefix("params/"),)
    assert caught.value.report.sha256
    _, report = formats.read(path, drop=name.removeprefix("params/"))
    assert report.dropped == (name.removeprefix("params/"),)


def test_an_mlp_mixer_is_refused_by_name(tmp_path: Path) -> None:
    arrays = {"stem/kernel": np.zeros((8, 8, 3, 48)), "MixerBlock_0/LayerNorm_0/scale": np.ones(48)}
    with pytest.raises(ValueError, match=r"0 of 2 tensors matched .*MLP-Mixer"):
        formats.read(save(tmp_path / "mixer.npz", arrays))


def test_a_missing_position_table_is_no_random_one(tmp_path: Path) -> None:
    """Report 049: sincos2d files of big_vision store none."""
    arrays = {n: a for n, a in fixture("bv_gap_learn").items() if "pos_embedding" not in n}
    with pytest.raises(ValueError, match="no positions"):
        formats.read(save(tmp_path / "sincos.npz", arrays))


def test_what_google_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for changes, what in (
        ({"registers": 2}, "registers"),
        ({"layer_scale": 0.1}, "LayerScale"),
        ({"pool": "mean"}, "mean pooling in a model with a class token"),
        ({"norm": "after_pool"}, "norm after pooling"),
    ):
        bundle = checkpoints.bundle(**changes)
        for name in ("google", "big_vision"):
            with pytest.raises(Refused, match=what):
                formats.write(bundle, tmp_path / "x.npz", name)
    hybrid = checkpoints.bundle(stem=StemConfig(layers=(1,), width=32), patch=1)
    with pytest.raises(Refused, match="stem"):
        formats.write(hybrid, tmp_path / "x.npz", "big_vision")
    assert not list(tmp_path.iterdir())
    registers = checkpoints.bundle(registers=2)
    report = formats.write(registers, tmp_path / "x.npz", "google", drop="registers")
    assert report.dropped == ("registers",)
    assert formats.read(tmp_path / "x.npz")[0].model.config.registers == 0


# BiT


def test_bit_returns_under_the_names_of_big_transfer(tmp_path: Path) -> None:
    bundle = checkpoints.wrap(BiTConfig(image=32, layers=(1, 2), width=32, classes=5))
    formats.write(bundle, tmp_path / "bit.npz", "google")
    arrays = checkpoints.tensors(tmp_path / "bit.npz")
    unit = "resnet/block2/unit02/b/"
    assert arrays["resnet/root_block/standardized_conv2d/kernel"].shape == (7, 7, 3, 32)
    assert arrays[f"{unit}standardized_conv2d/kernel"].shape == (3, 3, 64, 64)
    assert arrays[f"{unit}group_norm/gamma"].shape == (64,)
    assert arrays["resnet/head/conv2d/kernel"].shape == (1, 1, 256, 5)
    assert "resnet/block1/unit01/a/proj/standardized_conv2d/kernel" in arrays
    bare = save(tmp_path / "bare.npz", arrays)
    back, report = formats.read(bare)
    assert back.model.config.layers == (1, 2)
    assert back.model.config.standardize_eps == 1e-10
    assert report.format == "google"
    x = torch.randn(2, 3, 32, 32)
    assert checkpoints.gap(checkpoints.run(bundle.model, x), checkpoints.run(back.model, x)) == 0
    formats.write(back, tmp_path / "again.npz", "google")
    checkpoints.same(arrays, checkpoints.tensors(tmp_path / "again.npz"))


def test_bit_of_other_groups_is_refused(tmp_path: Path) -> None:
    bundle = checkpoints.wrap(BiTConfig(image=32, layers=(1,), width=16, groups=8, classes=5))
    with pytest.raises(Refused, match="32 groups"):
        formats.write(bundle, tmp_path / "x.npz", "google")
    with pytest.raises(ValueError, match="no place for a BiT"):
        formats.write(bundle, tmp_path / "x.pth", "torchvision")
