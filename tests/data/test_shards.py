"""Packing into tar shards, and reading them: bytes, order, resuming, other people's shards."""

import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitlab.data import loader, packing, shards
from vitlab.data.augment import Augment
from vitlab.data.decode import Unreadable
from vitlab.data.packing import pack, size
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources import Source, from_arrays, hold_out, open_spec, select


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """train/ and val/ of JPEG, PNG and BMP in three classes, one picture on its side."""
    rng = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    for split, count in (("train", 40), ("val", 6)):
        for i in range(count):
            at = tmp_path / "set" / split / "abc"[i % 3]
            at.mkdir(parents=True, exist_ok=True)
            kind = ("jpg", "png", "bmp")[i % 3 if i else 0]
            image = Image.fromarray(rng.integers(0, 256, (20, 24 + i, 3), np.uint8))
            image.save(at / f"{i:02d}.{kind}", **({"exif": exif} if i == 0 else {}))
    return tmp_path / "set"


def records(source: Source) -> dict[str, tuple[int, bytes]]:
    """Original id -> (label, pixels), by what each sample's JSON says."""
    found = {}
    for i in range(len(source)):
        shard, name = source.id(i).split("/")
        with tarfile.open(Path(source.spec) / shard) as tar:
            text = tar.extractfile(name.partition(".")[0] + ".json").read()
        record = json.loads(text)
        assert record["label"] == source.classes[int(source.labels[i])]
        found[record["id"]] = (int(source.labels[i]), source.load(i).tobytes())
    return found


def test_packed_pictures_are_the_same_pictures(folder: Path, tmp_path: Path) -> None:
    parts = open_spec(str(folder))
    done = pack(parts, tmp_path / "to", shard_size=20_000, threads=2)
    assert (done.pictures, done.left_out) == (46, [])
    assert done.shards > 4
    packed = open_spec(str(tmp_path / "to"))
    assert list(packed) == ["train", "val"]
    for split, source in parts.items():
        expected = {source.id(i): (source[i][1], source[i][0].tobytes())
                    for i in range(len(source))}  # fmt: skip
        assert records(packed[split]) == expected
        assert packed[split].classes == source.classes
    assert sorted(p.name for p in (tmp_path / "to").glob("*.json")) == ["index.json"]
    assert not [*(tmp_path / "to").glob(".*")]


def test_jpeg_and_png_keep_their_bytes_and_others_become_png(folder: Path, tmp_path: Path) -> None:
    pack(open_spec(str(folder)), tmp_path / "to", shard_size=10**6)
    kinds = []
    with tarfile.open(tmp_path / "to/train-000000.tar") as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar}
    for name, data in members.items():
        key, kind = name.split(".")
        if kind in ("jpg", "png"):
            record = json.loads(members[f"{key}.json"])
            original = (folder / record["id"]).read_bytes()
            kinds.append((Path(record["id"]).suffix, kind, data == original))
            assert members[f"{key}.cls"] == str("abc".index(record["label"])).encode()
    assert set(kinds) == {(".jpg", "jpg", True), (".png", "png", True), (".bmp", "png", False)}


def test_the_same_call_gives_the_same_bytes_and_order_is_shuffled(
    folder: Path, tmp_path: Path
) -> None:
    parts = open_spec(str(folder))
    for name, seed, threads in (("x", 0, 1), ("y", 0, 3), ("z", 1, 1)):
        pack(parts, tmp_path / name, shard_size=20_000, seed=seed, threads=threads)
    x, y, z = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in "xyz")
    assert x == y
    assert x != z
    labels = open_spec(str(tmp_path / "x"))["train"].labels.tolist()
    assert labels != sorted(labels)


