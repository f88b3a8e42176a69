"""`vitlab data check`, `preview` and `pack` as people call them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import toys
from PIL import Image

import vitlab
from vitlab import cli
from vitlab.data import sources
from vitlab.data.augment import Augment
from vitlab.data.loader import train_batches
from vitlab.data.preprocess import Preprocess
from vitlab.training import preview

pytestmark = pytest.mark.usefixtures("shared_process")


def call(*words: object) -> int:
    return cli.main(["data", *map(str, words)])


@pytest.fixture
def broken(photos: Path, tmp_path: Path) -> Path:
    """The toys' pictures, one of them damaged and one under a second label."""
    folder = shutil.copytree(photos, tmp_path / "photos")
    (folder / "cat/000.png").write_bytes(b"")
    shutil.copy(folder / "dog/001.png", folder / "eel/dog.png")
    return folder


# The group of commands -------------------------------------------------------------------------


def test_the_group_tells_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: vitlab data COMMAND ...")
    assert all(f"\n  data {verb} " in said for verb in ("check", "preview", "pack"))
    assert "evaluate" not in said
    assert call() == 2
    assert capsys.readouterr().out == said
    assert call("chek", "photos") == 2
    assert "unknown command 'data chek': did you mean data check?" in capsys.readouterr().err
    assert cli.main(["dta", "check"]) == 2
    assert "unknown command 'dta': did you mean data?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("check", "data check needs SPEC; see vitlab data check --help"),
        ("check none", "none: does not exist"),
        ("check {} --aganst x", "unknown option --aganst: did you mean --against?"),
        ("check {} --group (", "--group '(': not a regular expression"),
        ("check {} --against none", "none: does not exist"),
        ("check sample --fix x.csv", "--fix x.csv: sample holds no picture files of their own"),
        ("check {} --fix {}", "is no file"),
        ("pack {}", "data pack needs SPEC TO"),
        ("pack {} --to {}", "choose an empty folder"),
        ("pack {} --to x --shard-size much", "--shard-size much: write 256MB"),
        ("preview {}", "data preview needs --out FILE.png"),
        ("preview {} --size 8 --out x.jpg", "--out x.jpg: must end in .png"),
        ("preview {} --out x.png", "give --model NAME, --from BUNDLE or --size H W"),
        ("preview {} --size 8 --out x.png --rows 0", "--rows 0 --columns 7: a sheet of 1"),
        ("preview {} --size 8 --crop 2 3 --out x.png", "--crop must be two shares"),
    ],
)
def test_wrong_calls_are_a_line(
    words: str, said: str, photos: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert call(*words.replace("{}", str(photos)).split()) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not [*tmp_path.iterdir()]


# Check -----------------------------------------------------------------------------------------


def test_check_of_a_clean_set(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("check", photos) == 0
    assert capsys.readouterr().out == f"{photos}: 40 all; 4 classes\nnothing found\n"
    assert call("check", photos, "--json") == 0
    assert capsys.readouterr().out == ""


def test_check_tells_writes_a_page_and_a_table(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.read_bytes() for p in broken.rglob("*.png")}
    table = tmp_path / "clean.csv"
    assert call("check", broken, "--out", tmp_path / "page", "--fix", table, "--threads", 1) == 1
    told = capsys.readouterr()
    assert "unreadable: 1  (cannot be read)\n  cat/000.png (cat, all): empty file" in told.out
    assert "dog/001.png (dog, all) = eel/dog.png (eel, all): the same pixels" in told.out
    assert f"{table}: 38 pictures, 3 left out" in told.err
    assert "under dog and eel" in (tmp_path / "page/index.html").read_text()
    assert {p: p.read_bytes() for p in broken.rglob("*.png")} == before
    assert call("check", table) == 0
    capsys.readouterr()
    assert call("check", broken, "--json") == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        {"kind": "unreadable", "note": "empty file",
         "pictures": [{"split": "all", "file": "cat/000.png", "label": "cat"}]},
        {"kind": "conflict", "note": "the same pixels, under dog and eel",
         "pictures": [{"split": "all", "file": "dog/001.png", "label": "dog"},
                      {"split": "all", "file": "eel/dog.png", "label": "eel"}]},
    ]  # fmt: skip
    assert call("check", table, "--fix", table) == 2
    assert "is the table that is checked" in capsys.readouterr().err


def test_check_against_another_set(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(photos / "dog", tmp_path / "other/test/any")
    assert call("check", photos, "--against", tmp_path / "other") == 1
    assert "overlap: 10" in capsys.readouterr().out


def test_check_with_a_bundle_finds_labels_unlike_their_neighbours(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, labels = toys.pictures()
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        at = tmp_path / "set" / ("dog" if i == 4 else label)
        at.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(at / f"{i:03d}.png")
    assert call("check", tmp_path / "set", "--bundle", trained, "--json", "--device", "cpu") == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(f["kind"], f["pictures"][0]["file"]) for f in found] == [("suspicious", "dog/004.png")]
    assert "nearest are cat" in found[0]["note"]


# Preview ---------------------------------------------------------------------------------------


def test_preview_shows_what_training_sees(photos: Path, tmp_path: Path) -> None:
    flags = ["--size", 96, "--crop", 0.3, 0.6, "--seed", 5, "--rows", 3, "--columns", 4]
    assert call("preview", photos, "--out", tmp_path / "a.png", *flags) == 0
    sheet = np.asarray(Image.open(tmp_path / "a.png"))
    whole = sources.open_spec(str(photos))["all"]
    part = sources.select(whole, np.array([0, 19, 39]), "all")
    stream = train_batches(part, Augment(crop=(0.3, 0.6)), Preprocess(size=(96, 96)), batch=3,
                           seed=5, start=0, stop=3)  # fmt: skip
    gap, line = preview.GAP, preview.LINE
    for column, batch in enumerate(stream, start=1):
        for row, image in zip(batch.rows, batch.images, strict=True):
            y, x = 2 * line + row * (96 + line + gap), gap + column * (96 + gap)
            assert (sheet[y : y + 96, x : x + 96] == image.permute(1, 2, 0).numpy()).all()
    assert sheet.shape == (line + 3 * (96 + line + gap), gap + 4 * (96 + gap), 3)


def test_preview_takes_the_options_of_a_run_and_skips_the_unreadable(
    broken: Path, trained: Path, tmp_path: Path
) -> None:
    """Mixed, whole, of a bundle's size; small pictures are magnified."""
    for name, more in (
        ("a.png", ["--from", trained, "--crop", "none", "--no-flip"]),
        ("b.png", ["--from", trained, "--crop", "none", "--no-flip", "--mixup", 1.0]),
        ("c.png", ["--model", "vit-ti16", "--size", 32, "--recipe", "augreg-light1"]),
    ):
        assert call("preview", broken, "--out", tmp_path / name, "--rows", 4, *more) == 0
    a, b = (np.asarray(Image.open(tmp_path / name)) for name in ("a.png", "b.png"))
    assert a.shape == b.shape
    assert (a != b).any()
    columns = [a[:, preview.GAP + i * 100 :][2 * preview.LINE :, :96] for i in range(3)]
    assert (columns[1] == columns[2]).all()  # nothing is augmented
    assert not [*tmp_path.glob(".*")]


def test_preview_of_a_set_without_training_part(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(photos, tmp_path / "set/test")
    shutil.copytree(photos / "cat", tmp_path / "set/val/cat")
    (tmp_path / "t.csv").write_text(f"path,label,split\n{photos}/cat/000.png,cat,test\n")
    assert call("preview", tmp_path / "t.csv", "--size", 8, "--out", tmp_path / "x.png") == 2
    assert "has no training part, only test" in capsys.readouterr().err


# Pack ------------------------------------------------------------------------------------------


def test_pack_and_train_from_it(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "shards"
    words = ["pack", broken, "--to", to, "--shard-size", "20kB"]
    assert call(*words) == 1  # one could not be read
    told = capsys.readouterr()
    assert "cat/000.png: left out: empty file" in told.err
    assert f"{to}: 40 pictures in" in told.out
    assert call(*words, "--json") == 1  # as before: nothing to do
    found = json.loads(capsys.readouterr().out)
    assert (found["pictures"], found["left_out"]) == (40, 1)
    assert found["bytes"] == sum(p.stat().st_size for p in to.glob("*.tar"))
    run = tmp_path / "run"
    vitlab.train(str(to), toys.config(run, steps=4))
    card = json.loads((run / "config.json").read_text())
    held = card["data"]["held_out_ids"]
    assert held
    assert all(name.startswith("all-0000") and name.endswith(".png") for name in held)
    assert cli.main(["evaluate", str(run), str(to), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["n"] == len(held)


def test_training_keeps_groups_of_paths_together(tmp_path: Path) -> None:
    images, labels = toys.pictures()
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        at = tmp_path / "set" / label
        at.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(at / f"patient{i // 4 % 5}-{i}.png")
    run = tmp_path / "run"
    vitlab.train(str(tmp_path / "set"), toys.config(run, steps=2, group=r"patient\d"))
    held = json.loads((run / "config.json").read_text())["data"]["held_out_ids"]
    patients = {name.partition("-")[0].rpartition("/")[2] for name in held}
    assert len(patients) == 1
    assert len(held) == 8  # all of that patient's pictures
