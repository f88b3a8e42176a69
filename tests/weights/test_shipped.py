"""The models inside the package, and WordNet ids in the words of ImageNet."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toys
from safetensors.torch import load_file, save_file

import vitlab
from vitlab.data import sources
from vitlab.models import zoo
from vitlab.weights import bundle as bundles
from vitlab.weights import labels, shipped

DATA = Path(os.environ.get("VITLAB_TEST_DATA", Path(__file__).parents[2] / "../shared"))
TINY = DATA / "data" / "tiny-imagenet-64.zip"
stands = pytest.mark.skipif("vit-nano8" not in shipped.names(), reason="no weights yet")
BUNDLES_OWN = dict.fromkeys(("model", *toys.SHAPE))  # what --from says of a model


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> vitlab.Bundle:
    """A model that ships as `vit-toy`, in half precision, and a working folder without it."""
    bundle = toys.bundle()
    folder = tmp_path / "assets" / "vit-toy"
    vitlab.save(bundle, folder)
    file = folder / "model.safetensors"
    save_file({k: v.half() for k, v in load_file(file).items()}, file)
    monkeypatch.setattr(shipped, "FOLDER", folder.parent)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return bundle


def test_a_model_that_ships_is_loaded_by_its_name(inside: vitlab.Bundle) -> None:
    assert shipped.names() == ("vit-toy",)
    loaded = vitlab.load("vit-toy")
    assert loaded.card.source["name"] == "vit-toy"
    for name, tensor in loaded.model.state_dict().items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, inside.model.state_dict()[name].half().float())


def test_what_lies_in_the_folder_comes_first(inside: vitlab.Bundle) -> None:
    other = toys.bundle(classes=7)
    vitlab.save(other, "vit-toy")
    assert len(vitlab.load("vit-toy").classes) == 7
    shutil.rmtree("vit-toy")
    assert len(vitlab.load("vit-toy").classes) == 4


def test_training_goes_on_from_it(inside: vitlab.Bundle) -> None:
    config = toys.config(Path("run"), **BUNDLES_OWN, from_="vit-toy", steps=2)
    bundle = vitlab.train(toys.pictures(), config)
    assert bundle.card.source["name"] == "vit-toy"
    assert bundle.card.source["sha256"] == bundles.sha256(
        shipped.FOLDER / "vit-toy" / "model.safetensors"
    )


@stands
def test_the_model_inside_is_small() -> None:
    folder = shipped.FOLDER / "vit-nano8"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8e6
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {torch.float16}
    bundle = vitlab.load("vit-nano8")
    assert replace(bundle.model.config, image=(64, 64)) == zoo.MODELS["vit-nano8"]
    assert set(bundle.classes) < set(labels.imagenet(1000))


@stands
def test_the_model_inside_is_as_good_as_its_card() -> None:
    if not TINY.exists():
        pytest.skip(f"no {TINY} (VITLAB_TEST_DATA names its folder)")
    bundle, whole = vitlab.load("vit-nano8"), sources.open_spec(str(TINY))["val"]
    found = vitlab.evaluate(bundle, sources.select(whole, np.arange(0, len(whole), 5), "a fifth"))
    told = bundle.card.metrics["top1"]
    assert found.top1_interval[0] < told < found.top1_interval[1]
    assert f"{told:.2%}" in (shipped.FOLDER / "vit-nano8" / "README.md").read_text()


@pytest.mark.parametrize("count", sorted(labels.SETS))
def test_wordnet_ids_are_translated(count: int) -> None:
    ids = tuple(synset for synset, _ in labels.synsets(count))
    assert labels.translate(ids, labels.imagenet(count)) == labels.imagenet(count)


def test_what_is_no_wordnet_id_stays() -> None:
    known = ("goldfish", "tench")
    assert labels.translate(("n01443537", "tench", "cat"), known) == ("goldfish", "tench", "cat")
    assert labels.translate(("n01443537",), ("goldfish", "cat of mine")) == ("n01443537",)
    assert labels.translate(("n01443537",), ("n01443537", "x")) == ("n01443537",)


def fish(root: Path) -> Path:
    """Folders as ImageNet has them; the order of the ids is not that of the names."""
    toys.write_folder(root, classes=2)
    for old, new in zip(sorted(root.iterdir()), ("n01443537", "n01440764"), strict=True):
        old.rename(root / new)
    return root


def test_folders_of_wordnet_ids_fit_models_that_know_the_words(tmp_path: Path) -> None:
    folder = fish(tmp_path / "photos")
    trained = vitlab.train(str(folder), toys.config(tmp_path / "ids", steps=60))
    words = vitlab.Bundle(
        model=trained.model,
        preprocess=trained.preprocess,
        classes=labels.translate(trained.classes, labels.imagenet(1000)),
    )
    assert words.classes == ("tench", "goldfish")
    scores = [vitlab.evaluate(bundle, str(folder)) for bundle in (trained, words)]
    assert scores[0].top1 == scores[1].top1 > 0.8
    vitlab.save(words, tmp_path / "words")
    again = toys.config(
        tmp_path / "again", **BUNDLES_OWN, from_=str(tmp_path / "words"), steps=1, lr=1e-30
    )
    kept = vitlab.train(str(folder), again)
    assert kept.classes == words.classes, "the head is kept"
    for name, tensor in kept.model.state_dict().items():
        torch.testing.assert_close(tensor, words.model.state_dict()[name])
