"""Loading speed: pictures a second of vitlab's loader and torchvision's, model apart.

    python bench/load_speed.py --rounds 5

500 x 375 JPEGs are decoded, cropped at random, resized to 224 px (bicubic), mirrored, collated and
normalised to float32, by as many worker processes on both sides. Rounds are interleaved; best and
median are reported. The random numbers differ, their law does not.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from pictures import folder
from torchvision import datasets
from torchvision.transforms import v2

from vitlab.data import loader
from vitlab.data.augment import Augment
from vitlab.data.preprocess import Preprocess, normalise
from vitlab.data.sources import open_spec

SIZE, BATCH, CROP = 224, 32, (0.35, 1.0)


def vitlab(spec: str, workers: int, batches: int) -> Iterator[torch.Tensor]:
    preprocess = Preprocess(size=(SIZE, SIZE))
    for batch in loader.train_batches(
        open_spec(spec)["all"], Augment(crop=CROP), preprocess,
        batch=BATCH, seed=0, start=0, stop=batches, workers=workers,
    ):  # fmt: skip
        yield normalise(preprocess, batch.images)


def torchvision(spec: str, workers: int, batches: int) -> Iterator[torch.Tensor]:
    interpolation = v2.InterpolationMode.BICUBIC
    transform = v2.Compose([
        v2.RandomResizedCrop(SIZE, scale=CROP, interpolation=interpolation),
        v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.5] * 3),
    ])  # fmt: skip
    pictures = datasets.ImageFolder(spec, transform)
    drawn = torch.utils.data.RandomSampler(pictures, replacement=True, num_samples=BATCH * batches)
    for images, _ in torch.utils.data.DataLoader(
        pictures, batch_size=BATCH, sampler=drawn, num_workers=workers
    ):
        yield images


def speed(stream: Iterator[torch.Tensor], warm: int) -> float:
    """Pictures a second after the first batches, in which workers start."""
    count = 0
    began = 0.0
    for i, images in enumerate(stream):
        if i == warm:
            began = time.perf_counter()
        elif i > warm:
            count += len(images)
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pictures", type=int, default=512)
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    at = Path(tempfile.gettempdir()) / f"vitlab-bench-{options.pictures}"
    spec = str(folder(at, options.pictures))
    print("| workers | loader | best images/s | median images/s | vitlab / torchvision (median) |")
    print("| --- | --- | --- | --- | --- |")
    for workers in options.workers:
        warm = max(2, 4 * workers)
        rates: dict[str, list[float]] = {"vitlab": [], "torchvision": []}
        for _ in range(options.rounds):
            for name, make in (("vitlab", vitlab), ("torchvision", torchvision)):
                stream = make(spec, workers, options.batches + warm)
                rates[name].append(speed(stream, warm))
        median = {name: statistics.median(values) for name, values in rates.items()}
        for name, values in rates.items():
            ratio = f"{median['vitlab'] / median['torchvision']:.2f}" if name == "vitlab" else ""
            print(f"| {workers} | {name} | {max(values):.0f} | {median[name]:.0f} | {ratio} |")


if __name__ == "__main__":
    main()
