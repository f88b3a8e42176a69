"""Sets by name: the sample, Fashion-MNIST, torchvision's and the hub's, without a network."""

import io
import pickle
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torchvision
from PIL import Image

from vitlab.data import named, sources
from vitlab.data.decode import Unreadable


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_the_sample() -> None:
    parts = sources.open_spec("sample")
    assert {split: len(part) for split, part in parts.items()} == {"train": 10_000, "test": 2_000}
    train = parts["train"]
    assert (train.spec, train.split, train.classes) == ("sample", "train", named.FASHION)
    image, label = train[0]
    assert image.shape == (28, 28, 3)
    assert image.dtype == np.uint8
    assert (image[:, :, 0] == image[:, :, 1]).all()
    assert image.max() > 200
    assert set(train.labels) == set(range(10))
    assert label == train.labels[0]
    assert train.id(9_999) == "9999"


def test_fashion_mnist_is_read_from_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named, "SYSTEM", named.SAMPLE)  # the same form
    assert sources.open_spec("fashion-mnist")["test"].spec == "fashion-mnist"
    monkeypatch.setattr(named, "SYSTEM", tmp_path / "none")
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path))
    with pytest.raises(OSError) as error:
        sources.open_spec("fashion-mnist")
    message = str(error.value)
    assert message.startswith("fashion-mnist: could not be downloaded (")
    assert message.endswith(
        f"put torchvision's files for FashionMNIST into {tmp_path}/data/fashion-mnist"
    )
    assert len(message.splitlines()) == 1
    assert socket.getdefaulttimeout() is None


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("VITLAB_CACHE", raising=False)
    assert named.cache_folder() == Path("/h/.cache/vitlab")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert named.cache_folder() == Path("/x/vitlab")
    monkeypatch.setenv("VITLAB_CACHE", "/v")
    assert named.cache_folder() == Path("/v")


# torchvision -----------------------------------------------------------------------------------


def test_every_torchvision_set_exists() -> None:
    for kind, arguments in named.TORCHVISION.values():
        assert callable(getattr(torchvision.datasets, kind))
        assert arguments.keys() <= {"train", "val", "test", "all"}


def with_set(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]
) -> dict[str, sources.Source]:
    monkeypatch.setattr(torchvision.datasets, "SVHN", make)
    return sources.open_spec("svhn")


class Items(list[tuple[Image.Image, int]]):
    """A set as torchvision makes them."""


def items(truth: list[int], **attributes: Any) -> Items:
    made = Items((Image.new("RGB", (3, 2), (i, 0, 0)), label) for i, label in enumerate(truth))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("where", ["targets", "labels", "_labels", "y", "_samples", "pictures"])
