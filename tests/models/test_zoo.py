"""Names, what they stand for, and what they cost."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import vitlab
from vitlab.models import cost, zoo
from vitlab.models.resnet import BiT, BiTConfig
from vitlab.models.vit import ViT, ViTConfig

COUNTS = {  # at 1000 classes, 224 pixels; the original code's tests assert the same
    "vit-ti16": 5_717_416, "vit-s16": 22_050_664, "vit-s32": 22_878_952, "vit-b8": 86_576_872,
    "vit-b16": 86_567_656, "vit-b32": 88_224_232, "vit-l16": 304_326_632,
    "vit-l32": 306_535_400, "vit-h14": 632_045_800, "r-vit-ti16": 6_337_704,
    "r26-vit-s32": 36_431_912, "r26-vit-b32": 101_383_976, "r50-vit-b16": 98_659_112,
    "r50-vit-l32": 328_994_856,
}  # fmt: skip
GMACS = {  # of the paper's digest, to its printed digits
    "vit-ti16": 1.25, "vit-s32": 1.14, "vit-s16": 4.60, "vit-b32": 4.41, "vit-b16": 17.56,
    "vit-b8": 78.15, "vit-l32": 15.38, "vit-l16": 61.55, "vit-h14": 167.3,
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str) -> None:
    assert cost.parameters(zoo.MODELS[name]) == COUNTS[name]


@pytest.mark.parametrize(
    ("name", "timms"),
    [
        ("bit-r50x1", "resnetv2_50x1_bit"), ("bit-r101x1", "resnetv2_101x1_bit"),
        ("bit-r101x3", "resnetv2_101x3_bit"), ("bit-r152x2", "resnetv2_152x2_bit"),
        ("bit-r152x4", "resnetv2_152x4_bit"), ("r50-vit-b16", "vit_base_r50_s16_224"),
        ("r26-vit-s32", "vit_small_r26_s32_224"), ("r50-vit-l32", "vit_large_r50_s32_224"),
        ("r-vit-ti16", "vit_tiny_r_s16_p8_224"),
    ],
)  # fmt: skip
def test_counts_are_those_of_timm(name: str, timms: str) -> None:
    import timm

    with torch.device("meta"):
        theirs = timm.create_model(timms, num_classes=1000)
    assert cost.parameters(zoo.MODELS[name]) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("name", GMACS)
def test_macs_are_those_of_the_paper(name: str) -> None:
    assert cost.macs(zoo.MODELS[name]) / 1e9 == pytest.approx(GMACS[name], abs=0.05, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vit-nano8", {}), ("vit-nano8", {"registers": 4, "head_hidden": 50, "classes": 7}),
        ("vit-nano8", {"image": (32, 128), "class_token": False, "pool": "mean"}),
        ("r-vit-ti16", {"depth": 1, "image": (64, 96)}), ("r26-vit-s32", {"depth": 1}),
        ("bit-r50x1", {}), ("bit-r50x1", {"image": (75, 62), "classes": 0}),
    ],
)  # fmt: skip
def test_macs_are_those_that_torch_counts(name: str, changes: dict[str, Any]) -> None:
    config = zoo.configure(name, **changes)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        zoo.build(config).eval()(torch.empty(1, 3, *config.image))
    assert cost.macs(config) == counter.get_total_flops() // 2


def test_the_small_hybrid_costs_as_much() -> None:
    plain, hybrid = (cost.macs(zoo.MODELS[name]) for name in ("vit-nano8", "r-vit-nano8"))
    assert hybrid == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("vit-nano8", (8, 8)), ("vit-h14", (16, 16)), ("vit-b8", (28, 28)), ("r-vit-ti16", (7, 7)),
        ("r-vit-nano8", (8, 8)), ("r26-vit-s32", (7, 7)), ("r50-vit-b16", (14, 14)),
        ("r50-vit-l16", (14, 14)), ("r50-vit-b32", (7, 7)), ("r50-vit-l32", (7, 7)),
    ],
)  # fmt: skip
def test_grids(name: str, grid: tuple[int, int]) -> None:
    config = zoo.MODELS[name]
    assert isinstance(config, ViTConfig)
    assert config.grid == grid


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("ViT-B/16", "vit-b16"), ("ViT-B_16", "vit-b16"), ("vit_base_patch16_224", "vit-b16"),
        ("vit_base_patch16_224.augreg_in21k", "vit-b16"), ("vit_b_16", "vit-b16"),
        ("google/vit-base-patch16-224", "vit-b16"), ("ViT-Ti_16", "vit-ti16"),
        ("vit_tiny_patch16_384", "vit-ti16"), ("vit_small_patch32_224", "vit-s32"),
        ("ViT-L/32", "vit-l32"), ("vit_large_patch16_224", "vit-l16"), ("vit_l_16", "vit-l16"),
        ("ViT-H_14", "vit-h14"), ("vit_h_14", "vit-h14"), ("vit_huge_patch14_224", "vit-h14"),
        ("vit-s16", "vit-s16"), ("VIT-B8", "vit-b8"), ("R50+ViT-B_16", "r50-vit-b16"),
        ("R50+ViT-B/16", "r50-vit-b16"), ("vit_base_r50_s16_384", "r50-vit-b16"),
        ("vit_base_r50_s16_224.orig_in21k", "r50-vit-b16"), ("R50+ViT-L_32", "r50-vit-l32"),
        ("vit_large_r50_s32_224", "r50-vit-l32"), ("R26+ViT-S_32", "r26-vit-s32"),
        ("vit_small_r26_s32_224", "r26-vit-s32"), ("R26+ViT-B/32", "r26-vit-b32"),
        ("vit_base_r26_s32_224", "r26-vit-b32"), ("R+ViT-Ti_16", "r-vit-ti16"),
        ("R+ViT-Ti/16", "r-vit-ti16"), ("vit_tiny_r_s16_p8_224", "r-vit-ti16"),
        ("BiT-M-R50x1", "bit-r50x1"), ("BiT-S-R101x3", "bit-r101x3"), ("BiT-R152x4", "bit-r152x4"),
        ("resnetv2_50x1_bit", "bit-r50x1"), ("resnetv2_152x2_bitm", "bit-r152x2"),
        ("timm/resnetv2_101x1_bit.goog_in21k_ft_in1k", "bit-r101x1"),
        ("resnetv2_50x1_bitm_in21k", "bit-r50x1"), ("resnetv2_50x1_bit_distilled", "bit-r50x1"),
    ],
)  # fmt: skip
def test_spellings(spelling: str, name: str) -> None:
    assert zoo.find(spelling) == name


@pytest.mark.parametrize("name", zoo.MODELS)
def test_own_names_are_understood(name: str) -> None:
    assert zoo.find(name) == name
    assert zoo.find(name.upper()) == name


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("vit-b17", "vit-b16"), ("vitb32", "vit-b32"), ("bit-r50x4", "bit-r50x"),
        ("R50+ViT-S_16", "r50-vit-"), ("resnetv2_50x3_bit", "bit-r50x"), ("", ""),
    ],
)  # fmt: skip
def test_an_unknown_name_is_answered_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError) as error:
        zoo.create(name)
    assert str(error.value).startswith(f"unknown model {name!r}: did you mean {near}")


def test_create_takes_fields_of_the_configuration() -> None:
    model = vitlab.create("ViT-Ti/16", classes=3, image=(32, 64), patch=8, depth=2, pool="mean")
    assert isinstance(model, ViT)
    expected = ViTConfig(
        image=(32, 64), patch=(8, 8), width=192, depth=2, heads=3, mlp_width=768, classes=3,
        pool="mean",
    )  # fmt: skip
    assert model.config == expected
    assert model(torch.zeros(1, 3, 32, 64)).shape == (1, 3)


def test_create_dispatches_on_the_family() -> None:
    with torch.device("meta"):
        bit = vitlab.create("BiT-M-R50x1", classes=3, image=64)
        hybrid = vitlab.create("R50+ViT-B_16", image=384)
        for kind, model in zoo.FAMILIES.values():
            assert isinstance(zoo.build(kind(image=(32, 32))), model)
    assert isinstance(bit, BiT)
    assert bit.config == BiTConfig(image=(64, 64), classes=3)
    assert isinstance(hybrid, ViT)
    assert hybrid.config.grid == (24, 24)


def test_none_leaves_a_field_as_it_is() -> None:
    assert zoo.configure("vit-b16", width=None, image=None) == zoo.MODELS["vit-b16"]
    assert zoo.configure("vit-b16", classes=0) == replace(zoo.MODELS["vit-b16"], classes=0)


def test_refused_options() -> None:
    with pytest.raises(ValueError, match="option 'drop_paht' of vit-b16: did you mean drop_path"):
        zoo.configure("vit-b16", drop_paht=0.1)
    with pytest.raises(ValueError, match="unknown model option 'patch' of bit-r50x1"):
        zoo.configure("bit-r50x1", patch=16)
    with pytest.raises(ValueError, match="unknown model option 'nonsense'"):
        zoo.configure("bit-r50x1", nonsense=None)
    assert zoo.configure("bit-r50x1", patch=None, depth=None) == zoo.MODELS["bit-r50x1"]
    with pytest.raises(ValueError, match="nearest: 208 or 224"):
        zoo.configure("vit-b16", image=222)
