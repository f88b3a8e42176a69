"""Class folders, on disk and in zips."""

import io
import itertools
import os
import random
import stat
import tracemalloc
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from vitlab.data import sources
from vitlab.data.decode import Unreadable
from vitlab.data.sources import Source, match_classes, open_spec

DATA = Path(os.environ.get("VITLAB_TEST_DATA", Path(__file__).parents[2] / "../shared")) / "data"
real_data = pytest.mark.skipif(not DATA.is_dir(), reason="no real pictures in the test data")
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def png(value: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2, 2), (value, value, value)).save(file, "PNG")
    return file.getvalue()


PNG = png()


def folder(root: Path, names: Iterable[str], data: bytes = PNG) -> dict[str, Source]:
    """Files (folders, where the name ends with "/") on disk, opened."""
    root.mkdir(exist_ok=True)
    for name in names:
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_bytes(data)
    return open_spec(str(root))


def zipped(path: Path, names: Iterable[str], data: bytes = PNG, **how: int) -> dict[str, Source]:
    with zipfile.ZipFile(path, "w", **how) as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), b"" if name.endswith("/") else data)
    return open_spec(str(path))


def contents(parts: dict[str, Source]) -> dict[str, list[tuple[str, str]]]:
    """(picture, class name) of each split."""
    return {
        split: [(part.id(i), part.classes[label]) for i, label in enumerate(part.labels)]
        for split, part in parts.items()
    }


def line(action: Callable[[], object]) -> str | None:
    """The one line with which something is refused, or None."""
    error: Exception | None = None
    try:
        action()
    except (ValueError, FileNotFoundError) as e:
        error = e
    assert not isinstance(error, UnicodeError)
    assert error is None or len(str(error).splitlines()) == 1
    return error and str(error)


def read_all(parts: dict[str, Source]) -> None:
    """Each picture is read, or refused with one line."""
    for part in parts.values():
        for i in range(len(part)):
            if line(lambda part=part, i=i: part.load(i)) is None:
                assert part.load(i).shape == (2, 2, 3)


# Layouts ---------------------------------------------------------------------------------------


def test_classes_are_folders_and_pictures_lie_at_any_depth_in_them(tmp_path: Path) -> None:
    parts = folder(tmp_path, ["dog/1.png", "cat/x/y/2.png", "cat/1.png"])
    assert contents(parts) == {
        "all": [("cat/1.png", "cat"), ("cat/x/y/2.png", "cat"), ("dog/1.png", "dog")]
    }
    assert parts["all"].notes == ()
    assert parts["all"].load(0).shape == (2, 2, 3)


@pytest.mark.parametrize("words", ["train val test", "Training VALID Testing", "train validation"])
def test_split_folders(tmp_path: Path, words: str) -> None:
    parts = folder(tmp_path, [f"{word}/a/1.png" for word in words.split()])
    assert list(contents(parts).values()) == [
        [(f"{w}/a/1.png", "a")] for w in sorted(words.split())
    ]
    assert set(parts) == set(["train", "val", "test"][: len(words.split())])


def test_a_class_may_be_called_test(tmp_path: Path) -> None:
    parts = folder(tmp_path, ["test/1.png", "real/1.png"])
    assert (list(parts), parts["all"].classes) == (["all"], ("real", "test"))


def test_folders_beside_train_are_no_classes(tmp_path: Path) -> None:
    parts = folder(tmp_path, ["train/a/1.png", "annotations/1.png", "train/2.png"])
    assert contents(parts) == {"train": [("train/a/1.png", "a")]}
    assert parts["train"].notes[0].endswith(": annotations/1.png, train/2.png")


def test_val_and_test_alone_are_splits(tmp_path: Path) -> None:
    assert set(folder(tmp_path, ["val/a/1.png", "test/a/1.png"])) == {"val", "test"}


def test_an_empty_val_is_noted(tmp_path: Path) -> None:
    parts = folder(tmp_path, ["train/a/1.png", "val/"])
    assert set(parts) == {"train"}
    assert parts["train"].notes[0].endswith(": val/")


def test_two_folders_for_one_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two folders for one split: train, val, valid"):
        folder(tmp_path, ["train/a/1.png", "val/a/1.png", "valid/a/1.png"])


def test_nested_class_names_do_not_merge(tmp_path: Path) -> None:  # report 024
    parts = folder(tmp_path, ["train/a/b/1.png", "train/a_b/2.png"])
    assert parts["train"].classes == ("a", "a_b")


