"""`vitlab.weights.timm`: against timm itself, with random weights, in float64, both ways."""

import json
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import timm
import torch
from checkpoints import save, state
from checkpoints import timm_model as create
from torch import nn

from vitlab.models.resnet import BiTConfig, StemConfig
from vitlab.models.vit import ViT
from vitlab.weights import formats
from vitlab.weights.report import Refused

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
NAMED = {  # architecture, what differs from it, image side
    "ViT-Ti/16": ("vit_tiny_patch16_224", {}, 224),
    "ViT-B/32 at 64": ("vit_base_patch32_224", {"img_size": 64}, 64),
    "DeiT III small": ("deit3_small_patch16_224", {"img_size": 64}, 64),
    "DINOv2 small, registers": ("vit_small_patch14_reg4_dinov2", {"img_size": 70}, 70),
    "DINOv2 small": ("vit_small_patch14_dinov2", {"img_size": 70}, 70),
    "R+Ti/16": ("vit_tiny_r_s16_p8_224", {"img_size": 64}, 64),
    "R26+S/32": ("vit_small_r26_s32_224", {"img_size": 64}, 64),
    "R50+B/16": ("vit_base_r50_s16_224", {"img_size": 64}, 64),
    "BiT R50x1": ("resnetv2_50x1_bit", {}, 64),
}
SMALL = {  # a base of timm's, what differs from it
    "plain": {},
    "features": {"num_classes": 0},
    "mean, norm after": {"global_pool": "avg"},
    "mean, norm before": {"global_pool": "avg", "fc_norm": False},
    "mean, no class token": {"global_pool": "avg", "class_token": False},
    "no slot": {"no_embed_class": True},
    "registers, LayerScale": {"reg_tokens": 2, "init_values": 1e-5, "no_embed_class": True},
    "tanh GELU": {"act_layer": "gelu_tanh"},
    "rectangle": {"img_size": (32, 64)},
    "rectangular patch": {"patch_size": (8, 16)},
    "odd MLP": {"mlp_ratio": 97 / 48},
}


def both_ways(theirs: nn.Module, side: Any, path: Path, **asked: Any) -> None:
    """vitlab reads what timm saves, timm loads what vitlab writes, and the numbers agree."""
    tensors = state(theirs)
    bundle, report = formats.read(save(path / "theirs.safetensors", tensors), **asked)
    assert len(report.read) == len(tensors)
    assert not report.new + report.dropped + report.aside
    formats.write(bundle, path / "again.safetensors", "timm")
    checkpoints.same(tensors, checkpoints.tensors(path / "again.safetensors"))
    formats.write(bundle, path / "hub", "timm")
    loaded = timm.create_model(f"local-dir:{path / 'hub'}", pretrained=True).eval()
    assert type(loaded) is type(theirs)
    checkpoints.same(tensors, state(loaded))
    back, _ = formats.read(path / "hub")
    checkpoints.same_state(bundle, back)
    assert (back.preprocess, back.classes) == (bundle.preprocess, bundle.classes)
    x = torch.randn(2, 3, *((side, side) if isinstance(side, int) else side)).double()
    expected = checkpoints.run(theirs.double(), x)
    for model in (bundle.model, loaded):
        assert checkpoints.gap(expected, checkpoints.run(model.double(), x)) <= 1e-9


BIG = ("ViT-B/32 at 64", "R50+B/16")  # half a minute on two cores


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in BIG else n for n in NAMED]
)
def test_named_models(name: str, tmp_path: Path) -> None:
    architecture, changes, side = NAMED[name]
    both_ways(create(architecture, **changes), side, tmp_path)


