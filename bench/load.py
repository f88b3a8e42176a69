"""Loading speed and memory: ViT-B/16 from each format, in a process of its own.

    python bench/load.py --model vit-b16 --rounds 3

The model is written once in every format, then read: seconds of `formats.read` (sha256 and the
check for NaN included), and the peak of resident memory above that after imports, as a share of
the file. The file is in the page cache: what is measured is vitlab, not the disk. The median of
the rounds is reported.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILES = {  # what is written -> format
    "vitlab/": "vitlab", "google.npz": "google", "big_vision.npz": "big_vision",
    "timm.safetensors": "timm", "timm.pth": "timm", "huggingface/": "huggingface",
    "torchvision.pth": "torchvision",
}  # fmt: skip


def write(model: str, folder: Path) -> None:
    import vitlab
    from vitlab.data.preprocess import Preprocess
    from vitlab.weights import formats

    made = vitlab.create(model, activation="gelu").eval()
    classes = tuple(map(str, range(made.config.classes)))
    preprocess = Preprocess(size=made.config.image)
    bundle = vitlab.Bundle(model=made, preprocess=preprocess, classes=classes)
    for name, form in FILES.items():
        formats.write(bundle, folder / name, form)


def memory(word: str) -> float:
    """Of this process, in MiB (Linux)."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith(word))


def measure(path: Path) -> dict[str, float]:
    import torch

    from vitlab.weights import formats

    torch.zeros(8).sum()
    before, began = memory("VmRSS"), time.perf_counter()
    formats.read(path)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak": memory("VmHWM") - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit-b16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(options.model, folder)
        for file in FILES:
            path = folder / file
            parts = [path] if path.is_file() else [*path.glob("*.safetensors")]
            size = sum(p.stat().st_size for p in parts) / 2**20
            command = [sys.executable, __file__, "--measure", str(path)]
            rounds = [
                json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
                for _ in range(options.rounds)
            ]
            seconds = statistics.median(r["seconds"] for r in rounds)
            peak = statistics.median(r["peak"] for r in rounds)
            print(f"{file:<18} {seconds:5.2f} s  peak {peak / size:4.2f} x of {size:.0f} MiB")


if __name__ == "__main__":
    main()
