"""From a stage of a pre-training to the bundle that ships, its card, its log and its picture.

    python bench/release.py tiny-imagenet-64.zip runs/nano-48 --name vit-nano8

The weights are rounded to half precision, and what is then left of them is scored on the `val`
part: that is the figure of the card. The log keeps the stages before this one; this one, where it
was there already, is written anew. Needs `pip install 'vitlab[bench]'`.
"""

import argparse
import csv
import json
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

import vitlab
from vitlab.models.cost import macs, parameters
from vitlab.weights import labels

ROOT = Path(__file__).parents[1]
WORDS = ("stage", "kind", "weights")
COLUMNS = ("stage", "size", "kind", "step", "epochs", "images", "hours", "pflop", "lr", "loss",
           "weights", "top1", "top5")  # fmt: skip
CARD = """---
library_name: vitlab
pipeline_tag: image-classification
tags: [vision-transformer, image-classification]
license: apache-2.0
---

# {name}

A plain Vision Transformer with patches of 8 x 8 for images of {size} x {size}, {parameters:,}
parameters: small enough to come with the package, and to be fine-tuned in minutes without a GPU.

    vitlab predict {name} picture.jpg
    vitlab train photos/ --from {name} --recipe layer-decay --out runs/mine

**Accuracy** {top1:.2%} of the {n:,} validation pictures of Tiny-ImageNet-200 (95 % interval
{low:.2%} to {high:.2%}), top-5 {top5:.2%}, of these very weights: the moving average of the last
stage, rounded to half precision. They were not selected by that score; shape and mixing were
chosen by that of short runs (`docs/pretraining.md`).

**Data** The training part of Tiny-ImageNet-200: 100,000 pictures of 200 classes, 64 x 64, a part of
ImageNet and under ImageNet's terms (research, no republishing of pictures). None of them is in
this package. The picture file used here was stored anew as WebP of quality 50.

**Training** from scratch by supervised learning, {images:,} pictures seen in {hours:.1f} hours on
two CPU cores in bfloat16, {pflop:.2f} PFLOP (6 x multiply-accumulates of one forward pass x
pictures).

{stages}

Recipes: `nano-pretrain`, `nano-pretrain-48` and `nano-pretrain-64`, one a stage. Every line of the
log is in `docs/pretraining/`.

**Limits** It knows 200 things, from one collection of the web with its habits and gaps, at a
resolution where fine detail is gone. Its probabilities are those of softmax with smoothed labels
and mixed pictures, and not calibrated. Use it to start from, not to decide about people.
"""


def read(log: Path) -> list[dict[str, Any]]:
    """The lines of a log as they were written."""
    if not log.exists():
        return []
    with log.open(newline="") as file:
        return [
            {k: v if k in WORDS else json.loads(v) for k, v in line.items() if v}
            for line in csv.DictReader(file)
        ]


def log_of(run: Path, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every line of the stage, with what it and the stages before had spent until then."""
    asked = yaml.safe_load((run / "run.yaml").read_text())["asked"]
    cost = 6 * macs(vitlab.load(run).model.config) / 1e15
    past = before[-1] if before else dict.fromkeys(("images", "hours", "pflop", "epochs"), 0)
    lines = []
    spent = seconds = 0.0
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        seen = line["step"] * asked["batch"]
        if line["kind"] == "train":  # a resumed run counts anew
            spent += (line["seconds"] - seconds * (line["seconds"] > seconds)) / 3600
            seconds = line["seconds"]
        lines.append({
            "stage": run.name, "size": asked["size"][0],
            **{k: line[k] for k in COLUMNS if k in line},
            "epochs": round(past["epochs"] + line["epoch"], 4),
            "images": past["images"] + seen,
            "hours": round(past["hours"] + spent, 4),
            "pflop": round(past["pflop"] + cost * seen, 4),
        })  # fmt: skip
    return lines


def told(lines: list[dict[str, Any]]) -> str:
    """A line of the card for each stage."""
    text = []
    hours = epochs = 0.0
    for stage in dict.fromkeys(line["stage"] for line in lines):
        last = [x for x in lines if x["stage"] == stage and x["kind"] == "eval"][-1]
        now = last["hours"], last["epochs"]
        text.append(
            f"- {last['size']} x {last['size']}: {now[1] - epochs:.0f} epochs,"
            f" {now[0] - hours:.1f} hours, then {last['top1']:.2%}"
        )
        hours, epochs = now
    return "\n".join(text)


def draw(lines: list[dict[str, Any]], file: Path) -> None:
    """Accuracy and learning rate over hours, stages apart."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 4.5), height_ratios=(3, 1), layout="constrained"
    )
    for i, stage in enumerate(dict.fromkeys(line["stage"] for line in lines)):
        of = [line for line in lines if line["stage"] == stage]
        for weights, style in (("last", ":"), ("ema", "-")):
            scored = [x for x in of if x["kind"] == "eval" and x["weights"] == weights]
            if scored:
                above.plot([x["hours"] for x in scored], [100 * x["top1"] for x in scored], style,
                           color=f"C{i}", label=f"{stage}, {weights} weights")  # fmt: skip
        trained = [x for x in of if x["kind"] == "train"]
        below.plot([x["hours"] for x in trained], [x["lr"] for x in trained], color=f"C{i}")
    above.set_ylabel("top-1 of val, %")
    above.legend(fontsize="small")
    below.set(xlabel="hours on two CPU cores", ylabel="learning rate", ylim=0)
    for axis in (above, below):
        axis.grid(alpha=0.3)
    figure.savefig(file)


def main() -> None:
    """Write the bundle, and the log beside the docs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec")
    parser.add_argument("stage", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--assets", type=Path, default=ROOT / "vitlab" / "assets")
    parser.add_argument("--log", type=Path, default=ROOT / "docs" / "pretraining")
    a = parser.parse_args()
    log = a.log / f"{a.name}.csv"
    lines = list(takewhile(lambda line: line["stage"] != a.stage.name, read(log)))
    lines += log_of(a.stage, lines)
    last = vitlab.load(a.stage)
    for tensor in last.model.state_dict().values():
        tensor.copy_(tensor.half())
    metrics = vitlab.evaluate(last, a.spec, split="val").summary()
    kept = ("n", "top1", "top1_interval", "top5")
    metrics = {"scored_on": f"{Path(a.spec).name} val", **{k: metrics[k] for k in kept}}
    words = labels.translate(last.classes, labels.imagenet(1000))
    card = replace(
        last.card, metrics=metrics, data={"spec": Path(a.spec).name, "split": "val", "seed": 0},
        source={"format": "vitlab", "sha256": None, "licence": "Apache-2.0"},
    )  # fmt: skip
    folder = a.assets / a.name
    vitlab.save(replace(last, classes=words, card=card, model=last.model.half()), folder)
    low, high = metrics["top1_interval"]
    (folder / "README.md").write_text(CARD.format(
        name=a.name, parameters=parameters(last.model.config), low=low, high=high,
        stages=told(lines), **lines[-1] | metrics,
    ))  # fmt: skip
    a.log.mkdir(parents=True, exist_ok=True)
    with log.open("w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS)
        writer.writeheader()
        writer.writerows(lines)
    draw(lines, a.log / f"{a.name}.svg")
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
