"""Two processes of one thread against one process of two: `torchrun -m vitlab train`, and alone.

    python bench/processes.py --rounds 3

Rounds are interleaved. Reported are images a second of the steps after the first tenth, from each
run's own metrics.jsonl; pictures lie in memory, so that the engine is measured and not the disk.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = {  # batch, steps and model, for `vitlab train sample`
    "small": "--model vit-ti16 --size 28 --patch 7 --width 96 --depth 4 --heads 4 --mlp-width 192"
    " --batch 128 --steps 300 --crop none",
    "vit-s16 at 112 px": "--model vit-s16 --size 112 --batch 32 --steps 30",
}


def rate(case: str, processes: int, cores: int) -> float:
    """Images a second of one run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command = [
            sys.executable, *([*launcher, str(processes)] if processes > 1 else []),
            "-m", "vitlab", "train", "sample", *CASES[case].split(), "--held-out", "0",
            "--threads", str(cores // processes), "--workers", "0", "--out", str(out),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        record = (out / "run.yaml").read_text()
    batch = int(record.split("batch: ")[1].split()[0])
    first, last = lines[len(lines) // 10], lines[-1]
    seen = (last["step"] - first["step"]) * batch
    return float(seen / (last["seconds"] - first["seconds"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    from vitlab.training.machine import cores

    n = cores()
    print("| case | one process, images/s | as many as cores | ratio of medians |")
    print("| --- | --- | --- | --- |")
    for case in CASES:
        rates: dict[int, list[float]] = {1: [], n: []}
        for _ in range(rounds):
            for processes, found in rates.items():
                found.append(rate(case, processes, n))
        one, many = (statistics.median(found) for found in rates.values())
        shown = [f"{statistics.median(f):.0f} (best {max(f):.0f})" for f in rates.values()]
        print(f"| {case} | {shown[0]} | {shown[1]} | {many / one:.2f} |", flush=True)


if __name__ == "__main__":
    main()
