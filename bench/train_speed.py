"""Training speed: vitlab, a plain loop with timm, and transformers.Trainer, side by side.

    python bench/train_speed.py --case small --rounds 5
    python bench/train_speed.py --case photos --rounds 5

The same model, batch, optimizer, augmentation and pictures for all. Each measurement is a process
of its own; rounds are interleaved, since machines are noisy. Peers run twice: as they come, and
with our precision, threads, wait policy and workers. Reported are images a second of the steps
after warming up (best and median of the rounds) and the peak of the process tree's memory (PSS).

Needs: pip install timm transformers accelerate psutil
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pictures import folder

CASES: dict[str, dict[str, Any]] = {
    "small": {  # 28 px, 16 patches, in memory
        "size": 28, "patch": 7, "width": 96, "depth": 4, "heads": 4, "mlp_width": 192,
        "batch": 128, "warm": 20, "steps": 150, "crop": None,
    },
    "photos": {  # ViT-S/16 from 500 x 375 JPEGs on disk
        "size": 224, "patch": 16, "width": 384, "depth": 12, "heads": 6, "mlp_width": 1536,
        "batch": 32, "warm": 2, "steps": 6, "crop": (0.35, 1.0),
    },
}  # fmt: skip
CONTESTANTS = ["vitlab", "timm", "trainer", "timm+", "trainer+"]  # +: given our settings


# What runs in each process ------------------------------------------------------------------------


def vitlab(case: dict[str, Any], spec: str) -> Iterator[None]:
    """One step an item: vitlab's own loop, as `vitlab train` sets it up."""
    from vitlab.data.sources import open_spec
    from vitlab.training import machine, run
    from vitlab.training.config import TrainConfig
    from vitlab.training.loop import batches, update

    config = TrainConfig(
        model="vit-s16", size=(case["size"],), patch=case["patch"], width=case["width"],
        depth=case["depth"], heads=case["heads"], mlp_width=case["mlp_width"],
        batch=case["batch"], crop=case["crop"], steps=10**6, label_smoothing=0.0, out="unused",
    )  # fmt: skip
    parts = open_spec(spec)
    source = parts.get("train") or parts["all"]
    job = run._prepare(config, machine.device(None), source, None, None, None)
    for step, batch in enumerate(batches(job, start=0, stop=10**6)):
        update(job, job.model, batch, step)
        yield


def pictures(case: dict[str, Any], spec: str) -> Any:
    """torchvision's way to the same pictures: a map-style set with its v2 transforms."""
    import torch
    from torchvision import datasets
    from torchvision.transforms import v2

    from vitlab.data.sources import open_spec

    steps = [
        v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.5] * 3),
    ]  # fmt: skip
    if case["crop"]:
        bicubic = v2.InterpolationMode.BICUBIC
        steps = [v2.RandomResizedCrop(case["size"], case["crop"], interpolation=bicubic), *steps]
    transform = v2.Compose(steps)
    if case["crop"]:
        return datasets.ImageFolder(spec, transform)
    from PIL import Image

    class InMemory(torch.utils.data.Dataset):  # as torchvision.datasets.FashionMNIST works
        def __init__(self) -> None:
            self.source = open_spec(spec)["train"]
            self.images = [image for image, _ in self.source]

        def __len__(self) -> int:
            return len(self.images)

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            return transform(Image.fromarray(self.images[i])), int(self.source.labels[i])

    return InMemory()


def timm(case: dict[str, Any], spec: str, ours: dict[str, Any] | None) -> Iterator[None]:
    """The loop that tutorials show."""
    import torch
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=case["size"], patch_size=case["patch"], embed_dim=case["width"],
        depth=case["depth"], num_heads=case["heads"],
        mlp_ratio=case["mlp_width"] / case["width"], num_classes=10,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    loader = torch.utils.data.DataLoader(
        pictures(case, spec), batch_size=case["batch"], shuffle=True, drop_last=True,
        num_workers=ours["workers"] if ours else 0,
        persistent_workers=bool(ours and ours["workers"]),
    )  # fmt: skip
    bf16 = bool(ours and ours["precision"] == "bf16")
    while True:
        for images, labels in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            yield


