"""What is learned, and which part of the model learns it: losses, weights, freezing, adapters."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
import yaml
from safetensors.torch import load_file
from torch.nn import functional as F

import vitlab
from vitlab.data import loader, sources
from vitlab.models.resnet import BiT, BiTConfig
from vitlab.models.vit import ViT, ViTConfig
from vitlab.training import adapters, initial, loop, tasks
from vitlab.training.config import TrainConfig

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.25, 1.0]])


# Losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_is_the_cross_entropy(smoothing: float) -> None:
    config = TrainConfig(label_smoothing=smoothing)
    labels = torch.tensor([0, 2])
    ours = tasks.loss(config, LOGITS, labels)
    assert torch.equal(ours, F.cross_entropy(LOGITS, labels, label_smoothing=smoothing))


def test_sigmoid_by_hand() -> None:
    """One binary cross-entropy a class, summed over classes, mean over pictures."""
    config = TrainConfig(loss="sigmoid", label_smoothing=0.0)
    sp = [[math.log1p(math.exp(x)) for x in row] for row in LOGITS.tolist()]  # -log(1 - sigmoid)
    expected = (sum(sp[0]) - 2.0 + sum(sp[1]) - 1.0) / 2
    for targets in (torch.tensor([0, 2]), F.one_hot(torch.tensor([0, 2]), 3).float()):
        assert float(tasks.loss(config, LOGITS, targets)) == pytest.approx(expected, abs=1e-6)
    smooth = TrainConfig(loss="sigmoid", label_smoothing=0.3)
    shift = sum((0.1 - 0.3 * (j == t)) * x for row, t in zip(LOGITS.tolist(), (0, 2), strict=True)
                for j, x in enumerate(row)) / 2  # fmt: skip
    ours = float(tasks.loss(smooth, LOGITS, torch.tensor([0, 2])))
    assert ours == pytest.approx(expected - shift, abs=1e-6)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_weights_of_classes_by_hand(kind: Any) -> None:
    config = TrainConfig(loss=kind, label_smoothing=0.1)
    labels, weights = torch.tensor([0, 2]), torch.tensor([0.5, 9.0, 2.0])
    each = [tasks.loss(config, LOGITS[i : i + 1], labels[i : i + 1]) for i in range(2)]
    expected = (0.5 * each[0] + 2.0 * each[1]) / 2
    assert torch.allclose(tasks.loss(config, LOGITS, labels, weights), expected)
    soft = F.one_hot(labels, 3).float()
    assert torch.allclose(tasks.loss(config, LOGITS, soft, weights), expected)


def test_weighted_parts_of_a_batch_are_the_whole() -> None:
    """Torch's own weighted mean divides each part by its own weights."""
    config, weights = TrainConfig(), torch.tensor([0.5, 9.0, 2.0])
    logits, labels = torch.randn(8, 3), torch.tensor([0, 1, 2, 0, 0, 0, 2, 1])
    parts = [tasks.loss(config, logits[i : i + 2], labels[i : i + 2], weights)
             for i in range(0, 8, 2)]  # fmt: skip
    assert torch.allclose(sum(parts) / 4, tasks.loss(config, logits, labels, weights))


# Classes of different sizes --------------------------------------------------------------------


def uneven(counts: tuple[int, ...] = (24, 8, 4)) -> sources.Source:
    images, _ = toys.pictures(sum(counts), len(counts))
    labels = np.repeat(np.arange(len(counts)), counts).tolist()
    return sources.from_arrays(images, labels, toys.CLASSES[: len(counts)])


def test_class_weights_are_inverse_and_one_in_the_mean() -> None:
    source = uneven()
    weights = tasks.class_weights(source)
    assert torch.allclose(weights * torch.tensor([24.0, 8.0, 4.0]), torch.tensor(12.0))
    assert float(weights[source.labels].mean()) == pytest.approx(1)