def test_one_class_is_seen_as_one(tmp_path: Path) -> None:  # report 023: training refuses it
    assert folder(tmp_path, ["root/cat/1.png", "root/dog/1.png"])["all"].classes == ("root",)
    assert zipped(tmp_path / "a.zip", ["cat/1.png"])["all"].classes == ("cat",)


def test_numeric_folders_keep_their_names(tmp_path: Path) -> None:  # report 021
    source = folder(tmp_path, [f"{i}/{i}.png" for i in range(11)])["all"]
    matched = match_classes(source, tuple(map(str, range(11))))
    assert [f"{k}/{k}.png" for k in matched.labels] == [source.id(i) for i in range(11)]


def test_letters_composed_or_taken_apart_are_one_class(tmp_path: Path) -> None:
    parts = folder(tmp_path, ["train/caf\u00e9/1.png", "val/cafe\u0301/1.png"])
    assert parts["val"].classes == ("caf\u00e9",)
    assert parts["val"].load(0).shape == (2, 2, 3)


# What is left out, and what is refused ---------------------------------------------------------


def test_suffixes_count_in_any_case_and_once(tmp_path: Path) -> None:  # report 013
    names = ["a.jpg", "b.JPG", "c.Jpeg", "d.webp", "e.TIFF", "f.bmp", "notes.txt", "g.jpg.bak"]
    source = folder(tmp_path, [f"x/{name}" for name in names])["all"]
    assert [source.id(i) for i in range(len(source))] == [f"x/{name}" for name in names[:6]]
    assert source.notes[0].endswith(": x/g.jpg.bak, x/notes.txt")


def test_leftovers_are_no_pictures_and_no_classes(tmp_path: Path) -> None:  # reports 014, 018
    names = ["cat/1.jpg", "cat/._1.jpg", "cat/.DS_Store", "cat/Thumbs.db", "__MACOSX/cat/._1.jpg"]
    names += [".ipynb_checkpoints/1.png", "@eaDir/1.jpg", "lost+found/"]
    for source in (folder(tmp_path / "a", names)["all"], zipped(tmp_path / "a.zip", names)["all"]):
        assert contents({"all": source}) == {"all": [("cat/1.jpg", "cat")]}
        assert source.classes == ("cat",)
        note = source.notes[0].split(": ignored, as no pictures in a class: ")[1]
        assert note == ".ipynb_checkpoints/, @eaDir/, __MACOSX/, cat/.DS_Store, cat/._1.jpg, ..."


def test_val_may_lack_a_class(tmp_path: Path) -> None:  # report 019
    parts = folder(tmp_path, [*(f"train/{c}/1.png" for c in "abc"), "val/a/1.png", "val/c/1.png"])
    assert parts["val"].labels.tolist() == [0, 2]
    assert parts["val"].classes == ("a", "b", "c")


def test_val_may_not_have_another_class(tmp_path: Path) -> None:  # report 019
    with pytest.raises(ValueError, match=r"val has classes that train has not: d$"):
        folder(tmp_path, [f"train/{c}/1.png" for c in "abc"] + [f"val/{c}/1.png" for c in "bcd"])


def test_empty_classes_are_named(tmp_path: Path) -> None:  # report 020 (a)
    with pytest.raises(ValueError, match=r"class folder without pictures: train/b, train/c;"):
        folder(tmp_path, ["train/a/1.png", "train/b/", "train/c/x.txt"])


def test_val_may_have_an_empty_class(tmp_path: Path) -> None:
    parts = folder(tmp_path, ["train/a/1.png", "train/b/1.png", "val/a/1.png", "val/b/"])
    assert contents(parts)["val"] == [("val/a/1.png", "a")]


@pytest.mark.parametrize("names", [["train/"], ["train/a/"], ["a/x.txt"], []])
def test_no_pictures_at_all(tmp_path: Path, names: list[str]) -> None:  # report 020 (b)
    with pytest.raises(ValueError) as error:
        folder(tmp_path / "set", names)
    message = str(error.value).removeprefix(f"{tmp_path / 'set'}: ")
    assert message.startswith("no pictures in class folders; looked for ")
    assert " .jpeg .jpf .jpg " in message


