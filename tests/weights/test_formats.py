"""`vitlab.weights.formats`: the rules that hold for every format."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
import toys
from safetensors.torch import load_file, save_file

import vitlab
from vitlab.weights import formats, labels
from vitlab.weights.bundle import Bundle
from vitlab.weights.foreign import share
from vitlab.weights.report import Refused

# Rules


def bare(bundle: Bundle, path: Path) -> Path:
    """timm's names and nothing else, as anybody's `torch.save`."""
    formats.write(bundle, path, "timm")
    torch.save(dict(torch.load(path, weights_only=True)), path)
    return path


def edit(path: Path, **tensors: Any) -> Path:
    """Replace tensors of a `.pth` by others; None takes one out."""
    state = dict(torch.load(path, weights_only=True))
    for name, value in tensors.items():
        state[name] = value
        if value is None:
            del state[name]
    torch.save(state, path)
    return path


def test_transposed_and_shared_tensors_are_written(tmp_path: Path) -> None:
    """Report 045."""
    bundle = checkpoints.bundle()
    formats.write(bundle, tmp_path / "a.npz", "google")
    formats.convert(tmp_path / "a.npz", tmp_path / "b.safetensors", "timm")
    head = bundle.model.head
    bundle.model.head.weight = torch.nn.Parameter(head.weight.detach().T.contiguous().T)
    assert not bundle.model.head.weight.is_contiguous()
    one, two = bundle.model.blocks
    two.norm1.weight, two.norm2 = one.norm1.weight, one.norm2  # tied
    for name, file in checkpoints.EVERYWHERE:
        formats.write(bundle, tmp_path / name / file, name)
        back, _ = formats.read(tmp_path / name / file)
        found = back.model.state_dict()
        assert torch.equal(found["blocks.1.norm1.weight"], one.norm1.weight)
        assert torch.equal(found["head.weight"], head.weight)


def test_sizes_come_from_shapes_and_never_from_names(tmp_path: Path) -> None:
    """Report 039."""
    tiny = checkpoints.bundle(width=192, depth=12, heads=3, mlp_width=768)
    back, report = formats.read(bare(tiny, tmp_path / "foo_tiny_augreg_in21k.pt"))
    shape = back.model.config
    assert (shape.width, shape.depth, shape.heads, shape.mlp_width) == (192, 12, 3, 768)
    assert "3 heads, as published for width 192" in report.notes
    odd = bare(checkpoints.bundle(width=40, heads=5), tmp_path / "vit_base_patch16_224.pt")
    with pytest.raises(ValueError, match="number of heads is not in the file, and width 40"):
        formats.read(odd)
    assert formats.read(odd, heads=5)[0].model.config.width == 40


def test_a_head_of_another_size_is_new_only_when_asked(tmp_path: Path) -> None:
    """Report 041: the head alone is new, and said; anything else of a wrong shape is an error."""
    path = bare(checkpoints.bundle(classes=1000), tmp_path / "a.pth")
    bundle, report = formats.read(path, heads=3)
    assert bundle.model.config.classes == 1000
    assert bundle.classes == labels.imagenet(1000)
    assert not report.new
    bundle, report = formats.read(path, heads=3, classes=["ant", "bee", "cat"])
    assert report.new == ("head.weight", "head.bias")
    assert not bundle.model.head.weight.any()
    assert bundle.classes == ("ant", "bee", "cat")
    assert any("3 classes instead of 1000: the head is new" in note for note in report.notes)
    wrong = edit(path, **{"blocks.0.attn.qkv.weight": torch.zeros(96, 32)})
    with pytest.raises(
        Refused, match=r"blocks\.0\.attn\.qkv\.weight has shape \[96, 32\], but \[144, 48\]"
    ) as caught:
        formats.read(wrong, heads=3, classes=["ant", "bee", "cat"])
    assert caught.value.report.refused == ("blocks.0.attn.qkv.weight",)


def test_a_position_table_is_read_or_resampled_and_never_random(tmp_path: Path) -> None:
    """Report 049."""
    path = bare(checkpoints.bundle(), tmp_path / "a.pth")
    edit(path, pos_embed=torch.ones(1, 17, 48))
    assert torch.equal(formats.read(path, heads=3)[0].model.positions, torch.ones(1, 17, 48))
    for resample in ("bicubic", "google"):
        bundle, report = formats.read(path, heads=3, image=64, resample=resample)
        assert (bundle.model.positions - 1).abs().max() <= 1e-5
        assert bundle.model.positions.shape == (1, 65, 48)
        assert report.interpolated == (f"positions, 4 x 4 to 8 x 8 ({resample})",)
    edit(path, pos_embed=None)
    with pytest.raises(ValueError, match="no positions"):
        formats.read(path, heads=3)


@pytest.mark.parametrize(("name", "file"), checkpoints.EVERYWHERE)
def test_another_size_is_resampled_once_and_said(name: str, file: str, tmp_path: Path) -> None:
    """Report 054: 32 pixels stored, 64 wanted, from every format; report 059 at its own size."""
    bundle = checkpoints.bundle()
    path = tmp_path / file
    formats.write(bundle, path, name)
    same, report = formats.read(path, image=32)
    assert not report.interpolated
    table = formats.read(path)[0].model.positions
    assert torch.equal(same.model.positions, table)
    larger, report = formats.read(path, image=(64, 32))
    assert report.interpolated == ("positions, 4 x 4 to 8 x 4 (bicubic)",)
    assert larger.preprocess.size == larger.model.config.image == (64, 32)
    prefix = int(larger.model.config.class_position)
    assert torch.equal(larger.model.positions[:, :prefix], table[:, :prefix])
    assert checkpoints.run(larger.model, checkpoints.images(larger)).shape == (2, 5)
    formats.convert(path, tmp_path / "run", "vitlab", image=(64, 32))
    checkpoints.same_state(larger, vitlab.load(tmp_path / "run"))


def test_every_entry_takes_another_size(
    trained: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Report 054: converting, scoring, predicting and fine-tuning at other sizes than stored."""
    report, _ = formats.convert(trained, tmp_path / "larger", "vitlab", image=32)
    assert report.interpolated == ("positions, 2 x 2 to 4 x 4 (bicubic)",)
    small, larger = vitlab.load(trained), vitlab.load(tmp_path / "larger")
    assert larger.model.config.grid == (4, 4)
    assert torch.equal(larger.model.positions[:, :1], small.model.positions[:, :1])
    assert vitlab.evaluate(larger, str(photos), split="all").n == 40
    picture = next(photos.rglob("*.png"))
    assert [p.error for p in larger.predict(picture)] == [None]
    for name, file in (("timm", "a.pth"), ("google", "a.npz")):
        vitlab.save(larger, tmp_path / file, format=name)
        assert torch.equal(vitlab.load(tmp_path / file).model.positions, larger.model.positions)
    shape = dict.fromkeys(toys.SHAPE)
    given = {"model": None, "from_": str(tmp_path / "larger"), "size": (48,), "steps": 1, **shape}
    with caplog.at_level("INFO", "vitlab"):
        tuned = vitlab.train(str(photos), toys.config(tmp_path / "run", **given))
    assert tuned.model.config.grid == (6, 6)
    assert caplog.text.count("images of 48 x 48 instead of 32 x 32") == 1


