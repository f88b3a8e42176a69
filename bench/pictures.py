"""Folders of made-up photographs for the benchmarks: 500 x 375 JPEGs that decode like real ones."""

from pathlib import Path

import numpy as np
from PIL import Image


def folder(root: Path, count: int, classes: int = 10) -> Path:
    """`count` JPEGs (quality 90, about 60 kB each) in class folders below `root`, made once."""
    if (root / "done").exists():
        return root / "photos"
    rng = np.random.default_rng(0)
    for i in range(count):
        at = root / "photos" / f"class{i % classes}"
        at.mkdir(parents=True, exist_ok=True)
        layers = [  # detail at several scales, as photographs have it
            np.asarray(
                Image.fromarray(rng.integers(0, 256, (375 // s + 1, 500 // s + 1, 3), np.uint8))
                .resize((500, 375), Image.Resampling.BICUBIC),
                dtype=np.float32,
            )
            for s in (125, 25, 5)
        ]  # fmt: skip
        picture = 0.55 * layers[0] + 0.3 * layers[1] + 0.15 * layers[2]
        Image.fromarray(picture.astype(np.uint8)).save(at / f"{i}.jpg", quality=90)
    (root / "done").touch()
    return root / "photos"