def test_loose_pictures(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pictures lie loose, not in a folder a class"):
        folder(tmp_path, ["1.png", "2.png"])


def test_a_folder_that_cannot_be_listed_is_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path, ["a/1.png", "a/deep/2.png"])
    scandir = os.scandir

    def refuse(path: str) -> Iterator[os.DirEntry[str]]:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError):
        open_spec(str(tmp_path))


# Order and links -------------------------------------------------------------------------------


class Reversed:
    """A listing in another order, as another file system gives it."""

    def __init__(self, path: str) -> None:
        self.inner = scandir(path)
        self.entries = iter(sorted(self.inner, key=lambda e: e.name, reverse=True))

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self.entries

    def __next__(self) -> os.DirEntry[str]:
        return next(self.entries)

    def __enter__(self) -> "Reversed":
        return self

    def __exit__(self, *args: object) -> None:
        self.inner.close()

    close = __exit__


scandir = os.scandir


def test_order_does_not_depend_on_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # report 025
    names = [f"{c}/{name}.png" for c in "ba" for name in ("z", "a", "m")]
    before = folder(tmp_path, names)["all"]
    (tmp_path / "b" / "link").symlink_to(tmp_path / "a")  # whichever is entered first counts
    first = contents(open_spec(str(tmp_path)))
    monkeypatch.setattr(os, "scandir", Reversed)
    assert contents(open_spec(str(tmp_path))) == first
    assert first == contents({"all": before})
    split = sources.hold_out(open_spec(str(tmp_path))["all"], 0.3, 0)
    assert [p.ids.tolist() for p in split] == [
        p.ids.tolist() for p in sources.hold_out(before, 0.3, 0)
    ]


def test_links_are_followed_and_never_for_ever(tmp_path: Path) -> None:
    folder(tmp_path / "elsewhere", ["cat/1.png"])
    root = tmp_path / "set"
    folder(root, ["dog/1.png"])
    (root / "cat").symlink_to(tmp_path / "elsewhere" / "cat")
    (root / "dog" / "back").symlink_to(root)
    (root / "dog" / "2.png").symlink_to(root / "dog" / "1.png")
    (root / "dog" / "gone.png").symlink_to(root / "nowhere.png")
    source = open_spec(str(root))["all"]
    names = ["cat/1.png", "dog/1.png", "dog/2.png", "dog/gone.png"]
    assert [source.id(i) for i in range(len(source))] == names
    assert source.load(2).shape == (2, 2, 3)
    with pytest.raises(FileNotFoundError):
        source.load(3)


def test_a_link_into_a_hidden_folder_counts(tmp_path: Path) -> None:
    folder(tmp_path, [".store/cat/1.png", "dog/1.png"])
    (tmp_path / "cat").symlink_to(tmp_path / ".store" / "cat")
    assert open_spec(str(tmp_path))["all"].classes == ("cat", "dog")


def test_pipes_are_no_pictures(tmp_path: Path) -> None:
    folder(tmp_path, ["a/1.png"])
    os.mkfifo(tmp_path / "a" / "2.png")
    source = open_spec(str(tmp_path))["all"]
    with pytest.raises(Unreadable, match="not a regular file"):  # and no waiting for a writer
        source.load(1)
    assert stat.S_ISFIFO(os.stat(tmp_path / "a" / "2.png").st_mode)


# Zips ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_reads_as_its_folder(tmp_path: Path, method: int) -> None:
    names = ["train/a/1.png", "train/b/1.png", "val/b/x/2.png"]
    parts = folder(tmp_path / "set", names)
    with zipfile.ZipFile(tmp_path / "set.zip", "w", method) as archive:
        for value, name in enumerate(names):
            (tmp_path / "set" / name).write_bytes(png(value))
            archive.write(tmp_path / "set" / name, name)
    packed = open_spec(str(tmp_path / "set.zip"))
    assert contents(packed) == contents(parts)
    for split, part in parts.items():
        for i in range(len(part)):
            assert np.array_equal(packed[split].load(i), part.load(i))
    assert packed["val"].load(0)[0, 0, 0] == 2