@pytest.mark.parametrize("after", [0, 1, 3, 5])
def test_an_interrupted_packing_is_finished(
    after: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "train/a/bad.jpg").write_bytes(b"\xff\xd8\xffno")
    parts = open_spec(str(folder))
    pack(parts, tmp_path / "whole", shard_size=20_000)
    write, calls = packing._write, []

    def dies(*arguments: object) -> object:
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return write(*arguments)

    monkeypatch.setattr(packing, "_write", dies)
    with pytest.raises(KeyboardInterrupt):
        pack(parts, tmp_path / "to", shard_size=20_000)
    monkeypatch.undo()
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    written = {p: p.stat().st_mtime_ns for p in (tmp_path / "to").glob("*.tar")}
    assert len(written) == after
    (tmp_path / "to" / ".train-000009.tar.part").write_bytes(b"half")
    done = pack(parts, tmp_path / "to", shard_size=20_000)
    assert {p: p.stat().st_mtime_ns for p in written} == written  # not written again
    assert [file for file, _ in done.left_out] == ["train/a/bad.jpg"]
    one, other = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()
                   if p.name != "index.json"} for n in ("whole", "to"))  # fmt: skip
    assert one == other


def test_a_finished_packing_is_left_alone_and_another_refused(folder: Path, tmp_path: Path) -> None:
    parts = open_spec(str(folder))
    first = pack(parts, tmp_path / "to", shard_size=20_000)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "to").iterdir()}
    assert pack(parts, tmp_path / "to", shard_size=20_000) == first
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "to").iterdir()} == before
    with pytest.raises(ValueError, match="holds shards of other pictures or options"):
        pack(parts, tmp_path / "to", shard_size=30_000)
    with pytest.raises(ValueError, match=r"holds set|holds train; choose an empty folder"):
        pack(parts, folder, shard_size=20_000)
    with pytest.raises(ValueError, match="is a file"):
        pack(parts, folder / "train/a/00.jpg", shard_size=20_000)


def test_what_cannot_be_read_is_left_out(folder: Path, tmp_path: Path) -> None:
    (folder / "train/a/bad.jpg").write_bytes(b"\xff\xd8\xffno")
    (folder / "train/b/empty.png").write_bytes(b"")
    parts = open_spec(str(folder))
    done = pack(parts, tmp_path / "to", shard_size=10**6)
    assert sorted(file for file, _ in done.left_out) == ["train/a/bad.jpg", "train/b/empty.png"]
    assert len(open_spec(str(tmp_path / "to"))["train"]) == 40
    done = pack(parts, tmp_path / "fast", shard_size=10**6, verify=False)
    assert [file for file, _ in done.left_out] == ["train/b/empty.png"]  # no JPEG by its head


def test_pictures_in_memory_and_groups(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (9, 8, 8, 3), np.uint8)
    rows = ["path,label,group"]
    for i, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
        rows.append(f"{i}.png,{'ab'[i % 2]},{'' if i == 8 else i // 2}")
    (tmp_path / "set.csv").write_text("\n".join(rows))
    pack({"all": from_arrays(images, list("ababababa"))}, tmp_path / "arrays", shard_size=4000)
    assert sorted(v[1] for v in records(open_spec(str(tmp_path / "arrays"))["all"]).values()) == (
        sorted(image.tobytes() for image in images)
    )
    table = open_spec(str(tmp_path / "set.csv"))
    pack(table, tmp_path / "grouped", shard_size=10**6)
    packed = open_spec(str(tmp_path / "grouped"))["all"]
    assert sorted(packed.groups.tolist()) == sorted(table["all"].groups.tolist())
    train, val = hold_out(packed, 0.3, 0)
    assert not set(train.groups) & set(val.groups)


# Reading ---------------------------------------------------------------------------------------


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    pack(open_spec(str(folder)), tmp_path / "packed", shard_size=20_000)
    return tmp_path / "packed"


def test_training_is_the_same_from_any_number_of_workers_and_from_parts(packed: Path) -> None:
    source = open_spec(str(packed))["train"]
    how = {"batch": 8, "seed": 0, "start": 0, "stop": 6}
    config, preprocess = Augment(crop=(0.3, 1.0)), Preprocess(size=(8, 8))
    one = list(loader.train_batches(source, config, preprocess, **how))
    other = list(loader.train_batches(source, config, preprocess, workers=2, **how))
    assert [b.rows for b in one] == [b.rows for b in other]
    assert all((a.images == b.images).all() for a, b in zip(one, other, strict=True))
    assert all(b.labels.dtype.is_signed and b.labels.element_size() == 8 for b in one)
    part = select(source, np.array([7, 3]), "x")
    assert [part.id(i) for i in range(2)] == [source.id(7), source.id(3)]
    assert (part.load(1) == source.load(3)).all()
    assert list(map(bytes, part.ids)) == [os.fsencode(source.id(i)) for i in (7, 3)]
    sliced = source.ids[2:4]
    assert (len(sliced), bytes(sliced[1])) == (2, os.fsencode(source.id(3)))
    assert source.ids.tobytes() != part.ids.tobytes() != sliced.tobytes()


