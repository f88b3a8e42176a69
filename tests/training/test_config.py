"""Options from dictionaries and YAML: conversion, ranges, unknown keys."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vitlab.training.config import TrainConfig, from_dict, seconds, to_dict


def test_numbers_that_yaml_reads_as_text_are_converted() -> None:
    text = 'lr: 1e-4\nweight_decay: 5e-2\nepochs: "3"\nsize: 32\nrandaugment: [2, 9]\ncrop: null'
    config = from_dict(yaml.safe_load(text))
    assert (config.lr, config.weight_decay, config.epochs) == (1e-4, 0.05, 3.0)
    assert [type(v) for v in (config.lr, config.weight_decay, config.epochs)] == [float] * 3
    assert (config.size, config.randaugment, config.crop) == ((32,), (2, 9), None)
    assert from_dict({"size": [32, 48], "batch": 8.0}).batch == 8


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"epochs": "three"}, "epochs: must be a number, not 'three'"),
        ({"batch": 2.5}, "batch: must be a whole number, not 2.5"),
        ({"batch": True}, "batch: must be a whole number, not True"),
        ({"batch": None}, "batch: needs a value"),
        ({"batch": [8]}, r"batch: must be a whole number, not \[8\]"),
        ({"batch": float("inf")}, "batch: must be a whole number, not inf"),
        ({"lr": 10**400}, "lr: must be a number, not 1000"),
        ({"flip": "maybe"}, "flip: must be true or false, not 'maybe'"),
        ({"flip": 1}, "flip: must be true or false, not 1"),
        ({"out": 3}, "out: must be text, not 3"),
        ({"pool": "max"}, "pool: must be one of token, mean, not 'max'"),
        ({"pool": ["token"]}, "pool: must be one of token, mean"),
        ({"crop": [0.5]}, "crop: needs 2 values, not 0.5"),
        ({"crop": "ab"}, "crop: needs 2 values, not 'ab'"),
        ({"learning_rte": 0.1}, "unknown key 'learning_rte': did you mean"),
        ({"weight_deacy": 0.1}, "unknown key 'weight_deacy': did you mean weight_decay?"),
        ({"from_": "x"}, "unknown key 'from_': did you mean from?"),
        ({3: "x"}, "unknown key 3: did you mean"),
    ],
)
def test_what_is_wrong_is_named(values: dict[Any, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"recipe.yaml: {said}"):
        from_dict(values, "recipe.yaml")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"batch": 0}, "--batch must be at least 1, not 0"),
        ({"epochs": 0}, "--epochs must be above 0 and at most 1e.06, not 0"),
        ({"epochs": -1}, "--epochs must be above 0 and at most 1e.06, not -1"),
        ({"steps": 0}, "--steps must be between 1 and"),
        ({"lr": float("nan")}, "--lr must be at least 0, not nan"),
        ({"lr": float("inf")}, "--lr must be at least 0, not inf"),
        ({"label_smoothing": 1.5}, "--label-smoothing must be between 0 and 1, not 1.5"),
        ({"held_out": 0.95}, "--held-out must be between 0 and 0.9"),
        ({"seed": -1}, "--seed must be between 0 and"),
        ({"threads": 0}, "--threads must be at least 1"),
        ({"accumulate": 0}, "--accumulate must be at least 1"),
        ({"batch": 10, "accumulate": 4}, "--batch 10 is not divisible by --accumulate 4"),
        ({"epochs": 1.0, "steps": 5}, "give only one of --epochs and --steps"),
        ({"steps": 1, "images": 9, "budget": "3s"}, "give only one of --steps and --images and"),
        ({"size": (1, 2, 3)}, "--size takes one number or two"),
        ({"size": ()}, "--size takes one number or two"),
        ({"crop": (0.5, 0.2)}, "--crop must be"),
        ({"crop": (0.0, 1.0)}, "--crop must be"),
        ({"crop": (float("nan"), 1.0)}, "--crop must be"),
        ({"randaugment": (0, 9)}, "--randaugment must be"),
        ({"randaugment": (2, 31)}, "--randaugment must be"),
        ({"budget": "soon"}, "'soon' is no length of time"),
        ({"budget": "0s"}, "'0s' is no length of time"),
        ({"save_every": "-5s"}, "'-5s' is no length of time"),
        ({"batch": 10**400}, "--batch must be at least 1, not 1000"),
        ({"budget": "9" * 400 + "h"}, "is no length of time"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainConfig(**values)


def test_a_switch_that_may_be_left_open_takes_words() -> None:
    assert from_dict({"antialias": "false"}).antialias is False
    assert from_dict({"antialias": True}).antialias is True
    assert from_dict({"antialias": None}).antialias is None


def test_one_rate_or_several() -> None:
    several = {"lr": "0.003,1e-2", "select": "held-out"}
    assert from_dict(several).lr == from_dict({**several, "lr": [0.003, 0.01]}).lr == (0.003, 0.01)
    assert from_dict({"lr": "3e-3"}).lr == from_dict({"lr": [3e-3]}).lr == 3e-3
    assert from_dict(yaml.safe_load(yaml.safe_dump(to_dict(from_dict(several))))).lr == (
        0.003,
        0.01,
    )
    with pytest.raises(ValueError, match="lr: must be a number, not 'fast'"):
        from_dict({**several, "lr": "0.1,fast"})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lr": (0.1, 0.2)}, "several rates are a sweep, which needs --select held-out"),
        ({"lr": (0.1, -1.0), "select": "held-out"}, "--lr must be at least 0, not -1"),
        ({"select": "held-out", "held_out": 0.0}, "needs --held-out above 0"),
        ({"layer_decay": 0.0}, "--layer-decay must be above 0 and at most 1, not 0"),
        ({"layer_decay": 1.1}, "--layer-decay must be above 0 and at most 1, not 1.1"),
        ({"seeds": 0}, "--seeds must be between 1 and 1000"),
        ({"lora": 4, "freeze": "patch.*"}, "--lora freezes all but"),
        ({"task": "multi-label", "balanced": True}, "--class-weights and --balanced are for"),
    ],
)
def test_options_that_contradict_each_other(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainConfig(**values)


def test_python_may_give_a_path_and_one_number() -> None:
    config = TrainConfig(out=Path("a") / "b", from_=Path("c"), size=32)  # type: ignore[arg-type]
    assert (config.out, config.from_, config.size) == (str(Path("a") / "b"), "c", (32,))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "model": st.text(),
            "from": st.none() | st.text(),
            "size": st.lists(st.integers(1, 999), min_size=1, max_size=2),
            "lr": st.none() | st.floats(0, 10),
            "pool": st.sampled_from([None, "token", "mean"]),
            "crop": st.none() | st.just([0.08, 1.0]),
            "flip": st.booleans(),
            "seed": st.integers(0, 2**63 - 1),
        },
    )
)
def test_yaml_keeps_a_configuration(values: dict[str, Any]) -> None:
    config = from_dict(values)
    again = from_dict(yaml.safe_load(yaml.safe_dump(to_dict(config))))
    assert again == config
    assert to_dict(config).items() >= values.items()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90s", 90), ("90", 90), ("3min", 180), ("1.5h", 5400), (" 2 Hours ", 7200), ("0.2s", 0.2)],
)
def test_lengths_of_time(text: str, expected: float) -> None:
    assert seconds(text) == pytest.approx(expected)
