"""`vitlab.weights.detect`: wrappers and prefixes come off, whatever else is in a file."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from checkpoints import save, state
from checkpoints import timm_model as create
from safetensors.torch import save_file

from vitlab.models.resnet import BiTConfig, StemConfig
from vitlab.weights import formats
from vitlab.weights.report import Refused


def wrap_each(prefix: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda sd: {prefix + k: v for k, v in sd.items()}


WRAPPED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "model, module": lambda sd: {"model": wrap_each("module.")(sd), "epoch": 7},
    "teacher, backbone": lambda sd: {"teacher": wrap_each("backbone.")(sd)},
    "state_dict, model": lambda sd: {"state_dict": wrap_each("model.")(sd)},
    "compiled": wrap_each("_orig_mod."),
    "compiled in DDP": wrap_each("module._orig_mod."),
    "DDP in compiled": wrap_each("_orig_mod.module."),
    "nested": lambda sd: {"state_dict": {"model": {"encoder": wrap_each("module.")(sd)}}},
    "averaged": lambda sd: {"n_averaged": torch.tensor(4), **wrap_each("module.")(sd)},
    "optimizer": lambda sd: {
        "model": sd, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []},
        "moments": {"blocks.0": torch.ones(2)},
    },
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin"])
@pytest.mark.parametrize("kind", WRAPPED)
def test_wrapped_and_prefixed_files_load_fully(kind: str, suffix: str, tmp_path: Path) -> None:
    """Reports 032 and 033."""
    theirs = create()
    plain, _ = formats.read(save(tmp_path / "plain.pth", state(theirs)), heads=3)
    path = save(tmp_path / f"wrapped{suffix}", WRAPPED[kind](state(theirs)))
    bundle, report = formats.read(path, heads=3)
    checkpoints.same_state(plain, bundle)
    assert len(report.read) == len(state(theirs))
    if kind != "optimizer":
        assert any(note.startswith("unwrapped: ") for note in report.notes)
    formats.write(bundle, tmp_path / "out.pth", "timm")  # never with a prefix
    checkpoints.same(state(theirs), checkpoints.tensors(tmp_path / "out.pth"))
    left = {"averaged": ("n_averaged",), "optimizer": ("moments.blocks.0",)}
    assert report.dropped == left.get(kind, ())


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("family", ["vit", "hybrid", "bit"])
def test_state_dicts_of_vitlab_itself(kind: str, family: str, tmp_path: Path) -> None:
    """Reports 032 and 033, with the package's own state dict: everything matches, difference 0."""
    stem = StemConfig(layers=(1, 1), width=32)
    bundle = {
        "vit": checkpoints.bundle(), "hybrid": checkpoints.bundle(stem=stem, patch=1),
        "bit": checkpoints.wrap(BiTConfig(image=224, layers=(1, 1), width=32, classes=5)),
    }[family]  # fmt: skip
    tensors = bundle.model.state_dict()
    path = save(tmp_path / "sd.pth", WRAPPED[kind](dict(tensors)))
    back, report = formats.read(path, **({} if family == "bit" else {"heads": 3}))
    checkpoints.same_state(bundle, back)
    assert len(report.read) == len(tensors)
    assert report.format == "vitlab"
    assert any("no config.json" in note for note in report.notes)
    said = f"0 of {len(tensors)} tensors matched" if family != "hybrid" else "no place for"
    with pytest.raises(ValueError, match=said):
        formats.read(save(tmp_path / "x.pth", wrap_each("x")(dict(tensors))), heads=3)


def test_a_checkpoint_of_a_run_is_read(trained: Path) -> None:
    """Model, average and optimizer are in one file: the average is read, the rest told of."""
    path = sorted((trained / "checkpoints").glob("*.safetensors"))[-1]
    bundle, report = formats.read(path, heads=2)
    checkpoints.same(formats.read(trained)[0].model.state_dict(), bundle.model.state_dict())
    assert any(name.startswith("optimizer.") for name in report.dropped)
    tensors = checkpoints.tensors(path)
    averaged = {**tensors, **{k.replace("model.", "average."): v + 1 for k, v in tensors.items()
                              if k.startswith("model.")}}  # fmt: skip
    save_file(averaged, path.with_name("both.safetensors"))
    both, report = formats.read(path.with_name("both.safetensors"), heads=2)
    path.with_name("both.safetensors").unlink()
    assert torch.equal(both.model.norm.bias, bundle.model.norm.bias + 1)
    assert "model.norm.bias" in report.dropped


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_names_that_match_nothing_are_an_error(suffix: str, tmp_path: Path) -> None:
    """Report 032: a letter before every name; nothing is loaded in part or at random."""
    path = save(tmp_path / f"x{suffix}", wrap_each("x")(state(create())))
    count = len(state(create()))
    with pytest.raises(ValueError, match=rf"0 of {count} tensors matched .* the first are x\w+"):
        formats.read(path, heads=3)


def test_the_averaged_of_two_models_is_read(tmp_path: Path) -> None:
    student, teacher = create(), checkpoints.disturb(create(), seed=5)
    both = {"student": state(student), "teacher": state(teacher)}
    path = save(tmp_path / "both.pth", both)
    bundle, report = formats.read(path, heads=3)
    assert torch.equal(bundle.model.patch.bias, teacher.patch_embed.proj.bias)
    assert len(report.dropped) == len(state(student))
    other, _ = formats.read(path, heads=3, drop="teacher.*")
    assert torch.equal(other.model.patch.bias, student.patch_embed.proj.bias)
    twins = save(tmp_path / "twins.pth", {"a": state(student), "b": state(teacher)})
    with pytest.raises(ValueError, match=r"several models \(a\., b\.\)"):
        formats.read(twins, heads=3)
    assert formats.read(twins, heads=3, drop=["b.*"])[1].format == "timm"


def test_a_stranger_beside_the_model_is_refused_unless_dropped(tmp_path: Path) -> None:
    """As the projection head of self-supervised training."""
    tensors = {**wrap_each("backbone.")(state(create())), "head.mlp.0.weight": torch.ones(3, 48)}
    path = save(tmp_path / "dino.pth", {"teacher": tensors})
    with pytest.raises(Refused, match=r"head\.mlp\.0\.weight") as caught:
        formats.read(path, heads=3)
    assert caught.value.report.to_dict()["refused"] == ("head.mlp.0.weight",)
    for pattern in ("head.mlp.*", "teacher.head.mlp*"):
        _, report = formats.read(path, heads=3, drop=pattern)
        assert any(name.endswith("head.mlp.0.weight") for name in report.dropped)


class Trainer:
    """Something that only executing code restores."""


def test_options_beside_the_weights_are_plain_values(tmp_path: Path) -> None:
    """Report 034: a Namespace is read without executing anything; other objects are named."""
    tensors = state(create())
    path = save(tmp_path / "args.pth", {"model": tensors, "args": argparse.Namespace(lr=1.0)})
    _, report = formats.read(path, heads=3)
    assert "beside tensors the file has args" in report.notes
    path = save(tmp_path / "code.pth", {"model": tensors, "trainer": Trainer()})
    with pytest.raises(ValueError, match=r"holds an object of type \w+\.Trainer") as caught:
        formats.read(path, heads=3)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_file_from_a_gpu_loads_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 036: storages tagged cuda, and a device in the options."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
    path = save(tmp_path / "gpu.pth", {"model": state(create()), "device": "cuda:3"})
    monkeypatch.undo()
    assert b"cuda:3" in path.read_bytes()
    bundle, _ = formats.read(path, heads=3)
    assert {p.device.type for p in bundle.model.parameters()} == {"cpu"}