def test_a_compiled_model_is_written_under_its_own_names(tmp_path: Path) -> None:
    """Report 033: no file has _orig_mod in it."""
    bundle = checkpoints.bundle()
    compiled = replace(bundle, model=torch.compile(bundle.model, backend="eager"))
    assert all(name.startswith("_orig_mod.") for name in compiled.model.state_dict())
    for name, file in checkpoints.EVERYWHERE:
        formats.write(compiled, tmp_path / name / file, name)
        assert not any("_orig_mod" in n for n in checkpoints.tensors(tmp_path / name / file))
    checkpoints.same_state(bundle, vitlab.load(tmp_path / "vitlab" / "a"))


def test_rectangles_are_never_taken_for_squares(tmp_path: Path) -> None:
    """4 x 6 patches and a class token are 25 rows, but no 5 x 5."""
    bundle = checkpoints.bundle(image=(32, 48), activation="gelu")
    formats.write(bundle, tmp_path / "a.npz", "google")
    np.savez(tmp_path / "b.npz", **checkpoints.tensors(tmp_path / "a.npz"))
    with pytest.raises(ValueError, match=r"25 rows is no square grid.*stored=\(h, w\)"):
        formats.read(tmp_path / "b.npz")
    for how in ({"stored": (32, 48)}, {"image": (32, 48)}):
        checkpoints.same_state(
            formats.read(tmp_path / "b.npz", **how, activation="gelu")[0], bundle
        )
    # timm's models may do without a row for the class token: there it is said.
    _, report = formats.read(bare(bundle, tmp_path / "c.pth"), heads=3)
    assert "25 positions: 5 x 5, none of them the class token's" in report.notes
    with pytest.raises(ValueError, match=r"27 rows is no square .* two more than a square"):
        formats.read(edit(tmp_path / "c.pth", pos_embed=torch.ones(1, 27, 48)), heads=3)


