"""Pictures with several labels: from names joined by `|` to a table of yes and no."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from vitlab.data.sources import Source, listing

MARK = "|"  # between the labels of a picture


def spread(parts: Mapping[str, Source]) -> dict[str, Source]:
    """Sources whose classes are joined names (`cat|sofa`), with the single names as classes.

    `many` holds all labels of each picture, `labels` the first. Raises ValueError for an empty
    name, or a class that training does not have.
    """
    deciding = [parts["train"]] if "train" in parts else list(parts.values())
    names: set[str] = set()
    for part in deciding:
        used = np.unique(part.labels)
        names |= {name for i in used.tolist() for name in _split(part, part.classes[i])}
    order = tuple(sorted(names))
    index = {name: i for i, name in enumerate(order)}
    found = {}
    for split, part in parts.items():
        table = np.zeros((len(part.classes), len(order)), dtype=bool)
        first = np.zeros(len(part.classes), dtype=np.int64)
        for i in np.unique(part.labels).tolist():
            own = _split(part, part.classes[i])
            if unknown := [name for name in own if name not in index]:
                raise ValueError(
                    f"{part.spec}: {split} has classes that train has not: {listing(unknown)}"
                )
            table[i, [index[name] for name in own]] = True
            first[i] = index[own[0]]
        found[split] = replace(
            part, classes=order, labels=first[part.labels], many=table[part.labels]
        )
    return found


def _split(part: Source, joined: str) -> list[str]:
    own = [name.strip() for name in joined.split(MARK)]
    if not all(own):
        raise ValueError(f"{part.spec}: an empty label in {joined!r}")
    return own


def as_many(source: Source) -> Source:
    """The source as one of several labels a picture, where each has one."""
    if source.many is not None:
        return source
    many = np.zeros((len(source), len(source.classes)), dtype=bool)
    many[np.arange(len(source)), source.labels] = True
    return replace(source, many=many)
