"""`vitlab models`, `inspect`, `convert` and `push`: weights from and to everywhere."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro

from vitlab.training.config import Text, Whole


@dataclass(frozen=True, kw_only=True)
class Models:
    """Names of models with parameters and multiply-accumulates, and of published weights."""

    pattern: tyro.conf.Positional[str] = "*"  # shell pattern, such as 'vit-b*'
    json: bool = False  # one JSON object a line
    debug: bool = False  # show where an error comes from


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Tell what a file of weights is: format, model, grid, classes, an all-zero head."""

    file: tyro.conf.Positional[str]  # weights of any public format, a bundle or run
    json: bool = False  # everything, every tensor's shape included, as one JSON object
    debug: bool = False  # show where an error comes from


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Read weights of one format and write them in another, without loss."""

    source: tyro.conf.Positional[str]  # weights of any public format, a bundle or run
    destination: tyro.conf.Positional[str]  # a file, by its suffix, or else a folder
    to: Literal["vitlab", "google", "big_vision", "timm", "huggingface", "torchvision"]
    """format to write"""
    drop: Text = None  # pattern of tensors to do without, such as 'head.*'
    heads: Whole = None  # attention heads, where the file does not say
    json: bool = False  # print both reports as one JSON object
    debug: bool = False  # show where an error comes from


@dataclass(frozen=True, kw_only=True)
class Push:
    """Upload a bundle or run to the Hugging Face hub."""

    bundle: tyro.conf.Positional[str]  # folder of a bundle or run
    repository: tyro.conf.Positional[str]  # org/name
    private: bool = False  # do not show it to everybody
    debug: bool = False  # show where an error comes from


def models(options: Models) -> int:
    from fnmatch import fnmatch

    from vitlab.models.cost import macs, parameters
    from vitlab.models.zoo import MODELS
    from vitlab.weights import public, shipped

    chosen = {name: c for name, c in MODELS.items() if fnmatch(name, options.pattern)}
    published = [p for p in public.TABLE.values() if fnmatch(p.name, options.pattern)]
    if not chosen and not published:
        raise ValueError(f"no model matches {options.pattern!r}; `vitlab models` lists all")
    for name, config in chosen.items():
        h, w = config.image
        count, cost = parameters(config), macs(config)
        if options.json:
            print(json.dumps({"name": name, "parameters": count, "macs": cost, "image": [h, w]}))
        else:
            line = f"{name:<12} {count:>12,} parameters {cost / 1e9:>8.2f} GMACs at {h} x {w}"
            print(line + "  (its weights are here)" * (name in shipped.names()))
    if published and not options.json:
        print("\npublished weights, for --from, inspect and convert:")
    for p in published:
        if options.json:
            print(json.dumps(asdict(p)))
        else:
            score = f"top-1 {p.top1:g} % ({p.by})" if p.top1 else ""
            print(f"{p.name}  {p.image} px, {p.classes:,} classes, {p.licence}  {score}".rstrip())
    return 0


def inspect(options: Inspect) -> int:
    from vitlab.weights import formats

    found = formats.inspect(options.file)
    if options.json:
        print(json.dumps(found))
        return 1 if "reason" in found else 0
    if "reason" in found:
        raise ValueError(found["reason"])
    model, classes = found["model"], found["classes"]
    shown = {
        "format": found["format"],
        "sha256": found["sha256"],
        "parameters": f"{found['parameters']:,} in {len(found['tensors'])} tensors",
        "model": ", ".join(f"{k} {v}" for k, v in model.items() if v not in (None, 0, False)),
        "grid": found["grid"] and "{} x {} patches".format(*found["grid"]),
        "preprocess": ", ".join(f"{k} {v}" for k, v in found["preprocess"].items()),
        "classes": f"{len(classes)}: {', '.join(classes[:5])}{', ...' if len(classes) > 5 else ''}",
        "licence": found["source"].get("licence"),
        "dropped": ", ".join(found["dropped"]),
        "notes": "; ".join(found["notes"]),
    }
    for name, value in shown.items():
        if value:
            print(f"{name:<11} {value}")
    return 0


def convert(options: Convert) -> int:
    from vitlab.weights import formats

    how = {} if options.heads is None else {"heads": options.heads}
    came, went = formats.convert(
        options.source, options.destination, options.to, drop=options.drop or (), **how
    )
    if options.json:
        print(json.dumps({"read": came.to_dict(), "written": went.to_dict()}))
    else:
        print(
            "\n".join(["read", *came.lines(), f"written to {options.destination}", *went.lines()])
        )
    return 0


def push(options: Push) -> int:
    from vitlab.weights import hub

    print(hub.push(Path(options.bundle), options.repository, options.private))
    return 0
