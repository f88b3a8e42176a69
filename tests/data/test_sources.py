"""Sources: what every spec opens to, and how one is taken apart."""

import io
import os
import pickle
import tempfile
import zipfile
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitlab.data import sources
from vitlab.data.decode import Unreadable, decode
from vitlab.data.named import from_tables
from vitlab.data.sources import (
    Source,
    from_arrays,
    hold_out,
    load_region,
    match_classes,
    open_spec,
    select,
)


def grouped(labels: list[int], groups: list[int] | None = None) -> Source:
    """A source whose pictures know their number."""
    images = np.arange(len(labels), dtype=np.uint8)[:, None, None].repeat(2, 1).repeat(2, 2)
    classes = [f"c{i}" for i in range(max(labels) + 1)]
    source = from_arrays(images, labels, classes)
    return source if groups is None else sources.replace(source, groups=np.array(groups))


# Arrays ----------------------------------------------------------------------------------------


def test_arrays_give_pictures_and_labels_by_index() -> None:
    images = np.zeros((3, 4, 5), np.uint8)
    images[1] = 7
    source = from_arrays(images, ["b", "a", "b"])
    assert (source.classes, source.labels.tolist(), len(source)) == (("a", "b"), [1, 0, 1], 3)
    image, label = source[1]
    assert image.shape == (4, 5, 3)
    assert image.dtype == np.uint8
    assert (image == 7).all()
    assert label == 0
    assert [source.id(i) for i in range(3)] == ["0", "1", "2"]
    assert len(list(source)) == 3  # iteration ends by IndexError


def test_arrays_keep_the_order_of_classes_given() -> None:
    classes = ["zebra", "ant", "moth"]  # report 030
    source = from_arrays(np.zeros((2, 2, 2), np.uint8), ["moth", "zebra"], classes)
    assert source.classes == ("zebra", "ant", "moth")
    assert source.labels.tolist() == [2, 0]
    assert from_arrays(np.zeros((1, 2, 2), np.uint8), [2], classes).labels.tolist() == [2]


@pytest.mark.parametrize(
    ("count", "labels", "classes", "words"),
    [
        (2, [0], None, "2 images and 1 labels"),
        (0, [], None, "0 images and 0 labels"),
        (1, [-1], None, "whole numbers"),
        (1, [0.5], None, "whole numbers"),
        (1, [3], ["a", "b"], "whole numbers 0 ... 1"),
        (1, ["c"], ["a", "b"], "`classes` has not: c"),
        (1, ["a"], ["a", "a"], "class names must differ"),
        (1, ["\ud800"], None, "UTF-8"),
    ],
)
def test_arrays_refuse(count: int, labels: list, classes: list[str] | None, words: str) -> None:
    with pytest.raises(ValueError) as error:
        from_arrays(np.zeros((count, 2, 2), np.uint8), labels, classes)
    assert words in str(error.value)


def test_arrays_take_numpy_and_whole_floats() -> None:
    images = np.zeros((2, 2, 2), np.uint8)
    assert from_arrays(images, np.array([1.0, 0.0])).labels.tolist() == [1, 0]
    assert from_arrays(images, np.array(["b", "a"])).classes == ("a", "b")


# Splitting -------------------------------------------------------------------------------------


def places(source: Source) -> list[int]:
    return [int(source.id(i)) for i in range(len(source))]


@given(
    st.lists(st.integers(0, 4), min_size=4, max_size=60),
    st.floats(0.01, 0.9),
    st.integers(0, 2**63 - 1),
)
def test_hold_out_is_stratified_disjoint_complete_and_seeded(
    labels: list[int], share: float, seed: int
) -> None:
    source = grouped(labels)
    counts = np.bincount(labels)
    if (counts < 2).all():
        with pytest.raises(ValueError, match="too few"):
            hold_out(source, share, seed)
        return
    train, val = hold_out(source, share, seed)
    assert sorted(places(train) + places(val)) == list(range(len(labels)))
    assert (train.split, val.split) == ("train", "val")
    assert train.classes == val.classes == source.classes
    for part in (train, val):
        assert [labels[i] for i in places(part)] == part.labels.tolist()
        assert all(part.load(i)[0, 0, 0] == place for i, place in enumerate(places(part)))
    for c, count in enumerate(counts):
        held = int((val.labels == c).sum())
        if count > 1:
            assert 1 <= held < count
            assert abs(held - share * count) < 1 or held in (1, count - 1)
        else:
            assert held == 0
    again = hold_out(source, share, seed)
    assert (places(again[0]), places(again[1])) == (places(train), places(val))


