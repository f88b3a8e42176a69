"""What pre-training is worth: a small model fine-tuned, against the same trained from scratch.

    python bench/transfer.py --weights vit-nano8 --data FOLDER --out runs/transfer

FOLDER holds imagenette-128.zip and cifar10-12k.zip. The options of each (case, start) are chosen on
a tenth held out of the training part, in shorter runs of one seed; then each seed learns from all
of it, and the test part is scored once. A finished run is a row of results.csv at once: stop at
any time, the same command goes on where it was. `--table` only writes table.md and transfer.svg
anew, from the results.csv in `--out`; docs/transfer.md shows both.
"""

from __future__ import annotations

import argparse
import copy
import csv
import fnmatch
import hashlib
import io
import json
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import drawing

import vitlab

SETS = {  # a file of --data, or the name of a set
    "Imagenette": "imagenette-128.zip",
    "CIFAR-10": "cifar10-12k.zip",
    "sample": "sample",
}


@dataclass(frozen=True)
class Case:
    """Pictures at a size, and what the model starts from."""

    pictures: str  # one of SETS
    size: int  # pixels
    starts: tuple[str, ...] = ("scratch", "tuned")
    options_of: str = ""  # the case whose choices are taken; else its own are made
    equal: str = "minutes"  # what runs have the same of; or epochs


CASES = {  # in the order of work: what tells most comes first
    "imagenette-64": Case("Imagenette", 64),
    "cifar10": Case("CIFAR-10", 64),
    "sample": Case("sample", 56),
    "imagenette-128": Case("Imagenette", 128, options_of="imagenette-64"),
    "resolution-64": Case("Imagenette", 64, ("scratch", "tuned"), "imagenette-64", "epochs"),
    "resolution-128": Case(
        "Imagenette", 128, ("scratch", "tuned", "tuned-google", "tuned-random"),
        "imagenette-64", "epochs",
    ),
}  # fmt: skip
STARTS = {
    "scratch": "from scratch",
    "tuned": "fine-tuned",
    "tuned-google": "fine-tuned, positions resampled as google's",
    "tuned-random": "fine-tuned, positions random",
}
GRID: dict[str, dict[str, tuple[Any, ...]]] = {  # one option after the other is chosen
    "scratch": {
        "lr": (1e-3, 5e-4, 2e-3, 2.5e-4), "augment": ("light", "strong"), "layer_decay": (1.0,),
    },
    "tuned": {
        "lr": (5e-4, 2e-4, 1e-3, 2e-3), "augment": ("light", "strong"), "layer_decay": (0.75, 1.0),
    },
}  # fmt: skip
AUGMENT: dict[str, dict[str, Any]] = {  # beside crops of 35 % to all of the area, mirrored
    "light": {"drop_path": 0.0},
    "strong": {"drop_path": 0.1, "randaugment": (2, 9), "mixup": 0.2, "cutmix": 1.0},
}
HELD_OUT = 0.1  # of the training part
SHORTER = 0.2  # of --minutes, for a run that only chooses
KEY = ("case", "start", "weights", "length", "part", "seed", "lr", "augment", "layer_decay")
FOUND = ("top1", "low", "high", "n", "images", "epochs", "images_per_second")
Row = dict[str, str]  # of KEY, what a run is; of FOUND, what came out


# Running ---------------------------------------------------------------------------------------


def parts_of(data: Path, name: str) -> tuple[Any, Any]:
    """(train, test) sources of one of SETS; `val` is the test part where there is no other."""
    from vitlab.data import named, sources

    spec = SETS[name] if SETS[name] in named.NAMES else str(data / SETS[name])
    parts = sources.open_spec(spec)
    return parts["train"], parts.get("test") or parts["val"]


