"""The command line: what it prints where, exit codes, and one plain line for each mistake."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
import yaml
from PIL import Image

import vitlab
from vitlab import cli
from vitlab.commands import train as commands
from vitlab.training import checkpoint, loop
from vitlab.weights.bundle import Bundle

pytestmark = pytest.mark.usefixtures("shared_process")


class Call:
    """`call("train", ...)` -> exit code; `out` and `err` hold what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        code = cli.main(list(map(str, arguments)))
        self.out, self.err = self.capsys.readouterr()
        return code

    def refuses(self, *arguments: object, code: int = 2, said: str) -> None:
        """The command fails with exactly one line, on stderr."""
        assert self(*arguments) == code, self.err
        assert self.out == ""
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("vitlab: ")
        assert said in self.err


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    return Call(capsys)


def flags(out: Path, *more: object) -> list[object]:
    return [*toys.FLAGS, "--batch", 8, "--threads", 1, "--out", out, "--steps", 4, *more]


# Help ------------------------------------------------------------------------------------------


def test_overview_and_version(call: Call) -> None:
    for word in ("--help", "-h"):
        assert call(word) == 0
        assert all(f"\n  {verb} " in call.out for verb in cli.VERBS)
    assert call() == 2
    assert "usage: vitlab COMMAND" in call.out
    assert call("--version") == 0
    assert call.out.startswith("vitlab ")


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_shows_plain_types(verb: str, call: Call) -> None:
    assert call(verb, "--help") == 0
    assert call.err == ""
    assert f"usage: vitlab {verb}" in call.out
    assert "None" not in call.out
    assert "STR" not in call.out.replace("--save-every STR", "").replace(
        "--budget STR", ""
    ).replace("--out STR", "")


def test_help_of_train_shows_each_option_with_its_comment(call: Call) -> None:
    call("train", "--help")
    text = " ".join(call.out.replace("│", " ").split())
    for piece in (
        "train [-h] [OPTIONS] SPEC", "--model TEXT name of the model", "--from BUNDLE",
        "--size H [W] image size H W in pixels, or one number",
        "--pool {token,mean} representation: class token or patch mean",
        "--crop LEAST MOST area of the random resized crop; none: whole (default: 0.35 1.0)",
        "--randaugment N MAGNITUDE operations a picture", "--lr FLOAT peak rate",
        "--precision {float32,bf16,float64} arithmetic",
        "--batch INT pictures a step (default: 64)",
        "--flip, --no-flip mirror half of the pictures",
    ):  # fmt: skip
        assert piece in text
    assert "--from-" not in text


# Mistakes in the call --------------------------------------------------------------------------

