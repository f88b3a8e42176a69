"""The data doctor: what it finds, what it leaves alone, and what a clean table keeps."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.data import doctor, duplicates, mending, page
from vitlab.data.doctor import Checked, check, keep
from vitlab.data.packing import pack
from vitlab.data.sources import Source, from_arrays, open_spec, regroup


def photograph(seed: int, w: int = 96, h: int = 80) -> Image.Image:
    """Made up, with detail at several scales as photographs have it."""
    rng = np.random.default_rng(seed)
    layers = [
        np.asarray(
            Image.fromarray(rng.integers(0, 256, (h // s + 2, w // s + 2, 3), np.uint8)).resize(
                (w, h), Image.Resampling.BICUBIC
            ),
            np.float32,
        )
        for s in (32, 16, 8)
    ]
    return Image.fromarray((0.5 * layers[0] + 0.3 * layers[1] + 0.2 * layers[2]).astype(np.uint8))


def save(image: Image.Image, path: Path, **how: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **how)
    return path


def kinds(done: Checked) -> dict[str, list[set[str]]]:
    """Kind -> the files of each finding."""
    found: dict[str, list[set[str]]] = {}
    for f in done.findings:
        found.setdefault(f.kind, []).append({p.file for p in f.pictures})
    return found


def clean(root: Path, count: int = 12) -> Path:
    for i in range(count):
        save(photograph(i), root / "train" / "ab"[i % 2] / f"{i}.png")
        save(photograph(1000 + i), root / "val" / "ab"[i % 2] / f"{i}.png")
    return root


def test_a_clean_set_has_nothing_wrong_and_is_kept_whole(tmp_path: Path) -> None:
    done = check(open_spec(str(clean(tmp_path))), threads=2)
    assert done.findings == []
    assert keep(done).tolist() == list(range(24))


# The same picture ------------------------------------------------------------------------------

CHANGES = {
    "identical": lambda im: im,
    "encoded": lambda im: encoded(im, 60),
    "resized": lambda im: im.resize((round(0.9 * im.width), round(0.9 * im.height))),
    "larger": lambda im: im.resize((2 * im.width, 2 * im.height)),
    "corner": lambda im: im.crop((0, 0, round(0.95 * im.width), round(0.95 * im.height))),
    "side": lambda im: im.crop((round(0.05 * im.width), 0, im.width, im.height)),
    "middle": lambda im: im.crop((2, 2, im.width - 2, im.height - 2)).resize(im.size),
}


def encoded(image: Image.Image, quality: int) -> Image.Image:
    data = io.BytesIO()
    image.save(data, "JPEG", quality=quality)
    return Image.open(data)


@pytest.mark.parametrize("change", CHANGES)
def test_copies_in_another_split_are_leaks(change: str, tmp_path: Path) -> None:
    clean(tmp_path)
    for i in range(12):
        save(CHANGES[change](photograph(i)), tmp_path / "val" / "ab"[i % 2] / f"copy{i}.png")
    done = check(open_spec(str(tmp_path)), threads=2)
    pairs = [{f"train/{'ab'[i % 2]}/{i}.png", f"val/{'ab'[i % 2]}/copy{i}.png"} for i in range(12)]
    assert {frozenset(p) for p in pairs} == {frozenset(p) for p in kinds(done)["leak"]}
    assert kinds(done).keys() == {"leak"}
    exact = [f.note.startswith("the same pixels") for f in done.findings]
    assert all(exact) if change == "identical" else not any(exact)
    kept = {done.picture(row).file for row in keep(done).tolist()}
    assert all((p & kept) == {f for f in p if f.startswith("val")} for p in pairs)  # train loses


def test_within_a_split_they_are_duplicates_and_the_first_stays(tmp_path: Path) -> None:
    clean(tmp_path)
    for name, quality in (("y", 95), ("z", 40)):
        save(photograph(4), tmp_path / "train/a" / f"{name}.jpg", quality=quality)
    save(photograph(7), tmp_path / "train/b/twice.bmp")  # another file, the same pixels
    done = check(open_spec(str(tmp_path)))
    assert kinds(done) == {
        "duplicate": [{"train/b/7.png", "train/b/twice.bmp"}],
        "near-duplicate": [{"train/a/4.png", "train/a/y.jpg", "train/a/z.jpg"}],
    }
    gone = set(range(27)) - set(keep(done).tolist())
    assert {done.picture(row).file for row in gone} == {
        "train/a/y.jpg", "train/a/z.jpg", "train/b/twice.bmp",
    }  # fmt: skip


def test_two_labels_for_one_picture_are_a_conflict_and_neither_stays(tmp_path: Path) -> None:
    clean(tmp_path)
    save(photograph(4), tmp_path / "train/b/also.png")
    save(encoded(photograph(7), 80), tmp_path / "val/a/other.png")
    done = check(open_spec(str(tmp_path)))
    found = kinds(done)
    assert {"train/a/4.png", "train/b/also.png"} in found["conflict"]
    assert {"train/b/7.png", "val/a/other.png"} in found["conflict"]
    assert found["leak"] == [{"train/b/7.png", "val/a/other.png"}]  # it is both
    kept = {done.picture(row).file for row in keep(done).tolist()}
    assert not kept & {"train/a/4.png", "train/b/also.png", "train/b/7.png", "val/a/other.png"}
    assert len(kept) == 22


def test_several_labels_a_picture(tmp_path: Path) -> None:
    """The same labels are no conflict, others are; a clean table and shards keep them all."""
    for i in range(4):
        save(photograph(i // 2), tmp_path / f"{i}.png")
    rows = ["path,label", "0.png,a|b", "1.png,b|a", "2.png,a|b", "3.png,a"]
    (tmp_path / "set.csv").write_text("\n".join(rows))
    parts = open_spec(str(tmp_path / "set.csv"))
    done = check(parts)
    assert kinds(done) == {"conflict": [{"2.png", "3.png"}], "duplicate": [{"0.png", "1.png"}]}
    mending.write(done, keep(done), tmp_path / "clean.csv")
    assert (tmp_path / "clean.csv").read_text() == "path,label\n0.png,a|b\n"
    pack(parts, tmp_path / "to", shard_size=10**6)
    packed = open_spec(str(tmp_path / "to"))["all"]
    assert sorted(packed.many.tolist()) == sorted(parts["all"].many.tolist())


def test_another_set(tmp_path: Path) -> None:
    clean(tmp_path / "set")
    for i in range(3):
        save(encoded(photograph(i), 70), tmp_path / "other/test/x" / f"{i}.png")
        save(photograph(50 + i), tmp_path / "other/test/y" / f"{i}.png")
    save(photograph(50), tmp_path / "other/test/y/again.png")  # their own affair
    other = open_spec(str(tmp_path / "other"))["test"]
    done = check(open_spec(str(tmp_path / "set")), [other])
    assert kinds(done).keys() == {"overlap"}
    expected = [{f"train/{'ab'[i % 2]}/{i}.png", f"test/x/{i}.png"} for i in range(3)]
    assert sorted(kinds(done)["overlap"], key=sorted) == sorted(expected, key=sorted)
    assert done.findings[0].pictures[1].split.endswith("other test")
    kept = {done.picture(row).file for row in keep(done).tolist()}
    assert len(kept) == 21
    assert "train/a/0.png" not in kept


def test_pictures_that_only_resemble_each_other_are_not_reported() -> None:
    """Flat colours, one gradient with another, a scene with something else in it."""
    ramp = np.linspace(0, 255, 64).astype(np.uint8)
    pictures = [
        *(np.full((64, 64, 3), c, np.uint8) for c in ((0, 0, 0), (255, 255, 255), (200, 30, 30))),
        np.stack([np.tile(ramp, (64, 1))] * 3, axis=2),
        np.stack([np.tile(ramp[:, None], (1, 64))] * 3, axis=2),
        *(np.asarray(photograph(i)) for i in range(20)),
    ]
    for seed in (1, 2):  # half of each is the same
        half = np.asarray(photograph(99)).copy()
        half[:, 48:] = np.asarray(photograph(100 + seed))[:, 48:]
        pictures.append(half)
    done = check({"all": from_arrays(pictures, [0] * len(pictures))})
    assert done.findings == []


def test_many_equal_looking_pictures_stay_affordable() -> None:
    """Blank scans have one code: they must not be compared each with each."""
    blank = np.full((2000, 16, 16), 250, np.uint8)
    signs, weak = duplicates.codes(blank)
    assert len(duplicates.candidates(signs, weak)) <= 2000 * duplicates.CROWD


def test_sets_that_all_look_alike_stay_affordable() -> None:
    """X-rays, products on white: the nearest few of each are compared, copies among them."""
    rng = np.random.default_rng(0)
    base = rng.integers(60, 200, (16, 16))
    roughs = (base + rng.integers(-8, 9, (3000, 16, 16))).astype(np.uint8)
    roughs[2000:2020] = roughs[:20] + rng.integers(0, 2, (20, 16, 16)).astype(np.uint8)
    pairs = duplicates.candidates(*duplicates.codes(roughs))
    assert len(pairs) <= 3000 * duplicates.FEW
    assert {(i, 2000 + i) for i in range(20)} <= set(map(tuple, pairs.tolist()))


def test_candidates_are_few_among_many() -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (4000, 8, 8, 3), np.uint8)
    small = np.repeat(np.repeat(noise, 4, axis=1), 4, axis=2)
    near = small[:50].astype(int) + rng.integers(-6, 7, (50, 32, 32, 3))
    both = np.concatenate([small, near.clip(0, 255).astype(np.uint8)])
    pairs = duplicates.candidates(*duplicates.codes(duplicates.rough(both)))
    assert {(i, 4000 + i) for i in range(50)} <= set(map(tuple, pairs.tolist()))
    assert len(pairs) < 100


def test_groups_of_pairs() -> None:
    pairs = np.array([[5, 3], [8, 9], [3, 1], [9, 8], [2, 2]])
    assert [g for g in duplicates.groups(pairs) if len(g) > 1] == [[1, 3, 5], [8, 9]]


# Files and classes -----------------------------------------------------------------------------


def test_files_that_are_odd(tmp_path: Path) -> None:
    clean(tmp_path)
    at = tmp_path / "train/a"
    (at / "empty.png").write_bytes(b"")
    (at / "text.jpg").write_bytes(b"no picture at all")
    data = (at / "0.png").read_bytes()
    (at / "cut.png").write_bytes(data[: len(data) // 2])
    exif = Image.Exif()
    exif[0x0112] = 6
    save(photograph(30), at / "turned.jpg", exif=exif)
    save(photograph(31).convert("CMYK"), at / "print.jpg")
    save(photograph(32).convert("RGBA"), at / "opaque.png")
    save(photograph(33, 12, 9), at / "icon.png")
    save(photograph(34, 900, 80), at / "strip.png")
    done = check(open_spec(str(tmp_path)))
    found = kinds(done)
    assert found["unreadable"] == [{f"train/a/{n}"} for n in ("cut.png", "empty.png", "text.jpg")]
    assert found["rotated"] == [{"train/a/turned.jpg"}]
    assert {"train/a/print.jpg"} in found["mode"]
    assert found["size"] == [{"train/a/icon.png"}, {"train/a/strip.png"}]
    assert found.keys() == {"unreadable", "rotated", "mode", "size"}
    gone = {done.picture(r).file for r in set(range(len(done.first))) - set(keep(done).tolist())}
    assert gone == {f"train/a/{n}" for n in ("cut.png", "empty.png", "text.jpg")}  # odd ones stay
    order = [f.kind for f in done.findings]
    assert order == sorted(order, key=list(doctor.KINDS).index)


def test_pictures_that_are_gone_or_no_files(tmp_path: Path) -> None:
    save(photograph(0), tmp_path / "0.png")
    (tmp_path / "d.png").mkdir()
    (tmp_path / "set.csv").write_text("path,label\n0.png,a\ngone.png,a\nd.png,a\n")
    done = check(open_spec(str(tmp_path / "set.csv")))
    assert [(f.pictures[0].file, f.note) for f in done.findings] == [
        ("gone.png", "no such file or directory"), ("d.png", "a folder, not a file"),
    ]  # fmt: skip


def test_a_set_of_nothing_readable(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/0.png").write_bytes(b"")
    done = check(open_spec(str(tmp_path)))
    assert kinds(done) == {"unreadable": [{"a/0.png"}]}
    assert len(keep(done)) == 0


def test_imbalance() -> None:
    images = np.random.default_rng(0).integers(0, 256, (44, 16, 16, 3), np.uint8)
    done = check({"train": from_arrays(images, ["a"] * 40 + ["b"] * 4)})
    assert [(f.kind, f.note) for f in done.findings] == [
        ("imbalance", "all: a has 40 pictures, b 4")
    ]
    assert check({"train": from_arrays(images, ["a"] * 39 + ["b"] * 5)}).findings == []


# Groups ----------------------------------------------------------------------------------------


def test_a_group_in_two_splits_is_found_and_kept_in_one(tmp_path: Path) -> None:
    rows = ["path,label,split,group"]
    for i in range(8):
        save(photograph(i), tmp_path / f"{i}.png")
        split, group = ("train", f"g{i // 2}") if i < 6 else ("test", "g0" if i == 6 else "")
        rows.append(f"{i}.png,{'ab'[i % 2]},{split},{group}")
    (tmp_path / "set.csv").write_text("\n".join(rows) + "\n")
    done = check(open_spec(str(tmp_path / "set.csv")))
    assert kinds(done) == {"group": [{"0.png", "1.png", "6.png"}]}
    assert done.findings[0].note == "2 in train, 1 in test"
    kept = {done.picture(row).file for row in keep(done).tolist()}
    assert kept == {f"{i}.png" for i in (2, 3, 4, 5, 6, 7)}


def test_groups_from_paths(tmp_path: Path) -> None:
    for split, number in (("train", 1), ("train", 2), ("val", 1), ("val", 3)):
        for i in range(2):
            seed = number * 100 + i + 10 * (split == "val")
            save(photograph(seed), tmp_path / split / "a" / f"p{number}-{i}.png")
    parts = regroup(open_spec(str(tmp_path)), r"p(\d+)-")
    assert kinds(check(parts))["group"] == [
        {f"{split}/a/p1-{i}.png" for split in ("train", "val") for i in range(2)}
    ]
    assert "group" not in kinds(check(regroup(open_spec(str(tmp_path)), r".*")))
    with pytest.raises(ValueError, match="--group 'q': found in no picture's path"):
        regroup(parts, "q")
    with pytest.raises(ValueError, match=r"--group '\(': not a regular expression"):
        regroup(parts, "(")


def test_groups_that_lie_in_train_too_are_told(tmp_path: Path) -> None:
    for split, numbers in (("train", (1, 1, 2, 4)), ("val", (1, 3, 3)), ("test", (2, 4, 4))):
        for i, number in enumerate(numbers):
            save(photograph(0), tmp_path / split / "a" / f"p{number}-{i}.png")
    parts = open_spec(str(tmp_path))
    assert doctor.shared_groups(parts) == []
    assert doctor.shared_groups(regroup(parts, r"[a-z]+/a/p\d-\d")) == []
    test, val = doctor.shared_groups(regroup(parts, r"p(\d)-"))
    assert val == (
        f"{tmp_path}: 1 of 3 pictures in val are of groups in train (groups: 1, such as that of"
        " val/a/p1-0.png and train/a/p1-0.png), which flatters its score; `vitlab data check --fix`"
        " keeps each group in one split"
    )
    assert "3 of 3 pictures in test are of groups in train (groups: 2, such as that of test" in test


# Suspicious labels -----------------------------------------------------------------------------


def noisy(wrong: list[int]) -> tuple[Source, np.ndarray]:
    """60 pictures of three classes that their features tell apart, some with another label."""
    rng = np.random.default_rng(0)
    truth = np.arange(60) % 3
    labels = truth.copy()
    labels[wrong] = (truth[wrong] + 1) % 3
    features = np.eye(3, 8)[truth] + 0.1 * rng.standard_normal((60, 8))
    images = rng.integers(0, 256, (60, 16, 16, 3), np.uint8)
    return from_arrays(images, labels.tolist(), ["a", "b", "c"]), features.astype(np.float32)


def test_labels_unlike_their_neighbours_are_suspicious() -> None:
    source, features = noisy([4, 17, 33])
    done = check({"all": source})
    found = doctor.suspicious(done, features, np.arange(60))
    assert [f.pictures[0].row for f in found] == [4, 17, 33]
    assert "nearest are b" in found[0].note  # 4 is of class b
    source, features = noisy([])
    assert doctor.suspicious(check({"all": source}), features, np.arange(60)) == []


def test_copies_do_not_vote_for_each_other() -> None:
    """A dozen copies with one wrong label would else defend it."""
    source, features = noisy([4])
    images = np.stack([source.load(i) for i in range(60)] + [source.load(4)] * 12)
    labels = [*source.labels.tolist(), *[2] * 12]
    features = np.concatenate([features, features[[4] * 12]])
    done = check({"all": from_arrays(images, labels, ["a", "b", "c"])})
    rows = [f.pictures[0].row for f in doctor.suspicious(done, features, np.arange(72))]
    assert {4, *range(60, 72)} <= set(rows)


# What is written -------------------------------------------------------------------------------


def test_a_clean_table_is_a_spec_and_pictures_stay_untouched(tmp_path: Path) -> None:
    clean(tmp_path / "set")
    save(photograph(4), tmp_path / "set/train/a/comma, 'quoted' é.png")
    before = {p: p.read_bytes() for p in (tmp_path / "set").rglob("*.png")}
    parts = open_spec(str(tmp_path / "set"))
    done = check(parts)
    path = tmp_path / "tables/clean.csv"
    mending.refuse(parts, path)
    mending.write(done, keep(done), path)
    assert {p: p.read_bytes() for p in (tmp_path / "set").rglob("*.png")} == before
    with open(path, newline="") as file:
        assert next(csv.reader(file)) == ["path", "label", "split"]
    again = open_spec(str(path))
    assert {split: len(part) for split, part in again.items()} == {"train": 12, "val": 12}
    assert check(again).findings == []
    assert (again["train"].load(0) == parts["train"].load(0)).all()
    assert not [*path.parent.glob(".*")]


def test_a_table_keeps_groups_and_has_no_split_where_there_was_none(tmp_path: Path) -> None:
    for i in range(4):
        save(photograph(i), tmp_path / f"{i}.png")
    rows = ["path,label,group", *(f"{i}.png,a,{'xyzz'[i]}" for i in range(4))]
    (tmp_path / "set.csv").write_text("\n".join(rows))
    done = check(open_spec(str(tmp_path / "set.csv")))
    mending.write(done, keep(done), tmp_path / "clean.csv")
    assert (tmp_path / "clean.csv").read_text().splitlines() == [
        "path,label,group", "0.png,a,0", "1.png,a,1", "2.png,a,2", "3.png,a,2",
    ]  # fmt: skip


def test_no_table_of_pictures_that_are_no_files(tmp_path: Path) -> None:
    parts = {"all": from_arrays(np.zeros((2, 4, 4, 3), np.uint8), ["a", "b"])}
    with pytest.raises(ValueError, match="no picture files of their own"):
        mending.refuse(parts, tmp_path / "x.csv")


def test_the_page_is_self_contained_and_escapes_names(tmp_path: Path) -> None:
    clean(tmp_path / "set")
    save(photograph(4), tmp_path / "set/val/a/<script>&.png")
    (tmp_path / "set/train/a/bad.png").write_bytes(b"")
    done = check(open_spec(str(tmp_path / "set")))
    page.write(tmp_path / "out", done)
    text = (tmp_path / "out/index.html").read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;&amp;.png" in text
    assert text.count('src="data:image/') == 2
    assert "no picture" in text
    assert "http://" not in text.replace("http-equiv", "")
    assert "https://" not in text
    page.write(tmp_path / "none", check(open_spec(str(clean(tmp_path / "clean")))))
    assert "Nothing found" in (tmp_path / "none/index.html").read_text()
