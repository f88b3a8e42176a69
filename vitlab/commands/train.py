"""`vitlab demo` and `vitlab train`."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tyro

from vitlab.training.config import Number, TrainConfig
from vitlab.training.machine import talks

FROM_SCRATCH = 0.8720  # of the same 2,000 pictures: `vitlab demo --scratch` on two CPU cores
# Chosen on a tenth held out of the sample's training part, to take two minutes on two CPU cores.
TUNED: dict[str, Any] = {
    "from_": "vit-nano8", "size": (32,), "lr": 2e-3, "layer_decay": 0.75, "weight_decay": 0.05,
    "epochs": 8,
}  # fmt: skip
SCRATCH: dict[str, Any] = {
    "model": "vit-ti16", "size": (28,), "patch": 7, "width": 96, "depth": 4, "heads": 4,
    "mlp_width": 192, "lr": 3e-3, "weight_decay": 0.1, "epochs": 28,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Fine-tune the model that ships on the embedded sample, and show what it learned."""

    scratch: bool = False  # a model of the sample's own size instead, from random weights
    out: str = "runs/demo"  # folder of the run; an older demo there is replaced
    epochs: Number = None  # passes over the training part: 8, from scratch 28
    debug: bool = False  # show where an error comes from


@dataclass(frozen=True, kw_only=True)
class Train(TrainConfig):
    """Train a model on labelled pictures; the same command resumes an unfinished run."""

    spec: tyro.conf.Positional[str]  # photos/, photos.zip, labels.csv, cifar10, hf:org/name, sample
    json: bool = False  # print the result as one JSON object
    debug: bool = False  # show where an error comes from


def demo(options: Demo) -> int:
    from vitlab import runs

    kind = SCRATCH if options.scratch else TUNED
    given = {} if options.epochs is None else {"epochs": options.epochs}
    config = TrainConfig(
        **kind | given, batch=128, crop=None, mixup=0.1, cutmix=1.0, held_out=0.02,
        out=options.out, overwrite=True,
    )  # fmt: skip
    bundle = runs.train("sample", config)
    scores = runs.evaluate_into(bundle, "sample", "test", Path(options.out), batch=250)
    print(f"\n{scores.metrics.line()}")
    if not options.scratch:
        print(f"({SCRATCH['epochs']} epochs from random weights, --scratch: {FROM_SCRATCH:.2%})")
    print(f"report: {options.out}/report.html\n\ntry next:")
    print(f"  vitlab predict {options.out} PICTURE...")
    print(f"  vitlab evaluate {options.out} fashion-mnist --out {options.out}-full")
    print("  vitlab train PHOTOS/ --from vit-nano8 --budget 10min --out runs/mine")
    return 0


def train(options: Train) -> int:
    from vitlab import runs

    config = TrainConfig(**{f.name: getattr(options, f.name) for f in fields(TrainConfig)})
    bundle = runs.train(options.spec, config)
    if not talks():
        return 0
    if options.json:
        print(json.dumps({"out": options.out, "metrics": bundle.card.metrics}))
    else:
        print(_score(bundle.card.metrics, options.out))
    return 0


def _score(metrics: dict[str, Any], out: str | None) -> str:
    if not metrics:
        return f"trained without validation pictures: {out}"
    low, high = metrics["top1_interval"]
    seeds = metrics.get("seeds", {})
    if "mean" in seeds:
        of_all = [f"{seeds['mean']:.2%}", *(f"{bound:.2%}" for bound in seeds["interval"])]
        return (
            f"accuracy of {len(seeds['seed'])} seeds {of_all[0]} (95 % interval {of_all[1]} to"
            f" {of_all[2]}), of the first {metrics['top1']:.2%} on {metrics['scored_on']}: {out}"
        )
    return (
        f"accuracy {metrics['top1']:.2%} on {metrics['n']:,} pictures of {metrics['scored_on']}"
        f" (95 % interval {low:.2%} to {high:.2%}); report: {out}/report.html"
    )
