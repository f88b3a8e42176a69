"""Batches: order, augmentation, unreadable pictures, workers, memory."""

import gc
import itertools
import os
import random
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile, JpegImagePlugin

from vitlab.data import loader
from vitlab.data.augment import Augment, augment, draw, mix
from vitlab.data.decode import Unreadable
from vitlab.data.loader import (
    Batch,
    Decoded,
    eval_batches,
    fits_memory,
    in_memory,
    keys,
    order,
    train_batches,
)  # fmt: skip
from vitlab.data.preprocess import Preprocess, apply, normalise
from vitlab.data.sources import Source, from_arrays, hold_out, open_spec

DATA = Path(os.environ.get("VITLAB_TEST_DATA", Path(__file__).parents[2] / "../shared")) / "data"
real_data = pytest.mark.skipif(not DATA.is_dir(), reason="no real pictures in the test data")

many_workers = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIZE = Preprocess(size=(8, 8))
ALL = Augment(crop=(0.2, 1.0), flip=True, randaugment=(1, 9), erase=0.5)


@dataclass(frozen=True)
class Pictures:
    """Noise of a row's own, of a row's own size; or a refusal."""

    unreadable: frozenset[int] = frozenset()
    note: Callable[[int], None] | None = None

    def __call__(self, i: int) -> np.ndarray:
        if self.note:
            self.note(i)
        if i in self.unreadable:
            raise (Unreadable("not an image"), OSError("gone"))[i % 2]
        rng = np.random.default_rng(i)
        return rng.integers(0, 256, (8 + i % 5, 8 + i % 3, 3), dtype=np.uint8)


def source(n: int, unreadable: set[int] = frozenset(), **options: Any) -> Source:
    labels = np.arange(n) % 3
    made = from_arrays(range(n), labels, ["a", "b", "c"])
    return replace(made, spec="made", load=Pictures(frozenset(unreadable), **options))


def stream(of: Source, config: Augment = ALL, size: Preprocess = SIZE, **how: Any) -> list[Batch]:
    return list(train_batches(of, config, size, **{"batch": 4, "seed": 0, "start": 0, **how}))


def same(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.images, b.images)
        and torch.equal(a.labels, b.labels)
        and (a.rows, a.skipped) == (b.rows, b.skipped)
        for a, b in zip(one, other, strict=True)
    )


# Order -----------------------------------------------------------------------------------------

seeds = st.integers(0, 2**63 - 1)