def test_a_reader_travels_as_paths(packed: Path) -> None:
    source = open_spec(str(packed))["train"]
    sent = pickle.loads(pickle.dumps(source.load))
    assert (sent(5) == source.load(5)).all()
    assert len(pickle.dumps(source.load)) < 4000


def test_a_spec_in_braces_or_a_single_tar(packed: Path) -> None:
    files = sorted(packed.glob("train-*.tar"))
    whole = records(open_spec(str(packed))["train"])
    spec = f"{packed}/train-{{000000..{len(files) - 1:06d}}}.tar"
    parts = open_spec(spec)
    assert list(parts) == ["train"]
    source = parts["train"]
    assert source.classes == ("a", "b", "c")  # by name, of the JSON
    found = {(int(source.labels[i]), source.load(i).tobytes()) for i in range(len(source))}
    assert found == set(whole.values())
    assert len(open_spec(str(files[0]))["train"]) < len(source)
    with pytest.raises(FileNotFoundError, match=r"no file .*train-0000"):
        open_spec(f"{packed}/train-{{000000..000999}}.tar")


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("{x,y}-{0..1}.tar", ["x-0.tar", "x-1.tar", "y-0.tar", "y-1.tar"]),
    ],
)
def test_braces(spec: str, names: list[str]) -> None:
    assert shards.expand(spec) == names


