"""A control: the same run on shuffled labels must stay at chance, or something leaks.

    python bench/shuffled_labels.py photos.zip --budget 10min --out runs/shuffled

Labels are shuffled within the training part; validation keeps its own.
"""

import argparse
from dataclasses import replace

import numpy as np

import vitlab
from vitlab.data.sources import open_spec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", help="pictures with a train and a val part")
    parser.add_argument("--model", default="vit-ti16")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--budget", default="10min")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()

    parts = open_spec(options.spec)
    labels = np.random.default_rng(0).permutation(parts["train"].labels)
    parts = {**parts, "train": replace(parts["train"], labels=labels)}
    config = vitlab.TrainConfig(
        model=options.model, size=(options.size,), budget=options.budget, out=options.out
    )
    metrics = vitlab.train(parts, config).card.metrics
    low, high = metrics["top1_interval"]
    chance = 1 / len(parts["train"].classes)
    verdict = "at chance" if low <= chance <= high else "NOT at chance"
    print(
        f"{metrics['top1']:.2%} of {metrics['n']:,} ({low:.2%} to {high:.2%}), chance {chance:.2%}:"
        f" {verdict}"
    )


if __name__ == "__main__":
    main()
