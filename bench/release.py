"""From the stages of a pre-training to the bundle that ships, its card, its log and its picture.

    python bench/release.py tiny-imagenet-64.zip runs/nano-32 runs/nano-48 --name vit-nano8

The stages are runs in their order, each `--from` the one before. The last one's weights are rounded
to half precision, and what is then left of them is scored on the `val` part: that is the figure of
the card. The log has all lines of all stages. Needs `pip install 'vitlab[bench]'`.
"""

import argparse
import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

import vitlab
from vitlab.models.cost import macs, parameters
from vitlab.weights import labels

ROOT = Path(__file__).parents[1]
COLUMNS = ("stage", "kind", "step", "epochs", "images", "hours", "pflop", "lr", "loss", "weights",
           "top1", "top5")  # fmt: skip
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

Recipe: `nano-pretrain`. Every line of the log is in `docs/pretraining/`.

**Limits** It knows 200 things, from one collection of the web with its habits and gaps, at a
resolution where fine detail is gone. Its probabilities are those of softmax with smoothed labels
and mixed pictures, and not calibrated. Use it to start from, not to decide about people.
"""


def log_of(runs: list[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every line of every stage with what was spent until then, and a summary of each stage."""
    lines: list[dict[str, Any]] = []
    stages: list[dict[str, Any]] = []
    images = hours = pflop = epochs = 0.0
    for run in runs:
        asked = yaml.safe_load((run / "run.yaml").read_text())["asked"]
        cost = 6 * macs(vitlab.load(run).model.config) / 1e15
        text = (run / "metrics.jsonl").read_text().splitlines()
        spent = seconds = 0.0
        for line in map(json.loads, text):
            seen = line["step"] * asked["batch"]
            if line["kind"] == "train":  # a resumed run counts anew
                spent += (line["seconds"] - seconds * (line["seconds"] > seconds)) / 3600
                seconds = line["seconds"]
            lines.append({
                "stage": run.name, **{k: line[k] for k in COLUMNS if k in line},
                "epochs": round(epochs + line["epoch"], 4), "images": int(images + seen),
                "hours": round(hours + spent, 4), "pflop": round(pflop + cost * seen, 4),
            })  # fmt: skip
        last = [line for line in lines if line["stage"] == run.name and line["kind"] == "eval"][-1]
        size = asked["size"][0]
        stages.append({"size": size, "epochs": last["epochs"] - epochs, "hours": spent,
                       "top1": last["top1"]})  # fmt: skip
        images, hours, pflop, epochs = (last[k] for k in ("images", "hours", "pflop", "epochs"))
    return lines, stages


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
    parser.add_argument("stages", nargs="+", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--assets", type=Path, default=ROOT / "vitlab" / "assets")
    parser.add_argument("--log", type=Path, default=ROOT / "docs" / "pretraining")
    a = parser.parse_args()
    lines, stages = log_of(a.stages)
    last = vitlab.load(a.stages[-1])
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
    told = "\n".join(
        f"- {s['size']} x {s['size']}: {s['epochs']:.0f} epochs, {s['hours']:.1f} hours, then"
        f" {s['top1']:.2%}" for s in stages
    )  # fmt: skip
    config = last.model.config
    (folder / "README.md").write_text(CARD.format(
        name=a.name, size=config.image[0], parameters=parameters(config), low=low, high=high,
        stages=told, **lines[-1] | metrics,
    ))  # fmt: skip
    a.log.mkdir(parents=True, exist_ok=True)
    with open(a.log / f"{a.name}.csv", "w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS)
        writer.writeheader()
        writer.writerows(lines)
    draw(lines, a.log / f"{a.name}.svg")
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