def tar(path: Path, members: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def png(value: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (4, 3), (value, value, value)).save(data, "PNG")
    return data.getvalue()


def test_shards_of_others(tmp_path: Path) -> None:
    """Numbers as labels, folders and long names inside, samples without picture or label."""
    long = "n" * 150
    tar(tmp_path / "s/train-0.tar", {
        "./one.cls": b"3\n", "./one.png": png(1), "./one.txt": b"a caption",
        f"{long}.png": png(2), f"{long}.json": b'{"label": 0}',
        "d/three.input.png": png(3), "d/three.cls": b"1",
        "lonely.png": png(4), "blind.cls": b"2",
    })  # fmt: skip
    tar(tmp_path / "s/val-0.tar", {"x.jpeg": png(7), "x.cls": b"2"}, tarfile.GNU_FORMAT)
    for _ in range(2):  # scanned, then from the cache
        parts = open_spec(str(tmp_path / "s"))
        train, val = parts["train"], parts["val"]
        assert train.classes == val.classes == ("0", "1", "2", "3")
        assert train.labels.tolist() == [3, 0, 1]
        assert [train.load(i)[0, 0, 0] for i in range(3)] == [1, 2, 3]
        assert (val.labels.tolist(), val.load(0)[0, 0, 0]) == ([2], 7)
        assert train.id(0) == "train-0.tar/./one.png"
        assert "ignored 2 samples: train-0.tar//lonely (no label" in train.notes[0]
        assert len([*(tmp_path / "cache/shards").glob("*.npz")]) == 2
    tar(tmp_path / "s/train-0.tar", {"one.cls": b"2", "one.png": png(9)})
    assert open_spec(str(tmp_path / "s"))["train"].labels.tolist() == [2]  # it changed


def test_names_without_a_split_are_one_set(tmp_path: Path) -> None:
    for i in range(2):
        tar(tmp_path / f"part-{i}.tar", {"x.png": png(i), "x.json": b'{"label": "cat"}'})
    parts = open_spec(f"{tmp_path}/part-{{0..1}}.tar")
    assert list(parts) == ["all"]
    assert (len(parts["all"]), parts["all"].classes) == (2, ("cat",))


def test_what_is_no_shard_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "text.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(ValueError, match=r"text.tar is not a readable tar"):
        open_spec(str(tmp_path / "text.tar"))
    path = tar(tmp_path / "bare.tar", {"x.png": png(0)})
    with pytest.raises(ValueError, match=r"no pictures with labels; found bare.tar//x \(no label"):
        open_spec(str(path))


def test_damage_is_told(packed: Path) -> None:
    source = open_spec(str(packed))["train"]
    file = packed / "train-000000.tar"
    data = file.read_bytes()
    file.write_bytes(data[:3000])
    with pytest.raises(ValueError, match="is not as long as its index says"):
        open_spec(str(packed))
    with pytest.raises(Unreadable, match=r"cannot be read|truncated"):
        source.load(int(source.load.starts[1]) - 1)
    file.write_bytes(b"\1" * len(data))
    with pytest.raises(Unreadable, match="cannot be read from"):
        source.load(0)
    assert "picture 0" in source.id(0)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="which its index names"):
        open_spec(str(packed))
    file.write_bytes(data)
    index = json.loads((packed / "index.json").read_text())
    for changed, said in (({"version": 9}, "newer vitlab"), ({"format": "x"}, "not an index")):
        (packed / "index.json").write_text(json.dumps({**index, **changed}))
        with pytest.raises(ValueError, match=said):
            open_spec(str(packed))
    (packed / "index.json").write_text(json.dumps(index))
    (packed / "train.labels.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match="its index is damaged"):
        open_spec(str(packed))


# Shards that anybody may have written ----------------------------------------------------------


def change(index: dict[str, Any], *keys: str | int, to: object) -> None:
    for key in keys[:-1]:
        index = index[key]
    index[keys[-1]] = to


@pytest.mark.parametrize(
    ("keys", "to", "said"),
    [
        (["splits"], {}, "no pictures"),
        (["splits", "val", "columns"], "places", "val has the columns p, l"),
        (["splits", "val", "columns"], ["places"], "val has the columns places"),
        (["splits", "val", "columns"], ["places", "labels", "load"], "has the columns"),
        (["splits", "val", "shards"], [], "val has shards of impossible sizes"),
        (["splits", "val", "shards", 0, "pictures"], -1, "impossible sizes"),
        (["splits", "val", "shards", 0, "pictures"], 10**400, "impossible sizes"),
        (["splits", "val", "shards", 0, "bytes"], "many", "impossible sizes"),
        (["splits", "val", "shards", 0, "pictures"], 7, "places are not those of its shards"),
        (["splits", "val", "sha256"], 5, "its index is damaged"),
        (["splits", "val", "shards", 0, "file"], "n" * 2000, "which its index names"),
        (["splits", "val", "shards", 0, "file"], "\ud800", "index of shards .*surrogates"),
        (["classes"], ["a", "a", "b"], "class names must differ"),
        (["classes"], ["a", "b", "\ud800"], "class names must be UTF-8 text"),
        (["classes"], ["a"], "labels that are none of its classes"),
        (["version"], "new", "not an index of shards"),
    ],
)
def test_an_index_that_cannot_be_is_refused_in_a_line(
    keys: list[str | int], to: object, said: str, packed: Path
) -> None:
    index = json.loads((packed / "index.json").read_text())
    change(index, *keys, to=to)
    (packed / "index.json").write_text(json.dumps(index))
    with pytest.raises((ValueError, FileNotFoundError), match=said) as caught:
        open_spec(str(packed))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["[" * 100_000, "", "\0", '{"format": "vitlab-shards"}', "[]"])
def test_what_is_no_index_is_refused(text: str, packed: Path) -> None:
    (packed / "index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index.json: not an index of shards"):
        open_spec(str(packed))


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("labels", np.full(40, 3, np.int32)), ("labels", np.full(40, -1, np.int32)),
        ("labels", np.zeros(40)), ("labels", np.zeros((40, 1), np.int32)),
        ("places", np.zeros(40, np.uint64)), ("places", np.uint32(0)),
    ],
)  # fmt: skip
def test_columns_of_another_kind_are_refused(name: str, column: Any, packed: Path) -> None:
    np.save(packed / f"train.{name}.npy", column)
    with pytest.raises(ValueError, match=r"its index is damaged \(.*\); pack it again"):
        open_spec(str(packed))


