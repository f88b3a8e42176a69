"""Bundles: what is written is what is read, and nothing else is read in silence."""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import vitlab
from vitlab.data import writing
from vitlab.weights import bundle as bundles
from vitlab.weights.bundle import Bundle, Card


@pytest.fixture
def saved(bundle: Bundle, tmp_path: Path) -> Path:
    vitlab.save(bundle, tmp_path / "bundle")
    return tmp_path / "bundle"


def change(saved: Path, edit: Any) -> None:
    """Edit config.json, as a dict."""
    path = saved / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def same(one: Bundle, other: Bundle) -> None:
    assert (one.classes, one.preprocess, one.card) == (other.classes, other.preprocess, other.card)
    assert one.model.config == other.model.config
    first, second = one.model.state_dict(), other.model.state_dict()
    assert list(first) == list(second)
    assert all(torch.equal(first[k], second[k]) for k in first)


# There and back --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"image": (16, 24), "patch": (8, 4)},
        {"registers": 3, "class_position": False, "layer_scale": 0.1, "head_hidden": 8},
        {"pool": "mean", "class_token": False, "norm": "after_pool", "norm_eps": 1e-12},
        {"activation": "gelu", "dropout": 0.1, "drop_path": 0.2},
        {"classes": 0},
    ],
)
def test_what_is_saved_is_loaded(changes: dict[str, Any], tmp_path: Path) -> None:
    one = toys.bundle(**changes)
    vitlab.save(one, tmp_path)
    other = vitlab.load(tmp_path)
    same(one, other)
    assert not other.model.training
    assert all(p.requires_grad for p in other.model.parameters())
    images = torch.randn(2, 3, *one.model.config.image)
    assert torch.equal(one.model(images), other.model(images))


def test_resnets_and_hybrids(tmp_path: Path) -> None:
    stem = {"layers": (1, 1), "width": 8, "groups": 4}
    for name, one in {"bit": toys.resnet(), "hybrid": toys.bundle(patch=1, stem=stem)}.items():
        vitlab.save(one, tmp_path / name)
        same(one, vitlab.load(tmp_path / name))


def test_a_card_comes_back(bundle: Bundle, tmp_path: Path) -> None:
    card = Card(
        calibration={"temperature": 1.5}, source={"format": "timm", "licence": "Apache-2.0"},
        data={"spec": "photos/", "held_out_ids": ["a/ä.png", "b/\udcff.png"]},
        metrics={"top1": 0.5, "top1_interval": [0.4, 0.6], "n": 1234, "scored_on": "photos/ val"},
    )  # fmt: skip
    one = Bundle(
        model=bundle.model, preprocess=bundle.preprocess, classes=bundle.classes, card=card
    )
    vitlab.save(one, tmp_path)
    assert vitlab.load(tmp_path).card == card
    text = (tmp_path / "README.md").read_text()
    assert "Accuracy 50.00% on 1,234 pictures" in text
    assert text.startswith("---\nlibrary_name: vitlab\n")


def test_order_of_class_names_is_kept(tmp_path: Path) -> None:
    one = toys.bundle(3)
    names = ("zebra", "ant", "moth")
    vitlab.save(Bundle(model=one.model, preprocess=one.preprocess, classes=names), tmp_path)
    assert vitlab.load(tmp_path).classes == names


def test_loading_draws_no_random_numbers(saved: Path) -> None:
    before = torch.get_rng_state()
    vitlab.load(saved)
    assert torch.equal(before, torch.get_rng_state())


def test_loaded_weights_lie_in_memory_of_their_own(saved: Path) -> None:
    bundle = vitlab.load(saved)
    before = {k: v.clone() for k, v in bundle.model.state_dict().items()}
    (saved / "model.safetensors").write_bytes(b"")
    for name, tensor in bundle.model.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert tensor.data_ptr() % 64 == 0, "else products round in another way"


def test_weights_of_another_precision_become_float32(saved: Path) -> None:
    path = saved / "model.safetensors"
    halves = {k: v.half() for k, v in load_file(path).items()}
    save_file(halves, path)
    bundle = vitlab.load(saved)
    assert {p.dtype for p in bundle.model.parameters()} == {torch.float32}
    assert torch.equal(bundle.model.head.weight, halves["head.weight"].float())


def test_tensors_that_lie_strangely_are_saved(bundle: Bundle, tmp_path: Path) -> None:
    """Transposed ones, and one tensor under two names."""
    bundle.model.head.weight.data = bundle.model.head.weight.data.t().contiguous().t()
    bundle.model.blocks[1].norm1.weight = bundle.model.blocks[0].norm1.weight
    vitlab.save(bundle, tmp_path)
    same(bundle, vitlab.load(tmp_path))


