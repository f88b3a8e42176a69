"""Shards read from afar: which rows, in which order, by whom, and how often each byte."""

import copy
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import toys
from fsspec.implementations.local import LocalFileSystem

import vitlab
from vitlab import cli
from vitlab.data import doctor, loader, sources, streams
from vitlab.data.augment import Augment
from vitlab.data.decode import Away, Unreadable
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


# Bad days ----------------------------------------------------------------------------------------


class Flaky(LocalFileSystem):
    """A store whose next answers are errors, or other bytes than those asked for."""

    answers: ClassVar[list[Any]] = []

    def cat_file(self, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        data: bytes = super().cat_file(path.removeprefix("flaky://"), start, end, **more)
        return answer(data) if answer else data


class ClientError(Exception):
    """As aiohttp's and botocore's, which are no OSError."""


@pytest.fixture
def flaky(packed: str, monkeypatch: pytest.MonkeyPatch) -> str:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(streams, "RUN", 8)
    monkeypatch.setattr(streams, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(Flaky, "answers", [])
    return packed.replace("file://", "flaky://")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ClientError("500,\nmessage='Internal Server Error'"), "500, message='Internal"),
        (TimeoutError(), "(TimeoutError)"),
        (OSError(5, "Input/output error"), "Input/output error"),
        (KeyError("no such bucket"), "no such bucket"),
    ],
)
def test_whatever_a_store_raises_is_one_line(error: Exception, said: str, flaky: str) -> None:
    Flaky.answers[:] = [error] * 3
    with pytest.raises(Away) as caught:
        sources.open_spec(flaky)
    line = str(caught.value)
    assert line.startswith(f"{flaky}/index.json: cannot be read (")
    assert said in line
    assert line.endswith("asked 3 times; check address, network and access")
    assert "\n" not in line
    assert not Flaky.answers


def test_what_does_not_come_is_asked_for_again(
    flaky: str, caplog: pytest.LogCaptureFixture
) -> None:
    far = sources.open_spec(flaky)["train"]
    near = sources.open_spec(flaky.removeprefix("flaky://"))["train"]
    Flaky.answers[:] = [ClientError("reset"), lambda data: data[:-1]]
    assert np.array_equal(far.load(0), near.load(0))
    assert not Flaky.answers
    assert [r.getMessage().partition("; asked again")[1] for r in caplog.records] == [
        "; asked again"
    ] * 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda data: data[:1000], "1,000 bytes came, not "),
        (lambda data: data * 2, "can its server send parts of files"),
    ],
)
def test_other_bytes_than_asked_for_are_no_picture(answer: Any, said: str, flaky: str) -> None:
    source = sources.open_spec(flaky)["train"]
    Flaky.answers[:] = [answer] * 3
    with pytest.raises(Away, match=said):
        source.load(0)
    last = len(source) - 1  # of a run that ends with its shard
    Flaky.answers[:] = [answer] * 3
    with pytest.raises(Away, match=said):
        source.load(last)
    assert source.id(0).endswith(".png")


@pytest.mark.parametrize("workers", [0, 1])
def test_no_picture_is_skipped_because_a_store_is_gone(
    workers: int, flaky: str, tmp_path: Path
) -> None:
    source = sources.open_spec(flaky)["train"]
    size = Preprocess(size=(16, 16))
    how = {"batch": 8, "seed": 0, "start": 0, "stop": 2}
    for use in (
        lambda: list(loader.train_batches(source, Augment(), size, workers=workers, **how)),
        lambda: list(loader.eval_batches(source, size, batch=8, workers=workers)),
        lambda: doctor.check({"train": source}),
        lambda: pack({"train": source}, tmp_path / "to", shard_size=10**6),
    ):
        Flaky.answers[:] = [ClientError("no route to host")] * 3
        streams._kept.clear()
        with pytest.raises(Away, match="no route to host"):
            use()


@pytest.mark.usefixtures("shared_process")
def test_a_command_ends_in_a_line(flaky: str, capsys: pytest.CaptureFixture[str]) -> None:
    Flaky.answers[:] = [ClientError("403, Forbidden")] * 3
    assert cli.main(["data", "check", flaky]) == 1
    *told, last = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert last.startswith(f"vitlab: {flaky}/index.json: cannot be read (403, Forbidden), asked 3")


