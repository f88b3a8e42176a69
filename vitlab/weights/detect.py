"""Which tensors of a file are a model's, and in which format: wrappers and prefixes come off."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from vitlab.weights.files import Opened, names
from vitlab.weights.foreign import Format, State

AVERAGED = {
    "ema",
    "teacher",
    "average",
    "averaged",
    "swa",
}  # words of keys that hold the better of two models
ALIENS = (  # names of models that vitlab does not have -> what they are
    (r".*MixerBlock_\d+/.*", "an MLP-Mixer"),
    (r".*(visual\.|vision_model\.|vision_tower\.).*", "the image tower of CLIP or SigLIP"),
    (r".*layers\.\d+\.(blocks|downsample)\..*|.*swin.*", "a Swin Transformer"),
    (r".*(running_mean|bn1\.weight)", "a network with BatchNorm"),
)


@dataclass
class Found:
    """The tensors of one model in a file."""

    format: Format
    prefix: str = ""  # what stood before each name
    base: str = ""  # which of the format's bases stood before most
    tensors: State = field(default_factory=dict)  # under their names without these
    strangers: list[str] = field(default_factory=list)  # beside them in the same state dict
    elsewhere: list[str] = field(default_factory=list)  # in other parts of the file
    dropped: list[str] = field(default_factory=list)  # taken out by `drop` patterns
    notes: list[str] = field(default_factory=list)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Is a name one of those that the patterns (`head.*`) stand for?"""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def detect(opened: Opened, formats: Sequence[Format], drop: Sequence[str] = ()) -> Found:
    """Find the model in a file, once what `drop` patterns name is taken out of it.

    Raises ValueError where there is none, or where several could be meant.
    """
    nodes: dict[str, State] = {}
    dropped: list[str] = []
    for where, flat in _nodes(opened.tensors):
        nodes[where] = {k: v for k, v in flat.items() if not matches(where + k, drop)}
        dropped += [where + k for k in flat if k not in nodes[where]]
    hits = [hit for where, flat in nodes.items() for hit in _hits(where, flat, formats, opened.sep)]
    if not hits:
        raise ValueError(_nothing([where + name for where, flat in nodes.items() for name in flat]))
    where, prefix, fmt = _choose(hits)
    base = next(b for b in sorted(fmt.bases, key=len, reverse=True) if prefix.endswith(b))
    outer = prefix.removesuffix(base)
    found = Found(fmt, outer, base, dropped=dropped)
    others = tuple(p for at, p, _ in hits if at == where and p != prefix)
    for name, tensor in nodes.pop(where).items():
        if name.startswith(outer):
            found.tensors[name.removeprefix(outer).removeprefix(base)] = tensor
        elif opened.sep == "/" or name.startswith((*others, "optimizer.")):
            # An optimizer's state, another tower or model: what they are, their place tells.
            found.elsewhere.append(name)
        else:
            found.strangers.append(name)
    found.elsewhere += [at + name for at, other in nodes.items() for name in other]
    if where or outer not in ("", fmt.prefix):
        found.notes.append(f"unwrapped: {where}{outer}")
    values = [str(k) for k, v in opened.tensors.items() if not isinstance(v, (Tensor, Mapping))]
    if values:
        found.notes.append(f"beside tensors the file has {names(values, 6)}")
    return found


def _nothing(everything: Sequence[str]) -> str:
    looks = (
        f" (it looks like {what})"
        for pattern, what in ALIENS for name in everything if re.fullmatch(pattern, name)
    )  # fmt: skip
    return (
        f"0 of {len(everything)} tensors matched any format that is read{next(looks, '')};"
        f" the first are {names(everything) or 'none'}"
    )


def _nodes(
    value: Mapping[Any, Any], where: str = "", depth: int = 0
) -> Iterator[tuple[str, State]]:
    """Mappings of names to tensors, at any depth, and the keys that lead to them."""
    flat = {k: v for k, v in value.items() if isinstance(k, str) and isinstance(v, Tensor)}
    if flat:
        yield where, flat
    for key, inner in value.items():
        if isinstance(key, str) and isinstance(inner, Mapping) and depth < 6:
            yield from _nodes(inner, f"{where}{key}.", depth + 1)


def _hits(
    where: str, flat: State, formats: Sequence[Format], sep: str
) -> Iterator[tuple[str, str, Format]]:
    """Where in a state dict which format's names stand, by their anchors."""
    known: set[str] = set()
    for fmt in formats:
        first, *others = fmt.anchors
        for name in flat:
            prefix = name.removesuffix(first)
            whole = name.endswith(first) and (not prefix or prefix.endswith(sep))
            if not whole or fmt.sep != sep or prefix in known:
                continue
            if all(prefix + anchor in flat for anchor in others):
                known.add(prefix)
                yield where, prefix, fmt


def _choose(hits: Sequence[tuple[str, str, Format]]) -> tuple[str, str, Format]:
    """The model that is meant: the averaged of several; raises ValueError if that is not enough."""
    hybrids = [where + prefix for where, prefix, fmt in hits if fmt.family == "vit"]
    hits = [  # a hybrid's stem is no ResNet of its own
        (where, prefix, fmt) for where, prefix, fmt in hits
        if fmt.family == "vit" or not any((where + prefix).startswith(h) for h in hybrids)
    ]  # fmt: skip

    def averaged(hit: tuple[str, str, Format]) -> bool:
        return bool(AVERAGED & set(re.split(r"[._/]", (hit[0] + hit[1]).lower())))

    better = [hit for hit in hits if averaged(hit)] or list(hits)
    if len(better) > 1:
        raise ValueError(
            f"holds several models ({names(where + prefix for where, prefix, _ in better)}):"
            " name those to leave out with drop, such as drop='student.*'"
        )
    return better[0]
