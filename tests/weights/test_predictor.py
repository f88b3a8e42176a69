"""Predictions: pictures of every kind, good and bad, one entry each, in order."""

import gc
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
from PIL import Image

import vitlab
from vitlab.weights import predictor
from vitlab.weights.bundle import Bundle
from vitlab.weights.predictor import Prediction, stream


def image(size: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Good and bad files, in a strange order."""
    paths = [tmp_path / name for name in ("z.png", "half.jpg", "a.png", "gone.png", "b.png")]
    for i, path in enumerate(paths):
        if "gone" not in path.name:
            Image.fromarray(image(seed=i)).save(path)
    paths[1].write_bytes(paths[1].read_bytes()[:200])
    return paths


# One picture, many forms -----------------------------------------------------------------------


def forms(array: np.ndarray, folder: Path) -> dict[str, Any]:
    chw = torch.from_numpy(array).permute(2, 0, 1)
    Image.fromarray(array).save(folder / "x.png")
    return {
        "path": folder / "x.png",
        "text": str(folder / "x.png"),
        "bytes": (folder / "x.png").read_bytes(),
        "PIL": Image.fromarray(array),
        "opened": Image.open(folder / "x.png"),
        "uint8 HWC": array,
        "uint8 CHW": chw,
        "float32 CHW": chw / 255,
        "float64 HWC": array / 255,
        "int64 CHW": chw.long(),
        "int32 HWC": array.astype(np.int32),
        "needs a gradient": (chw / 255).requires_grad_(),
        "one of a batch": chw[None],
    }


@pytest.mark.parametrize("size", [16, 40])
def test_every_form_gives_the_same_answer(size: int, bundle: Bundle, tmp_path: Path) -> None:
    given = forms(image(size), tmp_path)
    answers = {name: vitlab.predict(bundle, picture) for name, picture in given.items()}
    expected = answers["PIL"][0].top
    assert len(expected) == 4
    for name, answer in answers.items():
        assert len(answer) == 1, name
        assert [label for label, _ in answer[0].top] == [label for label, _ in expected], name
        for (_, one), (_, other) in zip(answer[0].top, expected, strict=True):
            assert abs(one - other) <= 1e-6, name
    given["opened"].close()


def test_names_tell_where_a_picture_came_from(bundle: Bundle, tmp_path: Path) -> None:
    given = forms(image(), tmp_path)
    mixed = [given["PIL"], given["text"], given["uint8 CHW"], given["path"]]
    names = [p.file for p in vitlab.predict(bundle, mixed)]
    assert names == ["image 0", given["text"], "image 1", str(given["path"])]
    given["opened"].close()


@pytest.mark.parametrize(
    "wrong",
    [
        np.full((16, 16, 3), -1), np.full((16, 16, 3), 256), np.full((16, 16, 3), 1.5),
        np.full((16, 16, 3), math.nan), np.zeros((16, 16, 7)), np.zeros(3), "no such file.png", "",
        "nul\0.png", "x" * 5000, b"", b"no picture", None, 5, {"a": 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_picture_is_an_entry(wrong: Any, bundle: Bundle) -> None:
    good = image()
    answers = vitlab.predict(bundle, [good, wrong, good])
    assert [p.error is None for p in answers] == [True, False, True]
    assert answers[1].label is answers[1].probability is None
    assert "\n" not in str(answers[1].error)
    assert answers[0].label == answers[2].label


def test_upright_as_the_camera_meant_it(bundle: Bundle, tmp_path: Path) -> None:
    upright = np.zeros((32, 16, 3), dtype=np.uint8)
    upright[:16] = (255, 0, 0)
    upright[16:] = (0, 0, 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise to be seen
    stored = Image.fromarray(np.rot90(upright, k=1).copy())
    stored.save(tmp_path / "turned.png", exif=exif)
    stored.save(tmp_path / "as stored.png")
    turned, plain, right = vitlab.predict(
        bundle, [tmp_path / "turned.png", tmp_path / "as stored.png", upright]
    )
    assert dict(turned.top) == pytest.approx(dict(right.top), abs=1e-6)
    assert dict(plain.top) != pytest.approx(dict(right.top), abs=2e-5)


# Batches ---------------------------------------------------------------------------------------


def test_neighbours_in_a_batch_do_not_matter(bundle: Bundle) -> None:
    pictures = [image(seed=i) for i in range(8)]
    batch = vitlab.predict(bundle, pictures)
    alone = [vitlab.predict(bundle, p)[0] for p in pictures]
    backwards = vitlab.predict(bundle, pictures[::-1], batch=3)[::-1]
    for one, *others in zip(batch, alone, backwards, strict=True):
        for other in others:
            assert one.label == other.label
            mine, theirs = dict(one.top), dict(other.top)
            assert max(abs(mine[k] - theirs[k]) for k in mine) <= 1e-5


def test_the_same_batch_gives_the_same_bits(bundle: Bundle) -> None:
    images = torch.randn(8, 3, 16, 16)
    first = predictor.probabilities(bundle, images)
    assert torch.equal(first, predictor.probabilities(bundle, images))


def test_the_model_is_as_it_was_afterwards(bundle: Bundle) -> None:
    bundle.model.train()
    before = torch.get_rng_state()
    once = vitlab.predict(bundle, image())
    assert bundle.model.training
    bundle.model.eval()
    assert vitlab.predict(bundle, image()) == once
    assert not bundle.model.training
    assert torch.equal(before, torch.get_rng_state())


def test_order_is_kept_whatever_the_batch(bundle: Bundle, files: list[Path]) -> None:
    for batch in (1, 2, 3, 10):
        answers = bundle.predict(files, batch=batch)
        assert [p.file for p in answers] == list(map(str, files))
        assert [p.error is None for p in answers] == [True, False, True, False, True]
    assert answers[3].error == "No such file or directory"
    assert "truncated" in str(answers[1].error)


def test_only_bad_files(bundle: Bundle, files: list[Path]) -> None:
    answers = vitlab.predict(bundle, [files[1], files[3]])
    assert all(p.error for p in answers)
    assert vitlab.predict(bundle, []) == []


def test_folders_are_walked_in_order(bundle: Bundle, tmp_path: Path) -> None:
    for name in ("b/2.png", "b/10.JPG", "a/1.png", "a/.hidden.png", ".x/1.png", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if name.endswith("txt"):
            (tmp_path / name).write_text("no picture")
        else:
            Image.fromarray(image()).save(tmp_path / name)
    names = [p.file for p in vitlab.predict(bundle, [tmp_path / "b", tmp_path])]
    assert names == [
        str(tmp_path / n) for n in ("b/10.JPG", "b/2.png", "a/1.png", "b/10.JPG", "b/2.png")
    ]
    (tmp_path / "empty").mkdir()
    (answer,) = vitlab.predict(bundle, tmp_path / "empty")
    assert (answer.file, answer.error) == (str(tmp_path / "empty"), "no pictures in this folder")


def test_pictures_are_read_as_they_are_needed(bundle: Bundle) -> None:
    taken: list[int] = []

    def endless() -> Iterator[np.ndarray]:
        while True:
            taken.append(1)
            yield image()

    answers = stream(bundle, endless(), batch=4)
    next(answers)
    assert len(taken) == 4


def test_many_files_need_no_more_memory_than_few(bundle: Bundle, tmp_path: Path) -> None:
    for i in range(200):
        Image.fromarray(image(seed=i)).save(tmp_path / f"{i:03d}.png")
    counts = {}
    for i, answer in enumerate(stream(bundle, tmp_path, batch=10), start=1):
        assert answer.error is None
        assert type(answer.probability) is float
        if i in (20, 200):
            gc.collect()
            counts[i] = sum(
                issubclass(type(o), (torch.Tensor, np.ndarray)) for o in gc.get_objects()
            )
    assert abs(counts[200] - counts[20]) <= 3


# What an answer holds --------------------------------------------------------------------------


def test_top_is_ranked_and_sums_to_one(bundle: Bundle) -> None:
    (answer,) = vitlab.predict(bundle, image(), top=9)
    shares = [share for _, share in answer.top]
    assert len(shares) == 4, "no more than there are classes"
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    assert (answer.label, answer.probability) == answer.top[0]
    assert len(vitlab.predict(bundle, image(), top=2)[0].top) == 2
    with torch.inference_mode():
        logits = bundle.model(torch.from_numpy(image()).permute(2, 0, 1)[None] / 127.5 - 1)
    expected = logits.softmax(1)[0].tolist()
    assert dict(answer.top) == pytest.approx(
        dict(zip(bundle.classes, expected, strict=True)), abs=1e-6
    )


def test_five_by_default() -> None:
    (answer,) = vitlab.predict(toys.bundle(9), image())
    assert len(answer.top) == 5


@pytest.mark.parametrize("options", [{"top": 0}, {"top": -1}, {"batch": 0}])
def test_counts_below_one_are_refused(options: dict[str, int], bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="top and batch must be at least 1"):
        vitlab.predict(bundle, image(), **options)


def test_a_model_without_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="no classes to predict"):
        vitlab.predict(toys.bundle(0), image())


def test_an_output_that_is_not_finite_is_an_error(bundle: Bundle) -> None:
    bundle.model.head.bias.data[2] = math.nan
    (answer,) = vitlab.predict(bundle, image())
    assert answer.error == "the model's output is not finite"
    json.dumps(vars(answer), allow_nan=False)


def test_bf16_weights(bundle: Bundle) -> None:
    plain = vitlab.predict(bundle, image())[0]
    bundle.model.bfloat16()
    (half,) = vitlab.predict(bundle, image())
    assert sum(share for _, share in half.top) == pytest.approx(1, abs=1e-6), "softmax in float32"
    assert dict(half.top) == pytest.approx(dict(plain.top), abs=0.05)
    images = torch.randn(8, 3, 16, 16)
    with torch.inference_mode():
        logits = bundle.model(images.bfloat16())
    assert torch.equal(predictor.probabilities(bundle, images), logits.float().softmax(dim=1))


def test_predictions_compare_by_value() -> None:
    assert Prediction(file="a", error="x") == Prediction(file="a", error="x")


# What it costs ---------------------------------------------------------------------------------


def test_predicting_needs_torch_but_not_torchvision(bundle: Bundle, tmp_path: Path) -> None:
    vitlab.save(bundle, tmp_path / "b")
    Image.fromarray(image()).save(tmp_path / "x.png")
    code = f"""
import sys
from vitlab.cli import main
assert main(["predict", {str(tmp_path / "b")!r}, {str(tmp_path / "x.png")!r}, "--json"]) == 0
heavy = {{"torchvision", "datasets", "matplotlib", "scipy", "pandas", "yaml"}} & set(sys.modules)
assert not heavy, heavy
assert "torch" in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=toys.environment()
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["label"] == vitlab.predict(bundle, image())[0].label