names_in_trees = st.sampled_from(["a", "b", "train", "Val", "test", ".x", "1.png", "x.txt", "é"])
trees = st.lists(
    st.lists(names_in_trees, min_size=1, max_size=4).map("/".join), min_size=1, max_size=8
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees)
def test_any_tree_reads_alike_from_disk_and_from_a_zip(tmp_path: Path, names: list[str]) -> None:
    at = tmp_path / f"{len(os.listdir(tmp_path))}"
    (at / "set").mkdir(parents=True)
    kept: list[str] = []
    for name in names:
        if not any(k == name or k.startswith(name + "/") or name.startswith(k + "/") for k in kept):
            kept.append(name)
    for name in kept:
        (at / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (at / "set" / name).write_bytes(PNG)
    kept.append("twin/")  # a second folder at the top: nothing is around everything
    (at / "set" / "twin").mkdir()
    with zipfile.ZipFile(at / "set.zip", "w") as archive:
        for name in kept:
            archive.writestr(zipfile.ZipInfo(name), b"" if name.endswith("/") else PNG)
    results = []
    for spec in (at / "set", at / "set.zip"):
        refused = line(lambda spec=spec: open_spec(str(spec)))
        parts = {} if refused else open_spec(str(spec))
        notes = [note for part in parts.values() for note in part.notes]
        said = [text.removeprefix(f"{spec}: ") for text in [refused or "", *notes]]
        results.append((contents(parts), said))
    assert results[0] == results[1]


def test_a_folder_around_everything_is_looked_into(tmp_path: Path) -> None:
    names = ["set/", "set/train/a/1.png", "set/val/a/1.png", "README.txt", "__MACOSX/set/._1.png"]
    parts = zipped(tmp_path / "a.zip", names)
    assert contents(parts) == {"train": [("train/a/1.png", "a")], "val": [("val/a/1.png", "a")]}
    assert parts["train"].notes[0].endswith(": README.txt, __MACOSX/set/._1.png")
    assert parts["val"].load(0).shape == (2, 2, 3)
    assert set(zipped(tmp_path / "b.zip", ["Train/a/1.png", "Train/b/1.png"])) == {"train"}
    assert zipped(tmp_path / "c.zip", ["set/a/1.png", "set/b/1.png"])["all"].classes == ("a", "b")


def test_backslashes_separate_too(tmp_path: Path) -> None:
    parts = zipped(tmp_path / "a.zip", ["train\\a\\1.png", "train\\b\\1.png"])
    assert contents(parts) == {"train": [("train/a/1.png", "a"), ("train/b/1.png", "b")]}
    assert parts["train"].load(1).shape == (2, 2, 3)


def test_names_that_lead_out_are_ignored(tmp_path: Path) -> None:
    source = zipped(tmp_path / "a.zip", ["../x/1.png", "/etc/2.png", "a/../b/3.png", "a/1.png"])
    assert contents(source) == {"all": [("a/1.png", "a")]}


def test_a_name_given_twice_counts_once(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a/1.png", png(1))
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("a/1.png", png(2))
    source = open_spec(str(tmp_path / "a.zip"))["all"]
    assert len(source) == 1
    assert source.load(0)[0, 0, 0] == 2  # as unzip leaves it


def patched(path: Path, **fields: int) -> Source:
    """A zip of one picture whose directory entry says something else."""
    at = {"flags": (8, 2), "method": (10, 2), "crc": (16, 4), "size": (20, 4), "offset": (42, 4)}
    zipped(path, ["a/1.png"])
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\1\2")
    for name, value in fields.items():
        start, length = at[name]
        data[entry + start : entry + start + length] = value.to_bytes(length, "little")
    path.write_bytes(data)
    return open_spec(str(path))["all"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"flags": 1}, "encrypted in the zip"),
        ({"method": 12}, "packed by method 12, not stored or deflate in the zip"),
        ({"crc": 5}, "truncated or damaged in the zip"),
        ({"size": 9}, "truncated or damaged in the zip"),
        ({"size": 2**32 - 2}, "truncated or damaged in the zip"),
        ({"offset": 3}, "truncated or damaged in the zip"),
        ({"offset": 10**6}, "truncated or damaged in the zip"),
        ({"method": 8}, "cannot be read from the zip"),
    ],
)
def test_members_that_cannot_be_read(tmp_path: Path, fields: dict[str, int], why: str) -> None:
    source = patched(tmp_path / "a.zip", **fields)
    with pytest.raises(Unreadable) as error:
        source.load(0)
    assert str(error.value).startswith(why)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_that_explode_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: int
) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
        archive.writestr("a/1.png", bytes(40 << 20))
        archive.writestr("a/2.png", PNG)
    monkeypatch.setattr(sources, "MAX_MEMBER", 2 << 20)
    source = open_spec(str(tmp_path / "a.zip"))["all"]
    tracemalloc.start()
    with pytest.raises(Unreadable, match="larger than 2 MiB"):
        source.load(0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20
    assert source.load(1).shape == (2, 2, 3)


@pytest.mark.parametrize(
    "data", [b"", b"PK", b"PK\5\6" + bytes(18), png(), b"PK\5\6" + b"\xff" * 18]
)
def test_what_is_no_zip_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.zip").write_bytes(data)
    message = line(lambda: open_spec(str(tmp_path / "a.zip")))
    assert message is not None
    assert "not a readable zip" in message or "no pictures" in message


def test_damaged_zips_open_or_say_why_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    zipped(path, ["train/a/1.png", "train/b/1.png"], compression=zipfile.ZIP_DEFLATED)
    whole = path.read_bytes()
    rng = random.Random(0)
    opened = 0
    for _ in range(1500):
        data = bytearray(whole)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        directory = whole.index(b"PK\1\2")
        for _ in range(rng.randrange(4)):
            place = rng.randrange(directory, len(whole)) if rng.random() < 0.7 else 0
            place = place or rng.randrange(len(whole))
            if place < len(data):
                data[place] = rng.choice([0, 1, 0xFF, rng.randrange(256)])
        path.write_bytes(data)
        if line(lambda: open_spec(str(path))) is None:
            opened += 1
            read_all(open_spec(str(path)))
    assert 100 < opened < 1400  # both ends of the test are reached


odd_names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), max_size=5)
odd_paths = st.lists(
    st.one_of(odd_names, st.sampled_from(["..", ".", "", "a\nb", "train", "x.png", "\udcff"])),
    min_size=1, max_size=4,
).map("/".join)  # fmt: skip


