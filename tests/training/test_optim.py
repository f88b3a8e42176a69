"""Schedules against the original code, parameter groups, the moving average, clipping."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import toys
from torch import nn

from vitlab.models.resnet import BiT, BiTConfig, StemConfig
from vitlab.models.vit import ViT, ViTConfig
from vitlab.training.config import TrainConfig
from vitlab.training.optim import (
    Average,
    clip_gradients,
    decay_of,
    hold_back,
    learning_rate,
    make_optimizer,
    optimizer_of,
    parameter_groups,
    set_rate,
)

DATA = Path(os.environ.get("VITLAB_TEST_DATA", Path(__file__).parents[2] / "../shared"))
ORIGINAL = DATA / "fixtures" / "original-code"


# Learning rates --------------------------------------------------------------------------------


@pytest.mark.skipif(not ORIGINAL.is_dir(), reason="no numbers of the original code in test data")
@pytest.mark.parametrize(
    "column",
    [
        "vt_cosine",
        "vt_linear",
        "vt_linear_end",
        "vt_cosine_nowarmup",
        "bv_cosine",
        "bv_linear",
        "bv_linear_end",
    ],
)
def test_rates_are_those_of_the_original_code(column: str) -> None:
    cases = json.loads((ORIGINAL / "manifest.json").read_text())["cases"]
    case = next(c for c in cases if c["name"] == "schedules")
    entry = next(c for c in case["config"]["columns"] if c["column"] == column)
    k = entry["kwargs"]
    # Where nothing is said, linear decay ends at 1e-5 in vision_transformer, at 0 in big_vision.
    rest = 1e-5 if entry["family"] == "vit_jax" and k["decay_type"] == "linear" else 0.0
    ours = [
        learning_rate(
            step, k["total_steps"], peak=k["base"], warmup=k["warmup_steps"],
            schedule=k["decay_type"], end=k.get("linear_end", rest),
        )
        for step in range(21)
    ]  # fmt: skip
    theirs = np.load(ORIGINAL / "schedules.npz")[column]
    assert np.abs(np.array(ours) - theirs).max() <= case["tolerance"][column]


def test_rates_by_hand() -> None:
    rates = [
        learning_rate(s, 10, peak=1e-3, warmup=3, schedule="cosine") for s in range(11)
    ]  # fmt: skip
    assert rates[:4] == pytest.approx([0, 1e-3 / 3, 2e-3 / 3, 1e-3])
    assert rates.count(max(rates)) == 1
    assert max(rates) == 1e-3
    assert rates[5] == pytest.approx(1e-3 * 0.5 * (1 + math.cos(math.pi * 2 / 7)))
    assert abs(rates[10]) < 1e-12
    assert learning_rate(25, 10, peak=1e-3, warmup=3, schedule="linear", end=1e-4) == 1e-4
    assert learning_rate(0, 1, peak=1e-3, warmup=0, schedule="cosine") == 1e-3
    half = learning_rate(5, 10, peak=1.0, warmup=0, schedule="cosine", end=0.2)
    assert half == pytest.approx(0.6)


# Parameter groups ------------------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def full_model() -> ViT:
    """With every kind of parameter a ViT can have."""
    shape = {**toys.SHAPE, "image": 16, "registers": 2, "layer_scale": 0.1, "head_hidden": 8}
    return ViT(ViTConfig(classes=3, **shape))


@pytest.mark.parametrize(
    "wrap", [lambda m: m, Wrapped, torch.compile], ids=["plain", "wrapped", "compiled"]
)
def test_only_matrices_decay_whatever_the_wrapper(wrap) -> None:
    model = full_model()
    names = {id(p): name for name, p in model.named_parameters()}
    decay, rest = (
        sorted(names[id(p)] for p in group["params"])
        for group in parameter_groups(wrap(model), 0.1)
    )
    assert sorted(decay + rest) == sorted(names.values()), "each exactly once"
    kinds = ("patch.weight", "qkv.weight", "out.weight", "up.weight", "down.weight",
             "hidden.weight", "head.weight")  # fmt: skip
    assert decay == sorted(n for n in names.values() if n.endswith(kinds))
    assert {"class_token", "positions", "registers", "norm.weight", "blocks.0.scale1"} <= set(rest)
    assert all(n.endswith(".bias") or "norm" in n or n in rest for n in rest)


def test_frozen_parameters_are_left_out() -> None:
    model = full_model()
    for p in model.parameters():
        p.requires_grad = False
    model.head.weight.requires_grad = True
    decay, rest = parameter_groups(model, 0.1)
    assert [id(p) for p in decay["params"]] == [id(model.head.weight)]
    assert rest["params"] == []
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_step_without_gradient_only_decays_matrices(name: str) -> None:
    model = full_model().requires_grad_()
    optimizer = make_optimizer(model, name, weight_decay=0.5)
    for p in model.parameters():
        torch.nn.init.ones_(p)
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    assert model.patch.weight.unique().item() == pytest.approx(0.95)
    for untouched in (model.class_token, model.positions, model.norm.weight, model.head.bias):
        assert untouched.unique().item() == 1


@pytest.mark.parametrize(
    "wrap", [lambda m: m, Wrapped, torch.compile], ids=["plain", "wrapped", "compiled"]
)
def test_layer_decay_is_in_the_rate_itself(wrap) -> None:
    """Not in a key that only somebody's scheduler reads; and under any schedule."""
    model = full_model()
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = make_optimizer(wrap(model), "adamw", 0.1, layer_decay=0.5)
    for schedule in ("cosine", "linear"):
        rate = learning_rate(3, 10, peak=1e-3, warmup=2, schedule=schedule)
        set_rate(optimizer, rate)
        rates = {names[id(p)]: g["lr"] for g in optimizer.param_groups for p in g["params"]}
        assert rates.keys() == set(names.values())
        for name, own in rates.items():
            depth = {"blocks.0": 0.25, "blocks.1": 0.5, "norm.": 1, "head.": 1, "hidden.": 1}
            share = next((s for start, s in depth.items() if name.startswith(start)), 0.125)
            assert own == rate * share, name
    decay = {names[id(p)]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    plain = {names[id(p)]: g["weight_decay"] for g in parameter_groups(model, 0.1)
             for p in g["params"]}  # fmt: skip
    assert decay == plain, "who decays does not depend on the rate"
    assert optimizer.param_groups[0]["lr"] == rate, "the first group has the peak: it is logged"


def test_layer_decay_of_a_hybrid_and_of_a_resnet() -> None:
    stem = StemConfig(layers=(1,), width=8, groups=4)
    shape = {**toys.SHAPE, "patch": 1, "image": 16}
    model = ViT(ViTConfig(classes=3, stem=stem, **shape))
    names = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups(model, 0.1, layer_decay=0.5)
    shares = {names[id(p)]: g["lr_scale"] for g in groups for p in g["params"]}
    assert {s for n, s in shares.items() if n.startswith("stem.")} == {0.125}
    assert shares["norm.weight"] == 1
    resnet = BiT(BiTConfig(layers=(1,), width=8, groups=4, classes=3))
    with pytest.raises(ValueError, match="--layer-decay needs the encoder blocks"):
        parameter_groups(resnet, 0.1, layer_decay=0.5)


def test_a_head_apart_can_be_trained_alone() -> None:
    model = full_model()
    optimizer = make_optimizer(model, "adamw", 0.1, apart=True)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    hold_back(optimizer)
    left = {n for n, p in model.named_parameters() if p.grad is not None}
    assert left == {"hidden.weight", "hidden.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_decay_is_decoupled_also_from_momentum(name: str) -> None:
    """Ten steps without gradient: (1 - rate x decay)^10, as no momentum carries the decay on."""
    layer = nn.Linear(1, 1)
    optimizer = make_optimizer(layer, name, weight_decay=0.5)
    layer.weight.data.fill_(1.0)
    for _ in range(10):
        layer.weight.grad = torch.zeros_like(layer.weight)
        set_rate(optimizer, 0.1)
        optimizer.step()
    assert layer.weight.item() == pytest.approx(0.95**10, rel=1e-5)


def test_decay_apart_from_the_rate_is_that_of_big_vision() -> None:
    """There a step takes off wd x schedule, whatever the peak: 1e-4 at 1e-3 is AdamW's 0.1."""
    assert decay_of(1e-4, False, 1e-3) == pytest.approx(0.1)
    assert decay_of(0.05, True, 1e-3) == 0.05
    assert decay_of(0.05, False, 0.0) == 0.05
    for peak in (1e-3, 1e-2):
        config = TrainConfig(weight_decay=1e-2, decay_with_lr=False, lr=peak)
        layer = nn.Linear(1, 1)
        optimizer = optimizer_of(config, peak, layer)
        layer.weight.data.fill_(1.0)
        layer.weight.grad = torch.zeros_like(layer.weight)
        set_rate(optimizer, peak * 0.5)
        optimizer.step()
        assert layer.weight.item() == pytest.approx(1 - 1e-2 * 0.5, rel=1e-6)


# The moving average ----------------------------------------------------------------------------


def test_average_warms_up_then_follows_its_decay() -> None:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(0.0)
    average = Average(layer, decay=0.9)
    layer.weight.data.fill_(1.0)
    expected = 0.0
    for n in range(1, 201):
        average.update(layer)
        decay = min(0.9, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * 1.0
        assert float(average.tensors["weight"]) == pytest.approx(expected, abs=1e-6)
    assert average.updates == 200
    assert not average.tensors["weight"].requires_grad


def test_a_slow_average_is_useful_after_a_short_run() -> None:
    """With a fixed decay of 0.9998, 60 steps would leave 98.8 % of the initial weights."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(0.0)
    average = Average(layer, decay=0.9998)
    layer.weight.data.fill_(1.0)
    for _ in range(60):
        average.update(layer)
    assert float(average.tensors["weight"]) > 0.99


# Clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("largest", "left"), [(1.0, 1.0), (0.0, 5.0), (10.0, 5.0)])
def test_clipping_scales_the_global_norm_and_tells_it(largest: float, left: float) -> None:
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([0.0, 4.0])
    assert float(clip_gradients([a, b], largest)) == pytest.approx(5.0)
    assert float(torch.cat([a.grad, b.grad]).norm()) == pytest.approx(left, rel=1e-4)
    assert float(a.grad / b.grad[1]) == pytest.approx(0.75)
