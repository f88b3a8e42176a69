"""What the features know before anything is trained: few-shot accuracy against random weights.

    python bench/few_shot.py --weights vit-nano8 --data FOLDER --out runs/transfer

The paper's closed-form probe (section 4.1) on the pre-trained features, and on those of the same
architecture with random weights; each seed draws other pictures, and other random weights. FOLDER
holds imagenette-128.zip and cifar10-12k.zip. Writes few_shot.csv, few_shot.md and few_shot.svg;
features are kept below `--out`, so that a second call goes on where the first was stopped.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import drawing
import transfer

import vitlab

SETS = ("Imagenette", "CIFAR-10")  # of transfer.SETS
SHOTS = (1, 5, 10, 25)  # pictures a class
STARTS = {"scratch": "random weights", "tuned": "pre-trained"}
FIELDS = ("pictures", "weights", "shots", "seed", "top1", "n")
Row = tuple[str, str, int, int, float, int]  # FIELDS


def measure(bundle: vitlab.Bundle, data: Path, out: Path, seeds: int) -> list[Row]:
    """Every set, start, seed and number of shots, scored on all test pictures."""
    from vitlab.data import sources
    from vitlab.evaluation import probes

    rows: list[Row] = []
    for title in SETS:
        train, test = transfer.parts_of(data, title)
        parts = (train, sources.match_classes(test, train.classes))
        for start, words in STARTS.items():
            for seed in range(seeds):
                model = transfer.begin(bundle, start, bundle.preprocess.size, seed)
                known, asked = (
                    probes.features(model, part, cache=out / "features") for part in parts
                )
                drawn = probes.few_shot_rows(known.y, seed, SHOTS)
                for shots in SHOTS:
                    probe = probes.few_shot(known, drawn[shots], len(train.classes))
                    found = probe.accuracy(asked)
                    rows.append((title, words, shots, seed, found, len(asked)))
                print(f"{title}, {words}, seed {seed}: {found:.2%} of {shots} shots", flush=True)
    return rows


def show(out: Path, rows: Sequence[Row]) -> None:
    """few_shot.csv, few_shot.md and few_shot.svg."""
    from vitlab.data.writing import write_text
    from vitlab.evaluation.metrics import wilson

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([FIELDS, *rows])
    write_text(out / "few_shot.csv", text.getvalue())
    head = ("pictures", "features", *(f"{shots} a class" for shots in SHOTS), "test pictures")
    table = [head, ("---",) * len(head)]
    panels: dict[str, dict[str, dict[int, drawing.Point]]] = {}
    for title in SETS:
        for start, words in STARTS.items():
            line, n = {}, 0
            for shots in SHOTS:
                found = [(share, n) for *key, share, n in rows if key[:3] == [title, words, shots]]
                share, n = found[0]
                alone = (share, *wilson(round(share * n), n))
                line[shots] = transfer.point([share for share, _ in found], alone)
            panels.setdefault(title, {})[start] = line
            cells = (f"{a:.2%} ({b:.2%} to {c:.2%})" for a, b, c in line.values())
            table.append((title, words, *cells, f"{n:,}"))
    title = "Accuracy in percent by pictures a class, with 95 % intervals of the seeds"
    text = "".join(f"| {' | '.join(row)} |\n" for row in table)
    write_text(out / "few_shot.md", text)
    below = "pictures a class"
    write_text(out / "few_shot.svg", drawing.curves(title, STARTS, panels, below))


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 2: it cannot be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", required=True, help="a bundle, a run, a file, or a name")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the zips")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/transfer"))
    o = parser.parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads
    try:
        o.out.mkdir(parents=True, exist_ok=True)
        show(o.out, measure(vitlab.load(o.weights), o.data, o.out, o.seeds))
    except (ValueError, OSError) as e:
        print(f"few_shot.py: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
