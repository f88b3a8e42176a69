"""Shards read from afar: which rows, in which order, by whom, and how often each byte."""

import copy
import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import toys

import vitlab
from vitlab.data import loader, sources, streams
from vitlab.data.augment import Augment
from vitlab.data.packing import pack
from vitlab.data.preprocess import Preprocess

SHARDS = np.cumsum([0, 700, 650, 720, 30, 500, 610, 400])  # rows
N = int(SHARDS[-1])


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """300 toy pictures for training and 20 to validate, in shards of a few dozen."""
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    toys.write_folder(tmp_path / "photos" / "train", 300)
    toys.write_folder(tmp_path / "photos" / "val", 20)
    parts = sources.open_spec(str(tmp_path / "photos"))
    pack(parts, tmp_path / "packed", shard_size=60_000)
    assert len(list((tmp_path / "packed").glob("train-*.tar"))) > 3
    streams._kept.clear()
    return f"file://{tmp_path / 'packed'}"


def stream(batch: int = 64, stop: int = 400, seed: int = 1, start: int = 0) -> list[np.ndarray]:
    return list(streams.keys(SHARDS, batch, seed, start, stop))


def test_each_epoch_has_every_row_once() -> None:
    keys = np.concatenate(stream(stop=200))
    for epoch in range(2):  # the last ones are not over
        rows = keys[keys[:, 0] == epoch, 2]
        assert sorted(rows) == list(range(N))
    positions = keys[keys[:, 0] == 1, 1]
    assert sorted(positions) == list(range(N))


@pytest.mark.parametrize("batch", [64, 8, 30, 1])
def test_a_stream_may_start_anywhere(batch: int) -> None:
    whole = stream(batch, stop=150)
    for start in (1, 77, 149):
        for one, other in zip(whole[start:], stream(batch, 150, start=start), strict=True):
            assert np.array_equal(one, other)


def test_few_rows_are_one_lane() -> None:
    keys = np.concatenate(list(streams.keys(np.array([0, 5]), 4, 0, 0, 10)))
    for epoch in range(8):
        assert sorted(keys[keys[:, 0] == epoch, 2]) == list(range(5))


def test_seeds_and_epochs_shuffle() -> None:
    keys, other = np.concatenate(stream()), np.concatenate(stream(seed=2))
    assert not np.array_equal(keys, other)
    first, second = (keys[keys[:, 0] == epoch][:N] for epoch in (0, 1))
    assert (first[np.argsort(first[:, 1]), 2] != second[np.argsort(second[:, 1]), 2]).mean() > 0.9
    batch = stream(stop=1)[0][:, 2]
    shards = np.searchsorted(SHARDS, batch, side="right") - 1
    assert len(set(shards)) >= 4, "a batch is a mixture of shards"


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_readers_have_rows_of_their_own(world: int, workers: int) -> None:
    """But for the rows of a fetched run that lies across a cut between two lanes."""
    steps = stream(stop=N // 64 // 4 * 4)
    share = 64 // world
    fetched: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for step, keys in enumerate(steps):
        for rank in range(world):
            rows = keys[rank * share : (rank + 1) * share, 2]
            shards = np.searchsorted(SHARDS, rows, side="right") - 1
            runs = (rows - SHARDS[shards]) // streams.RUN
            own = fetched.setdefault((rank, step % workers), set())
            own.update(zip(shards.tolist(), runs.tolist(), strict=True))
    every = [run for runs in fetched.values() for run in runs]
    lanes = streams.PARTS * streams.GROUPS
    assert len(every) - len(set(every)) <= lanes + len(SHARDS)


def test_no_byte_is_fetched_twice(packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    local = fsspec.filesystem("file")
    plain = type(local).cat_file

    def cat_file(self: Any, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        if path.endswith(".tar"):
            asked.append((path, start))
        data: bytes = plain(self, path, start=start, end=end, **more)
        return data

    monkeypatch.setattr(type(local), "cat_file", cat_file)
    source = sources.open_spec(packed)["train"]
    how = {"batch": 32, "seed": 0, "start": 0, "stop": 9}
    seen = [
        row for batch in loader.train_batches(source, Augment(), Preprocess(size=(16, 16)), **how)
        for row in batch.rows
    ]  # fmt: skip
    assert len(set(seen)) == len(seen) == 288
    assert len(asked) == len(set(asked))


def test_pictures_and_labels_are_those_of_the_shards(packed: str) -> None:
    far, near = sources.open_spec(packed), sources.open_spec(packed.removeprefix("file://"))
    assert far.keys() == near.keys() == {"train", "val"}
    for split in far:
        assert far[split].classes == near[split].classes
        assert far[split].labels.tolist() == near[split].labels.tolist()
        for i in range(0, len(far[split]), 7):
            assert far[split].id(i) == near[split].id(i)
            assert np.array_equal(far[split].load(i), near[split].load(i))


def test_training_from_afar(packed: str, tmp_path: Path) -> None:
    config = toys.config(tmp_path / "run", steps=60, batch=16, lr=3e-3, workers=2)
    bundle = vitlab.train(packed, config)
    assert bundle.card.metrics["n"] == 20
    assert bundle.card.metrics["top1"] > 0.5


def test_what_is_not_there_is_named(tmp_path: Path, packed: str) -> None:
    with pytest.raises(ValueError, match=r"no index.json there"):
        sources.open_spec(f"file://{tmp_path}/photos")
    with pytest.raises(ValueError, match="nonsense://"):
        sources.open_spec("nonsense://bucket/set")
    shard = next((tmp_path / "packed").glob("train-*.tar"))
    shard.unlink()
    source = sources.open_spec(packed)["train"]
    how = {"batch": 64, "seed": 0, "start": 0, "stop": 5}
    found = list(loader.train_batches(source, Augment(), Preprocess(size=(16, 16)), **how))
    skipped = [why for batch in found for _, why in batch.skipped]
    assert skipped
    assert all("cannot be read from" in why for why in skipped)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "", ".."])
def test_no_name_of_an_index_leaves_its_folder(packed: str, name: str) -> None:
    path = Path(packed.removeprefix("file://")) / "index.json"
    index = json.loads(path.read_text())
    for place in ("split", "column", "file"):
        bad = copy.deepcopy(index)
        part = bad["splits"]["val"]
        if place == "split":
            bad["splits"][name] = part
        elif place == "column":
            part["columns"] = [*part["columns"], name]
        else:
            part["shards"][0]["file"] = name
        path.write_text(json.dumps(bad))
        for spec in (packed, packed.removeprefix("file://")):
            with pytest.raises(ValueError, match="is no name of a file in it"):
                sources.open_spec(spec)