def test_balanced_shows_every_picture_and_each_class_as_often() -> None:
    source = uneven((24, 8, 5))
    even = tasks.balanced(source, seed=3)
    assert np.bincount(even.labels).tolist() == [24, 24, 24]
    assert set(even.ids.tolist()) == set(source.ids.tolist())
    times = np.unique(even.ids, return_counts=True)[1]
    assert set(times.tolist()) == {1, 3, 4, 5}
    for i in (0, 30, 71):
        row = int(source.ids.tolist().index(even.ids[i]))
        assert np.array_equal(even[i][0], source[row][0])
    again, other = tasks.balanced(source, 3), tasks.balanced(source, 4)
    assert np.array_equal(even.ids, again.ids)
    assert not np.array_equal(even.ids, other.ids)
    held = loader.in_memory(source, 1)
    assert np.array_equal(tasks.balanced(held, 3)[30][0], even[30][0])


@pytest.mark.parametrize("changes", [{"class_weights": True}, {"balanced": True}])
def test_small_classes_count(changes: dict[str, Any], tmp_path: Path) -> None:
    """A model without any pictures' features, its bias alone: it learns the classes' shares."""
    shares = []
    for name, how in (("plain", {}), ("even", changes)):
        config = toys.config(
            tmp_path / name, steps=90, batch=24, lr=0.1, held_out=0, freeze="*[!d].bias,*weight,"
            "class_token,positions", label_smoothing=0.0, warmup=0, **how,
        )  # fmt: skip
        bundle = vitlab.train(uneven((24, 8, 4)), config)
        shares.append(bundle.model.head.bias.softmax(0))
    assert shares[0].tolist() == pytest.approx([24 / 36, 8 / 36, 4 / 36], abs=0.08)
    assert shares[1].tolist() == pytest.approx([1 / 3] * 3, abs=0.08)


# Initial values --------------------------------------------------------------------------------


def model(**changes: Any) -> ViT:
    torch.manual_seed(0)
    return ViT(ViTConfig(**{"image": 16, "classes": 4, **toys.SHAPE, **changes}))


@pytest.mark.parametrize(
    ("options", "bias"),
    [
        ({}, 0.0), ({"head_bias": -2.5}, -2.5), ({"loss": "sigmoid"}, -math.log(4)),
        ({"loss": "sigmoid", "head_bias": -10.0}, -10.0),
        ({"task": "multi-label"}, 0.0),
    ],
)  # fmt: skip
def test_bias_of_a_new_head(options: dict[str, Any], bias: float) -> None:
    vit = model()
    initial.prepare(TrainConfig(**options), vit, new_head=True)
    assert vit.head.bias.tolist() == pytest.approx([bias] * 4)
    vit.head.bias.data.fill_(7)
    initial.prepare(TrainConfig(**options), vit, new_head=False)
    assert vit.head.bias.tolist() == [7] * 4


def test_the_tanh_head_has_the_width_of_the_model(tmp_path: Path) -> None:
    bundle = vitlab.train(toys.pictures(), toys.config(tmp_path / "a", tanh_head=True, steps=1))
    assert bundle.model.config.head_hidden == toys.SHAPE["width"]
    vitlab.train(toys.pictures(), toys.config(tmp_path / "b", tanh_head=False, steps=1))
    with pytest.raises(ValueError, match="--tanh-head needs a Vision Transformer"):
        vitlab.train(toys.pictures(), TrainConfig(model="bit-r50x1", size=16, tanh_head=True,
                     out=tmp_path / "c"))  # type: ignore[arg-type]  # fmt: skip


def test_sincos_positions_by_hand() -> None:
    table = initial.sincos((2, 3), 8)
    assert table.shape == (6, 8)
    slow = 1e-4
    for row, (y, x) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]):
        expected = [f(v * w) for v in (x, y) for f in (math.sin, math.cos) for w in (1, slow)]
        assert table[row].tolist() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="width that 4 divides, not 30"):
        initial.sincos((2, 2), 30)