@pytest.mark.parametrize("size", [224, 384, 518, 32])
def test_shares_of_a_crop_are_whole_pixels_once_undone(size: int) -> None:
    edges = range(size, 3 * size)
    assert [int(size / share(size, edge)) for edge in edges] == [*edges]
    assert all(0 < share(size, edge) <= 1 for edge in edges)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    path = bare(checkpoints.bundle(), tmp_path / "a.pth")
    edit(path, **{"blocks.1.mlp.fc2.bias": None, "norm.weight": None})
    with pytest.raises(
        Refused, match=r"2 tensors are missing: blocks\.1\.mlp\.fc2\.bias"
    ) as caught:
        formats.read(path, heads=3)
    assert len(caught.value.report.refused) == 2
    bundle, report = formats.read(path, heads=3, drop=("norm.weight", "blocks.1.mlp.*"))
    assert report.new == (
        "blocks.1.mlp.up.weight", "blocks.1.mlp.up.bias", "blocks.1.mlp.down.weight",
        "blocks.1.mlp.down.bias", "norm.weight",
    )  # fmt: skip
    assert torch.equal(bundle.model.norm.weight, torch.ones(48))


def test_a_projection_of_three_must_be_whole(tmp_path: Path) -> None:
    formats.write(checkpoints.bundle(), tmp_path / "hf", "huggingface")
    path = tmp_path / "hf" / "model.safetensors"
    state = load_file(path)
    gone = "vit.encoder.layer.1.attention.attention.key.weight"
    save_file({k: v for k, v in state.items() if k != gone}, path)
    with pytest.raises(Refused, match=r"1 tensors are missing: .*attention\.key\.weight"):
        formats.read(tmp_path / "hf")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(bad: float, tmp_path: Path) -> None:
    path = bare(checkpoints.bundle(), tmp_path / "a.pth")
    bias = torch.zeros(144)
    bias[7] = bad
    edit(path, **{"blocks.1.attn.qkv.bias": bias})
    with pytest.raises(Refused, match=r"blocks\.1\.attn\.qkv\.bias holds NaN or infinity"):
        formats.read(path, heads=3)


def test_whole_numbers_are_refused(tmp_path: Path) -> None:
    path = bare(checkpoints.bundle(), tmp_path / "a.pth")
    edit(path, **{"norm.bias": torch.zeros(48, dtype=torch.int8)})
    with pytest.raises(Refused, match=r"norm\.bias holds torch\.int8"):
        formats.read(path, heads=3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "file"), [e for e in checkpoints.EVERYWHERE if e[0] != "vitlab"])