def begin(bundle: vitlab.Bundle, start: str, size: Any, seed: int) -> vitlab.Bundle:
    """What a run starts from: the bundle at another size; random in part, or all of it."""
    import torch

    from vitlab.models import positions, zoo

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if start == "scratch":
            model = zoo.build(replace(bundle.model.config, image=size))
        else:
            how = "google" if start == "tuned-google" else "bicubic"
            model = copy.deepcopy(bundle.model).resize(size, how)
        if start == "tuned-random":
            model.positions = positions.learned(*model.positions.shape[1:])
    return replace(
        bundle, model=model, preprocess=replace(bundle.preprocess, size=model.config.image)
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is asked for, and the rows so far."""

    bundle: vitlab.Bundle
    data: Path
    out: Path
    minutes: float
    epochs: float
    rows: list[Row]

    @property
    def weights(self) -> str:
        """A short name of the bundle's tensors."""
        tensors = self.bundle.model.state_dict().values()
        return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:12]

    def choose(self, name: str, start: str) -> dict[str, Any]:
        """The options of a (case, start) that score best on held-out pictures."""
        name, start = CASES[name].options_of or name, start.partition("-")[0]
        best = {option: values[0] for option, values in GRID[start].items()}
        for option, values in GRID[start].items():
            tried = {v: self.row(name, start, "held-out", 0, {**best, option: v}) for v in values}
            best[option] = max(tried, key=lambda value: float(tried[value]["top1"]))
        return best

    def row(self, name: str, start: str, part: str, seed: int, options: dict[str, Any]) -> Row:
        """A run's row: found among the results, or else the run is done and its row added."""
        case, minutes = CASES[name], self.minutes * (1 if part == "test" else SHORTER)
        equal_epochs = case.equal == "epochs"
        length = f"{self.epochs:g} epochs" if equal_epochs else f"{minutes:g} min"
        weights = "" if start == "scratch" else self.weights
        what = (name, start, weights, length, part, seed, *options.values())
        key = dict(zip(KEY, map(str, what), strict=True))
        for row in self.rows:
            if key.items() <= row.items():
                return row
        lasts = {"epochs": self.epochs} if equal_epochs else {"budget": length}
        augment = AUGMENT[options["augment"]]
        row = key | self.run(
            case, key, seed=seed, lr=options["lr"], layer_decay=options["layer_decay"],
            **augment, **lasts,
        )  # fmt: skip
        self.rows.append(row)
        write(self.out, self.rows)
        print(f"{', '.join(filter(None, key.values()))}: {float(row['top1']):.2%}", flush=True)
        return row

    def run(self, case: Case, key: Row, **options: Any) -> Row:
        """Train, or go on, and score once; the folder stays, without start and checkpoints."""
        from vitlab.data import sources

        train, test = parts_of(self.data, case.pictures)
        if key["part"] == "held-out":
            train, test = sources.hold_out(train, HELD_OUT, seed=0)
        folder = self.out / "runs" / "-".join(filter(None, key.values())).replace(" ", "")
        begun, run = folder / "start", folder / "run"
        vitlab.save(begin(self.bundle, key["start"], case.size, options["seed"]), begun)
        config = vitlab.TrainConfig(from_=begun, out=run, held_out=0.0, **options)
        metrics = vitlab.evaluate(vitlab.train({"train": train}, config), test)
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        last = [line for line in map(json.loads, lines) if line["kind"] == "train"][-1]
        shutil.rmtree(begun)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)  # gone, if it was cut right here
        values = (metrics.top1, *metrics.top1_interval, metrics.n, last["step"] * config.batch,
                  last["epoch"], last["images_per_second"])  # fmt: skip
        return dict(zip(FOUND, map(str, values), strict=True))


# Results ---------------------------------------------------------------------------------------


def kept(out: Path) -> list[Row]:
    """The rows of results.csv; none where there is no such file."""
    path = out / "results.csv"
    return list(csv.DictReader(path.read_text("utf-8").splitlines())) if path.exists() else []


def pairs(pattern: str = "*") -> list[tuple[str, str]]:
    """Every (case, start) that a pattern of case/start matches."""
    every = [(name, start) for name, case in CASES.items() for start in case.starts]
    return [pair for pair in every if fnmatch.fnmatch("/".join(pair), pattern)]


