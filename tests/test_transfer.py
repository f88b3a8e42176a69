"""The scripts that measure the small model: end to end on toys, cut and resumed, told truly."""

import csv
import importlib
import logging
import shutil
import signal
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import toys

import vitlab
from vitlab.models.positions import resample
from vitlab.training import loop, selection

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"
SMALL = {  # fewer runs that choose
    "scratch": {"lr": (1e-3,), "augment": ("light",), "layer_decay": (1.0,)},
    "tuned": {"lr": (0.5, 1e-4), "augment": ("light", "strong"), "layer_decay": (0.75,)},
}
pytestmark = pytest.mark.usefixtures("shared_process")


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("transfer", monkeypatch)


@pytest.fixture
def few_shot(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("few_shot", monkeypatch)


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of zips that the scripts expect, of toy pictures."""
    folder = tmp_path_factory.mktemp("data")
    for split, n in (("train", 80), ("val", 40)):
        toys.write_folder(folder / "tree" / split, n)
    for name in ("imagenette-128", "cifar10-12k"):
        shutil.make_archive(str(folder / name), "zip", folder / "tree")
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as f:
        return list(csv.DictReader(f))


def test_transfer_is_cut_resumed_and_told(
    transfer: ModuleType, data: Path, trained: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(transfer, "GRID", SMALL)
    call = ["--weights", str(trained), "--data", str(data), "--out", str(tmp_path / "out"),
            "--minutes", "0.002", "--epochs", "1.6", "--seeds", "2"]  # fmt: skip
    update = loop.update

    def cut(*arguments: Any) -> Any:
        if (tmp_path / "out/results.csv").exists():  # in the second run
            signal.raise_signal(signal.SIGINT)
        return update(*arguments)

    monkeypatch.setattr(loop, "update", cut)
    assert transfer.main([*call, "--only", "cifar10/*"]) == 128 + signal.SIGINT
    assert "the same command resumes" in capsys.readouterr().err
    first = rows_of(tmp_path / "out/results.csv")
    assert [row["part"] for row in first] == ["held-out"]
    monkeypatch.setattr(loop, "update", update)
    with caplog.at_level(logging.INFO, "vitlab"):
        assert transfer.main([*call, "--only", "cifar10/*"]) == 0
    assert caplog.text.count("resuming at step 1 ") == 1
    assert transfer.main([*call, "--only", "resolution-128/tuned-*"]) == 0

    rows = rows_of(tmp_path / "out/results.csv")
    assert rows[0] == first[0]
    keys = [tuple(row[k] for k in transfer.KEY) for row in rows]
    assert len(set(keys)) == len(keys)
    # cifar10: 1 + 3 tries, 2 x 2 runs; resolution: 3 tries at 64 px, 2 x 2 runs
    assert [row["part"] for row in rows].count("held-out") == 7
    tests = [row for row in rows if row["part"] == "test"]
    assert len(tests) == 8
    assert {row["n"] for row in tests} == {"40"}
    assert {row["n"] for row in rows if row["part"] == "held-out"} == {"8"}
    assert {row["epochs"] for row in tests if "epochs" in row["length"]} == {"1.6"}  # 2 steps of 64
    tuned = [row for row in tests if (row["case"], row["start"]) == ("cifar10", "tuned")]
    assert {row["lr"] for row in tuned} == {best(rows, "cifar10", "tuned")} == {"0.0001"}
    assert {row["weights"] == "" for row in rows if row["start"] == "scratch"} == {True}
    assert not list((tmp_path / "out").rglob("checkpoints"))

    told = (tmp_path / "out/table.md").read_text()
    for case, start in (("cifar10", "scratch"), ("resolution-128", "tuned-google")):
        found = [float(r["top1"]) for r in tests if (r["case"], r["start"]) == (case, start)]
        mean, (low, high) = selection.mean_interval(found)
        assert mean == statistics.fmean(found)
        interval = f"{max(0, low):.2%} to {min(1, high):.2%}"
        length = tests[0]["length"] if case == "cifar10" else "1.6 epochs"
        line = f"{transfer.STARTS[start]} | {length}"
        assert f"| {line} | {mean:.2%} | {interval} | 2 | 40 |" in told

    # Neither an equal call nor the table trains anything.
    monkeypatch.setattr(vitlab, "train", None)
    assert transfer.main([*call, "--only", "cifar10/*"]) == 0
    for name in ("table.md", "transfer.svg"):
        (tmp_path / "out" / name).rename(tmp_path / name)
    assert transfer.main(["--table", "--out", str(tmp_path / "out")]) == 0
    for name in ("table.md", "transfer.svg"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / name).read_text()


def best(rows: list[dict[str, str]], case: str, start: str) -> str:
    """The rate that a (case, start) should take, from its rows."""
    tried = [r for r in rows if (r["case"], r["start"], r["part"]) == (case, start, "held-out")]
    rates = [r for r in tried if r["augment"] == "light"]
    return max(rates, key=lambda r: float(r["top1"]))["lr"]


def test_picture_places_dots_by_accuracy(transfer: ModuleType, tmp_path: Path) -> None:
    def row(start: str, seed: int, top1: float) -> dict[str, str]:
        values = ("sample", start, "", "10 min", "test", seed, "0.001", "light", "1.0",
                  top1, top1 - 0.01, top1 + 0.01, 2000, 64000, 6.4, 200.0)  # fmt: skip
        return dict(zip(transfer.KEY + transfer.FOUND, map(str, values), strict=True))

    transfer.write(tmp_path, [row("scratch", 0, 0.71), row("tuned", 0, 0.9), row("tuned", 1, 0.9)])
    assert transfer.main(["--table", "--out", str(tmp_path)]) == 0
    told = (tmp_path / "table.md").read_text()
    assert "from scratch | 10 min | 71.00% | 70.00% to 72.00% | 1 | 2,000 | 64,000 | 6.4" in told
    assert "fine-tuned | 10 min | 90.00% | 90.00% to 90.00% | 2 |" in told
    drawn = ElementTree.parse(tmp_path / "transfer.svg").getroot()
    rule = {
        text.text: float(text.attrib["x"]) for text in drawn.iter(f"{SVG}text") if "%" in text.text
    }
    places = [float(dot.attrib["cx"]) for dot in drawn.iter(f"{SVG}circle")][2:]  # after the legend
    unit = (rule["90 %"] - rule["70 %"]) / 20
    assert places == pytest.approx([rule["70 %"] + unit, rule["90 %"]], abs=0.2)


def test_starts_are_random_where_they_should_be(transfer: ModuleType, trained: Path) -> None:
    bundle = vitlab.load(trained)
    given = bundle.model.state_dict()
    old, new = bundle.model.config.grid, (4, 4)
    for start, how in (("tuned", "bicubic"), ("tuned-google", "google")):
        table = resample(given["positions"], old, new, how)
        begun = transfer.begin(bundle, start, 32, 0).model
        assert begun.config.image == (32, 32)
        torch.testing.assert_close(begun.positions.data, table, rtol=0, atol=0)
    control = transfer.begin(bundle, "tuned-random", 32, 0).model.state_dict()
    differ = [name for name in given if given[name].shape != control[name].shape
              or not torch.equal(given[name], control[name])]  # fmt: skip
    assert differ == ["positions"]
    one, other, again = (transfer.begin(bundle, "scratch", 16, s).model for s in (0, 1, 0))
    for name in ("patch.weight", "positions", "blocks.0.attention.qkv.weight"):
        assert not torch.equal(one.state_dict()[name], given[name])
        assert not torch.equal(one.state_dict()[name], other.state_dict()[name])
        assert torch.equal(one.state_dict()[name], again.state_dict()[name])
    assert bundle.model.config.image == (16, 16)  # the bundle itself is as it was


def test_few_shot_is_measured_and_told(
    few_shot: ModuleType, data: Path, trained: Path, tmp_path: Path
) -> None:
    call = ["--weights", str(trained), "--data", str(data), "--out", str(tmp_path)]
    assert few_shot.main(call) == 0
    rows = rows_of(tmp_path / "few_shot.csv")
    assert len(rows) == 2 * 2 * 4 * 3
    assert {row["n"] for row in rows} == {"40"}
    share: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["pictures"] == "CIFAR-10":
            share.setdefault((row["weights"], row["shots"]), []).append(float(row["top1"]))
    assert min(share["pre-trained", "5"]) > 0.9  # it has learned these very pictures
    mean, (low, high) = selection.mean_interval(share["random weights", "1"])
    told = (tmp_path / "few_shot.md").read_text()
    line = f"random weights | {mean:.2%} ({max(0, low):.2%} to {min(1, high):.2%})"
    assert f"| CIFAR-10 | {line}" in told
    drawn = ElementTree.parse(tmp_path / "few_shot.svg").getroot()
    assert len(list(drawn.iter(f"{SVG}circle"))) == 2 + 2 * 2 * 4  # legend, points
    few_shot.main(call)  # from the kept features
    assert rows_of(tmp_path / "few_shot.csv") == rows


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "birds/*", "--weights", "w", "--data", "d"], "none of imagenette-64/scratch"),
        (["--table"], "there is no"),
        ([], "give --weights and --data"),
        (["--weights", "nowhere", "--data", "d"], "nowhere"),
    ],
)
def test_what_cannot_be_is_one_line(
    transfer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    arguments: list[str], says: str,
) -> None:  # fmt: skip
    try:
        code = transfer.main([*arguments, "--out", str(tmp_path / "out")])
    except SystemExit as e:
        code = e.code
    last = capsys.readouterr().err.splitlines()[-1]
    assert code == 2
    assert says in last


def test_page_shows_what_the_committed_results_say(
    transfer: ModuleType, few_shot: ModuleType, tmp_path: Path
) -> None:
    folder = ROOT / "docs" / "transfer"
    transfer.write(tmp_path, transfer.kept(folder))
    kinds = (str, str, int, int, float, int)  # few_shot.Row
    rows = [
        tuple(kind(value) for kind, value in zip(kinds, row.values(), strict=True))
        for row in rows_of(folder / "few_shot.csv")
    ]
    few_shot.show(tmp_path, rows)
    page = (ROOT / "docs" / "transfer.md").read_text()
    for name in ("table.md", "few_shot.md"):
        assert (tmp_path / name).read_text() in page
    for name in ("transfer.svg", "few_shot.svg", "results.csv", "few_shot.csv"):
        assert (tmp_path / name).read_text() == (folder / name).read_text()
