"""`vitlab probe`: how good are features, with nothing of the model trained."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vitlab.training.config import Pool, Text, Whole


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Score the features of a model on labelled pictures: few-shot, nearest or linear."""

    bundle: tyro.conf.Positional[str]  # a bundle, run or weights of any public format
    spec: tyro.conf.Positional[str]  # the pictures: train, and test or val (else a tenth of train)
    method: Literal["fewshot", "knn", "linear"] = "fewshot"  # the probe
    shots: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N [N...]")] = (1, 5, 10, 25)
    """fewshot: pictures a class"""
    seeds: int = 3  # fewshot: drawings of these pictures
    k: int = 20  # knn: neighbours that vote
    layer: Whole = None  # tokens that leave this block, raw; -1: the last; default: what heads see
    pool: Pool = None  # of a layer: class token or patch mean
    size: Whole = None  # image size in pixels, if not the model's own
    cache: Text = None  # folder where features are kept and found again
    batch: int = 64  # pictures at once
    workers: int = 0  # processes that decode
    seed: int = 0  # linear: of the pictures that choose its strength
    device: Text = None  # cuda, mps or cpu
    threads: Whole = None  # CPU threads
    json: bool = False  # one JSON object a line
    debug: bool = False  # show where an error comes from


def probe(options: Probe) -> int:
    from dataclasses import replace

    from vitlab.commands.use import load
    from vitlab.data import sources
    from vitlab.evaluation import probes
    from vitlab.evaluation.metrics import wilson
    from vitlab.training import run

    if options.seeds < 1 or min(options.shots) < 1:
        raise ValueError("--seeds and --shots must be at least 1")
    bundle = load(options)
    if options.size:
        size = (options.size, options.size)
        bundle.model.resize(size)
        bundle = replace(bundle, preprocess=replace(bundle.preprocess, size=size))
    parts = sources.open_spec(options.spec)
    train = run.training_part(options.spec, parts)
    test = parts.get("test") or parts.get("val")
    if test is None:
        train, test = sources.hold_out(train, 0.1, options.seed)
    test = sources.match_classes(test, train.classes)
    how: dict[str, Any] = {
        "layer": options.layer, "pool": options.pool, "batch": options.batch,
        "workers": options.workers, "cache": Path(options.cache) if options.cache else None,
    }  # fmt: skip
    known, asked = (probes.features(bundle, part, **how) for part in (train, test))
    classes, n = len(train.classes), len(asked)

    def tell(name: str, accuracies: list[float], **more: Any) -> None:
        mean = sum(accuracies) / len(accuracies)
        low, high = wilson(round(mean * n), n)
        if options.json:
            print(json.dumps({"probe": name, "top1": mean, "top1_interval": [low, high], "n": n,
                              "seeds": accuracies, **more}))  # fmt: skip
            return
        spread = f", seeds {', '.join(f'{a:.2%}' for a in accuracies)}" if accuracies[1:] else ""
        print(f"{name}: {mean:.2%} of {n:,} (95 % interval {low:.2%} to {high:.2%}{spread})")

    if options.method == "fewshot":
        drawn = [probes.few_shot_rows(known.y, s, options.shots) for s in range(options.seeds)]
        for shots in options.shots:
            maps = [probes.few_shot(known, rows[shots], classes) for rows in drawn]
            tell(f"{shots}-shot", [m.accuracy(asked) for m in maps], shots=shots)
    elif options.method == "knn":
        tell(f"{options.k} nearest", [probes.knn(known, asked, options.k, classes)], k=options.k)
    else:
        strength = probes.choose_strength(known, classes, options.seed)
        accuracy = probes.linear(known, classes, strength).accuracy(asked)
        tell(f"linear, strength {strength:g}", [accuracy], strength=strength)
    return 0