@pytest.mark.parametrize("name", SMALL)
def test_kinds_of_vit(name: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = SMALL[name]
    asked: dict[str, Any] = {"heads": 3}
    if name == "mean, norm before":  # no name tells it, a folder's config.json does
        asked["pool"] = "mean"
    if name == "tanh GELU":
        asked["activation"] = "gelu_tanh"
    if "rectang" in name:
        asked["stored"] = changes.get("img_size", 32)
    both_ways(create(**changes), changes.get("img_size", 32), tmp_path, **asked)


def test_a_rectangle_is_not_taken_for_a_square_of_as_many_patches(tmp_path: Path) -> None:
    """4 x 16 patches are no 8 x 8: what vitlab wrote tells its grid."""
    theirs = create(img_size=(32, 128))
    path = save(tmp_path / "a.pth", state(theirs))
    assert formats.read(path, heads=3)[0].model.config.grid == (8, 8)  # nothing says otherwise
    bundle, _ = formats.read(path, heads=3, stored=(32, 128))
    formats.write(bundle, tmp_path / "b.pth", "timm")
    assert formats.read(tmp_path / "b.pth")[0].model.config.grid == (4, 16)
    wanted, report = formats.read(path, heads=3, image=(32, 128))
    assert report.interpolated == ("positions, 8 x 8 to 4 x 16 (bicubic)",)
    assert wanted.model.config.grid == (4, 16)


def test_the_hub_folder_that_timm_writes_is_read(tmp_path: Path) -> None:
    theirs = create("vit_tiny_patch16_224", img_size=64, num_classes=3, global_pool="avg")
    labels = ["ant", "bee", "cat"]
    config = {"labels": labels, "pretrained_cfg": {"crop_pct": 0.95, "interpolation": "bilinear"}}
    timm.models.save_for_hf(
        theirs.float(), str(tmp_path), model_config=config, safe_serialization=True
    )
    bundle, report = formats.read(tmp_path)
    assert bundle.classes == tuple(labels)
    assert (bundle.preprocess.crop, bundle.preprocess.interpolation) == (0.95, "bilinear")
    assert bundle.card.source["licence"] == "apache-2.0"
    config = bundle.model.config
    assert (config.pool, config.norm, config.image) == ("mean", "after_pool", (64, 64))
    x = torch.randn(2, 3, 64, 64)
    assert checkpoints.gap(checkpoints.run(theirs, x), checkpoints.run(bundle.model, x)) <= 1e-5
    assert report.notes == ("3 heads, as published for width 192",)


def test_preprocessing_that_no_file_tells_is_a_note(tmp_path: Path) -> None:
    for changes, mean in (
        ({}, 0.5),
        ({"init_values": 1e-5}, 0.485),
        ({"global_pool": "avg"}, 0.485),
    ):
        path = save(tmp_path / "a.pth", state(create(**changes)))
        bundle, report = formats.read(path, heads=3)
        assert bundle.preprocess.mean[0] == mean
        assert any("preprocessing is not in the file" in note for note in report.notes)


# Facebook's own files


def test_original_dinov2_files(tmp_path: Path) -> None:
    """register_tokens, mask_token and a class slot beside registers; all of it returns."""
    theirs = create(reg_tokens=2, init_values=0.1, no_embed_class=True, num_classes=0)
    tensors = state(theirs)
    slot = torch.full((1, 1, 48), 0.3)
    original = {
        **{k: v for k, v in tensors.items() if k != "reg_token"},
        "register_tokens": tensors["reg_token"],
        "mask_token": torch.randn(1, 48),
        "pos_embed": torch.cat([slot, tensors["pos_embed"]], 1),
        "cls_token": tensors["cls_token"] - slot,
    }
    path = save(tmp_path / "dinov2_vits14_reg4_pretrain.pth", original)
    bundle, report = formats.read(path, heads=3)
    assert report.aside == ("mask_token",)
    x = torch.randn(2, 3, 32, 32)
    expected = checkpoints.run(theirs, x)
    assert checkpoints.gap(expected, checkpoints.run(bundle.model, x)) <= 1e-5
    formats.write(bundle, tmp_path / "again.pth", "timm")
    checkpoints.same(original, checkpoints.tensors(tmp_path / "again.pth"))
    report = formats.write(bundle, tmp_path / "hub", "timm")  # timm's own form: the slot is folded
    assert any("class_token" in note for note in report.notes)
    assert any("mask_token" in note for note in report.notes)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True).eval()
    assert checkpoints.gap(expected, checkpoints.run(loaded, x)) <= 1e-5


def test_original_deit3_files(tmp_path: Path) -> None:
    """gamma_1, gamma_2; report 056: as many rows as patches, none for the class token."""
    theirs = create(init_values=0.1, no_embed_class=True)
    original = {
        k.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): v
        for k, v in state(theirs).items()
    }
    path = save(tmp_path / "deit3.pth", {"model": original})
    bundle, _ = formats.read(path, heads=3)
    assert not bundle.model.config.class_position
    x = torch.randn(2, 3, 32, 32)
    expected = checkpoints.run(theirs, x)
    assert checkpoints.gap(expected, checkpoints.run(bundle.model, x)) <= 1e-5
    formats.write(bundle, tmp_path / "again.pth", "timm")
    checkpoints.same(original, checkpoints.tensors(tmp_path / "again.pth"))
    larger, report = formats.read(path, heads=3, image=64)
    assert larger.model.positions.shape == (1, 64, 48)
    assert checkpoints.run(larger.model, torch.randn(1, 3, 64, 64)).isfinite().all()
    assert report.interpolated == ("positions, 4 x 4 to 8 x 8 (bicubic)",)


def test_old_files_with_pre_logits(tmp_path: Path) -> None:
    tensors = {**state(create()), "pre_logits.fc.weight": torch.randn(48, 48),
               "pre_logits.fc.bias": torch.randn(48)}  # fmt: skip
    bundle, _ = formats.read(save(tmp_path / "old.pth", tensors), heads=3)
    assert bundle.model.config.head_hidden == 48
    formats.write(bundle, tmp_path / "again.pth", "timm")
    checkpoints.same(tensors, checkpoints.tensors(tmp_path / "again.pth"))
    with pytest.raises(Refused, match="tanh layer"):
        formats.write(bundle, tmp_path / "hub", "timm")


# What is refused