def test_sincos_positions_stay(tmp_path: Path) -> None:
    config = toys.config(tmp_path / "run", positions="sincos", weight_decay=0.5, ema=0.9)
    bundle = vitlab.train(toys.pictures(), config)
    positions = bundle.model.positions[0]
    assert torch.equal(positions[1:], initial.sincos((2, 2), 24))
    assert not positions[0].any(), "a class token stands nowhere"
    with pytest.raises(ValueError, match="--positions sincos is for a new Vision Transformer"):
        vitlab.train(toys.pictures(), TrainConfig(
            from_=tmp_path / "run", positions="sincos", out=tmp_path / "b"))  # type: ignore[arg-type]  # fmt: skip


def test_the_evaluation_transform_may_be_changed(tmp_path: Path) -> None:
    config = toys.config(tmp_path / "run", resize="squash", eval_crop=0.875,
                         interpolation="bilinear", antialias=False, steps=2)  # fmt: skip
    vitlab.train(toys.pictures(), config)
    p = vitlab.load(tmp_path / "run").preprocess
    assert (p.resize, p.crop, p.interpolation, p.antialias) == ("squash", 0.875, "bilinear", False)


# Freezing --------------------------------------------------------------------------------------


def changed(start: Path, run: Path) -> set[str]:
    """Names of the tensors whose bits a run has changed."""
    before, after = (load_file(path / "model.safetensors") for path in (start, run))
    assert before.keys() == after.keys()
    return {k for k in before if not torch.equal(before[k], after[k])}


@pytest.fixture
def start(tmp_path: Path) -> Path:
    vitlab.save(toys.bundle(), tmp_path / "start")
    return tmp_path / "start"