def test_halves_are_widened_and_return_as_halves(
    dtype: torch.dtype, name: str, file: str, tmp_path: Path
) -> None:
    bundle = checkpoints.bundle()
    bundle.model.to(dtype).float()  # numbers that both types hold
    if name == "big_vision":  # whose sum of class token and slot needs more
        bundle = replace(bundle, model=checkpoints.bundle(class_position=False).model)
        bundle.model.to(dtype).float()
    formats.write(replace(bundle, model=bundle.model.to(dtype)), tmp_path / file, name)
    back, _ = formats.read(tmp_path / file)
    assert {p.dtype for p in back.model.parameters()} == {torch.float32}
    word = str(dtype).removeprefix("torch.")
    assert back.card.source["dtype"] == word
    formats.write(back, tmp_path / "again" / file, name)
    old, new = checkpoints.tensors(tmp_path / file), checkpoints.tensors(tmp_path / "again" / file)
    checkpoints.same(old, new)
    with torch.no_grad():
        back.model.head.bias += 1e-4  # trained: no longer a half
    formats.write(back, tmp_path / "tuned" / file, name)
    found = checkpoints.tensors(tmp_path / "tuned" / file)
    kinds = {n: str(t.dtype) for n, t in found.items() if "head" in n or "classifier" in n}
    bias = next(k for n, k in kinds.items() if n.endswith("bias"))
    assert bias.endswith("float32")
    assert len(set(kinds.values())) == 2


def test_mixed_types_return_one_by_one(tmp_path: Path) -> None:
    path = bare(checkpoints.bundle(), tmp_path / "a.pth")
    edit(path, **{"norm.bias": torch.ones(48, dtype=torch.float16)})
    before = checkpoints.tensors(path)
    bundle, _ = formats.read(path, heads=3)
    assert bundle.card.source["dtype"] == {"": "float32", "norm.bias": "float16"}
    formats.write(bundle, tmp_path / "b.pth", "timm")
    checkpoints.same(before, checkpoints.tensors(tmp_path / "b.pth"))


@pytest.mark.parametrize(("name", "file"), checkpoints.EVERYWHERE)
def test_the_memory_of_a_file_is_not_the_models(name: str, file: str, tmp_path: Path) -> None:
    """What is read outlives the file, and lies as torch lays it: equal bits give equal sums."""
    formats.write(checkpoints.bundle(), tmp_path / file, name)
    bundle, _ = formats.read(tmp_path / file)
    before = {k: v.clone() for k, v in bundle.model.state_dict().items()}
    for path in [p for p in tmp_path.rglob("*") if p.is_file()]:
        with open(path, "r+b") as f:  # in place, as `cp` does
            f.write(bytes(path.stat().st_size))
    for key, tensor in bundle.model.state_dict().items():
        assert torch.equal(tensor, before[key]), key
        assert tensor.data_ptr() % 64 == 0, key
        assert tensor.is_contiguous(), key
    assert all(p.requires_grad for p in bundle.model.parameters())
    assert not bundle.model.training


def test_reports_are_plain_values_and_lines_for_people(tmp_path: Path) -> None:
    formats.write(checkpoints.bundle(), tmp_path / "a.npz", "google")
    came, went = formats.convert(tmp_path / "a.npz", tmp_path / "b.pth", "torchvision", image=64)
    for report in (came, went):
        plain = json.loads(json.dumps(report.to_dict()))
        assert plain["format"] == report.format
        assert len(plain["sha256"]) == 64
        assert all("\n" not in line for line in report.lines())
    assert came.lines()[0].startswith("google: 40 tensors, 40 renamed, 20 reshaped, sha256 ")
    assert came.lines()[1] == "interpolated: positions, 4 x 4 to 8 x 8 (bicubic)"
    assert came.renamed["cls"] == "class_token"
    query = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"
    assert came.renamed[query] == "blocks.0.attention.qkv.weight"
    assert query in came.reshaped
    assert "cls" not in came.reshaped
    assert went.renamed["conv_proj.weight"] == "patch.weight"
    assert any(line.startswith("note: torchvision's own code") for line in went.lines())


