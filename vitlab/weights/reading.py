"""From an opened file to a model: what `formats.read` does once the format is known."""

import base64
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from vitlab.models.zoo import FAMILIES, Config, Model, build
from vitlab.weights import shapes
from vitlab.weights.detect import Found, matches
from vitlab.weights.files import Opened, names
from vitlab.weights.foreign import Facts, Seen
from vitlab.weights.report import Refused, Report
from vitlab.weights.tables import SAME, Renamed, rename, spell

BOOKKEEPING = {"n_averaged"}  # of torch's averaged models: no weights


@dataclass(frozen=True)
class Reading:
    """A model as its file has it, and what became of the file's tensors."""

    model: Model
    facts: Facts
    source: dict[str, Any]  # what is needed to write the file again
    report: Report


def read_model(
    opened: Opened, found: Found, drop: Sequence[str], stored: Any, asked: Mapping[str, Any]
) -> Reading:
    """Build the model that a file holds, and fill it.

    Raises `Refused` for a tensor without a place, a missing one, one of a wrong shape or with
    numbers that are none; `drop` patterns except tensors from that.
    """
    fmt, left = found.format, found.tensors
    dropped = [*found.dropped, *(n for n in (*left, *found.strangers) if matches(n, drop))]
    left = {name: tensor for name, tensor in left.items() if not matches(name, drop)}
    found.tensors = {}  # so that each tensor goes once it is converted
    stacked = fmt.unstack(left)
    seen = Seen({n: tuple(t.shape) for n, t in left.items()}, opened.config, opened.processor)
    dtypes = {name: str(t.dtype).removeprefix("torch.") for name, t in left.items()}
    renamed = rename(left, fmt.table)
    for ours in [ours for ours in renamed.tensors if matches(ours, drop)]:
        dropped += renamed.names.pop(ours)
        del renamed.tensors[ours]
    story = Report(format=fmt.name, dropped=tuple(dropped))
    if renamed.incomplete:
        raise Refused(
            _missing(renamed.incomplete, renamed), replace(story, refused=tuple(renamed.incomplete))
        )
    aside = {name: left.pop(name) for name in fmt.aside if name in left}
    noted, foreign = _leftover(found, left, drop)
    if foreign:
        raise Refused(_no_place(found, foreign), replace(story, refused=tuple(foreign)))
    try:
        facts, config, assumed = _configure(seen, opened.record, renamed, found, stored, asked)
    except (TypeError, KeyError, AttributeError, IndexError) as e:
        raise ValueError(f"its configuration makes no sense ({type(e).__name__}: {e})") from e
    new = _check(renamed, config, found, drop, story, seen.shapes)
    zero = ["head: all zeros, it predicts nothing (so released in 2020 for ImageNet-21k; or new)"]
    notes = [
        *found.notes,
        *([f"not read: {names(noted, 4)}"] if noted else []),
        *(zero if _is_zero(renamed.tensors, "head") else []),
        *facts.notes,
        *assumed,
    ]
    theirs = {n: ours for ours, listed in renamed.names.items() for n in listed}
    moved = [n for n, ours in theirs.items() if renamed.used[ours].layout is not SAME]
    report = replace(
        story,
        read=tuple(theirs),
        renamed={n: ours for n, ours in theirs.items() if n != ours},
        reshaped=tuple(moved),
        new=tuple(new),
        aside=tuple(aside),
        dropped=(*dropped, *noted),
        notes=tuple(notes),
    )
    source = {
        "format": fmt.name,
        "dtype": _dtype(dtypes),
        "prefix": found.prefix if opened.sep == "/" else "",
        "base": found.base,
        "style": renamed.style if fmt.restyles else {},
        "stacked": stacked,
        "aside": {name: pack(tensor) for name, tensor in aside.items()},
        "origin": _once(opened.record.get("source"), {fmt.name}),
    }
    model = _fill(config, renamed.tensors, new)
    return Reading(model, facts, {k: v for k, v in source.items() if v}, report)


def _once(source: Mapping[str, Any] | None, seen: set[str]) -> dict[str, Any]:
    """The files that weights came from, each format's last one alone: no chain grows for ever."""
    if not source:
        return {}
    said = str(source.get("format"))
    before = _once(source.get("origin"), seen | {said})
    if said in seen:
        return before
    own = {k: v for k, v in source.items() if k != "origin"}
    return {**own, **({"origin": before} if before else {})}


def _configure(
    seen: Seen, record: Mapping[str, Any], renamed: Renamed, found: Found, stored: Any,
    asked: Mapping[str, Any],
) -> tuple[Facts, Config, list[str]]:  # fmt: skip
    """What the format says, what vitlab left in the file, and what the shapes are."""
    facts = found.format.facts(seen)
    model = record.get("model", {})
    if model.get("family") == found.format.family:
        known = {f.name for f in fields(FAMILIES[found.format.family][0])}
        facts.config |= {k: v for k, v in model.items() if k in known}
    if stored is not None:
        facts.config["image"] = stored
    infer = shapes.bit if found.format.family == "bit" else shapes.vit
    config, assumed = infer(renamed.tensors, facts.config, asked)
    return facts, config, assumed


