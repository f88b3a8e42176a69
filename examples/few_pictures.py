"""A table of a few training pictures a class, drawn by a seed.

    python examples/few_pictures.py photos/ few.csv --per-class 100

The table lies where it is written and names the pictures from there; `vitlab train few.csv` trains
on them alone. Pictures of `val/` and `test/` are never in it.
"""

import argparse
import csv
import os
from pathlib import Path

import numpy as np

from vitlab.data.sources import open_spec


def draw(folder: Path, table: Path, count: int, seed: int) -> list[tuple[str, str]]:
    """Rows (path from the table, label): `count` pictures of each class, in the source's order."""
    if not folder.is_dir():
        raise SystemExit(f"{folder}: is no folder; unpack an archive first")
    parts = open_spec(str(folder))
    source = parts.get("train") or parts["all"]
    random = np.random.default_rng(seed)
    rows = []
    for label, name in enumerate(source.classes):
        all_of_it = np.flatnonzero(source.labels == label)
        if len(all_of_it) < count:
            raise SystemExit(f"{folder}: class {name} has {len(all_of_it)} pictures, not {count}")
        for i in sorted(random.choice(all_of_it, count, replace=False)):
            rows.append((os.path.relpath(folder / source.id(int(i)), table.parent), name))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="pictures in class folders")
    parser.add_argument("table", type=Path, help="CSV to write")
    parser.add_argument("--per-class", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rows = draw(given.folder, given.table, given.per_class, given.seed)
    with open(given.table, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    print(f"{given.table}: {len(rows)} pictures")


if __name__ == "__main__":
    main()