def test_a_package_that_is_missing_is_named() -> None:
    fsspec.register_implementation("faraway", "no_such_package.System", errtxt="Install it")
    with pytest.raises(ValueError, match=r"^faraway://: Install it: pip install no_such_package$"):
        sources.open_spec("faraway://bucket/set")


def test_a_damaged_copy_of_an_index_is_fetched_anew(packed: str, tmp_path: Path) -> None:
    count = len(sources.open_spec(packed)["train"])
    (copy_of,) = (tmp_path / "cache/streams").glob("*/train.labels.npy")
    copy_of.write_bytes(copy_of.read_bytes()[:-4])
    with pytest.raises(ValueError, match="its index is damaged"):
        sources.open_spec(packed)
    assert len(sources.open_spec(packed)["train"]) == count
    assert len([*(tmp_path / "cache/streams").iterdir()]) == 1


def test_a_run_that_no_memory_holds_is_not_fetched(
    packed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sources.open_spec(packed)["train"]
    monkeypatch.setattr(streams, "MOST", 1000)
    with pytest.raises(Unreadable, match=r"bytes of file.*tar; 1,000 can be kept"):
        source.load(0)


# A web server ------------------------------------------------------------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    """Files of a folder and parts of them, as asked for; the next answers may be faults."""

    protocol_version = "HTTP/1.1"
    root = Path()
    faults: ClassVar[list[str]] = []
    over = threading.Event()

    def do_GET(self) -> None:
        fault = self.faults.pop(0) if self.faults else ""
        file = self.root / self.path.lstrip("/")
        if fault == "silent":
            self.over.wait(10)
        if fault.isdecimal() or not file.is_file():
            self.send_error(int(fault or 404))
            return
        data, part = file.read_bytes(), self.headers.get("Range")
        if part and fault != "whole":
            first, last = map(int, part.removeprefix("bytes=").split("-"))
            data = data[first : last + 1]
        self.send_response(206 if part else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)
        self.close_connection = fault in ("cut", "silent")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def served(packed: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("aiohttp", reason="fsspec reads http:// by aiohttp")
    monkeypatch.setattr(streams, "RUN", 8)
    monkeypatch.setattr(streams, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(streams, "TIMEOUT", 0.5)
    monkeypatch.setattr(Handler, "root", Path(packed.removeprefix("file://")))
    monkeypatch.setattr(Handler, "faults", [])
    monkeypatch.setattr(Handler, "over", threading.Event())
    streams._system.cache_clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        Handler.over.set()
        streams._system.cache_clear()
        server.shutdown()
        thread.join()


def test_shards_of_a_web_server(served: str, packed: str) -> None:
    far, near = sources.open_spec(served)["train"], sources.open_spec(packed)["train"]
    for i in range(len(near)):
        assert np.array_equal(far.load(i), near.load(i))
    with pytest.raises(ValueError, match=r"/nowhere: no index.json there"):
        sources.open_spec(f"{served}/nowhere")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("500", "500, message="), ("403", "403, message="), ("cut", "cannot be read"),
        ("silent", "imeout"), ("whole", "HTTP Range"),
    ],
)  # fmt: skip
def test_faults_of_a_web_server(fault: str, said: str, served: str) -> None:
    source = sources.open_spec(served)["train"]
    Handler.faults[:] = [fault] * 2
    assert source.load(0).shape == (16, 16, 3)  # asked for again
    streams._kept.clear()
    Handler.faults[:] = [fault] * 3
    with pytest.raises(Away, match=said) as caught:
        source.load(0)
    assert f"{served}/train-000000.tar: cannot be read (" in str(caught.value)
    Handler.faults[:] = ["404"]
    with pytest.raises(Unreadable, match="no such file"):
        source.load(0)


def test_a_server_that_is_not_there(served: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Away, match=rf"http://127.0.0.1:{port}/index.json: cannot be read"):
        sources.open_spec(f"http://127.0.0.1:{port}")
