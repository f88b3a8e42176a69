"""Training over good pictures mixed with odd ones: what decodes is used, the rest is told of."""

import csv
import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import toys
from PIL import Image

import vitlab
from vitlab.data import decode
from vitlab.training import loop

DATA = Path(os.environ.get("VITLAB_TEST_DATA", Path(__file__).parents[2] / "../shared")) / "data"


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def oddities() -> tuple[dict[str, bytes], dict[str, tuple[bytes, str]]]:
    """(files that decode, files that do not and why), by name."""
    image = Image.fromarray(toys.pictures(1, size=24)[0][0])
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = Image.fromarray((np.arange(576).reshape(24, 24) * 100).astype(np.uint16))
    jpeg, png = encode(image, "JPEG"), encode(image, "PNG")
    good = {
        "upright.jpg": encode(image, "JPEG", exif=exif), "wrong suffix.jpg": png,
        "print.jpg": encode(image.convert("CMYK"), "JPEG"), "xray.png": encode(deep, "PNG"),
        "gray.png": encode(image.convert("L"), "PNG"), "fax.png": encode(image.convert("1"), "PNG"),
        "logo.png": encode(image.convert("RGBA"), "PNG"), "DEPTH.TIFF": encode(deep, "TIFF"),
        "old.gif": encode(image.convert("P"), "GIF"), "new.webp": encode(image, "WEBP"),
        "moving.webp": encode(image, "WEBP", save_all=True, append_images=[image.rotate(90)]),
        "broken exif.jpg": encode(image, "JPEG", exif=b"Exif\0\0garbage"),
    }  # fmt: skip
    twelve_bits = bytearray(jpeg)
    twelve_bits[jpeg.index(b"\xff\xc0") + 4] = 12
    huge = bytearray(png)
    huge[16:24] = struct.pack(">II", 100_000, 100_000)
    huge[29:33] = struct.pack(">I", zlib.crc32(huge[12:29]))
    nothing = b"GIF89a" + struct.pack("<HHBBB", 0, 5, 0, 0, 0) + b";"
    not_finite = Image.fromarray(np.full((8, 8), np.nan, np.float32))
    bad = {
        "half.jpg": (jpeg[: len(jpeg) // 2], "truncated"), "half.png": (png[:200], "truncated"),
        "empty.jpg": (b"", "empty file"), "notes.png": (b"not a picture", "not an image"),
        "page.jpg": (b"<!doctype html>", "not an image"), "bomb.png": (bytes(huge), "too large"),
        "scan.jpg": (bytes(twelve_bits), "unsupported kind"), "line.gif": (nothing, ""),
        "heat.tiff": (encode(not_finite, "TIFF"), "NaN or infinity"),
    }  # fmt: skip
    return good, bad


def skipped(run: Path) -> dict[str, str]:
    with open(run / "skipped.csv", newline="", encoding="utf-8") as f:
        header, *rows = csv.reader(f)
    assert header == ["file", "reason"]
    return dict(rows)


@pytest.fixture(params=["in memory", "from disk"])
def from_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Are pictures decoded step by step, by workers."""
    if request.param == "from disk":
        monkeypatch.setattr("vitlab.data.loader.MEMORY", 0)
    return request.param == "from disk"


def test_oddities_made_here(from_disk: bool, tmp_path: Path) -> None:
    """Reports 001, 003, 005, 006 and 007."""
    photos, (good, bad) = toys.write_folder(tmp_path / "photos"), oddities()
    for name, data in {**good, **{name: data for name, (data, _) in bad.items()}}.items():
        (photos / ("cat" if name in good else "dog") / name).write_bytes(data)
    config = toys.config(tmp_path / "run", steps=14, workers=2 if from_disk else 0)
    bundle = vitlab.train(str(photos), config)
    found = skipped(tmp_path / "run")
    assert set(found) == {f"dog/{name}" for name in bad}
    assert all(bad[file.removeprefix("dog/")][1] in why for file, why in found.items())
    names = [photos / "cat" / name for name in good]
    assert all(answer.error is None for answer in bundle.predict(names))


@pytest.mark.skipif(not (DATA / "edge-cases").is_dir(), reason="no odd pictures in the test data")
def test_real_oddities(from_disk: bool, tmp_path: Path) -> None:
    """Folders of a collection of hard files, between two of good pictures."""
    photos = toys.write_folder(tmp_path / "photos", classes=2)
    reasons: dict[str, str] = {}
    manifest = (DATA / "edge-cases" / "manifest.txt").read_text(encoding="utf-8")
    for line in manifest.splitlines():
        name, *_, end = line.split("|")
        (photos / name).parent.mkdir(exist_ok=True)
        (photos / name).symlink_to((DATA / "edge-cases" / name).resolve())
        if end != "ok" and Path(name).suffix in decode.EXTENSIONS:
            with pytest.raises(decode.Unreadable) as refused:
                decode.decode(photos / name)
            reasons[name] = str(refused.value)
    assert len(reasons) > 10
    run, flags = tmp_path / "run", ["--batch", 16, "--steps", 8, "--threads", 1]
    if from_disk:
        vitlab.train(str(photos), toys.config(run, batch=16, steps=8, workers=2))
    else:
        code, out, err = toys.vitlab("train", photos, *toys.FLAGS, *flags, "--out", run)
        assert code == 0, err
        assert out.startswith("accuracy ")
        assert f"{len(reasons)} skipped as unreadable, see {run}/skipped.csv" in err
    assert skipped(run) == reasons
    assert f"Skipped files ({len(reasons)})" in (run / "report.html").read_text(encoding="utf-8")
    assert vitlab.load(run).classes[:2] == ("cat", "dog")


@pytest.mark.parametrize("kind", ["L", "1"])
def test_sets_without_colour(kind: str, tmp_path: Path) -> None:
    """Report 006: MNIST and scanned pages."""
    for i in range(8):
        folder = tmp_path / "photos" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new(kind, (28, 28), 255 if i % 2 else 0).save(folder / f"{i}.png")
    config = toys.config(tmp_path / "run", steps=30, lr=3e-3, batch=4, held_out=0.5)
    bundle = vitlab.train(str(tmp_path / "photos"), config)
    assert bundle.card.metrics["top1"] == 1.0


def test_evaluation_training_and_prediction_see_the_same_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report 008: a checkerboard shows each difference in resizing; here there is none."""
    board = (np.indices((96, 96)).sum(axis=0) % 2 * 255).astype(np.uint8)
    for i in range(8):
        folder = tmp_path / "photos" / ("train", "val")[i // 6] / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.roll(board, i, axis=1)[: 96 - 8 * i]).save(folder / f"{i}.png")
    seen: dict[str, list[bytes]] = {"train": [], "evaluate": [], "predict": []}
    now = "train"
    plain = vitlab.models.vit.ViT.forward

    def forward(self, images):
        if not self.training:
            seen[now] += [image.numpy().tobytes() for image in images]
        return plain(self, images)

    monkeypatch.setattr(vitlab.models.vit.ViT, "forward", forward)
    config = toys.config(tmp_path / "run", steps=1, batch=2)
    bundle = vitlab.train(str(tmp_path / "photos"), config)
    now = "evaluate"
    vitlab.evaluate(bundle, str(tmp_path / "photos"))
    now = "predict"
    vitlab.predict(bundle, tmp_path / "photos" / "val")
    assert len(seen["predict"]) == 2
    assert seen["train"] == seen["evaluate"] == seen["predict"]
    values = np.frombuffer(seen["predict"][0], np.float32)
    assert np.abs(values).max() < 0.2, "gray: antialiased"


def test_a_compiled_model_sees_one_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 108: small last batches of an epoch or of evaluation compile nothing anew."""
    shapes = set()

    def compiled(model):
        def forward(images):
            shapes.add(tuple(images.shape))
            return model(images)

        return forward

    monkeypatch.setattr(loop.torch, "compile", compiled)
    config = toys.config(tmp_path / "run", batch=16, accumulate=2, compile=True, held_out=0.2)
    bundle = vitlab.train(toys.pictures(43), config)
    assert shapes == {(8, 3, 16, 16)}
    assert bundle.card.metrics["n"] % 16, "evaluation did have a small batch"