@pytest.mark.parametrize("data", [b"", b"PK\3\4", b"\x93NUMPY\1\0\x0f\0{'descr': ((((("])
def test_columns_that_are_no_array_are_refused(data: bytes, packed: Path) -> None:
    (packed / "train.labels.npy").write_bytes(data)
    with pytest.raises(ValueError, match="its index is damaged"):
        open_spec(str(packed))


def resized(data: bytes, at: int, size: int) -> bytes:
    """A tar whose header at this place says another size; its checksum is right."""
    info = tarfile.TarInfo.frombuf(data[at : at + 512], "utf-8", "surrogateescape")
    info.size = size
    return data[:at] + info.tobuf(tarfile.GNU_FORMAT) + data[at + 512 :]


@pytest.mark.parametrize("size", [-1, -512, 1 << 40])
def test_a_size_that_cannot_be_is_not_read(size: int, packed: Path) -> None:
    source = open_spec(str(packed))["train"]
    file = packed / "train-000000.tar"
    file.write_bytes(resized(file.read_bytes(), 0, size))
    with pytest.raises(Unreadable, match=f"{size:,} bytes long in .*train-000000.tar, not 0 to"):
        source.load(0)
    with pytest.raises(Unreadable, match="bytes long in file"):
        open_spec(f"file://{packed}")["train"].load(0)


@pytest.mark.parametrize("size", [-512, -1024, -1536, -(1 << 62)])
def test_a_tar_that_leads_back_is_refused(size: int, tmp_path: Path) -> None:
    path = tar(tmp_path / "x.tar", {"a.cls": b"1", "a.png": png(0)}, tarfile.GNU_FORMAT)
    path.write_bytes(resized(path.read_bytes(), 1024, size))
    with pytest.raises(ValueError, match=r"x.tar is not a readable tar \(.+\)"):
        open_spec(str(path))


def test_damage_inside_a_tar_is_not_its_end(tmp_path: Path) -> None:
    """tarfile stops at it without a word, and the set would be smaller."""
    path = tar(tmp_path / "x.tar", {f"{i}.{k}": d for i in range(3)
                                    for k, d in (("png", png(i)), ("cls", b"1"))})  # fmt: skip
    data = bytearray(path.read_bytes())
    at = [i for i in range(0, len(data), 512) if data[i + 257 : i + 262] == b"ustar"][2]
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"not a readable tar \(damaged at byte {at:,}\)"):
        open_spec(str(path))
    path.write_bytes(data[:at])  # writers that leave the end mark out
    assert len(open_spec(str(path))["all"]) == 1


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["2", "0"], ("0", "1", "2")), (["99999999999", "7"], ("7", "99999999999")),
        (["007", "1"], ("007", "1")), (["9" * 5000], ("9" * 5000,)),
    ],
)  # fmt: skip
def test_numbers_count_classes_or_name_them(
    labels: list[str], classes: tuple[str, ...], tmp_path: Path
) -> None:
    members = {f"{i}.{kind}": data for i, label in enumerate(labels)
               for kind, data in (("png", png(i)), ("cls", label.encode()))}  # fmt: skip
    source = open_spec(str(tar(tmp_path / "x.tar", members)))["all"]
    assert source.classes == classes
    assert [source.classes[i] for i in source.labels] == labels


@pytest.mark.parametrize("text", ["0", "-1", "many", "5 parsecs", "2048GiB", ""])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="--shard-size"):
        size(text)


def test_sizes() -> None:
    assert [size(t) for t in ("256MB", "1GiB", "1.5 kb", "77")] == [256 * 10**6, 2**30, 1500, 77]