START = "train photos --model vit-ti16 --out x"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian photos", "unknown command 'trian': did you mean train?"),
        ("train photos --modl x", "unknown option --modl: did you mean --model?"),
        ("train photos --mod x", "unknown option --mod: did you mean --model?"),
        ("train photos --learning-rte 1", "unknown option --learning-rte: did you mean"),
        ("train photos --weight_deacy=1", "--weight-deacy: did you mean --weight-decay?"),
        ("train photos --from_ x", "unknown option --from-: did you mean --from?"),
        ("train photos --no-batch", "unknown option --no-batch: did you mean --batch?"),
        ("evaluate b photos --splitt val", "unknown option --splitt: did you mean --split?"),
        ("predict b x.png --josn", "unknown option --josn: did you mean --json?"),
        ("train", "train needs SPEC; see vitlab train --help"),
        ("train --model vit-ti16", "train needs SPEC"),
        ("evaluate", "evaluate needs BUNDLE SPEC"),
        ("evaluate b", "evaluate needs BUNDLE SPEC"),
        ("predict", "predict needs BUNDLE IMAGES"),
        ("predict b", "predict needs BUNDLE IMAGES"),
        ("train photos more", "unexpected: more"),
        ("train photos --model", "--model needs a value"),
        ("train photos --model --lr 1", "--model needs a value"),
        ("train photos --batch many", "--batch must be a whole number, not 'many'"),
        ("train photos --batch 2.5", "--batch must be a whole number, not '2.5'"),
        ("train photos --lr fast", "--lr must be a number, not 'fast'"),
        ("train photos --size a", "--size must be a whole number, not 'a'"),
        ("train photos --crop 0.5", "--crop needs 2 values, not '0.5'"),
        ("train photos --pool max", "--pool must be one of token, mean, not 'max'"),
        ("train photos --select best", "must be one of last, top1, loss, held-out, not 'best'"),
        ("train photos --flip maybe", "unexpected: maybe"),
        ("train photos --flip=maybe", "--flip is on or off: true or false, not 'maybe'"),
        ("train photos --batch 0", "--batch must be at least 1, not 0"),
        ("train photos --epochs -1", "--epochs must be above 0 and at most 1e+06, not -1"),
        (f"{START} --dropout 1.5", "dropout must lie in [0, 1), not 1.5"),
        ("train photos --crop 0.5 0.2", "--crop must be two shares of the area, rising"),
        ("train photos --steps 3 --epochs 2", "give only one of --epochs and --steps"),
        ("train photos --save-every soon", "'soon' is no length of time"),
        ("train photos --threads 0", "--threads must be at least 1, not 0"),
        ("train photos --model vit-ti16", "give --out RUN"),
        ("train photos --out x", "give --model NAME"),
        (f"{START} --model vit-ti17", "unknown model 'vit-ti17': did you mean vit-ti16?"),
        (f"{START} --width 100 --heads 12", "width 100 is not divisible by heads 12"),
        (f"{START} --size 32 --patch 64", "a patch of 64 does not fit"),
        (f"{START} --depth 0", "depth must be at least 1, not 0"),
        ("train nowhere --model vit-ti16 --out x", "nowhere: does not exist"),
        ("evaluate nowhere photos", "nowhere: no bundle"),
        ("evaluate b nowhere --threads 0", "--threads must be at least 1, not 0"),
        ("predict nowhere x.png", "nowhere: no bundle"),
        ("predict b x.png --device tpu", "--device tpu: must be cuda, mps or cpu"),
        ("models nothing*", "no model matches 'nothing*'"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_one_line(
    words: str, said: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call.refuses(*words.split(), said=said)
    assert list(tmp_path.iterdir()) == [], "and nothing is left behind"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there(call: Call, trained: Path, photos: Path, tmp_path: Path) -> None:
    said = "--device cuda: this machine or this torch has no cuda"
    call.refuses("train", photos, *flags(tmp_path / "run", "--device", "cuda"), said=said)
    call.refuses("evaluate", trained, photos, "--device", "cuda", said=said)
    call.refuses("predict", trained, photos, "--device", "cuda:1", said="this torch has no cuda")
    assert not (tmp_path / "run").exists()


def test_switches_say_what_they_mean(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    asked: list[Any] = []
    monkeypatch.setitem(cli.VERBS, "train", (commands.Train, lambda o: asked.append(o) or 0))
    on = ["", "--flip", "--flip True", "--flip=true", "--flip yes", "--no-flip --flip"]
    off = ["--no-flip", "--flip False", "--flip false", "--flip=no", "--no_flip", "--flip FALSE"]
    for words in (*on, *off):
        assert call("train", "photos", *words.split()) == 0, words
    assert [o.flip for o in asked] == [True] * len(on) + [False] * len(off)
    assert call("train", "--flip", "false", "photos", "--overwrite", "--strict", "no") == 0
    assert (asked[-1].spec, asked[-1].flip) == ("photos", False)
    assert (asked[-1].overwrite, asked[-1].strict) == (True, False)


def test_values_arrive_as_they_were_meant(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    asked: list[Any] = []
    monkeypatch.setitem(cli.VERBS, "train", (commands.Train, lambda o: asked.append(o) or 0))
    words = "photos --lr 1e-4 --size 32 48 --crop none --from=b --weight_decay 0 --lr_end=1e-6"
    assert call("train", *words.split(), "--out", "a b") == 0
    o = asked[-1]
    assert (o.lr, o.size, o.crop, o.from_, o.weight_decay) == (1e-4, (32, 48), None, "b", 0.0)
    assert (o.lr_end, o.out, o.batch) == (1e-6, "a b", 64)
    assert call("train", "--crop", 0.2, 1, "--size", 32, "photos", "--randaugment=2", 9) == 0
    o = asked[-1]
    assert (o.crop, o.size, o.spec, o.randaugment) == ((0.2, 1.0), (32,), "photos", (2, 9))
    assert call("train", "--lr", 1, "--lr", 2, "--out", "none", "--", "--photos") == 0
    o = asked[-1]
    assert (o.lr, o.out, o.spec) == (2.0, "none", "--photos"), "the last counts"


# Mistakes in the data and in folders -----------------------------------------------------------


def test_data_that_cannot_be_trained_on(call: Call, tmp_path: Path) -> None:
    photos = toys.write_folder(tmp_path / "photos")
    (photos / "gnu").mkdir()
    call.refuses(
        "train", photos, *flags(tmp_path / "run"), said="class folder without pictures: gnu"
    )
    one = toys.write_folder(tmp_path / "one" / "images", classes=1).parent
    call.refuses("train", one, *flags(tmp_path / "run"), said="found 1 class (images)")
    (tmp_path / "none").mkdir()
    call.refuses(
        "train", tmp_path / "none", *flags(tmp_path / "run"), said="no pictures in class folders"
    )
    (tmp_path / "list.csv").write_text("file,label\n")
    call.refuses(
        "train",
        tmp_path / "list.csv",
        *flags(tmp_path / "run"),
        said="the header must be path,label",
    )
    assert not (tmp_path / "run").exists()


def test_folders_that_are_in_the_way(
    call: Call, trained: Path, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    call.refuses("train", photos, *flags(tmp_path / "file"), said="file: is a file")
    call.refuses("evaluate", trained, photos, "--out", tmp_path / "file", said="file: is a file")
    (tmp_path / "README.md").touch()
    call.refuses("train", photos, *flags(tmp_path, "--overwrite"), said="holds other files")
    vitlab.save(toys.bundle(), tmp_path / "bundle")
    call.refuses("train", photos, *flags(tmp_path / "bundle"), said="a bundle that is no run")
    call.refuses("train", photos, *flags(trained), said="holds a run with other options (")


def test_a_corrupt_bundle_is_one_line(
    call: Call, bundle: Bundle, photos: Path, tmp_path: Path
) -> None:
    vitlab.save(bundle, tmp_path / "good")
    nan = float("nan")
    for name, damage, said in [
        ("config.json", lambda p: os.truncate(p, 99), "damaged, not JSON"),
        ("config.json", lambda p: p.write_bytes(b"\0" * 9), "damaged, not JSON"),
        ("config.json", lambda p: p.unlink(), "no bundle (there is no config.json)"),
        ("config.json", edit(lambda c: c["model"].update(width=nan)), "width must be a number"),
        ("config.json", edit(lambda c: c.update(version=2)), "version 2; this vitlab reads 1"),
        ("model.safetensors", lambda p: os.truncate(p, 999), "model.safetensors: damaged"),
        ("model.safetensors", lambda p: os.truncate(p, 0), "model.safetensors: damaged"),
        ("model.safetensors", lambda p: p.write_bytes(b"\xff" * 99), "safetensors: damaged"),
        ("model.safetensors", lambda p: p.unlink(), "model.safetensors: is missing"),
    ]:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        damage(tmp_path / "bad" / name)
        call.refuses("evaluate", tmp_path / "bad", photos, said=said)
        call.refuses("predict", tmp_path / "bad", photos, said=said)
        start = ["--from", tmp_path / "bad", "--out", tmp_path / "run"]
        call.refuses("train", photos, *start, said=said)


def edit(change: Any) -> Any:
    """What changes a JSON file."""

    def edited(path: Path) -> None:
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    return edited


def test_weights_of_nan_are_an_error_and_no_answer(
    call: Call, bundle: Bundle, photos: Path, tmp_path: Path
) -> None:
    bundle.model.head.bias.data[0] = float("nan")
    vitlab.save(bundle, tmp_path)
    call.refuses("evaluate", tmp_path, photos, code=1, said="the model's outputs are not finite")
    assert call("predict", tmp_path, photos / "cat" / "000.png", "--json") == 1
    answer = json.loads(call.out, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    assert answer["error"] == "the model's output is not finite"


def test_a_debugger_may_see_where(call: Call, photos: Path) -> None:
    with pytest.raises(FileNotFoundError):
        call("evaluate", "nowhere", photos, "--debug")


# Training --------------------------------------------------------------------------------------


def test_training_says_what_it_does_and_resumes(call: Call, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert call("train", photos, *flags(out)) == 0
    assert call.out.startswith("accuracy ")
    assert call.out.endswith(f"; report: {out}/report.html\n")
    assert call.out.count("\n") == 1
    for piece in (
        "14,668 parameters", "4 classes, 36 training pictures, 4 validation",
        "device cpu, precision float32, processes 1, threads 1", "last weights: accuracy",
    ):  # fmt: skip
        assert piece in call.err
    assert (out / "report.html").exists()
    assert call("train", photos, *flags(out)) == 0
    assert "this run is finished" in call.err
    call.refuses("train", photos, *flags(out, "--lr", 0.1), said="(lr was None, now 0.1)")
    assert call("train", photos, *flags(out, "--lr", 0.1, "--overwrite")) == 0


def test_json_is_one_object_on_stdout(call: Call, photos: Path, tmp_path: Path) -> None:
    assert call("train", photos, *flags(tmp_path / "run", "--json")) == 0
    result = json.loads(call.out)
    assert call.out.count("\n") == 1
    assert result["out"] == str(tmp_path / "run")
    assert result["metrics"] == vitlab.load(tmp_path / "run").card.metrics
    assert "accuracy" in call.err
    assert call("evaluate", tmp_path / "run", photos, "--json") == 0
    again = json.loads(call.out)
    assert (again["n"], again["top1"]) == (result["metrics"]["n"], result["metrics"]["top1"])


def test_without_validation_there_is_no_report(call: Call, photos: Path, tmp_path: Path) -> None:
    assert call("train", photos, *flags(tmp_path / "run", "--held-out", 0)) == 0
    assert call.out == f"trained without validation pictures: {tmp_path / 'run'}\n"
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_run_that_fails_is_one_line(
    call: Call, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(error: BaseException) -> Any:
        def update(*args: Any) -> Any:
            raise error

        return update

    for error, code, said in [
        (FloatingPointError("step 7: loss nan"), 1, "vitlab: step 7: loss nan\n"),
        (torch.OutOfMemoryError("CUDA\nmuch"), 1, "vitlab: out of memory: --batch 8 in 2 parts"),
        (RuntimeError("two\nlines"), 1, "vitlab: two lines (--debug shows where)\n"),
        (KeyError("x"), 1, "vitlab: 'x' (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, "vitlab: interrupted\n"),
        (loop.Stopped(15), 143, "vitlab: stopped by SIGTERM; the same command resumes\n"),
        (loop.Stopped(2), 130, "vitlab: stopped by SIGINT; the same command resumes\n"),
    ]:  # fmt: skip
        monkeypatch.setattr(loop, "update", failing(error))
        assert call("train", photos, *flags(tmp_path / "run")) == code
        assert call.out == ""
        assert call.err.splitlines(keepends=True)[-1].startswith(said)
        assert "Traceback" not in call.err


def test_unreadable_files_end_a_strict_run(call: Call, tmp_path: Path) -> None:
    photos = toys.write_folder(tmp_path / "photos")
    (photos / "cat" / "000.png").write_bytes(b"")
    said = "cat/000.png: empty file (--strict)"
    call.refuses("train", photos, *flags(tmp_path / "run", "--strict"), code=1, said=said)
    assert call("train", photos, *flags(tmp_path / "run")) == 0
    assert "1 skipped as unreadable, see" in call.err


def test_a_full_disk_while_saving(
    call: Call, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last good checkpoint stays, nothing half-written does, and with room it goes on."""
    plain, calls = checkpoint.save_file, iter(range(99))

    def save_file(tensors: Any, path: Path, metadata: Any = None) -> None:
        if next(calls) == 2:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(tensors, path, metadata)

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    arguments = ["train", photos, *flags(tmp_path / "run", "--save-every", "0.000001s")]
    assert call(*arguments) == 1
    last = call.err.splitlines()[-1]
    assert last.startswith("vitlab: ")
    assert last.endswith("000000002.safetensors: could not be written (No space left on device)")
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["000000000.safetensors", "000000001.safetensors"]
    assert call(*arguments) == 0
    assert "resuming at step 1 of 4" in call.err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    try:
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("mounting is not permitted here")
    except FileNotFoundError:
        pytest.skip("there is no mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(call: Call, photos: Path, small_disk: Path) -> None:
    """Wherever it runs full: one line, exit 1, nothing half-written; with room, it resumes."""
    filler = small_disk / "filler"
    arguments = flags(small_disk / "run", "--save-every", "0.000001s", "--steps", 30)
    for left in (0, 8, 100, 200, 400):  # KiB
        filler.write_bytes(b"x" * (508 - left) * 1024)
        assert call("train", photos, *arguments) == 1
        last = call.err.splitlines()[-1]
        assert last.startswith(f"vitlab: {small_disk}"), last
        assert "could not be written (" in last
        assert "No space left on device" in last
        assert "Traceback" not in call.err
        assert not list(small_disk.rglob("*.part"))
        filler.unlink()
        shutil.rmtree(small_disk / "run", ignore_errors=True)
    filler.write_bytes(b"x" * 200 * 1024)
    assert call("train", photos, *arguments) == 1
    assert len(list((small_disk / "run" / "checkpoints").iterdir())) >= 1
    filler.unlink()
    code = call("train", photos, *arguments)
    assert (code, "resuming at step" in call.err) in [(0, True), (1, True)]


# Evaluation ------------------------------------------------------------------------------------


def test_evaluation_says_which_pictures(
    call: Call, trained: Path, photos: Path, tmp_path: Path
) -> None:
    assert call("evaluate", trained, photos) == 0
    assert (
        call.out
        == f"accuracy 100.00% (8/8; 95 % interval 67.56% to 100.00%), on {photos} held-out\n"
    )
    assert call("evaluate", trained, photos, "--split", "all", "--out", tmp_path / "e") == 0
    assert "(40/40;" in call.out
    assert json.loads((tmp_path / "e" / "metrics.json").read_text())["n"] == 40
    assert (tmp_path / "e" / "report.html").exists()
    call.refuses(
        "evaluate", trained, photos, "--split", "test", said="has no split test; it has all"
    )


def test_evaluation_refuses_other_classes(call: Call, trained: Path, tmp_path: Path) -> None:
    other = toys.write_folder(tmp_path / "other")
    (other / "cat").rename(other / "gnu")
    call.refuses("evaluate", trained, other, said="1 of its classes are unknown to the model: gnu")
    call.refuses("evaluate", trained, tmp_path / "no", said="does not exist")


def test_memory_that_runs_out(
    call: Call, trained: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Any, images: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20.00 MiB")

    monkeypatch.setattr(vitlab.models.vit.ViT, "forward", forward)
    for words in (("evaluate", trained, photos), ("predict", trained, photos)):
        call.refuses(*words, code=1, said="out of memory; a smaller --batch needs less")


# Prediction ------------------------------------------------------------------------------------


@pytest.fixture
def mixed(photos: Path, tmp_path: Path) -> list[Path]:
    """Good and bad files."""
    (tmp_path / "half.png").write_bytes((photos / "dog" / "001.png").read_bytes()[:200])
    (tmp_path / "empty.jpg").touch()
    return [
        photos / "fox" / "003.png", tmp_path / "half.png", photos / "cat" / "000.png",
        tmp_path / "gone.png", tmp_path / "empty.jpg", photos / "eel" / "002.png",
    ]  # fmt: skip


def test_predictions_for_people(call: Call, trained: Path, mixed: list[Path]) -> None:
    assert call("predict", trained, *mixed) == 1
    assert [line.rpartition(" (")[0] for line in call.out.splitlines()] == [
        f"{mixed[0]}: fox", f"{mixed[2]}: cat", f"{mixed[5]}: eel",
    ]  # fmt: skip
    errors = call.err.splitlines()
    assert [line.partition(": error: ")[0] for line in errors] == [str(mixed[i]) for i in (1, 3, 4)]
    assert errors[1].endswith("error: No such file or directory")
    assert call("predict", trained, mixed[0], mixed[2]) == 0


def test_predictions_for_programs(call: Call, trained: Path, mixed: list[Path]) -> None:
    for batch in (1, 4, 32):
        assert call("predict", trained, *mixed, "--json", "--batch", batch, "--top", 9) == 1
        assert call.err == ""
        answers = [json.loads(line) for line in call.out.splitlines()]
        assert [a["file"] for a in answers] == list(map(str, mixed))
        assert [set(a) for a in answers] == [
            {"file", "error"} if i in (1, 3, 4) else {"file", "label", "probability", "top"}
            for i in range(6)
        ]
        assert [a.get("label") for a in answers] == ["fox", None, "cat", None, None, "eel"]
        top = answers[0]["top"]
        assert top[0] == {"label": "fox", "probability": answers[0]["probability"]}
        assert len(top) == 4, "no more than there are classes"
        assert sum(t["probability"] for t in top) == pytest.approx(1, abs=1e-5)
    assert call("predict", trained, mixed[0], "--json", "--top", 1) == 0
    assert len(json.loads(call.out)["top"]) == 1
    call.refuses("predict", trained, mixed[0], "--top", 0, said="top and batch must be at least 1")


def test_a_folder_is_predicted_whole(
    call: Call, trained: Path, photos: Path, tmp_path: Path
) -> None:
    assert call("predict", trained, photos) == 0
    lines = call.out.splitlines()
    assert len(lines) == 40
    assert lines == sorted(lines)
    (tmp_path / "empty").mkdir()
    assert call("predict", trained, tmp_path / "empty") == 1
    assert call.err == f"{tmp_path / 'empty'}: error: no pictures in this folder\n"


def test_threads_asked_for_are_used(call: Call, trained: Path, mixed: list[Path]) -> None:
    for threads in (1, 2):
        assert call("predict", trained, mixed[0], "--threads", threads) == 0
        assert torch.get_num_threads() == threads
        assert os.environ["OMP_NUM_THREADS"] == str(threads)


# In a process of its own -----------------------------------------------------------------------


def test_output_survives_strange_names_and_closed_pipes(trained: Path, tmp_path: Path) -> None:
    strange = os.fsdecode(os.fsencode(str(tmp_path)) + b"/b\xffd.png")
    Image.fromarray(toys.pictures(1)[0][0]).save(strange)
    with toys.start("predict", trained, strange, strange, tmp_path / "gone.png") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out.count("b\\udcffd.png: cat") == 2
    assert err == f"{tmp_path / 'gone.png'}: error: No such file or directory\n"
    many = [strange] * 3000
    with toys.start("predict", trained, *many, "--batch", 1) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_mistakes_are_answered_before_torch_is_imported() -> None:
    code = (
        "import sys; from vitlab.cli import main; c = main(sys.argv[1:]);"
        " assert not {'torch', 'numpy'} & set(sys.modules); sys.exit(c)"
    )
    for words in ("train photos --modl x", "train", "train --help", "predict b --top x y"):
        command = [sys.executable, "-c", code, *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, env=toys.environment())
        assert done.returncode == (0 if "--help" in words else 2), done.stderr
        assert "Traceback" not in done.stderr


def test_models_lists_names(call: Call) -> None:
    assert call("models", "vit-b*", "--json") == 0
    rows = [json.loads(line) for line in call.out.splitlines()]
    assert [r["name"] for r in rows] == ["vit-b8", "vit-b16", "vit-b32"]
    assert rows[1]["parameters"] == 86_567_656
    assert call("models") == 0
    assert "vit-h14" in call.out


@pytest.mark.parametrize("scratch", [(), ("--scratch",)], ids=["tuned", "scratch"])
def test_demo(call: Call, tmp_path: Path, scratch: tuple[str, ...]) -> None:
    out = tmp_path / "demo"
    assert call("demo", *scratch, "--out", out, "--epochs", "0.05") == 0
    assert "accuracy" in call.out
    assert f"report: {out}/report.html" in call.out
    assert (out / "report.html").exists()
    assert np.isfinite(vitlab.load(out).card.metrics["loss"])
    asked = yaml.safe_load((out / "run.yaml").read_text())["asked"]
    assert asked["from"] == (None if scratch else "vit-nano8")
    assert ("from random weights" in call.out) != bool(scratch)