def trainer(
    case: dict[str, Any], spec: str, ours: dict[str, Any] | None, steps: int
) -> list[float]:
    """transformers.Trainer; the moments at which steps ended."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig
    from transformers import ViTForImageClassification as Classifier

    model = Classifier(ViTConfig(
        image_size=case["size"], patch_size=case["patch"], hidden_size=case["width"],
        num_hidden_layers=case["depth"], num_attention_heads=case["heads"],
        intermediate_size=case["mlp_width"], num_labels=10,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))  # fmt: skip
    moments: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            moments.append(time.perf_counter())

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        images, labels = zip(*rows, strict=True)
        return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}

    Trainer(
        model=model, train_dataset=pictures(case, spec), data_collator=collate, callbacks=[Clock()],
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=case["batch"],
            max_steps=steps, learning_rate=1e-3, weight_decay=0.05, max_grad_norm=1.0,
            save_strategy="no", report_to=[], disable_tqdm=True, remove_unused_columns=False,
            dataloader_num_workers=ours["workers"] if ours else 0, use_cpu=True,
            bf16=bool(ours and ours["precision"] == "bf16"),
        ),
    ).train()  # fmt: skip
    return moments


def measure(name: str, case: dict[str, Any], spec: str, ours: dict[str, Any]) -> float:
    """Images a second of the steps after warming up."""
    given = ours if name.endswith("+") else None
    total = case["warm"] + case["steps"]
    if name.startswith("trainer"):
        moments = trainer(case, spec, given, total)
    else:
        loop = vitlab(case, spec) if name == "vitlab" else timm(case, spec, given)
        moments = []
        for _ in range(total):
            next(loop)
            moments.append(time.perf_counter())
    return case["batch"] * case["steps"] / (moments[-1] - moments[case["warm"] - 1])


# The referee --------------------------------------------------------------------------------------


def peak_memory(process: "subprocess.Popen[str]", peak: list[float]) -> None:
    """Keep the largest PSS (MB) of a process and its children, until it ends."""
    import psutil

    while process.poll() is None:
        total = 0.0
        try:
            root = psutil.Process(process.pid)
            for member in [root, *root.children(recursive=True)]:
                total += member.memory_full_info().pss / 1e6
        except psutil.Error:
            pass
        peak[0] = max(peak[0], total)
        time.sleep(1.0)


def run(name: str, arguments: list[str], ours: dict[str, Any]) -> tuple[float, float]:
    environment = dict(os.environ)
    if name == "vitlab" or name.endswith("+"):
        environment |= {
            "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000",
            "OMP_NUM_THREADS": str(ours["threads"]),
        }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, __file__, "--worker", name, "--settings", json.dumps(ours), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    peak = [0.0]
    watch = threading.Thread(target=peak_memory, args=(process, peak))
    watch.start()
    out, err = process.communicate()
    watch.join()
    if process.returncode:
        raise SystemExit(f"{name}: {err[-2000:]}")
    return float(out.split()[-1]), peak[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, default="small")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pictures", type=int, default=512, help="JPEGs of the photos case")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    options = parser.parse_args()
    case = CASES[options.case]
    at = Path(tempfile.gettempdir()) / f"vitlab-bench-{options.pictures}"
    spec = str(folder(at, options.pictures)) if case["crop"] else "sample"
    if options.worker:
        print(measure(options.worker, case, spec, json.loads(options.settings)))
        return

    from vitlab.training import machine

    cores = machine.cores()
    where = machine.device(None)
    ours = {
        "threads": cores, "workers": max(1, cores - 1) if case["crop"] else 0,
        "precision": machine.precision(None, where),
    }  # fmt: skip
    arguments = ["--case", options.case, "--pictures", str(options.pictures)]
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTESTANTS}
    for round_ in range(options.rounds):
        turn = round_ % len(CONTESTANTS)
        for name in CONTESTANTS[turn:] + CONTESTANTS[:turn]:
            results[name].append(run(name, arguments, ours))
            print(f"round {round_ + 1} {name:<9} {results[name][-1][0]:8.1f} images/s", flush=True)
    median = {name: statistics.median(r for r, _ in rows) for name, rows in results.items()}
    print(f"\n{options.case}: {case['batch']} pictures a step, our settings: {ours}\n")
    print("| | best images/s | median images/s | vitlab / it (median) | peak PSS, MB |")
    print("| --- | --- | --- | --- | --- |")
    for name, rows in results.items():
        best, memory = max(r for r, _ in rows), max(m for _, m in rows)
        print(f"| {name} | {best:.1f} | {median[name]:.1f} | {median['vitlab'] / median[name]:.2f}"
              f" | {memory:.0f} |")  # fmt: skip


if __name__ == "__main__":
    main()