# Large sets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [loader.LARGE + 1, 1_500_007])
def test_the_order_of_a_large_set_is_a_permutation(n: int) -> None:
    rows = loader.rows_at(3, 1, n, np.arange(n))
    assert rows.dtype == np.int64
    assert np.array_equal(np.sort(rows), np.arange(n))
    some = np.array([5, n - 1, 77])
    assert np.array_equal(loader.rows_at(3, 1, n, some), rows[some])  # in parts, too
    others = loader.rows_at(3, 2, n, np.arange(n)), loader.rows_at(4, 1, n, np.arange(n))
    for other in others:
        assert (rows == other).sum() < 20  # one is expected
    assert abs(np.corrcoef(np.arange(n), rows)[0, 1]) < 0.005
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.005
    counts = np.bincount(rows[: n // 10] * 100 // n, minlength=100)  # a tenth lies everywhere
    assert (counts.std() / counts.mean()) < 0.1


def test_a_small_set_keeps_its_order() -> None:
    rows = np.random.default_rng([7, 1, 2]).permutation(50)
    assert np.array_equal(loader.rows_at(7, 2, 50, np.arange(50)), rows)


STEPS = """
import json, resource, sys, time
import numpy as np, torch
from pathlib import Path
from vitlab.data import loader, sources, shards
from vitlab.data.augment import Augment
from vitlab.data.preprocess import Preprocess

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))

small = sources.open_spec(sys.argv[2])["train"]
how = dict(batch=64, seed=0, workers=0)
def run(source, start, stop):
    began = time.process_time()
    for batch in loader.train_batches(source, Augment(), Preprocess(size=(8, 8)),
                                      start=start, stop=stop, **how):
        assert len(batch.rows) == 64 and not batch.skipped
    return (time.process_time() - began) / (stop - start)

run(small, 0, 5)
before = peak()
large = sources.open_spec(sys.argv[1])["train"]
steps = [run(large, 0, 30), run(large, 150_000, 150_030)]
rows = np.random.default_rng(0).integers(0, len(large), 200_000)
assert large.labels[rows].max() < 10  # touch what an epoch would
shards.mapped(large.load.places)[rows].max()
large.ids.tobytes()
print(json.dumps({"peak": peak() - before, "small": run(small, 5, 35), "large": min(steps),
                  "n": len(large)}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is Linux's")
def test_ten_million_pictures_cost_little(tmp_path: Path) -> None:
    """A synthetic index: all places are those of one shard's few pictures."""
    images = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 3), np.uint8)
    pack({"train": from_arrays(images, [str(i % 10) for i in range(64)])}, tmp_path / "few",
         shard_size=10**9)  # fmt: skip
    many = tmp_path / "many"
    many.mkdir()
    data = (tmp_path / "few/train-000000.tar").read_bytes()
    index = json.loads((tmp_path / "few/index.json").read_text())
    n, parts = 10_000_000, 100
    files = [f"train-{i:06d}.tar" for i in range(parts)]
    (many / files[0]).write_bytes(data)
    for file in files[1:]:
        os.link(many / files[0], many / file)
    index["splits"]["train"]["shards"] = [
        {"file": file, "pictures": n // parts, "bytes": len(data)} for file in files
    ]
    (many / "index.json").write_text(json.dumps(index))
    for name in ("places", "labels"):
        column = np.load(tmp_path / f"few/train.{name}.npy")
        np.save(many / f"train.{name}.npy", np.resize(column, n))
    run = subprocess.run(
        [sys.executable, "-c", STEPS, many, tmp_path / "few"], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)

    assert found["n"] == n
    assert found["peak"] < 150  # MiB
    assert found["large"] < 1.5 * found["small"] + 0.01  # seconds of CPU a step


# Others read ours ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_webdataset_reads_packed_shards(folder: Path, packed: Path) -> None:
    wds = pytest.importorskip("webdataset", reason="needs the shards extra")
    files = [str(p) for p in sorted(packed.glob("train-*.tar"))]
    dataset = wds.WebDataset(files, shardshuffle=False).decode("rgb8")
    source = open_spec(str(packed))["train"]
    samples = list(dataset.to_tuple("__key__", "jpg;png", "cls", "json"))
    assert len(samples) == 40
    for i, (key, image, label, record) in enumerate(samples):
        assert key == source.id(i).split("/")[1].split(".")[0]
        assert label == source.labels[i]
        assert record["label"] == source.classes[label]
        if record["id"] != "train/a/00.jpg":  # webdataset does not turn pictures upright
            assert (image == source.load(i)).all()
