"""`vitlab.weights.files`: bad files of every kind, each refused in one clear line."""

import json
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vitlab.weights import formats

CODE = []


class Trap:
    """Whoever unpickles it executes code."""

    def __reduce__(self) -> Any:
        return CODE.append, (1,)


def good(path: Path) -> Path:
    name = {".npz": "google", ".pth": "torchvision", ".safetensors": "timm"}[path.suffix]
    formats.write(checkpoints.bundle(), path, name)
    return path


def refused(path: Path) -> str:
    """The one line with which a file is refused."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        formats.read(path, heads=3)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(str(path)) or line.startswith(str(path.parent))
    assert len(line) < len(str(path)) + 400
    return line


@pytest.mark.parametrize("suffix", [".npz", ".pth", ".safetensors"])
@pytest.mark.parametrize("share", [0.9, 0.5, 0.01])
def test_files_that_are_cut_off(suffix: str, share: float, tmp_path: Path) -> None:
    path = good(tmp_path / f"a{suffix}")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert "cut off" in refused(path)


@pytest.mark.parametrize("suffix", [".npz", ".pth", ".safetensors"])
def test_files_with_nothing_or_something_else_in_them(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    for content, what in (
        (b"", "is empty"),
        (b"<!DOCTYPE html><html>404", "a web page"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
        (bytes(range(1, 200)), "not a file of weights"),
        (b"PK\x03\x04" + bytes(200), "damaged or cut off"),
        (
            b"\x80\x02" + bytes(50),
            "a pickle that torch did not write" if suffix != ".safetensors" else "cut off",
        ),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f{" + bytes(50), "damaged or cut off"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{" + b"x" * 50, "damaged or cut off"),
    ):
        path.write_bytes(content)
        assert what in refused(path)


def test_bits_that_flipped_in_an_npz(tmp_path: Path) -> None:
    path = good(tmp_path / "a.npz")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))
    assert "damaged" in refused(path)


def test_the_content_and_not_the_name_says_what_a_file_is(tmp_path: Path) -> None:
    bundle = checkpoints.bundle()
    for name, suffix in (("google", ".npz"), ("timm", ".pth"), ("timm", ".safetensors")):
        formats.write(bundle, tmp_path / f"a{suffix}", name)
        (tmp_path / f"a{suffix}").rename(tmp_path / "weights.bin")
        checkpoints.same_state(bundle, formats.read(tmp_path / "weights.bin")[0])


def test_pickles_are_never_executed(tmp_path: Path) -> None:
    """Report 034 and its like: in torch's new and old files, in plain pickles, in arrays."""
    new, old, plain = (tmp_path / f"{name}.pth" for name in ("new", "old", "plain"))
    torch.save({"model": {"a": torch.ones(1)}, "trap": Trap()}, new)
    torch.save({"trap": Trap()}, old, _use_new_zipfile_serialization=False)
    plain.write_bytes(pickle.dumps({"trap": Trap()}))
    array = tmp_path / "array.npz"
    np.savez(array, a=np.array([Trap()], dtype=object))
    for path in (new, old):
        assert "an object of type" in refused(path)
    assert "could run code" in refused(plain)
    assert "a holds Python objects" in refused(array)
    assert CODE == []


def test_old_files_of_torch_are_read(tmp_path: Path) -> None:
    formats.write(checkpoints.bundle(), tmp_path / "new.pth", "timm")
    state = dict(torch.load(tmp_path / "new.pth", weights_only=True))
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    bundle, report = formats.read(tmp_path / "old.pth", heads=3)
    assert report.format == "timm"
    assert torch.equal(bundle.model.norm.weight, checkpoints.bundle().model.norm.weight)