def test_inspection_tells_of_what_is_read_and_of_what_is_not(tmp_path: Path) -> None:
    path = bare(checkpoints.bundle(), tmp_path / "a.pth")
    told = json.loads(json.dumps(formats.inspect(path, heads=3)))
    assert (told["format"], told["grid"], len(told["classes"])) == ("timm", [4, 4], 5)
    assert told["parameters"] == sum(p.numel() for p in checkpoints.bundle().model.parameters())
    assert told["tensors"]["patch.weight"] == [48, 3, 8, 8]
    told = formats.inspect(edit(path, dist_token=torch.zeros(1, 1, 48)), heads=3)
    assert told["refused"] == ("dist_token",)
    assert "distilled DeiT" in told["reason"]


def test_the_call_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown format 'flax'"):
        formats.write(checkpoints.bundle(), tmp_path / "x", "flax")
    with pytest.raises(ValueError, match="unknown format 'flax'"):
        formats.convert(tmp_path / "missing", tmp_path / "x", "flax")
    with pytest.raises(FileNotFoundError, match="missing"):
        formats.read(tmp_path / "missing")
    formats.write(checkpoints.bundle(), tmp_path / "a.npz", "google")
    with pytest.raises(ValueError, match="width is not asked of a file"):
        formats.read(tmp_path / "a.npz", width=3)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").touch()
    with pytest.raises(ValueError, match="holds a run"):
        formats.write(checkpoints.bundle(), tmp_path / "run", "timm")


def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    formats.write(checkpoints.bundle(), tmp_path / "hub", "timm")
    before = {p.name: p.read_bytes() for p in (tmp_path / "hub").iterdir()}

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(formats.files, "save", full)
    with pytest.raises(OSError, match="No space left"):
        formats.write(checkpoints.bundle(classes=3), tmp_path / "hub", "timm")
    assert {p.name: p.read_bytes() for p in (tmp_path / "hub").iterdir()} == before


def test_bundles_are_read_like_every_other_format(tmp_path: Path) -> None:
    bundle = checkpoints.bundle()
    vitlab.save(bundle, tmp_path / "b")
    for path in (tmp_path / "b", tmp_path / "b" / "model.safetensors"):
        back, report = formats.read(path)
        checkpoints.same_state(bundle, back)
        assert report.format == "vitlab"
        assert set(report.read) == set(bundle.model.state_dict())
    with pytest.raises(ValueError, match="is a bundle, which says heads itself"):
        formats.read(tmp_path / "b", heads=3)
    _, report = formats.read(tmp_path / "b", drop="head.*")
    assert report.new == ("head.weight", "head.bias")
    bare(bundle, tmp_path / "b" / "other.pth")  # a file of another kind in the same folder
    assert formats.read(tmp_path / "b" / "other.pth", heads=3)[1].format == "timm"
    (tmp_path / "b" / "config.json").rename(tmp_path / "b" / "run.yaml")
    with pytest.raises(FileNotFoundError, match="an unfinished run"):
        formats.read(tmp_path / "b")


def test_class_names_are_their_own(tmp_path: Path) -> None:
    formats.write(checkpoints.bundle(), tmp_path / "hf", "huggingface")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    config["id2label"] = {str(i): "crane" if i in (1, 3) else f"c{i}" for i in range(5)}
    path.write_text(json.dumps(config))
    bundle, report = formats.read(tmp_path / "hf")
    assert bundle.classes == ("c0", "crane (1)", "c2", "crane (3)", "c4")
    assert any("same name" in note for note in report.notes)


def test_labels_of_the_public_heads() -> None:
    """The 1,000 and 21,843 classes, in the order of torchvision and of Google's heads."""
    from timm.data import ImageNetInfo
    from torchvision.models import ViT_B_16_Weights

    small, big = labels.imagenet(1000), labels.imagenet(21843)
    assert list(small) == ViT_B_16_Weights.IMAGENET1K_V1.meta["categories"]
    assert [s for s, _ in labels.synsets(1000)] == ImageNetInfo("imagenet-1k").label_names()
    assert [s for s, _ in labels.synsets(21843)] == ImageNetInfo("imagenet-21k-goog").label_names()
    assert len(set(small)) == 1000
    assert len(set(big)) == 21843
    assert big[:2] == ("organism", "benthos (n00005787)")  # there are two of these
    assert labels.imagenet(12) == ()