def point(values: Sequence[float], alone: drawing.Point) -> drawing.Point:
    """Mean of several seeds and its 95 % interval; of one seed, `alone`."""
    from vitlab.training.selection import mean_interval

    if len(values) == 1:
        return alone
    mean, (low, high) = mean_interval(list(values))
    return mean, max(0.0, low), min(1.0, high)


def write(out: Path, rows: Sequence[Row]) -> None:
    """results.csv, then table.md and transfer.svg, where the seeds of a (case, start) are one."""
    from vitlab.data.writing import write_text

    text = io.StringIO()
    writer = csv.DictWriter(text, (*KEY, *FOUND), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(out / "results.csv", text.getvalue())
    tests: dict[tuple[str, ...], list[Row]] = {}
    for pair in pairs():
        for row in rows:
            if (row["case"], row["start"]) == pair and row["part"] == "test":
                tests.setdefault((*pair, row["length"], row["weights"]), []).append(row)
    head = ("pictures", "start", "each run", "accuracy", "95 % interval", "seeds", "test pictures",
            "images seen", "epochs", "chosen")  # fmt: skip
    table = [head, ("---",) * len(head)]
    groups: dict[tuple[str, str], list[tuple[str, drawing.Point]]] = {}
    for (name, start, length, _), seeds in tests.items():
        first, title = seeds[0], f"{CASES[name].pictures}, {CASES[name].size} px"
        numbers = [[float(row[field]) for row in seeds] for field in FOUND[:6]]
        share, low, high = point(numbers[0], (numbers[0][0], numbers[1][0], numbers[2][0]))
        n, images, epochs = map(statistics.fmean, numbers[3:])
        decay = f", layer decay {first['layer_decay']}" if start != "scratch" else ""
        table.append((
            title, STARTS[start], length, f"{share:.2%}", f"{low:.2%} to {high:.2%}",
            f"{len(seeds)}", f"{n:,.0f}", f"{images:,.0f}", f"{epochs:.1f}",
            f"lr {first['lr']}, {first['augment']}{decay}",
        ))  # fmt: skip
        groups.setdefault((title, f"{length} each"), []).append((start, (share, low, high)))
    if groups:
        title = "Accuracy on test pictures, with 95 % intervals"
        lines = "".join(f"| {' | '.join(row)} |\n" for row in table)
        write_text(out / "table.md", lines)
        write_text(out / "transfer.svg", drawing.dots(title, STARTS, groups))


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 2: it cannot be; 128 and more: stopped by a signal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", help="a bundle, a run, a file, or a name")
    parser.add_argument("--data", type=Path, help="the folder of the zips")
    parser.add_argument("--minutes", type=float, default=10.0, help="of training, each run")
    parser.add_argument("--epochs", type=float, default=2.0, help="of the runs of equal epochs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of case/start")
    parser.add_argument("--out", type=Path, default=Path("runs/transfer"))
    parser.add_argument("--table", action="store_true", help="only show what results.csv says")
    o = parser.parse_args(argv)
    rows, wanted = kept(o.out), pairs(o.only)
    if not o.table and not (o.weights and o.data):
        parser.error("give --weights and --data, or --table")
    if o.table and not rows:
        parser.error(f"--table: there is no {o.out / 'results.csv'}")
    if not wanted:
        parser.error(f"--only {o.only}: none of {', '.join(map('/'.join, pairs()))}")
    if o.table:
        write(o.out, rows)
        return 0
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads
    from vitlab.training.loop import Stopped

    try:
        o.out.mkdir(parents=True, exist_ok=True)
        work = Work(bundle=vitlab.load(o.weights), data=o.data, out=o.out, minutes=o.minutes,
                    epochs=o.epochs, rows=rows)  # fmt: skip
        for seed in range(o.seeds):  # the first seed of everything first: a whole table soon
            for name, start in wanted:
                work.row(name, start, "test", seed, work.choose(name, start))
    except Stopped as e:
        print(f"transfer.py: {e}; the same command resumes", file=sys.stderr)
        return 128 + e.number
    except (ValueError, OSError) as e:
        print(f"transfer.py: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