def test_hold_out_differs_by_seed() -> None:
    source = grouped([0, 1] * 50)
    assert len({tuple(places(hold_out(source, 0.1, seed)[1])) for seed in range(5)}) == 5


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7)), min_size=6, max_size=60),
    st.sampled_from([0.1, 0.2, 0.5]),
    st.integers(0, 99),
)
def test_hold_out_keeps_groups_together_and_classes_in_training(
    rows: list[tuple[int, int]], share: float, seed: int
) -> None:
    labels, groups = (list(column) for column in zip(*rows, strict=True))
    source = grouped(labels, groups)
    counts = np.bincount(labels)
    inside = [
        np.bincount([c for c, of in rows if of == g], minlength=len(counts)) for g in set(groups)
    ]
    if all(((held == counts) & (held > 0)).any() for held in inside):
        with pytest.raises(ValueError, match="too few"):  # each group is all of some class
            hold_out(source, share, seed)
        return
    train, val = hold_out(source, share, seed)
    assert sorted(places(train) + places(val)) == list(range(len(rows)))
    assert not set(train.groups) & set(val.groups)
    assert set(train.labels) == set(labels)
    assert places(hold_out(source, share, seed)[1]) == places(val)


def test_hold_out_of_many_small_groups_is_near_the_share_in_each_class() -> None:
    labels = [i % 4 for i in range(800)]
    source = grouped(labels, [i // 2 for i in range(800)])  # two classes a group
    _, val = hold_out(source, 0.1, 0)
    assert np.abs(np.bincount(val.labels) - 20).max() <= 1


def test_hold_out_of_few_large_groups_holds_one() -> None:
    source = grouped([0, 1] * 30, [i // 20 for i in range(60)])  # three hospitals
    train, val = hold_out(source, 0.1, 0)
    assert (len(train), len(val)) == (40, 20)


def test_hold_out_scales_with_classes() -> None:
    labels = np.arange(400_000) % 20_000  # a pass over the rows for each class would take minutes
    images = np.broadcast_to(np.zeros((1, 1, 1), np.uint8), (len(labels), 1, 1))
    source = sources.replace(
        grouped([0]), labels=labels, ids=np.arange(len(labels)).astype("S"),
        classes=tuple(map(str, range(20_000))), load=sources.Images(images),
    )  # fmt: skip
    train, val = hold_out(source, 0.1, 0)
    assert (np.bincount(val.labels) == 2).all()
    assert len(train) == 360_000


def test_the_parts_of_a_split_share_nothing() -> None:  # report 027, as far as sources go
    train, val = hold_out(grouped([0, 1] * 5), 0.3, 0)
    assert not set(places(train)) & set(places(val))
    assert len(train) + len(val) == 10


def test_select_keeps_groups_and_nests() -> None:
    source = grouped([0, 1, 0, 1, 0], [5, 6, 7, 8, 9])
    part = select(select(source, np.array([4, 2, 0]), "x"), np.array([0, 2]), "y")
    assert (places(part), part.groups.tolist(), part.split) == ([4, 0], [9, 5], "y")
    assert part.load(0)[0, 0, 0] == 4


# Matching --------------------------------------------------------------------------------------


def test_labels_match_by_class_name() -> None:
    source = from_arrays(np.zeros((3, 1, 1), np.uint8), ["a", "c", "a"])
    matched = match_classes(source, ("c", "b", "a"))
    assert (matched.classes, matched.labels.tolist()) == (("c", "b", "a"), [2, 0, 2])


def test_numeric_class_folders_match_by_name_not_by_place() -> None:  # report 021
    names = [str(i) for i in range(11)]
    source = from_arrays(np.zeros((11, 1, 1), np.uint8), names)
    assert source.classes != tuple(names)  # sorted as text: 0, 1, 10, 2, ...
    assert match_classes(source, tuple(names)).labels.tolist() == list(range(11))


def test_unknown_classes_are_named() -> None:
    source = from_arrays(np.zeros((3, 1, 1), np.uint8), ["a", "d", "e"])
    with pytest.raises(ValueError, match=r"2 of its classes .*: d, e; the model knows a, b, c$"):
        match_classes(source, ("a", "b", "c"))


def test_matching_twenty_thousand_classes_is_quick() -> None:
    names = tuple(str(i) for i in range(20_000))
    source = sources.replace(grouped([0]), classes=names[::-1])
    assert match_classes(source, names).labels.tolist() == [19_999]


# Specs -----------------------------------------------------------------------------------------


def test_what_is_not_there_is_said() -> None:  # report 020 (c)
    with pytest.raises(FileNotFoundError, match="no/such/folder: does not exist"):
        open_spec("no/such/folder")


@pytest.mark.parametrize("spec", ["", "\n", "a\0b", "~nobody-here/x", "\ud800", "x" * 200])
def test_any_spec_opens_or_says_why_in_one_line(spec: str) -> None:
    with pytest.raises((ValueError, OSError)) as error:
        open_spec(spec)
    assert len(str(error.value).splitlines()) == 1


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ValueError, match=r"x\.txt: not a folder, \.zip, \.csv or \.jsonl"):
        open_spec(str(tmp_path / "x.txt"))


def test_messages_are_one_line_whatever_the_names(tmp_path: Path) -> None:
    (tmp_path / "a\nb").mkdir()
    (tmp_path / "c").mkdir()
    Image.new("RGB", (2, 2)).save(tmp_path / "c" / "1.png")
    with pytest.raises(ValueError) as error:
        open_spec(str(tmp_path))
    assert "without pictures: a\\nb;" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "set" / "c").mkdir(parents=True)
    Image.new("RGB", (2, 2)).save(tmp_path / "set" / "c" / "1.png")
    assert len(open_spec("~/set")["all"]) == 1


# One picture, every way ------------------------------------------------------------------------


def sideways(path: Path, orientation: int) -> None:
    """16 wide, 8 high, left half red, right half blue, and a tag that says how to hold it."""
    image = Image.new("RGB", (16, 8), "blue")
    image.paste("red", (0, 0, 8, 8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(path, exif=exif, quality=100, subsampling=0)


@pytest.mark.parametrize("orientation", [3, 6])
def test_exif_orientation_counts_in_every_kind_of_source(tmp_path: Path, orientation: int) -> None:
    """Report 003: folder, zip, tables, the hub and pictures in memory agree."""
    file = tmp_path / "set" / "c" / "1.jpg"
    file.parent.mkdir(parents=True)
    sideways(file, orientation)
    with zipfile.ZipFile(tmp_path / "set.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(file, "c/1.jpg")
    (tmp_path / "set.csv").write_text("path,label\nset/c/1.jpg,c\n")
    (tmp_path / "set.jsonl").write_text('{"path": "set/c/1.jpg", "label": "c"}\n')
    opened = [
        open_spec(str(tmp_path / name))["all"]
        for name in ("set", "set.zip", "set.csv", "set.jsonl")
    ]
    table = datasets.Dataset.from_dict(
        {"image": [str(file)], "label": ["c"]},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")}),
    )
    opened.append(from_tables("hf:x", {"train": table}, label="label")["train"])
    with Image.open(file) as picture:
        opened.append(from_arrays([picture.copy()], ["c"]))
    pictures = [source.load(0) for source in opened]
    pictures += [pickle.loads(pickle.dumps(source)).load(0) for source in opened]  # as to workers
    assert pictures[0].shape == ((16, 8, 3) if orientation == 6 else (8, 16, 3))
    first, last = pictures[0][1, 1].tolist(), pictures[0][-2, -2].tolist()
    red, blue = (first, last) if orientation == 6 else (last, first)
    assert red[0] > 250 > 5 > red[2]
    assert blue[2] > 250 > 5 > blue[0]
    assert all(np.array_equal(picture, pictures[0]) for picture in pictures)


@given(st.tuples(st.integers(1, 90), st.integers(1, 90)), st.data())
def test_a_region_is_that_part_of_the_picture(size: tuple[int, int], data: st.DataObject) -> None:
    """Exactly, but of JPEGs; by whatever way it is read."""
    h, w = size
    image = np.random.default_rng(0).integers(0, 256, (h, w, 3), dtype=np.uint8)
    left, top = data.draw(st.integers(0, w - 1)), data.draw(st.integers(0, h - 1))
    right, bottom = data.draw(st.integers(left + 1, w)), data.draw(st.integers(top + 1, h))
    asked = []

    def region(height: int, width: int) -> tuple[int, int, int, int]:
        asked.append((height, width))
        return left, top, right, bottom

    with tempfile.TemporaryDirectory() as folder:
        Image.fromarray(image).save(f"{folder}/1.png")
        with zipfile.ZipFile(f"{folder}/1.zip", "w") as archive:
            archive.write(f"{folder}/1.png", "c/1.png")
        files = sources.Files(folder, np.array([b"0.png", b"1.png"]))
        members = open_spec(f"{folder}/1.zip")["all"].load
        for load, i in (
            (sources.Images([image]), 0), (files, 1), (members, 0),
            (sources.Chosen(files, np.array([1])), 0),
        ):  # fmt: skip
            part = load_region(load, i, region, (1, 1))
            assert np.array_equal(part, image[top:bottom, left:right])
    assert set(asked) == {(h, w)}


lengths = st.integers(1, 130) | st.integers(1, 20).map(lambda eighth: 8 * eighth)


@settings(max_examples=150)
@given(
    st.integers(1, 8), st.tuples(lengths, lengths),
    st.tuples(st.integers(1, 40), st.integers(1, 40)), st.data(),
)  # fmt: skip
def test_a_region_of_a_jpeg_is_chosen_upright_and_has_enough_pixels(
    orientation: int, size: tuple[int, int], least: tuple[int, int], data: st.DataObject
) -> None:
    h, w = size
    y, x = np.mgrid[:h, :w]
    ramps = np.stack([255 * x / w, 255 * y / h, 0 * x], axis=2).astype(np.uint8)
    smooth = Image.fromarray(ramps)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    smooth.save(file, "JPEG", exif=exif, quality=97, subsampling=0)
    whole = decode(file.getvalue())
    h, w = whole.shape[:2]
    left, top = data.draw(st.integers(0, w - 1)), data.draw(st.integers(0, h - 1))
    right, bottom = data.draw(st.integers(left + 1, w)), data.draw(st.integers(top + 1, h))
    asked = []

    def region(height: int, width: int) -> tuple[int, int, int, int]:
        asked.append((height, width))
        return left, top, right, bottom

    part = decode(file.getvalue(), region=region, least=least)
    assert set(asked) == {(h, w)}
    tall, wide = bottom - top, right - left
    fits = min(tall // (least[0] + 1), wide // (least[1] + 1))
    scale = max(s for s in (1, 2, 4, 8) if s <= max(1, fits))
    exact = whole[top:bottom, left:right]
    if scale == 1:
        assert np.array_equal(part, exact)
        return
    for side, full, enough in zip(part.shape, (tall, wide), least, strict=False):
        assert side >= enough
        assert abs(side - full / scale) <= 1
    # The ramps' means tell where its middle lies: within half a pixel of the scale, and one more
    # where the picture ends within such a pixel and is then turned.
    difference = np.abs(part.mean((0, 1)) - exact.mean((0, 1)))[:2] / 255
    allowed = 1.7 if h % scale or w % scale else 0.7
    assert difference.max() < allowed * scale / min(h, w) + 0.02


@pytest.mark.parametrize(("least", "scale"), [(16, 1), (15, 2), (8, 2), (7, 4), (4, 4), (3, 8)])
def test_jpegs_are_halved_while_the_region_keeps_enough(least: int, scale: int) -> None:
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "JPEG")
    for needed in (least, 1), (1, least):
        part = decode(file.getvalue(), region=lambda h, w: (0, 0, w, h), least=needed)
        assert part.shape == (32 // scale, 32 // scale, 3)


def test_edges_are_rounded_to_the_nearest_pixel_of_the_scale() -> None:
    file = io.BytesIO()
    Image.effect_noise((320, 320), 80).convert("RGB").save(file, "JPEG")
    whole = decode(file.getvalue(), region=lambda h, w: (0, 0, w, h), least=(9, 9))
    assert whole.shape == (40, 40, 3)
    part = decode(file.getvalue(), region=lambda h, w: (7, 3, 267, 261), least=(9, 9))
    assert np.array_equal(part, whole[0:33, 1:33])


def test_reading_fails_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "set.csv").write_text("path,label\ngone.png,c\nhere.png,c\n")
    (tmp_path / "here.png").write_bytes(b"")
    source = open_spec(str(tmp_path / "set.csv"))["all"]
    with pytest.raises(FileNotFoundError):
        source.load(0)
    with pytest.raises(Unreadable, match=r"^empty file$"):
        source.load(1)


def test_ids_are_names_whatever_their_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    names = ["é.png", "a b.png", os.fsdecode(b"\xff.png")]
    for name in names:
        Image.new("RGB", (2, 2)).save(folder / name, "PNG")
    source = open_spec(str(tmp_path))["all"]
    assert {source.id(i) for i in range(3)} == {f"c/{name}" for name in names}
    assert all(source.load(i).shape == (2, 2, 3) for i in range(3))
