"""Small things to train and score: pictures that a tiny model tells apart within seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vitlab as vitlab_package
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources import Source, from_arrays
from vitlab.models.resnet import BiT, BiTConfig
from vitlab.models.vit import ViT, ViTConfig
from vitlab.training.config import TrainConfig
from vitlab.weights.bundle import Bundle

CLASSES = ("cat", "dog", "eel", "fox")
SHAPE = {"patch": 8, "width": 24, "depth": 2, "heads": 2, "mlp_width": 48}
FLAGS = [
    "--model", "vit-ti16", "--size", "16", "--patch", "8", "--width", "24", "--depth", "2",
    "--heads", "2", "--mlp-width", "48", "--precision", "float32",
]  # fmt: skip
# Everything that draws random numbers or keeps a state of its own.
RICH: dict[str, Any] = {
    "dropout": 0.1, "drop_path": 0.1, "mixup": 0.2, "cutmix": 0.5, "randaugment": (2, 10),
    "erase": 0.3, "ema": 0.99, "accumulate": 2,
}  # fmt: skip
TIMING = ("seconds", "images_per_second", "waiting")  # what two runs may differ in


def pictures(n: int = 40, classes: int = 4, size: int = 16) -> tuple[np.ndarray, list[str]]:
    """n noisy pictures [n, size, size, 3], a colour a class, and their labels."""
    rng = np.random.default_rng(0)
    colours = np.array([[200, 40, 40], [40, 200, 40], [40, 40, 200], [200, 200, 40]])
    labels = [i % classes for i in range(n)]
    noise = rng.integers(-40, 40, (n, size, size, 3))
    return (colours[labels][:, None, None] + noise).clip(0, 255).astype(np.uint8), [
        CLASSES[i] for i in labels
    ]


def source(n: int = 40, classes: int = 4, size: int = 16) -> Source:
    images, labels = pictures(n, classes, size)
    return from_arrays(images, labels, CLASSES[:classes])


def write_folder(root: Path, n: int = 40, classes: int = 4, size: int = 16) -> Path:
    """The same pictures as PNG files in class folders."""
    for i, (image, label) in enumerate(zip(*pictures(n, classes, size), strict=True)):
        (root / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / label / f"{i:03d}.png")
    return root


def config(out: Path, **changes: Any) -> TrainConfig:
    """A run of a second or less."""
    options = {
        "model": "vit-ti16", "size": (16,), **SHAPE, "steps": 12, "batch": 8, "threads": 1,
        "held_out": 0.2, "precision": "float32", "out": str(out),
    }  # fmt: skip
    return TrainConfig(**{**options, **changes})


def bundle(classes: int = 4, image: int = 16, **changes: Any) -> Bundle:
    """A model with random weights everywhere, the head included."""
    names = [f"class {i}" for i in range(classes)] if classes > len(CLASSES) else CLASSES[:classes]
    shape = {**SHAPE, "image": image, "classes": classes, **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ViT(ViTConfig(**shape))
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.3)
    return Bundle(
        model=model.eval(), preprocess=Preprocess(size=model.config.image), classes=tuple(names)
    )


def resnet(classes: int = 4, image: int = 16) -> Bundle:
    """A BiT ResNet of two units."""
    config = BiTConfig(image=(image, image), layers=(1, 1), width=8, groups=4, classes=classes)
    return Bundle(
        model=BiT(config).eval(), preprocess=Preprocess(size=(image, image)),
        classes=CLASSES[:classes],
    )  # fmt: skip


def lines(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on time."""
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    parsed = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMING} for line in parsed]


def same_run(one: Path, other: Path) -> None:
    """Both runs ended with the same bits: weights, optimizer, average, state, history."""
    assert lines(one) == lines(other)
    weights = [run / "model.safetensors" for run in (one, other)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    last = [sorted((run / "checkpoints").glob("*.safetensors"))[-1] for run in (one, other)]
    assert last[0].name == last[1].name
    assert last[0].read_bytes() == last[1].read_bytes()
    configs = [(run / "config.json").read_text() for run in (one, other)]
    assert configs[0] == configs[1]
    assert not [*other.glob(".*.part"), *other.glob("checkpoints/.*.part")]


def environment(**more: str) -> dict[str, str]:
    """Of a child process: it finds this module and the vitlab that is tested."""
    paths = [Path(__file__).parent, Path(vitlab_package.__file__).parents[1]]
    return {
        **os.environ, "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": os.pathsep.join(map(str, paths)), **more,
    }  # fmt: skip


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """`vitlab ...` in a process of its own."""
    command = [sys.executable, "-m", "vitlab", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, text=True, env=environment(), **pipes)


def vitlab(*arguments: object, **options: Any) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `vitlab ...`."""
    with start(*arguments, **options) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err
