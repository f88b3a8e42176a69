"""Round trips among all formats: bytes, logits, and queries that stay queries."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import checkpoints
import pytest
import torch
from checkpoints import EVERYWHERE, FILES
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import vitlab
from vitlab.models.resnet import BiTConfig, StemConfig
from vitlab.models.vit import ViTConfig
from vitlab.models.zoo import Config
from vitlab.weights import formats
from vitlab.weights.bundle import Bundle
from vitlab.weights.report import Refused

FOREIGN = [name for name in formats.NAMES if name != "vitlab"]
RANDOM = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_every_format_is_tried() -> None:
    assert set(formats.NAMES) == set(FILES)


def logits(bundle: Bundle) -> torch.Tensor:
    return checkpoints.run(bundle.model, checkpoints.images(bundle))


@pytest.mark.parametrize(("name", "file"), EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_returns_from_every_format(
    name: str, file: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    if name == "vitlab" and dtype == torch.float64:
        pytest.skip("bundles are float32")
    bundle = checkpoints.bundle(dtype)
    written = formats.write(bundle, tmp_path / file, name)
    back, report = formats.read(tmp_path / file)
    assert report.format == written.format == name
    assert report.sha256 == written.sha256 or name == "vitlab"
    assert not report.new + report.dropped
    assert back.classes == bundle.classes
    assert checkpoints.gap(logits(bundle), logits(back)) == 0
    if name != "big_vision":  # which folds the class slot
        checkpoints.same_state(bundle, back)
    if file != "a":  # where a folder has files of its own, these tell of preprocessing
        assert back.preprocess == bundle.preprocess


@pytest.mark.parametrize(("one", "other"), [*permutations(FOREIGN, 2)])
def test_there_and_back_by_way_of_another(one: str, other: str, tmp_path: Path) -> None:
    """A to B to A: each tensor of A byte by byte; where B folds the class slot, tokens agree."""
    first, hop = FILES[one][0], FILES[other][0]
    a, b, back = tmp_path / first, tmp_path / f"hop-{hop}", tmp_path / f"back-{first}"
    bundle = checkpoints.bundle(activation="gelu")
    formats.write(bundle, a, one)
    _, went = formats.convert(a, b, other)
    came, _ = formats.convert(b, back, one)
    assert came.format == other
    folds = other == "big_vision"
    assert folds == any("class_token" in note for note in went.notes)
    if not folds:
        checkpoints.same(checkpoints.tensors(a), checkpoints.tensors(back))
    x = checkpoints.images(bundle)
    then, now = formats.read(a)[0].model, formats.read(back)[0].model
    with torch.no_grad():
        for before, after in zip(then.layers(x), now.layers(x), strict=True):
            assert (before - after).abs().max() <= 1e-6


@pytest.mark.parametrize("family", ["hybrid", "bit"])
def test_hybrids_and_bit_go_round(family: str, tmp_path: Path) -> None:
    config: Config = BiTConfig(image=32, layers=(1, 2), width=32, classes=5)
    if family == "hybrid":
        stem = StemConfig(layers=(1, 2), width=32)
        config = ViTConfig(**{**checkpoints.SMALL, "patch": 1, "image": 64, "stem": stem})
    bundle = checkpoints.wrap(config)
    formats.write(bundle, tmp_path / "a.npz", "google")
    formats.convert(tmp_path / "a.npz", tmp_path / "b.safetensors", "timm")
    formats.convert(tmp_path / "b.safetensors", tmp_path / "c", "vitlab")
    formats.convert(tmp_path / "c", tmp_path / "d.npz", "google")
    checkpoints.same(*(checkpoints.tensors(tmp_path / f"{n}.npz") for n in "ad"))
    checkpoints.same_state(bundle, formats.read(tmp_path / "d.npz")[0])
    assert vitlab.load(tmp_path / "c").model.config == config


def test_the_record_of_where_weights_came_from_does_not_grow(tmp_path: Path) -> None:
    bundle = checkpoints.bundle(activation="gelu")
    formats.write(bundle, tmp_path / "0.npz", "google")
    last = tmp_path / "0.npz"
    for i in range(1, 7):
        name, suffix = [("timm", ".pth"), ("torchvision", ".pth"), ("google", ".npz")][i % 3]
        formats.convert(last, tmp_path / f"{i}{suffix}", name)
        last = tmp_path / f"{i}{suffix}"
    source, formats_seen = formats.read(last)[0].card.source, []
    while source:
        formats_seen.append(source["format"])
        source = source.get("origin")
    assert sorted(formats_seen) == ["google", "timm", "torchvision"]


# Random configurations


@st.composite
def configurations(draw: st.DrawFn) -> ViTConfig:
    """Small ViTs of every kind; every other one is plain enough for all formats."""
    plain = draw(st.booleans())
    heads = draw(st.sampled_from([1, 2, 3, 5]))
    width = heads * draw(st.sampled_from([1, 4, 8]))
    grid = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    patch = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    if plain or draw(st.booleans()):
        grid, patch = (grid[0], grid[0]), (patch[0], patch[0])
    common = {
        "image": (grid[0] * patch[0], grid[1] * patch[1]), "patch": patch, "width": width,
        "heads": heads, "depth": draw(st.integers(1, 3)),
        "mlp_width": width * draw(st.integers(1, 3)) + (0 if plain else draw(st.integers(0, 1))),
        "classes": draw(st.sampled_from([0, 1, 3])),
        "activation": draw(st.sampled_from(["gelu", "gelu_tanh"])),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-12, 1e-5])),
        "class_position": draw(st.booleans()),
    }  # fmt: skip
    if plain:
        return ViTConfig(**common)
    token = draw(st.booleans())
    return ViTConfig(
        **common, class_token=token,
        pool=draw(st.sampled_from(["token", "mean"])) if token else "mean",
        head_hidden=draw(st.sampled_from([0, 4])), registers=draw(st.integers(0, 2)),
        layer_scale=draw(st.sampled_from([0.0, 0.1])),
        norm=draw(st.sampled_from(["before_pool", "after_pool"])),
    )  # fmt: skip


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Refusals leave nothing behind, and end the example."""
    try:
        yield
    except Refused as refusal:
        if not refusal.report.refused:
            raise
        if [*folder.iterdir()]:
            raise AssertionError(f"{refusal} came too late") from refusal
        assume(False)