def test_dropped_tensors_keep_their_initial_values(saved: Path) -> None:
    bundle = vitlab.load(saved, drop=["head.*", "blocks.1.norm?.bias"])
    assert not bundle.model.head.weight.any()
    assert not bundle.model.head.bias.any()
    assert not bundle.model.blocks[1].norm2.bias.any()
    whole = vitlab.load(saved).model.state_dict()
    kept = {k: v for k, v in bundle.model.state_dict().items() if k not in (
        "head.weight", "head.bias", "blocks.1.norm1.bias", "blocks.1.norm2.bias")}  # fmt: skip
    assert all(torch.equal(v, whole[k]) for k, v in kept.items())


def test_a_dropped_tensor_may_have_another_shape_or_be_missing(saved: Path) -> None:
    path = saved / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "head.weight": torch.zeros(7, 24)}, path)
    with pytest.raises(ValueError, match=r"head.weight has shape \[7, 24\], .* says \[4, 24\]"):
        vitlab.load(saved)
    vitlab.load(saved, drop=["head.*"])
    del tensors["head.weight"]
    save_file(tensors, path)
    vitlab.load(saved, drop=["head.*"])


# What is refused -------------------------------------------------------------------------------


def refused(saved: Path, file: str, said: str = "") -> None:
    """Loading fails with one line that names the file."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        vitlab.load(saved)
    text = str(caught.value)
    assert text.startswith(f"{saved / file}: ")
    assert "\n" not in text
    assert said in text


def test_what_is_no_bundle(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="no bundle"):
            vitlab.load(path)
    with pytest.raises(ValueError, match="not a file of weights"):
        vitlab.load(__file__)
    (tmp_path / "run.yaml").touch()
    with pytest.raises(FileNotFoundError, match="an unfinished run"):
        vitlab.load(tmp_path)


@pytest.mark.parametrize("share", [0, 0.01, 0.1, 0.5, 0.9, 0.99])
def test_a_truncated_file(share: float, saved: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        data = (saved / name).read_bytes()
        (saved / name).write_bytes(data[: int(len(data) * share)])
        refused(saved, name, "damaged")
        (saved / name).write_bytes(data)
    vitlab.load(saved)


@pytest.mark.parametrize("noise", [b"\0" * 999, bytes(range(256)), b"[" * 99999, b"\xff\xfe{}"])
def test_a_garbled_file(noise: bytes, saved: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        data = (saved / name).read_bytes()
        (saved / name).write_bytes(noise)
        refused(saved, name, "damaged")
        (saved / name).write_bytes(data)


def test_missing_weights(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    refused(saved, "model.safetensors", "is missing")


@pytest.mark.parametrize("text", ["{}", "[]", "3", "null", '{"format": "other"}'])
def test_a_json_of_something_else(text: str, saved: Path) -> None:
    (saved / "config.json").write_text(text)
    refused(saved, "config.json", "not the configuration of a vitlab bundle")


@pytest.mark.parametrize("version", [0, 2, "1", None, 1.5])
def test_another_version(version: Any, saved: Path) -> None:
    change(saved, lambda c: c.update(version=version))
    refused(saved, "config.json", f"version {version}; this vitlab reads 1")


def edits() -> dict[str, tuple[Any, str]]:
    def put(*keys: str, value: Any) -> Any:
        def edit(config: dict[str, Any]) -> None:
            for key in keys[:-1]:
                config = config[key]
            config[keys[-1]] = value

        return edit

    def lose(*keys: str) -> Any:
        def edit(config: dict[str, Any]) -> None:
            for key in keys[:-1]:
                config = config[key]
            del config[keys[-1]]

        return edit

    return {
        "no model": (lose("model"), "'model' is missing"),
        "no family": (lose("model", "family"), "'family' is missing"),
        "no preprocess": (lose("preprocess"), "'preprocess' is missing"),
        "no size": (lose("preprocess", "size"), "size"),
        "no classes": (lose("classes"), "'classes' is missing"),
        "family": (put("model", "family", value="cnn"), "model family 'cnn' is not known"),
        "families": (put("model", "family", value=["vit"]), ""),
        "model is text": (put("model", value="vit"), ""),
        "unknown key": (put("model", "widht", value=3), "unknown key 'widht': did you mean width?"),
        "unknown too": (put("preprocess", "means", value=3), "'means': did you mean mean?"),
        "width": (put("model", "width", value=25), "width 25 is not divisible by heads 2"),
        "patch": (put("model", "patch", value=[5, 5]), "not a multiple of patch 5"),
        "huge": (put("model", "width", value=10**12), ""),
        "depth": (put("model", "depth", value=-1), "depth must be at least 1"),
        "size": (put("preprocess", "size", value=[8, 8]), "preprocess size (8, 8), model (16, 16)"),
        "std": (put("preprocess", "std", value=[0, 1, 1]), "std positive"),
        "count": (put("classes", value=["a", "b"]), "2 class names for 4 outputs"),
        "letters": (put("classes", value="abcd"), "classes is no list of names"),
        "numbers": (put("classes", value=[1, 2, 3, 4]), "classes is no list of names"),
        "twice": (put("classes", value=["a", "b", "a", "c"]), "a class name occurs twice"),
        "metrics": (put("metrics", value=[]), "metrics is no mapping"),
        "data": (put("data", value=None), "data is no mapping"),
        "held-out ids": (put("data", "held_out_ids", value=5), "held_out_ids is no list of names"),
        "deep": (put("model", "depth", value=10**9), "depth must be at most 1000"),
        "a share of a head": (put("model", "heads", value=2.0), "heads must be a whole number"),
        "whole in text": (put("model", "image", value="16"), "image must be a number, not '16'"),
        "large epsilon": (put("model", "norm_eps", value=10**400), "norm_eps must be a number"),
        "a word for a switch": (put("model", "class_token", value="no"), "must be true or false"),
        "a share of a pixel": (put("preprocess", "size", value=[16.0, 16]), "size must be a whole"),
        "mean": (put("preprocess", "mean", value="abc"), "mean must be a number"),
        "crop": (put("preprocess", "crop", value=1e-9), "crop must lie in"),
        "lines": (put("version", value="1\n2"), r"version 1\n2; this vitlab reads 1"),
    }


@pytest.mark.parametrize("name", edits())
def test_a_configuration_that_does_not_hold_together(name: str, saved: Path) -> None:
    edit, said = edits()[name]
    change(saved, edit)
    refused(saved, "config.json", said)


NUMBERS = ["width", "depth", "heads", "mlp_width", "classes", "head_hidden", "registers",
           "layer_scale", "dropout", "drop_path", "norm_eps", "image", "patch"]  # fmt: skip


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, -math.inf, "24", None, [], {}, [math.nan] * 2])
def test_numbers_that_are_none(field: str, value: Any, saved: Path) -> None:
    change(saved, lambda c: c["model"].update({field: value}))
    error = failure(saved) or "loaded"
    assert error.startswith(f"{saved}{os.sep}")
    assert "\n" not in error


def failure(saved: Path) -> str | None:
    """What loading says, if it fails as it should."""
    try:
        vitlab.load(saved)
    except ValueError as e:
        return str(e)
    return None


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_weights_never_load_in_part(
    data: st.DataObject, header: tuple[Path, bytes]
) -> None:
    """One byte of the header changed: refused in one line, or what loads is complete."""
    saved, content = header
    length = int.from_bytes(content[:8], "little") + 8
    at, value = data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, 255))
    path = saved / "model.safetensors"
    path.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
    if (error := failure(saved)) is None:
        assert len(load_file(path)) == len(toys.bundle().model.state_dict())
    else:
        assert error.startswith(f"{path}: ")
        assert "\n" not in error


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    saved = tmp_path_factory.mktemp("header")
    vitlab.save(toys.bundle(), saved)
    return saved, (saved / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.pop("head.bias"), "missing: head.bias; unknown: none"),
        (lambda t: t.update(extra=torch.zeros(1)), "missing: none; unknown: extra"),
        (
            lambda t: t.update({"positions": torch.zeros(1, 9, 24)}),
            "positions has shape [1, 9, 24]",
        ),
        (lambda t: t.update({"head.bias": torch.zeros(4, dtype=torch.int64)}), "torch.int64"),
    ],
)
def test_tensors_that_do_not_fit(edit: Any, said: str, saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    edit(tensors)
    save_file(tensors, saved / "model.safetensors")
    refused(saved, "model.safetensors", said)


def test_prefixes_of_wrappers_are_not_ours(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    assert not any("module" in k or "_orig_mod" in k for k in tensors)
    save_file({f"module.{k}": v for k, v in tensors.items()}, saved / "model.safetensors")
    refused(saved, "model.safetensors", "does not fit its config.json")


# Writing ---------------------------------------------------------------------------------------


def test_another_format_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown format 'pickle'"):
        vitlab.save(bundle, tmp_path / "x", format="pickle")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("fails", ["save_file", "model_card", "_config"])
def test_a_full_disk_leaves_the_old_bundle(
    fails: str, saved: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p.name: p.read_bytes() for p in saved.iterdir()}

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundles, fails, full)
    with pytest.raises(OSError, match=r"could not be written \(No space left on device\)"):
        vitlab.save(toys.bundle(3), saved)
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before


def test_an_older_bundle_is_never_mixed_with_a_newer_one(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off between two files, it is no bundle any more, rather than half of each."""
    plain, calls = os.replace, iter(range(9))

    def replace(source: Any, target: Any) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt
        plain(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        vitlab.save(toys.bundle(3), saved)
    with pytest.raises(FileNotFoundError, match="no bundle"):
        vitlab.load(saved)


def test_a_text_is_written_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    writing.write_text(path, "old")
    monkeypatch.setattr(os, "fsync", lambda f: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writing.write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_files_have_the_mode_that_the_user_asks_of_new_files(saved: Path) -> None:
    (saved / "mine").touch()
    assert len({stat.S_IMODE(p.stat().st_mode) for p in saved.iterdir()}) == 1