def _leftover(
    found: Found, left: Mapping[str, Tensor], drop: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Names that are no part of the model: those that need only be told of, and the others."""
    inside = [*left, *found.strangers]
    noted = [n for n in inside if n.rpartition(".")[2] in BOOKKEEPING]
    foreign = [n for n in inside if n not in noted and not matches(n, drop)]
    return [*found.elsewhere, *noted], foreign


def _no_place(found: Found, foreign: Sequence[str]) -> str:
    """What to say of tensors that vitlab's models have no place for: whose they are, if known."""
    whose = {
        what: [n for n in foreign if re.fullmatch(pattern, n)]
        for pattern, what in found.format.refused
    }
    reasons = [f"{what} ({names(listed)})" for what, listed in whose.items() if listed]
    known = {n for listed in whose.values() for n in listed}
    rest = [n for n in foreign if n not in known]
    reasons += [f"{names(rest)}"] if rest else []
    return (
        f"vitlab's models have no place for {'; '.join(reasons)} [{found.format.name}];"
        f" drop patterns leave tensors out, such as drop='{foreign[0]}'"
    )


def _check(
    renamed: Renamed, config: Config, found: Found, drop: Sequence[str], story: Report,
    sizes: Mapping[str, tuple[int, ...]],
) -> list[str]:  # fmt: skip
    """Compare tensors with the model they are for; returns names that stay as initialised."""
    wanted = shapes.skeleton(config).state_dict()
    heads = getattr(config, "heads", 0)
    tensors, table = renamed.tensors, found.format.table
    new: list[str] = []
    missing: list[str] = []
    for ours, like in wanted.items():
        theirs, row = spell(ours, table, renamed.style)
        if ours not in tensors:
            if any(matches(name, drop) for name in (ours, *theirs)):
                new.append(ours)
            else:
                missing += theirs
            continue
        tensor, theirs, row = tensors[ours], renamed.names[ours], renamed.used[ours]
        for name, part in zip(theirs, row.layout.split(like, heads), strict=True):
            if (shape := sizes[name]) != tuple(part.shape):
                raise Refused(
                    f"{name} has shape {list(shape)}, but {list(part.shape)} goes with the others",
                    replace(story, refused=(name,)),
                )
        if not tensor.is_floating_point():
            raise Refused(f"{theirs[0]} holds {tensor.dtype}, not real numbers", story)
        if tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):
            raise Refused(
                f"{theirs[0]} holds NaN or infinity: the file is damaged, or its training diverged",
                replace(story, refused=tuple(theirs)),
            )
    if missing:
        raise Refused(_missing(missing, renamed), replace(story, refused=tuple(missing)))
    if extra := [ours for ours in tensors if ours not in wanted]:
        listed = [n for ours in extra for n in renamed.names[ours]]
        raise Refused(_no_place(found, listed), replace(story, refused=tuple(listed)))
    return new


def _missing(missing: Sequence[str], renamed: Renamed) -> str:
    return (
        f"{len(missing)} tensors are missing: {names(missing)}"
        f" ({len(renamed.names)} of the model's are there)"
    )


def _fill(config: Config, tensors: dict[str, Tensor], new: Sequence[str]) -> Model:
    """A model made of these tensors, with as few copies as can be; halves become float32."""
    double = any(t.dtype == torch.float64 for t in tensors.values())
    for name in list(tensors):
        tensor = tensors[name].to(torch.float64 if double else torch.float32)
        # Products round by where numbers lie: as torch's own memory lies, in lines of 64 bytes.
        tensors[name] = tensor.clone() if tensor.data_ptr() % 64 else tensor
    model = build(config) if new else shapes.skeleton(config)
    own = model.state_dict() if new else {}
    model.load_state_dict({**own, **tensors}, assign=True)
    return model.eval()


def _is_zero(tensors: Mapping[str, Tensor], layer: str) -> bool:
    parts = [t for name, t in tensors.items() if name.startswith(f"{layer}.")]
    return bool(parts) and not any(bool(t.any()) for t in parts)


def _dtype(dtypes: Mapping[str, str]) -> Any:
    """The type of most tensors; where others have another, also theirs, by name."""
    common = Counter(dtypes.values()).most_common(1)[0][0]
    others = {name: dtype for name, dtype in dtypes.items() if dtype != common}
    return {"": common, **others} if others else common


def pack(tensor: Tensor) -> dict[str, Any]:
    """A small tensor as plain values, to the bit."""
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    data = base64.b64encode(raw).decode()
    return {"dtype": dtype, "shape": list(tensor.shape), "data": data}


def unpack(packed: Mapping[str, Any]) -> Tensor:
    """The inverse of `pack`."""
    raw = bytearray(base64.b64decode(packed["data"]))
    flat = torch.frombuffer(raw, dtype=getattr(torch, packed["dtype"]))
    return flat.view(packed["shape"])