@RANDOM
@given(config=configurations(), at=st.sampled_from(EVERYWHERE))
def test_random_models_return_from_all_formats_that_hold_them(
    config: ViTConfig, at: tuple[str, str]
) -> None:
    name, file = at
    bundle = checkpoints.wrap(config)
    with tempfile.TemporaryDirectory() as folder:
        path, again = Path(folder) / file, Path(folder) / f"again-{file}"
        with held(Path(folder)):
            written = formats.write(bundle, path, name)
        back, report = formats.read(path)
        found = checkpoints.tensors(path)
        assert sorted(written.read) == sorted(found)
        assert len(report.read) + len(report.aside) == len(found)
        assert not report.new + report.dropped
        # A class slot is folded or added, LayerScale keeps its numbers alone.
        slot, scale = back.model.config.class_position, back.model.config.layer_scale
        assert back.model.config == replace(config, class_position=slot, layer_scale=scale)
        assert bool(scale) == bool(config.layer_scale)
        assert torch.equal(logits(bundle), logits(back))
        formats.write(back, again, name)
        checkpoints.same(found, checkpoints.tensors(again))


@RANDOM
@given(config=configurations(), one=st.sampled_from(FOREIGN), other=st.sampled_from(FOREIGN))
def test_random_models_return_by_way_of_another_format(
    config: ViTConfig, one: str, other: str
) -> None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as empty:
        a, b = Path(folder) / FILES[one][0], Path(empty) / f"hop-{FILES[other][0]}"
        back = Path(folder) / f"back-{FILES[one][0]}"
        with held(Path(folder)):
            formats.write(checkpoints.wrap(config), a, one)
        with held(Path(empty)):
            formats.convert(a, b, other)
        with held(Path(empty) / "never"):
            formats.convert(b, back, one)
        then, now = formats.read(a)[0], formats.read(back)[0]
        kept = then.model.config.class_position == now.model.config.class_position
        if kept and not (config.class_position and other in ("big_vision", "timm")):
            checkpoints.same(checkpoints.tensors(a), checkpoints.tensors(back))
        assert (logits(then) - logits(now)).abs().max() <= 1e-5


# q, k, v


@pytest.mark.parametrize(("name", "file"), EVERYWHERE)
def test_queries_keys_and_values_stay_what_they_are(name: str, file: str, tmp_path: Path) -> None:
    """Report 047: q, k, v hold 1, 2, 3 and their biases 0.1, 0.2, 0.3; heads are 16 wide."""
    bundle = checkpoints.bundle(activation="gelu")
    with torch.no_grad():
        for block in bundle.model.blocks:
            qkv = block.attention.qkv
            for i in range(3):
                qkv.weight[48 * i : 48 * (i + 1)] = i + 1
                qkv.bias[48 * i : 48 * (i + 1)] = (i + 1) / 10
    formats.write(bundle, tmp_path / file, name)
    kinds = {"q": 0, "k": 0, "v": 0}
    for where, array in checkpoints.tensors(tmp_path / file).items():
        tensor = torch.as_tensor(array).double()
        parts = {}
        if "qkv" in where or "in_proj" in where:
            parts = dict(zip("qkv", tensor.chunk(3), strict=True))
        for word in ("query", "key", "value"):
            if f"{word}/" in where or f"{word}." in where:
                parts[word[0]] = tensor
        for letter, part in parts.items():
            value = 1.0 + "qkv".index(letter)
            value = value / 10 if where.endswith("bias") else value
            assert (part - value).abs().max() < 1e-6, where
            kinds[letter] += 1
    assert kinds == dict.fromkeys("qkv", 4), "weights and biases of two blocks"
    back, _ = formats.read(tmp_path / file)
    assert torch.equal(
        back.model.blocks[1].attention.qkv.weight, bundle.model.blocks[1].attention.qkv.weight
    )
    assert checkpoints.gap(logits(bundle), logits(back)) <= 1e-5