@given(seeds, st.integers(0, 1000), st.integers(1, 200))
def test_an_epoch_is_a_permutation_of_its_own(seed: int, epoch: int, n: int) -> None:
    rows = order(seed, epoch, n)
    assert sorted(rows) == list(range(n))
    order.cache_clear()
    assert np.array_equal(order(seed, epoch, n), rows)
    if n > 20:  # 20! orders: no two are equal by chance
        assert not np.array_equal(order(seed, epoch + 1, n), rows)
        assert not np.array_equal(order(seed + 1, epoch, n), rows)
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = 0


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 12), seeds)
def test_the_stream_does_not_depend_on_batch_or_start(n: int, b: int, c: int, seed: int) -> None:
    total = b * c * 5
    one = np.concatenate(list(keys(n, b, seed, 0, total // b)))
    other = np.concatenate(list(keys(n, c, seed, 0, total // c)))
    assert np.array_equal(one, other)
    assert one.shape == (total, 3)
    assert one.dtype == np.int64
    epochs, positions, rows = one.T
    assert np.array_equal(epochs * n + positions, np.arange(total))
    assert all(row == order(seed, epoch, n)[at] for epoch, at, row in one.tolist())
    assert all(sorted(rows[i : i + n]) == list(range(n)) for i in range(0, total - n + 1, n))
    for start in {0, 1, total // b // 2, total // b}:
        tail = list(keys(n, b, seed, start, total // b))
        assert np.array_equal(np.concatenate([*tail, np.empty((0, 3), int)]), one[start * b :])


# Training --------------------------------------------------------------------------------------


def test_a_batch_is_what_its_keys_say() -> None:
    of = source(10)
    for step, batch in enumerate(stream(of, stop=6)):
        key = next(iter(keys(10, 4, 0, step, step + 1)))
        assert batch.rows == key[:, 2].tolist()
        assert batch.labels.tolist() == [row % 3 for row in batch.rows]
        assert batch.images.shape == (4, 3, 8, 8)
        assert batch.images.dtype == torch.uint8
        assert batch.images.is_contiguous()
        assert batch.skipped == []
        assert all(isinstance(row, int) for row in batch.rows)
    plain = stream(of, Augment(flip=False), stop=3)
    for batch in plain:
        for pixels, row in zip(batch.images, batch.rows, strict=True):
            assert torch.equal(normalise(SIZE, pixels), apply(SIZE, of.load(row)))


def test_augmentation_depends_on_seed_epoch_and_position_alone() -> None:  # report 155
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    one = replace(source(1), load=lambda i: picture)
    images = torch.cat([b.images for b in stream(one, Augment(crop=(0.1, 0.3)), stop=10)])
    assert len({x.numpy().tobytes() for x in images}) == 40  # the same picture, 40 epochs
    by_one = torch.cat([b.images for b in stream(one, Augment(crop=(0.1, 0.3)), batch=1, stop=40)])
    assert torch.equal(images, by_one)
    other = torch.cat([b.images for b in stream(one, Augment(crop=(0.1, 0.3)), seed=1, stop=10)])
    assert not torch.equal(images, other)
    # In one epoch each place has its own draws, and they are those of (seed, epoch, position).
    many = replace(source(40), load=lambda i: picture)
    batch = stream(many, Augment(flip=True, crop=(0.1, 0.3)), batch=40, stop=1)[0]
    assert len({x.numpy().tobytes() for x in batch.images}) == 40


@pytest.mark.parametrize("start", [0, 1, 4, 7])
def test_a_resumed_stream_is_the_tail_of_the_whole_one(start: int) -> None:
    of = source(10, {3, 4})
    assert same(stream(of, start=start, stop=8), stream(of, stop=8)[start:])


@many_workers
@pytest.mark.parametrize("config", [ALL, Augment(), Augment(crop=(0.35, 1.0))])
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_do_not_change_a_bit(workers: int, config: Augment) -> None:
    of = source(14, {2, 5, 6})
    random.seed(workers)
    np.random.seed(workers)
    torch.manual_seed(workers)
    alone = stream(of, config, stop=9)
    assert any(batch.skipped for batch in alone)
    assert same(stream(of, config, stop=9, workers=workers), alone)
    scored = list(eval_batches(of, SIZE, batch=4))
    assert same(list(eval_batches(of, SIZE, batch=4, workers=workers)), scored)


def test_the_callers_random_numbers_are_left_alone() -> None:
    states = (random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist())
    stream(source(8), stop=2)
    list(eval_batches(source(8), SIZE, batch=4))
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.random.get_state()[1].tolist() == states[2]


def test_a_split_shares_nothing_and_validation_is_never_augmented() -> None:  # report 027
    train, val = hold_out(source(10), 0.3, 0)
    config = Augment(flip=True, erase=1.0)
    batches = stream(train, config, batch=len(train), stop=1)
    seen = {train.id(row) for batch in batches for row in batch.rows}
    assert len(seen) == len(train) == 7
    assert not seen & {val.id(i) for i in range(len(val))}
    reads = [next(iter(eval_batches(val, SIZE, batch=1))).images for _ in range(10)]
    assert all(torch.equal(read, reads[0]) for read in reads)
    assert torch.equal(reads[0][0], apply(SIZE, val.load(0)))


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_odd_batches_mix(batch: int) -> None:  # report 083
    for step, made in enumerate(stream(source(7), batch=batch, stop=5)):
        images = normalise(SIZE, made.images)
        mixed, targets = mix(images, made.labels, 3, 0.8, 1.0, [0, 3, step])
        assert mixed.shape == (batch, 3, 8, 8)
        assert torch.isfinite(mixed).all()
        assert torch.allclose(targets.sum(1), torch.ones(batch))
        assert batch > 1 or torch.equal(mixed, images)


def test_a_source_smaller_than_a_batch_crosses_epochs() -> None:
    batches = stream(source(3), batch=8, stop=3)
    rows = [row for batch in batches for row in batch.rows]
    assert all(sorted(rows[i : i + 3]) == [0, 1, 2] for i in range(0, 24, 3))


# Unreadable pictures ---------------------------------------------------------------------------


def test_unreadable_pictures_are_listed_and_replaced() -> None:
    batches = stream(source(10, {3, 4, 9}), stop=5)  # two epochs
    skipped = [row for batch in batches for row, _ in batch.skipped]
    assert sorted(skipped) == [3, 3, 4, 4, 4, 4, 9, 9]  # 4 also when 3 is
    assert {(9, "gone"), (4, "not an image")} <= {s for batch in batches for s in batch.skipped}
    for step, batch in enumerate(batches):
        asked = next(iter(keys(10, 4, 0, step, step + 1)))[:, 2].tolist()
        assert batch.rows == [{3: 5, 4: 5, 9: 0}.get(row, row) for row in asked]
        assert batch.labels.tolist() == [row % 3 for row in batch.rows]
        assert len(batch.images) == 4


def test_a_replaced_picture_has_the_draws_of_its_place() -> None:
    of = source(10, {3})
    config = Augment(crop=None)
    for step, batch in enumerate(stream(of, config, stop=3)):
        key = next(iter(keys(10, 4, 0, step, step + 1)))
        expected = augment(config, SIZE, [of.load(r) for r in batch.rows], draw(0, key[:, :2]))
        assert torch.equal(batch.images, expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_strict_names_the_first_unreadable_picture(workers: int) -> None:
    with pytest.raises(Unreadable) as error:
        stream(source(10, {4}), strict=True, stop=5, workers=workers)
    assert str(error.value) == "4: not an image"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("n", [1, 3, 150])
def test_nothing_readable_is_one_line(n: int, workers: int) -> None:
    count = min(n, loader.TRIES)
    with pytest.raises(Unreadable) as error:
        stream(source(n, set(range(n))), stop=1, workers=workers)
    start = f"made: {count} unreadable pictures in a row, the last of them "
    assert str(error.value).startswith(start if n > 1 else "0: ")
    assert str(error.value).endswith((": gone", ": not an image"))
    assert len(str(error.value).splitlines()) == 1


def test_real_files_that_cannot_be_read_are_skipped_with_reasons(tmp_path: Path) -> None:
    """Report 007: half a JPEG, an empty file, a text file, one that is gone."""
    for c, i in itertools.product("ab", range(4)):
        (tmp_path / c).mkdir(exist_ok=True)
        image = Image.effect_noise((40, 40), 50).convert("RGB")
        image.save(tmp_path / c / f"{i}.jpg")
    whole = (tmp_path / "a" / "0.jpg").read_bytes()
    (tmp_path / "a" / "half.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "a" / "zero.jpg").write_bytes(b"")
    (tmp_path / "b" / "text.png").write_text("no picture")
    (tmp_path / "b" / "gone.png").write_text("soon")
    of = open_spec(str(tmp_path))["all"]
    (tmp_path / "b" / "gone.png").unlink()
    expected = {
        "a/half.jpg": "truncated file", "a/zero.jpg": "empty file", "b/text.png": "not an image",
        "b/gone.png": "no such file or directory",
    }  # fmt: skip
    for batches in (eval_batches(of, SIZE, batch=5), stream(of, batch=12, stop=2)):
        skipped = {of.id(row): why for batch in batches for row, why in batch.skipped}
        assert skipped == expected
    held = in_memory(of, 2)
    assert {of.id(i): x for i, x in enumerate(held.load.images) if isinstance(x, str)} == expected
    assert same(stream(held, Augment(), batch=12, stop=2), stream(of, Augment(), batch=12, stop=2))


# Evaluation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 10, 64])
def test_evaluation_sees_each_picture_once_and_in_order(batch: int) -> None:  # report 148
    batches = list(eval_batches(source(10), SIZE, batch=batch))
    assert [row for b in batches for row in b.rows] == list(range(10))
    assert [len(b.rows) for b in batches] == [len(b.images) for b in batches]
    assert torch.cat([b.labels for b in batches]).tolist() == [i % 3 for i in range(10)]
    images = torch.cat([b.images for b in batches])
    assert images.dtype == torch.float32
    assert torch.equal(images, torch.stack([apply(SIZE, source(10).load(i)) for i in range(10)]))


def test_evaluation_leaves_unreadable_pictures_out_and_lists_them() -> None:
    batches = list(eval_batches(source(7, {0, 1, 2, 5}), SIZE, batch=3))
    assert [b.rows for b in batches] == [[], [3, 4], [6]]
    assert [len(b.images) for b in batches] == [0, 2, 1]
    assert batches[0].images.shape == (0, 3, 8, 8)
    assert batches[0].labels.dtype == torch.int64
    assert [row for b in batches for row, _ in b.skipped] == [0, 1, 2, 5]


@real_data
def test_real_pictures_are_the_same_from_memory_and_with_workers() -> None:
    whole = open_spec(str(DATA / "imagenette-128.zip"))["val"]
    of = hold_out(whole, 0.01, 0)[1]
    preprocess = Preprocess(size=(64, 64), crop=0.875, mean=(0.485, 0.456, 0.406))
    held = in_memory(of, 2)
    for config in (Augment(crop=(0.35, 1.0)), Augment()):
        batches = stream(of, config, preprocess, batch=16, stop=3)
        assert same(batches, stream(held, config, preprocess, batch=16, stop=3))
        assert same(batches, stream(of, config, preprocess, batch=16, stop=3, workers=2))
    one, two = eval_batches(of, preprocess, batch=7), eval_batches(held, preprocess, batch=40)
    assert torch.equal(*(torch.cat([b.images for b in batches]) for batches in (one, two)))


# Crops of JPEGs --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> Source:
    root = tmp_path_factory.mktemp("jpegs")
    for i in range(6):
        (root / "ab"[i % 2]).mkdir(exist_ok=True)
        rough = np.random.default_rng(i).integers(0, 256, (6, 8, 3), dtype=np.uint8)
        smooth = Image.fromarray(rough).resize((400, 300), Image.Resampling.BICUBIC)
        smooth.save(root / "ab"[i % 2] / f"{i}.jpg", quality=95)
    return open_spec(str(root))["all"]


def test_training_crops_of_large_jpegs_are_decoded_small(
    jpegs: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, preprocess = Augment(crop=(0.35, 1.0)), Preprocess(size=(32, 32))
    sizes: list[tuple[int, int]] = []
    load = ImageFile.ImageFile.load

    def note(image: ImageFile.ImageFile) -> Any:
        sizes.append(image.size)
        return load(image)

    whole = stream(in_memory(jpegs, 1), config, preprocess, stop=6)
    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "load", note)
    small = stream(jpegs, config, preprocess, stop=6)
    assert {(200, 150), (100, 75)} & set(sizes)
    assert (400, 300) not in sizes
    for one, other in zip(whole, small, strict=True):
        assert one.rows == other.rows
        difference = (one.images.float() - other.images.float()).abs()
        assert difference.mean() < 3  # the same boxes of the same pictures, mirrored alike
        assert difference.max() > 0
    sizes.clear()
    list(eval_batches(jpegs, preprocess, batch=4))
    stream(jpegs, Augment(), preprocess, stop=2)
    assert set(sizes) == {(400, 300)}  # only random crops are


def test_evaluation_of_jpegs_is_the_same_from_memory_and_zip(jpegs: Source, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for i in range(len(jpegs)):
            archive.write(jpegs.load.file(i), jpegs.id(i))
    packed = open_spec(str(tmp_path / "a.zip"))["all"]
    one, two, three = (
        list(eval_batches(of, SIZE, batch=4)) for of in (jpegs, in_memory(jpegs, 2), packed)
    )
    assert same(one, two)
    assert same(one, three)
    config = Augment(crop=(0.35, 1.0))
    assert same(stream(jpegs, config, stop=3), stream(packed, config, stop=3))
    assert same(stream(jpegs, config, stop=3), stream(jpegs, config, stop=3, workers=2))


# Memory ----------------------------------------------------------------------------------------


def test_pictures_in_memory_behave_as_before() -> None:
    of = source(12, {2, 3, 7})
    held = in_memory(of, 3)
    assert isinstance(held.load, Decoded)
    assert held.load.images[2] == "not an image"
    assert same(stream(held, stop=8), stream(of, stop=8))
    one, two = (list(eval_batches(s, SIZE, batch=5)) for s in (held, of))
    assert same(one, two)
    before = [image.copy() for image in held.load.images if not isinstance(image, str)]
    stream(held, Augment(flip=True, erase=1.0), stop=8)
    after = [image for image in held.load.images if not isinstance(image, str)]
    assert all(map(np.array_equal, before, after))  # no batch writes into the source


def test_what_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    of = from_arrays(np.zeros((100, 10, 10), np.uint8), [0] * 100)  # 30,000 bytes as RGB
    assert fits_memory(of)
    monkeypatch.setattr(loader, "MEMORY", 40_000)
    assert fits_memory(of)
    assert not fits_memory(of, of)  # training and validation share it
    monkeypatch.setattr(loader, "MEMORY", 30_000)
    assert not fits_memory(of)
    assert fits_memory(source(5, set(range(5))))


@dataclass(frozen=True)
class Million:
    """Reads only the path; each worker notes its private memory now and then."""

    paths: Any
    folder: Path

    def __call__(self, i: int) -> np.ndarray:
        assert os.fsdecode(bytes(self.paths[i])).startswith("folder/class/")
        if i % 9_973 == 0:
            with open("/proc/self/smaps_rollup") as file:
                fields = dict(line.split(":") for line in file if "Private" in line)
            private = sum(int(value.split()[0]) for value in fields.values())
            with open(self.folder / str(os.getpid()), "a") as file:
                file.write(f"{private}\n")
        return np.zeros((1, 1, 3), np.uint8)


@many_workers
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="no smaps_rollup here")
def test_a_million_paths_cost_workers_no_memory(tmp_path: Path) -> None:  # report 103
    n = 1_000_000
    ids = np.char.add(b"folder/class/", np.arange(n).astype("S"))
    of = replace(source(1), labels=np.zeros(n, np.int64), ids=ids, load=Million(ids, tmp_path))
    seen = 0
    for batch in eval_batches(of, Preprocess(size=(1, 1)), batch=10_000, workers=4):
        seen += len(batch.rows)
    assert seen == n
    grown = []
    for file in tmp_path.iterdir():
        kilobytes = [int(line) for line in file.read_text().split()]
        grown.append(max(kilobytes) - kilobytes[0])
    assert len(grown) == 4
    assert max(grown) < 15_000  # kilobytes; a list of names costs 23,000 here


# Processes -------------------------------------------------------------------------------------


def test_workers_live_as_long_as_the_stream(tmp_path: Path) -> None:  # report 107
    def note(_: int) -> None:
        (tmp_path / str(os.getpid())).touch()

    of = source(8, note=note)
    batches = train_batches(of, ALL, SIZE, batch=4, seed=0, start=0, stop=6, workers=2)
    assert len(list(batches)) == 6  # three epochs
    pids = {int(file.name) for file in tmp_path.iterdir()}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_a_stream_that_is_dropped_ends_its_workers(tmp_path: Path) -> None:
    def note(_: int) -> None:
        (tmp_path / str(os.getpid())).touch()

    of = source(8, note=note)
    batches = train_batches(of, ALL, SIZE, batch=4, seed=0, start=0, stop=10**9, workers=2)
    next(batches)
    pids = [int(file.name) for file in tmp_path.iterdir()]
    batches.close()
    gc.collect()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.skipif(not hasattr(os, "setsid"), reason="no process groups here")
def test_signals_to_the_process_group_leave_workers_working() -> None:
    """Ctrl-C, `timeout` and job managers signal the whole group; the run still saves and ends."""
    script = """
        import os, signal
        import numpy as np
        from vitlab.data.augment import Augment
        from vitlab.data.loader import train_batches
        from vitlab.data.preprocess import Preprocess
        from vitlab.data.sources import from_arrays

        received = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: received.append(number))
        source = from_arrays(np.zeros((8, 4, 4), np.uint8), [0] * 8)
        batches = train_batches(
            source, Augment(), Preprocess(size=(4, 4)), batch=2, seed=0, start=0, stop=60, workers=2
        )
        next(batches), next(batches)  # one of each worker
        os.killpg(0, signal.SIGINT)
        os.killpg(0, signal.SIGTERM)
        print(len(list(batches)), len(received))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True,
        start_new_session=True, timeout=100, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("58 2\n", "", 0)


def test_batches_can_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    batch = stream(source(4, {1}), stop=1)[0]
    pinned = torch.utils.data._utils.pin_memory.pin_memory(batch)  # as DataLoader does
    assert isinstance(pinned, Batch)
    assert pinned.images is not batch.images
    assert same([pinned], [batch])
