"""Fine-tune by each preset, on the same pictures and weights; prints the table of the docs.

    python bench/finetuning.py few.csv WEIGHTS --epochs 3 --size 126 --test imagenette-128.zip

Accuracy is that of the pictures of `--test`, which take no part in the training, scored once;
minutes are those of the training, memory is the process's peak (of the GPU, where there is one).
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PRESETS = ("head-first", "layer-decay", "lora", "paper")


def one(preset: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train and score in this process."""
    import torch

    import vitlab
    from vitlab.training import recipes

    out = Path(arguments.out) / preset
    options: dict[str, Any] = {"from_": arguments.weights, "out": str(out), "overwrite": True,
                               "epochs": arguments.epochs}  # fmt: skip
    for name in ("batch", "accumulate", "size"):
        if getattr(arguments, name):
            options[name] = getattr(arguments, name)
    began = time.perf_counter()
    bundle = vitlab.train(arguments.spec, recipes.configure(preset, **options))
    minutes = (time.perf_counter() - began) / 60
    metrics = bundle.card.metrics
    if arguments.test:
        metrics = vitlab.evaluate(bundle, arguments.test, batch=64).summary()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    return {"top1": metrics["top1"], "interval": metrics["top1_interval"], "minutes": minutes,
            "gigabytes": peak / 1e9}  # fmt: skip


def main() -> None:
    """Each preset in a process of its own, so that memory is its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec")
    parser.add_argument("weights")
    parser.add_argument("--test", help="pictures to score; else the validation part's score")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=0)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--out", default="runs/finetuning")
    parser.add_argument("--preset", choices=PRESETS)
    arguments = parser.parse_args()
    if arguments.preset:
        print(json.dumps(one(arguments.preset, arguments)))
        return
    print("| recipe | accuracy | 95 % interval | minutes | GB |\n| --- | --- | --- | --- | --- |")
    for preset in PRESETS:
        command = [sys.executable, __file__, *sys.argv[1:], "--preset", preset]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True,
                              env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ})  # fmt: skip
        row = json.loads(done.stdout.splitlines()[-1])
        low, high = row["interval"]
        print(f"| `{preset}` | {row['top1']:.2%} | {low:.2%} to {high:.2%} |"
              f" {row['minutes']:.1f} | {row['gigabytes']:.1f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