def tuned(start: Path, out: Path, **changes: Any) -> vitlab.Bundle:
    shape = dict.fromkeys(["model", "size", *toys.SHAPE])
    return vitlab.train(toys.pictures(), toys.config(out, from_=str(start), **shape, **changes))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_what_is_frozen_keeps_its_bits(optimizer: str, start: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = {"optimizer": optimizer, "weight_decay": 0.5, "ema": 0.9, "dropout": 0.1}
    tuned(start, out, freeze="blocks.0.*, patch.*,positions", **more)
    names = toys.bundle().model.state_dict().keys()
    frozen = {n for n in names if n.startswith(("blocks.0.", "patch.", "positions"))}
    assert changed(start, out) == set(names) - frozen
    tuned(start, tmp_path / "probe", freeze="backbone", **more)
    assert changed(start, tmp_path / "probe") == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ("blocks.7.*", "no tensor has such a name; did you mean blocks."),
        ("bacbone", "did you mean backbone"),
        ("backbone,head.*", "nothing would be left to train"),
        ("*", "nothing would be left"),
    ],
)
def test_patterns_that_cannot_be_meant(patterns: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        initial.freeze(model(), patterns)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_head_learns_first(optimizer: str, start: Path, tmp_path: Path,
                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Not a bit of the rest moves, nor do its moments see what the untrained head sent down."""
    seen = []
    plain = loop.update

    def update(job, forward, batch, step):
        result = plain(job, forward, batch, step)
        body = [p for n, p in job.model.named_parameters() if not n.startswith("head")]
        seen.append((torch.equal(before, body[0]), any(map(job.optimizer.state.get, body))))
        return result

    before = toys.bundle().model.class_token
    monkeypatch.setattr(loop, "update", update)
    tuned(start, tmp_path / "run", head_first=0.25, optimizer=optimizer, weight_decay=0.5)
    assert seen == [(True, False)] * 3 + [(False, True)] * 9
    plan = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["plan"]
    assert plan["head_steps"] == 3
    with pytest.raises(ValueError, match="--head-first 13 is more than the 12 steps"):
        tuned(start, tmp_path / "b", head_first=13)


def test_layer_decay_moves_lower_layers_less(start: Path, tmp_path: Path) -> None:
    """By SGD without momentum's help: a first step in proportion to each layer's rate."""
    steps = []
    for decay in (1.0, 0.5):
        out = tmp_path / f"{decay}"
        tuned(start, out, layer_decay=decay, optimizer="sgd", lr=0.1, steps=1, warmup=0,
              weight_decay=0.0, clip=0.0)  # fmt: skip
        before, after = (load_file(path / "model.safetensors") for path in (start, out))
        steps.append({k: (after[k] - before[k]) for k in before})
    whole, less = steps
    for prefix, share in (("head", 1.0), ("norm", 1.0), ("blocks.1", 0.5), ("blocks.0", 0.25),
                          ("patch", 0.125), ("positions", 0.125)):  # fmt: skip
        for name in filter(lambda n, p=prefix: n.startswith(p), whole):
            assert torch.allclose(less[name], share * whole[name], rtol=1e-3, atol=1e-6), name
            assert whole[name].abs().max() > 1e-5, name


# Adapters --------------------------------------------------------------------------------------


def test_adapters_begin_as_nothing_and_merge_into_a_plain_model() -> None:
    pytest.importorskip("peft")
    vit = toys.bundle().model
    names = list(vit.state_dict())
    images = torch.randn(2, 3, 16, 16)
    before = vit(images)
    adapters.inject(vit, rank=4)
    assert torch.allclose(vit(images), before, atol=1e-6)
    trained = {n for n, p in vit.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 4 * 2 + 2, "two matrices beside each of four, in two blocks"
    assert {"head.weight", "head.bias"} <= trained
    for name, parameter in vit.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    moved = vit(images)
    assert (moved - before).abs().max() > 1e-3
    adapters.merge(vit)
    assert list(vit.state_dict()) == names
    assert torch.allclose(vit(images), moved, atol=1e-5)
    with pytest.raises(ValueError, match="--lora needs the encoder blocks"):
        adapters.inject(BiT(BiTConfig(layers=(1,), width=8, groups=4)), 4)  # type: ignore[arg-type]


def test_a_run_with_adapters_leaves_a_plain_bundle(start: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    tuned(start, tmp_path / "run", lora=2, lr=0.01, ema=0.9)
    moved = changed(start, tmp_path / "run")
    matrices = ("qkv.weight", "out.weight", "up.weight", "down.weight")
    assert moved == {
        n for n in toys.bundle().model.state_dict() if n.startswith("head") or n.endswith(matrices)
    }
    scored = vitlab.evaluate(vitlab.load(tmp_path / "run"), toys.source())
    assert scored.n == 40


def test_a_missing_peft_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ValueError, match=r"--lora needs peft: pip install 'vitlab\[lora\]'"):
        adapters.inject(model(), 4)


# Options that change what lives from step to step ----------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_decay": 0.7, "head_first": 0.4, "decay_with_lr": False},
        {"loss": "sigmoid", "class_weights": True, "freeze": "patch.*", "optimizer": "sgd"},
        {"balanced": True, "augment_as": "google", "positions": "sincos", "tanh_head": True},
    ],
)
def test_a_killed_run_ends_the_same(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**toys.RICH, "save_every": "0.000001s", **changes}
    vitlab.train(toys.pictures(41), toys.config(tmp_path / "whole", **options))
    plain = loop.update

    def update(job, forward, batch, step):
        if step == 5:
            raise RuntimeError
        return plain(job, forward, batch, step)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", update)
        with pytest.raises(RuntimeError):
            vitlab.train(toys.pictures(41), toys.config(tmp_path / "cut", **options))
    vitlab.train(toys.pictures(41), toys.config(tmp_path / "cut", **options))
    toys.same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_frozen_stem_and_recomputed_blocks_go_together(tmp_path: Path) -> None:
    """Nothing that enters the first block needs a gradient then; its weights do all the same."""
    runs = []
    for recompute in (False, True):
        config = toys.config(
            tmp_path / f"{recompute}", recompute=recompute, freeze="patch.*,positions,class_token",
            dropout=0.2, drop_path=0.2, precision="float32",
        )  # fmt: skip
        runs.append(vitlab.train(toys.pictures(), config).model.state_dict())
    fresh = model().state_dict()
    for name, tensor in runs[0].items():
        assert torch.allclose(tensor, runs[1][name], atol=1e-6), name
    assert not torch.equal(runs[0]["blocks.0.mlp.up.weight"], fresh["blocks.0.mlp.up.weight"])
