"""The folder of a run: what may be written where, and what a run is resumed with."""

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import toys
import yaml

import vitlab
from vitlab.training import folder, loop


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def refused(out: Path, said: str, **changes: Any) -> None:
    """Training into `out` is refused in one line, and nothing there changes."""
    before = snapshot(out) if out.is_dir() else None
    with pytest.raises(ValueError, match=said) as caught:
        vitlab.train(toys.pictures(), toys.config(out, **changes))
    assert "\n" not in str(caught.value)
    assert before == (snapshot(out) if out.is_dir() else None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run."""
    vitlab.train(toys.pictures(), toys.config(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose 6th update failed."""
    plain = loop.update

    def update(job, forward, batch, step):
        if step == 5:
            raise RuntimeError("power cut")
        return plain(job, forward, batch, step)

    config = toys.config(tmp_path / "run", save_every="0.000001s")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", update)
        with pytest.raises(RuntimeError):
            vitlab.train(toys.pictures(), config)
    return tmp_path / "run"


# What is in the way ----------------------------------------------------------------------------


def test_a_file_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused(tmp_path / "file", "--out .*file: is a file")
    refused(tmp_path / "file" / "run", "--out .*run: not a directory")
    assert (tmp_path / "file").read_text() == "mine"


def test_other_files_are_in_the_way(tmp_path: Path) -> None:
    """A README.md or a folder called checkpoints may be anybody's."""
    (tmp_path / "README.md").write_text("my project")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mine").write_text("mine")
    for overwrite in (False, True):
        refused(tmp_path, r"holds other files \(README.md\)", overwrite=overwrite)


def test_a_bundle_is_in_the_way(tmp_path: Path) -> None:
    vitlab.save(toys.bundle(), tmp_path)
    for overwrite in (False, True):
        refused(tmp_path, "holds a bundle that is no run", overwrite=overwrite)


def test_hidden_files_are_not(tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").write_text("x")
    vitlab.train(toys.pictures(), toys.config(tmp_path))
    assert (tmp_path / ".DS_Store").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    refused(tmp_path / "run", "--out .*run: permission denied")
    refused(tmp_path, "--out .*: cannot be written to")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_read_only_disk(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        refused(tmp_path / "run", "--out .*run: read-only file system")
        refused(tmp_path, "--out .*: cannot be written to")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_what_is_refused_early_leaves_no_folder(tmp_path: Path) -> None:
    for said, changes in {
        "unknown model 'vit-xx': did you mean": {"model": "vit-xx"},
        "width 24 is not divisible by heads 5": {"heads": 5},
        "give --model NAME": {"model": None},
        "--warmup 12 is not less than the 12 steps": {"warmup": 12},
        "--device tpu: must be": {"device": "tpu"},
    }.items():
        refused(tmp_path / "run", said, **changes)
        assert not (tmp_path / "run").exists()


def test_a_run_among_class_folders(tmp_path: Path) -> None:
    photos = toys.write_folder(tmp_path / "photos")
    with pytest.raises(ValueError, match="lies among the class folders"):
        vitlab.train(str(photos), toys.config(photos / "run"))
    assert not (photos / "run").exists()
    os.renames(photos, tmp_path / "sets" / "train")
    vitlab.train(str(tmp_path / "sets"), toys.config(tmp_path / "sets" / "run"))


# Two at once -----------------------------------------------------------------------------------


def test_a_second_run_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    """Even while the first, still planning, has written nothing."""
    with folder.alone(tmp_path / "run"):
        refused(tmp_path / "run", "another run is writing there")
        assert (tmp_path / "run").is_dir()
        code = (
            "import sys, toys, vitlab\n"
            f"vitlab.train(toys.pictures(), toys.config({str(tmp_path / 'run')!r}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=toys.environment()
        )
        assert "another run is writing there" in done.stderr
        assert (tmp_path / "run").is_dir()
    assert not (tmp_path / "run").exists()


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    results: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with folder.alone(tmp_path / "run"):
            begun.set()
            go_on.wait(30)
            (tmp_path / "run" / "x").touch()
            results.append("done")

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait(30)
    refused(tmp_path / "run", "another run")
    go_on.set()
    thread.join()
    assert results == ["done"]


# Resuming --------------------------------------------------------------------------------------


def test_a_finished_run_is_left_alone(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = snapshot(run)
    with caplog.at_level("INFO", "vitlab"):
        bundle = vitlab.train(toys.pictures(), toys.config(run, save_every="1s", workers=0))
    assert "this run is finished; --overwrite starts anew" in caplog.text
    assert snapshot(run) == before
    assert bundle.classes == toys.CLASSES


def test_a_changed_option_is_named(unfinished: Path) -> None:
    refused(unfinished, r"other options \(lr was None, now 0.01\)", lr=0.01)
    refused(unfinished, r"epochs was None, now 3.0; steps was 12, now None", steps=None, epochs=3.0)
    refused(unfinished, r"size was \[16\], now \[32\]", size=(32,))


def test_a_finished_run_with_other_options_too(run: Path) -> None:
    refused(run, "seed was 0, now 1", seed=1)


def test_overwrite_starts_anew(run: Path) -> None:
    old = (run / "model.safetensors").read_bytes()
    (run / "notes.txt").write_text("mine")
    vitlab.train(toys.pictures(), toys.config(run, steps=6, seed=1, overwrite=True))
    assert (run / "model.safetensors").read_bytes() != old
    assert [p.stem for p in sorted((run / "checkpoints").iterdir())] == ["000000006"]
    assert toys.lines(run)[-1]["step"] == 6
    assert (run / "notes.txt").read_text() == "mine"


def test_overwriting_keeps_the_old_run_until_all_is_checked(run: Path) -> None:
    before = snapshot(run)
    for changes in ({"heads": 5}, {"warmup": 100}, {"device": "tpu"}):
        with pytest.raises(ValueError):
            vitlab.train(toys.pictures(), toys.config(run, overwrite=True, **changes))
        assert snapshot(run) == before


def test_changed_pictures_are_refused(unfinished: Path) -> None:
    images, labels = toys.pictures()
    for other in ((images[:-4], labels[:-4]), (images, labels[1:] + labels[:1])):
        with pytest.raises(ValueError, match="the pictures have changed"):
            vitlab.train(other, toys.config(unfinished))


def test_changed_validation_pictures_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"train": toys.source(), "val": toys.source(8)}
    monkeypatch.setattr(loop, "_save", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        vitlab.train(parts, toys.config(tmp_path / "run"))
    with pytest.raises(ValueError, match="the pictures have changed"):
        vitlab.train({**parts, "val": toys.source(12)}, toys.config(tmp_path / "run"))


@pytest.mark.parametrize(
    "damage",
    [b"", b"a: [", b"\xff\xfe", b"- 1", b"asked: 3", b"asked: {batch: x}", b"asked: [1]", "plan"],
)
def test_a_damaged_record(damage: bytes | str, unfinished: Path) -> None:
    path = unfinished / "run.yaml"
    record = yaml.safe_load(path.read_text())
    if damage == "plan":
        record["plan"]["speed"] = 1
        damage = yaml.safe_dump(record).encode()
    path.write_bytes(damage)
    refused(unfinished, "run.yaml: damaged .*; --overwrite starts anew")
    vitlab.train(toys.pictures(), toys.config(unfinished, overwrite=True))


@pytest.mark.parametrize(
    "change",
    [
        {"steps": "4x0"}, {"steps": None}, {"steps": 0}, {"eval_every": 0}, {"threads": 0},
        {"threads": 1.5}, {"workers": -1}, {"in_memory": "maybe"}, {"device": 3}, {"lr": -1.0},
        {"lr": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_plan(change: dict[str, Any], unfinished: Path) -> None:
    path = unfinished / "run.yaml"
    record = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**record, "plan": {**record["plan"], **change}}))
    refused(unfinished, "run.yaml: damaged .*; --overwrite starts anew")


def test_a_record_nested_too_deeply(unfinished: Path) -> None:
    (unfinished / "run.yaml").write_text("[" * 5000)
    refused(unfinished, "run.yaml: damaged .*; --overwrite starts anew")


def test_a_record_of_an_older_version_lacks_options(unfinished: Path) -> None:
    path = unfinished / "run.yaml"
    record = yaml.safe_load(path.read_text())
    del record["asked"]["erase"]
    path.write_text(yaml.safe_dump(record))
    vitlab.train(toys.pictures(), toys.config(unfinished))


def test_another_torch_is_told(unfinished: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = unfinished / "run.yaml"
    record = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**record, "torch": "1.0.0"}))
    vitlab.train(toys.pictures(), toys.config(unfinished))
    assert "began with torch 1.0.0, this is" in caplog.text


def test_record_holds_what_was_asked_and_what_was_chosen(run: Path) -> None:
    record = yaml.safe_load((run / "run.yaml").read_text())
    assert record["asked"]["lr"] is None
    chosen = {
        "device": "cpu", "precision": "float32", "threads": 1,
        "workers": 0, "in_memory": True, "lr": 0.001, "steps": 12, "warmup_steps": 1,
        "eval_every": 4,
    }  # fmt: skip
    assert record["plan"].items() >= chosen.items()
    assert len(record["plan"]) == len(fields(loop.Plan)), "all that was chosen"
    assert record["model"]["width"] == 24
    assert record["preprocess"]["size"] == [16, 16]


def test_a_kill_while_overwriting_leaves_a_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever file was the last to go, what is left can be overwritten, or trained again."""
    order: list[str] = []
    plain = Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        order.append(self.name)
        plain(self, missing_ok)

    copy = run.with_name("copy")
    shutil.copytree(run, copy)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        folder.clear(run)
    assert order[0] == "config.json"
    assert order[-1] == "run.yaml"
    (copy / "config.json").unlink()
    shutil.rmtree(copy / "checkpoints")
    again = vitlab.train(toys.pictures(), toys.config(copy))
    assert again.card.metrics


def test_skipped_files_are_listed(tmp_path: Path) -> None:
    folder.write_skipped(tmp_path, {"b,c.png": "empty file", "a.png": "not an image"})
    text = (tmp_path / "skipped.csv").read_text()
    assert text == 'file,reason\na.png,not an image\n"b,c.png",empty file\n'
