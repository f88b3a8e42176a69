"""From a model to the tensors of a foreign file: what `formats.write` does before it writes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitlab.models.zoo import Config
from vitlab.weights.bundle import Bundle
from vitlab.weights.detect import matches
from vitlab.weights.foreign import Beside, Format, State
from vitlab.weights.reading import unpack
from vitlab.weights.report import Refused, Report
from vitlab.weights.tables import SAME, spell


@dataclass(frozen=True)
class Writing:
    """What goes into a file, and what is told of it."""

    tensors: State
    record: dict[str, Any]  # what vitlab wants to find again in the file
    files: dict[str, dict[str, Any]]  # JSON beside it in a folder
    report: Report


def write_model(bundle: Bundle, fmt: Format, drop: Sequence[str], alone: bool) -> Writing:
    """Name and lay out a bundle's tensors as a format does.

    Raises `Refused` for what the format has no place for and `drop` does not name.
    """
    tensors = bundle.model.state_dict()  # of a compiled model: under its own names
    state = {name.removeprefix("_orig_mod."): tensor.detach() for name, tensor in tensors.items()}
    source, config = bundle.card.source, bundle.model.config
    dropped: list[str] = []
    notes: list[str] = []
    if not (alone and source.get("format") == fmt.name):  # else it goes back as it came
        config, state, dropped = _without(config, state, fmt, drop)
        config, state, notes = fmt.adapt(config, state)
    classes = bundle.classes if config.classes else ()
    origin = _origin(source, fmt, alone)
    style = {**origin.get("style", {}), **fmt.style(config)}
    prefix, base = origin.get("prefix", fmt.prefix), fmt.base(config) or origin.get("base", "")

    out: State = {}
    renamed, moved = {}, []
    for ours, tensor in state.items():
        names, row = spell(ours, fmt.table, style)
        parts = row.layout.split(tensor, getattr(config, "heads", 0))
        for name, part in zip(names, parts, strict=True):
            full = name if ours.startswith("head.") else base + name
            out[full] = _narrow(part, name, origin.get("dtype"))
            if prefix + full != ours:
                renamed[prefix + full] = ours
            moved += [prefix + full] if row.layout is not SAME else []
    aside, new = _aside(fmt, config, origin)
    lost = [n for s in _chain(source) for n in s.get("aside", {}) if not aside]
    out |= {base + name: tensor for name, tensor in aside.items()}
    out = fmt.stack(out) if origin.get("stacked") else out
    out = {prefix + name: tensor for name, tensor in out.items()}

    record = _record(bundle, config, fmt, alone)
    files = {}
    if fmt.beside and not alone:
        files = fmt.beside(Beside(config, bundle.preprocess, classes, record, tuple(aside)))
    notes += [f"{name}, which training alone reads, has no place in {fmt.name}" for name in lost]
    notes += [*_differences(fmt, config, alone), *_resizing(fmt, bundle.preprocess, alone)]
    report = Report(
        format=fmt.name, read=tuple(out), renamed=renamed, reshaped=tuple(moved),
        new=tuple(new), aside=tuple(n for n in aside if n not in new), dropped=tuple(dropped),
        notes=tuple(notes),
    )  # fmt: skip
    return Writing(out, record, files, report)


def _without(
    config: Config, state: State, fmt: Format, drop: Sequence[str]
) -> tuple[Config, State, list[str]]:
    """Leave out what the format has no place for, where `drop` says so; else refuse."""
    dropped, refused = [], []
    for lack in fmt.lacks(config):
        names = [name for name in state if lack.tensors and matches(name, [lack.tensors])]
        if names and all(matches(name, drop) for name in names):
            config = replace(config, **lack.without)
            dropped += names
        elif not set(names) <= set(dropped) or not names:
            remedy = f" (drop='{lack.tensors}' leaves it out)" if lack.tensors else ""
            refused.append(f"{lack.reason}{remedy}")
    if refused:
        story = Report(format=fmt.name, dropped=tuple(dropped), refused=tuple(refused))
        raise Refused(f"{fmt.name} has no place for {'; nor for '.join(refused)}", story)
    return config, {name: t for name, t in state.items() if name not in dropped}, dropped


def _chain(source: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The file that weights came from, and those that it was made of."""
    while source:
        yield source
        source = source.get("origin") or {}


def _origin(source: Mapping[str, Any], fmt: Format, alone: bool) -> Mapping[str, Any]:
    """How a file of this format looked that the weights once came from."""
    origin = next((s for s in _chain(source) if s.get("format") == fmt.name), {})
    if alone or not fmt.suffixes:
        return origin
    return {"dtype": origin.get("dtype")}  # in a folder the format's own names are expected


def _narrow(tensor: Tensor, name: str, recorded: Any) -> Tensor:
    """The type that the file had, where the numbers still fit into it."""
    if recorded is None:
        return tensor
    word = recorded if isinstance(recorded, str) else recorded.get(name, recorded[""])
    narrow = tensor.to(getattr(torch, word))
    exact = narrow is tensor or torch.equal(narrow.to(tensor.dtype), tensor)
    return narrow if exact else tensor


def _aside(fmt: Format, config: Config, origin: Mapping[str, Any]) -> tuple[State, list[str]]:
    """Tensors that training alone reads, as they came, or zeros where the code insists on them."""
    tensors = {name: unpack(packed) for name, packed in origin.get("aside", {}).items()}
    new = [name for name in fmt.wants(config) if name not in tensors]
    return tensors | {name: torch.zeros(fmt.wants(config)[name]) for name in new}, new


def _record(bundle: Bundle, config: Config, fmt: Format, alone: bool) -> dict[str, Any]:
    """What the format's own files do not tell, for vitlab to read again."""
    told = () if alone else fmt.told
    model = {k: v for k, v in asdict(config).items() if k not in told}
    record: dict[str, Any] = {
        "model": {"family": fmt.family, **model},
        "source": bundle.card.source,
    }
    if alone:
        record["preprocess"] = asdict(bundle.preprocess)
        record["classes"] = list(bundle.classes) if config.classes else []
    return {k: v for k, v in record.items() if v}


def _differences(fmt: Format, config: Config, alone: bool) -> list[str]:
    """Where the format's own code computes something else than the model does."""
    told = () if alone else fmt.told
    notes = []
    for name, theirs in fmt.computes.items():
        ours = getattr(config, name)
        pairs = [(name, ours, theirs)]
        if isinstance(theirs, Mapping):  # of the stem
            pairs = (
                [(k, getattr(ours, k), v) for k, v in theirs.items()] if is_dataclass(ours) else []
            )
        notes += [
            f"{fmt.name}'s own code computes {what} {other}, this model {own}: its numbers will"
            " differ a little there, not here"
            for what, own, other in pairs if own != other and name not in told
        ]  # fmt: skip
    return notes


def _resizing(fmt: Format, preprocess: Any, alone: bool) -> list[str]:
    """What files beside the tensors cannot say of preprocessing."""
    if alone:
        return []
    lost = [] if preprocess.antialias else ["without antialias"]
    lost += [] if preprocess.resize in fmt.resizes else [f"by {preprocess.resize}"]
    return [f"{fmt.name} cannot say that pictures are resized {how}" for how in lost]