@same_folder
@given(st.lists(odd_paths, max_size=6))
def test_zips_of_any_names_open_or_say_why_in_one_line(tmp_path: Path, names: list[str]) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in dict.fromkeys(n.encode("utf-8", "replace").decode() for n in names):
            if name and name[-1:] != "/":
                archive.writestr(zipfile.ZipInfo(name), PNG)
    if line(lambda: open_spec(str(path))) is None:
        read_all(open_spec(str(path)))


counter = itertools.count()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(odd_paths, odd_names.map(lambda n: f"{n}/1.png")), max_size=6))
def test_folders_of_any_names_open_or_say_why_in_one_line(tmp_path: Path, names: list[str]) -> None:
    root = tmp_path / str(next(counter))
    root.mkdir()
    for name in names:
        path = os.path.join(root, name.lstrip("/"))
        if ".." not in name and len(os.fsencode(path)) < 250:
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                Path(path).write_bytes(PNG)
            except OSError:  # a file where a folder must be
                continue
    if line(lambda: open_spec(str(root))) is None:
        read_all(open_spec(str(root)))


# Real sets -------------------------------------------------------------------------------------


@real_data
@pytest.mark.parametrize(
    ("name", "counts", "classes"),
    [
        ("tiny-imagenet-64", {"train": 100_000, "val": 10_000}, 200),
        ("imagenette-128", {"train": 9_469, "val": 3_925}, 10),
        ("cifar10-12k", {"train": 10_000, "test": 2_000}, 10),
    ],
)
def test_real_zips(name: str, counts: dict[str, int], classes: int) -> None:
    parts = open_spec(str(DATA / f"{name}.zip"))
    assert {split: len(part) for split, part in parts.items()} == counts
    for part in parts.values():
        assert (len(part.classes), part.notes) == (classes, ())
        rows = np.linspace(0, len(part) - 1, 20).astype(int)
        shapes = {part.load(i).shape for i in rows}
        assert name == "imagenette-128" or len(shapes) == 1
        assert all(part.id(i).split("/")[1] == part.classes[part.labels[i]] for i in rows)


@real_data
def test_real_oddities_are_read_or_refused(tmp_path: Path) -> None:
    source = open_spec(str(DATA / "edge-cases"))["all"]
    assert len(source) > 70
    assert "manifest.txt" in source.notes[0]
    reasons = {}
    for i in range(len(source)):
        try:
            image = source.load(i)
            assert image.dtype == np.uint8
            assert image.shape[2] == 3
        except Unreadable as e:
            reasons[source.id(i)] = str(e)
    assert 5 < len(reasons) < 40
    assert all(reason and len(reason.splitlines()) == 1 for reason in reasons.values())