def test_torchvision_labels_are_found(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    labels = [2, 0, 1]
    kept: Any = [("file", label) for label in labels] if where == "_samples" else np.array(labels)

    def make(root: str, *, download: bool, split: str) -> Items:
        assert download
        assert root.endswith("svhn")
        return items(labels, **({} if where == "pictures" else {where: kept}))

    source = with_set(monkeypatch, make)["train"]
    assert (source.labels.tolist(), source.classes) == (labels, ("0", "1", "2"))
    assert source.load(1).tolist() == [[[1, 0, 0]] * 3] * 2


def test_torchvision_class_names_and_numbers_are_those_of_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A test part that lacks the last class must not number by itself."""
    names = {"a": ["x", "y", "z"], "b": None}
    for given in names.values():

        def make(root: str, *, download: bool, split: str, given: Any = given) -> Items:
            labels = [0, 1, 2] if split == "train" else [1]
            return items(labels, targets=labels, **({"classes": given} if given else {}))

        parts = with_set(monkeypatch, make)
        assert parts["test"].classes == parts["train"].classes == tuple(given or "012")
        assert parts["test"].labels.tolist() == [1]


# The hub ---------------------------------------------------------------------------------------


def table(columns: dict[str, Any], **features: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def hub_pictures(*values: int) -> list[Image.Image]:
    return [Image.new("RGB", (4, 4), (v, 0, 0)) for v in values]


def cifar(fine: Any, coarse: Any) -> dict[str, datasets.Dataset]:
    columns = {"img": hub_pictures(1, 2, 3), "fine_label": [2, 0, 1], "coarse_label": [0, 1, 1]}
    return {"train": table(columns, img=datasets.Image(), fine_label=fine, coarse_label=coarse)}


@pytest.mark.parametrize(
    "kinds",
    [
        (datasets.Value("int64"), datasets.Value("int64")),
        (datasets.ClassLabel(names=list("xyz")), datasets.ClassLabel(names=list("pq"))),
    ],
)
def test_label_columns_are_never_guessed(kinds: tuple[Any, Any]) -> None:  # report 029
    with pytest.raises(ValueError) as error:
        named.from_tables("hf:x/y", cifar(*kinds))
    message = str(error.value)
    assert message.startswith("hf:x/y: which column is the label? add ?label=NAME; found img (")
    assert "fine_label (int64)" in message
    assert "coarse_label (int64)" in message
    assert len(message.splitlines()) == 1


def test_named_columns_are_taken() -> None:  # report 029
    kinds = datasets.ClassLabel(names=list("xyz")), datasets.ClassLabel(names=list("pq"))
    fine = named.from_tables("hf:x/y", cifar(*kinds), label="fine_label")["train"]
    assert (fine.classes, fine.labels.tolist()) == (("x", "y", "z"), [2, 0, 1])
    assert [fine.load(i)[0, 0, 0] for i in range(3)] == [1, 2, 3]
    coarse = named.from_tables("hf:x/y", cifar(*kinds), label="coarse_label", image="img")["train"]
    assert (coarse.classes, coarse.labels.tolist()) == (("p", "q"), [0, 1, 1])


@pytest.mark.parametrize("options", [{"label": "img"}, {"label": "no"}, {"image": "fine_label"}])
def test_named_columns_must_be_of_the_kind(options: dict[str, str]) -> None:
    kinds = datasets.ClassLabel(names=list("xyz")), datasets.Value("int64")
    with pytest.raises(ValueError, match=r"which column is the (image|label)\?"):
        named.from_tables("hf:x/y", cifar(*kinds), **options)


def test_one_image_and_one_class_column_need_no_names() -> None:
    kinds = datasets.ClassLabel(names=list("xyz")), datasets.Value("int64")
    assert named.from_tables("hf:x/y", cifar(*kinds))["train"].classes == ("x", "y", "z")


def test_plain_labels_are_numbered_by_train_alone() -> None:
    """Report 019, for the hub: each split once numbered its own labels."""

    def part(*labels: Any) -> datasets.Dataset:
        kind = datasets.Value("string" if isinstance(labels[0], str) else "int64")
        columns = {"image": hub_pictures(*range(len(labels))), "label": list(labels)}
        return table(columns, image=datasets.Image(), label=kind)

    parts = named.from_tables(
        "hf:x", {"train": part("b", "c", "a"), "validation": part("c")}, label="label"
    )
    assert (parts["val"].classes, parts["val"].labels.tolist()) == (("a", "b", "c"), [2])
    parts = named.from_tables("hf:x", {"test": part(2), "train": part(10, 2, 0)}, label="label")
    assert parts["train"].classes == ("0", "2", "10")  # numbers in their order
    assert parts["test"].labels.tolist() == [1]
    with pytest.raises(ValueError, match="val has classes that train has not: d"):
        named.from_tables("hf:x", {"train": part("a"), "validation": part("d")}, label="label")


def test_splits_without_labels_are_left_out_and_noted() -> None:
    kind = datasets.ClassLabel(names=["a", "b"])

    def part(*labels: int) -> datasets.Dataset:
        columns = {"image": hub_pictures(*range(len(labels))), "label": list(labels)}
        return table(columns, image=datasets.Image(), label=kind)

    parts = named.from_tables("hf:x", {"train": part(0, 1), "test": part(-1, -1)})
    assert list(parts) == ["train"]
    assert parts["train"].notes == ("hf:x: ignored test, which has no labels",)
    with pytest.raises(ValueError, match="no labelled pictures"):
        named.from_tables("hf:x", {"test": part(-1)})


def test_hub_pictures_go_through_our_decoder() -> None:
    gray = np.array([[0, 128, 255, 256], [1000, 20000, 40000, 65535]], np.uint16)
    file = io.BytesIO()
    Image.fromarray(gray).save(file, "PNG")
    columns = {
        "image": [{"bytes": file.getvalue(), "path": None}, {"bytes": b"rubbish", "path": "x.png"}],
        "label": [0, 0], "other": hub_pictures(1, 2),
    }  # fmt: skip
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a"])}
    hub = {"train": table(columns, **kinds, other=datasets.Image())}
    source = named.from_tables("hf:x", hub, image="image")["train"]
    assert source.load(0)[:, :, 0].tolist() == [[0, 0, 1, 1], [4, 78, 156, 255]]  # report 001
    with pytest.raises(Unreadable, match="not an image"):
        source.load(1)


def test_opening_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []
    kinds = datasets.ClassLabel(names=list("xyz")), datasets.ClassLabel(names=list("pq"))

    def load(name: str, config: str | None) -> dict[str, datasets.Dataset]:
        asked.append((name, config))
        return cifar(*kinds)

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = sources.open_spec("hf:org/cifar?label=coarse_label&config=small")["train"]
    assert (source.classes, source.spec[:6]) == (("p", "q"), "hf:org")
    assert asked == [("org/cifar", "small")]
    with pytest.raises(ValueError, match="unknown option colour; use image, label or config"):
        sources.open_spec("hf:org/cifar?colour=x")


@pytest.mark.parametrize("error", [ValueError("two\nlines"), OSError("gone"), KeyError("x")])
def test_a_hub_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load(name: str, config: str | None) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(OSError) as raised:
        sources.open_spec("hf:org/name")
    message = str(raised.value)
    assert message.startswith("hf:org/name: could not be downloaded (")
    assert message.endswith("); check the name, or use a copy on disk")
    assert len(message.splitlines()) == 1


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the hub extra: pip install 'vitlab\[hub\]'"):
        sources.open_spec("hf:org/name")


def test_readers_travel_to_other_processes() -> None:
    kinds = datasets.ClassLabel(names=list("xyz")), datasets.Value("int64")
    source = named.from_tables("hf:x/y", cifar(*kinds))["train"]
    assert np.array_equal(pickle.loads(pickle.dumps(source)).load(0), source.load(0))