def test_mean_pooled_weights_are_not_read_as_others(tmp_path: Path) -> None:
    """Report 050: fc_norm stands for norm, and says how tokens are pooled."""
    theirs = create(global_pool="avg")
    path = save(tmp_path / "mae.pth", {"model": state(theirs)})
    bundle, report = formats.read(path, heads=3, pool="mean")
    assert len(report.read) == len(state(theirs))
    x = torch.randn(2, 3, 32, 32)
    assert checkpoints.gap(checkpoints.run(theirs, x), checkpoints.run(bundle.model, x)) <= 1e-5
    with pytest.raises(ValueError, match="the checkpoint is mean-pooled"):
        formats.read(path, heads=3, pool="token")
    both = {**state(theirs), "norm.weight": torch.ones(48), "norm.bias": torch.zeros(48)}
    with pytest.raises(ValueError, match=r"fc_norm.* stand for the same tensor"):
        formats.read(save(tmp_path / "both.pth", both), heads=3)


def test_distilled_deit_is_refused_by_name(tmp_path: Path) -> None:
    """Report 044: two prefix tokens and two heads are never read as one."""
    distilled = checkpoints.disturb(
        timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=2)
    )
    path = save(tmp_path / "distilled.pth", {"model": state(distilled)})
    with pytest.raises(Refused, match=r"distilled DeiT.*dist_token"):
        formats.read(path)
    with pytest.raises(ValueError, match="distilled DeiT"):  # its table has a row too many as well
        formats.read(path, drop=("dist_token", "head_dist.*"))


REFUSED = {
    "a MAP head": ("attn_pool.latent", {"global_pool": "map"}),
    "a SwiGLU MLP": ("blocks.0.mlp.fc1_g.weight", {}),
    "norms of queries and keys": ("blocks.0.attn.q_norm.weight", {"qk_norm": True}),
    "a norm before the blocks": ("norm_pre.weight", {"pre_norm": True}),
    "rotary or relative positions": ("blocks.0.attn.rope.freqs", {}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_kinds_of_vit_are_refused_by_name(what: str, tmp_path: Path) -> None:
    name, changes = REFUSED[what]
    tensors = state(create(**changes))
    tensors.setdefault(name, torch.ones(16))
    path = save(tmp_path / "other.pth", tensors)
    with pytest.raises(Refused, match=what) as caught:
        formats.read(path, heads=3)
    assert name in caught.value.report.refused
    assert str(caught.value).startswith(str(path))


def test_models_that_only_look_alike_are_refused(tmp_path: Path) -> None:
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, window_size=7)
    with pytest.raises(ValueError, match="Swin"):
        formats.read(save(tmp_path / "swin.pth", state(swin)))
    resnet = timm.create_model("resnet18")
    with pytest.raises(ValueError, match=r"0 of \d+ tensors .*BatchNorm"):
        formats.read(save(tmp_path / "resnet.pth", state(resnet)))


def test_arguments_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    formats.write(checkpoints.bundle(), tmp_path / "hub", "timm")
    path = tmp_path / "hub" / "config.json"
    config = json.loads(path.read_text())
    for changes, what in (
        ({"model_args": {"act_layer": "silu"}}, "activation 'silu'"),
        ({"model_args": {"norm_layer": "rmsnorm"}}, "norm 'rmsnorm'"),
        ({"global_pool": "max"}, "pooling 'max'"),
    ):
        path.write_text(json.dumps({**config, **changes}))
        with pytest.raises(ValueError, match=what):
            formats.read(tmp_path / "hub")


def test_hybrids_that_timm_does_not_have_are_refused(tmp_path: Path) -> None:
    bundle = checkpoints.bundle(stem=StemConfig(layers=(1, 1), width=32), patch=1)
    with pytest.raises(ValueError, match=r"no hybrid with a stem of layers \(1, 1\)"):
        formats.write(bundle, tmp_path / "hub", "timm")
    assert not (tmp_path / "hub").exists()
    formats.write(bundle, tmp_path / "names.safetensors", "timm")
    checkpoints.same_state(bundle, formats.read(tmp_path / "names.safetensors")[0])
    other = checkpoints.wrap(BiTConfig(image=32, layers=(1,), width=32, classes=5))
    with pytest.raises(ValueError, match="no BiT with layers"):
        formats.write(other, tmp_path / "hub", "timm")


def test_where_timm_computes_otherwise_is_said(tmp_path: Path) -> None:
    stem = StemConfig(layers=(), width=64)
    report = formats.write(checkpoints.bundle(stem=stem, patch=2), tmp_path / "h.pth", "timm")
    said = " ".join(report.notes)
    for word in ("activation", "standardize", "standardize_eps", "norm_eps"):
        assert f"computes {word} " in said
    report = formats.write(checkpoints.bundle(activation="gelu"), tmp_path / "g.pth", "timm")
    assert report.notes == ()
    report = formats.write(checkpoints.bundle(), tmp_path / "hub", "timm")  # config.json says it
    assert report.notes == ()
    model = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True).eval()
    ours, x = checkpoints.bundle(), torch.randn(1, 3, 32, 32)
    assert isinstance(ours.model, ViT)
    assert checkpoints.gap(checkpoints.run(ours.model, x), checkpoints.run(model, x)) <= 1e-5