def test_other_things_that_torch_saves(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        torch.jit.script(torch.nn.ReLU()).save(tmp_path / "a.pt")
    assert "a TorchScript program" in refused(tmp_path / "a.pt")
    torch.save([torch.ones(1)], tmp_path / "b.pt")
    assert "holds a list, not tensors by name" in refused(tmp_path / "b.pt")
    torch.save({}, tmp_path / "c.pt")
    assert "0 of 0 tensors" in refused(tmp_path / "c.pt")


def test_a_zip_of_anything(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as z:
        z.writestr("readme.txt", "hello")
    assert "damaged" in refused(tmp_path / "a.npz")


def test_arrays_without_numbers_are_passed_by(tmp_path: Path) -> None:
    formats.write(checkpoints.bundle(), tmp_path / "a.npz", "google")
    arrays = {**checkpoints.tensors(tmp_path / "a.npz"), "comment": np.array("trained in 2020")}
    np.savez(tmp_path / "b.npz", **arrays)
    _, report = formats.read(tmp_path / "b.npz")
    assert "beside tensors the file has comment" in report.notes


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def two_weights(folder: Path) -> None:
    for name in ("a.pth", "b.pth"):
        (folder / "model.safetensors").read_bytes()
        good(folder / name)
    (folder / "model.safetensors").unlink()


def odd_values(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"layer_norm_eps": "small", "image_size": {"a": 1}}
    (folder / "config.json").write_text(json.dumps(config))


def odd_labels(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": ["a", "b"]}))


def odd_heads(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 5}))


def stray_index(folder: Path) -> None:
    index = {"weight_map": {"a": "../../etc/passwd"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (damage_config, "not JSON"),
        (list_config, "no JSON object"),
        (no_weights, "no bundle and no files of weights"),
        (two_weights, r"2 files of weights (a.pth, b.pth): say which"),
        (odd_values, "could not convert string to float"),
        (odd_labels, "id2label is a list"),
        (odd_heads, "width 48 is not divisible by heads 5"),
        (stray_index, "does not name its files"),
    ],
)
def test_folders(damage: Callable[[Path], None], what: str, tmp_path: Path) -> None:
    formats.write(checkpoints.bundle(), tmp_path / "hf", "huggingface")
    damage(tmp_path / "hf")
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        formats.read(tmp_path / "hf")
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_file_in_a_folder_stands_for_the_folder(tmp_path: Path) -> None:
    """config.json beside it is not forgotten: eps, activation and heads are there."""
    bundle = checkpoints.bundle(norm_eps=1e-5, heads=4)
    formats.write(bundle, tmp_path / "hf", "huggingface")
    back, _ = formats.read(tmp_path / "hf" / "model.safetensors")
    checkpoints.same_state(bundle, back)


def test_a_bundle_without_its_config_is_none(tmp_path: Path) -> None:
    """Cut off while it was written: its tensors are not read with guesses."""
    formats.write(checkpoints.bundle(), tmp_path / "b")
    for text in ("{}", '{"format": "other"}'):
        (tmp_path / "b" / "config.json").write_text(text)
        with pytest.raises(ValueError, match="not the configuration of a vitlab bundle"):
            formats.read(tmp_path / "b")
    (tmp_path / "b" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="no bundle"):
        formats.read(tmp_path / "b")
    assert formats.read(tmp_path / "b" / "model.safetensors", heads=3)[1].format == "vitlab"


def test_the_licence_follows_the_card(tmp_path: Path) -> None:
    formats.write(checkpoints.bundle(), tmp_path, "huggingface")
    (tmp_path / "README.md").write_text("---\ntags: [a]\nlicense: cc-by-nc-4.0\n---\n# Model\n")
    bundle, _ = formats.read(tmp_path)
    assert bundle.card.source["licence"] == "cc-by-nc-4.0"


def test_records_of_others_are_passed_by(tmp_path: Path) -> None:
    """Comments, metadata and keys that vitlab did not write."""
    formats.write(checkpoints.bundle(activation="gelu"), tmp_path / "a.pth", "timm")
    state = dict(torch.load(tmp_path / "a.pth", weights_only=True))
    for record in ("no JSON", "[1]", '{"model": 3}', '{"model": {"family": "vit", "heads": "x"}}'):
        save_file(state, tmp_path / "b.safetensors", {"format": "pt", "vitlab": record})
        bundle, _ = formats.read(tmp_path / "b.safetensors", heads=3)
        assert bundle.model.config.activation == "gelu"
    formats.write(checkpoints.bundle(), tmp_path / "a.npz", "google")
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as z:
        z.comment = b"mine \xff"
    assert formats.read(tmp_path / "a.npz")[1].format == "google"


def test_a_record_that_does_not_fit_a_comment_goes_without_names(tmp_path: Path) -> None:
    """A zip archive's comment holds 64 KB: 21,843 names are not in it, all else is."""
    bundle = checkpoints.bundle(classes=5000, activation="gelu", heads=4)
    formats.write(bundle, tmp_path / "a.npz", "google")
    back, report = formats.read(tmp_path / "a.npz")
    checkpoints.same_state(bundle, back)
    assert any("no names" in note for note in report.notes)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        assert set(arrays.files) == set(report.read)
