"""Names and layouts of tensors in foreign files.

A table is a list of rows "ours <-> theirs". It is read from left to right to write a file and
from right to left to read one, so that the two directions cannot drift apart.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

# Layouts: how numbers of ours lie in their file


@dataclass(frozen=True)
class Layout:
    """One tensor of ours as one or several of theirs."""

    join: Callable[[Sequence[Tensor]], Tensor]  # theirs -> ours
    split: Callable[[Tensor, int], list[Tensor]]  # ours, number of heads -> theirs
    rank: int | None = None  # axes of theirs; None: any


SAME = Layout(lambda t: t[0], lambda t, k: [t])
THIRDS = Layout(lambda t: torch.cat(list(t)), lambda t, k: list(t.chunk(3)))  # q, k, v apart
# Of JAX, kernels lie [in, out] and [h, w, in, out].
DENSE = Layout(lambda t: t[0].T.contiguous(), lambda t, k: [t.T], 2)
CONV = Layout(
    lambda t: t[0].permute(3, 2, 0, 1).contiguous(), lambda t, k: [t.permute(2, 3, 1, 0)], 4
)
POINT = Layout(lambda t: t[0][0, 0].T.contiguous(), lambda t, k: [t.T[None, None]], 4)  # 1 x 1
CHANNELS = Layout(lambda t: t[0].flatten(), lambda t, k: [t.view(1, 1, 1, -1)], 4)  # [1, 1, 1, C]
# Of flax, projections into heads lie [D, k, D_h], out of heads [k, D_h, D].
HEADS = Layout(
    lambda t: torch.cat([part.flatten(1).T for part in t]),
    lambda t, k: [part.T.unflatten(1, (k, -1)) for part in t.chunk(3)],
    3,
)
HEADS_BIAS = Layout(
    lambda t: torch.cat([part.flatten() for part in t]),
    lambda t, k: [part.unflatten(0, (k, -1)) for part in t.chunk(3)],
    2,
)
UNHEADS = Layout(
    lambda t: t[0].flatten(0, 1).T.contiguous(), lambda t, k: [t.T.unflatten(0, (k, -1))], 3
)


# Names


@dataclass(frozen=True)
class Row:
    """A tensor's name here and there. `{}` counts from 0, `{+}` from 1, `{+0}` as 01, 02, ...

    `{a|b|c}` stands for three tensors of theirs that are one of ours.
    """

    ours: str
    theirs: str
    layout: Layout = SAME

    @property
    def parts(self) -> list[str]:
        """Templates of their names."""
        choice = re.search(r"\{([^{}]*\|[^{}]*)\}", self.theirs)
        if not choice:
            return [self.theirs]
        return [self.theirs.replace(choice[0], word) for word in choice[1].split("|")]


def fill(template: str, at: Iterable[int]) -> str:
    """A name from its template and the numbers in it, counted from 0."""
    numbers = iter(at)

    def number(m: re.Match[str]) -> str:
        return f"{next(numbers) + bool(m[1]):0{2 if m[2] else 1}d}"

    return re.sub(r"\{(\+?)(0?)\}", number, template)


@lru_cache(maxsize=4096)
def _pattern(template: str) -> tuple[re.Pattern[str], list[int]]:
    pieces = re.split(r"\{\+?0?\}", template)
    ones = [int("+" in hole) for hole in re.findall(r"\{\+?0?\}", template)]
    return re.compile(r"(\d+)".join(map(re.escape, pieces))), ones


def numbers(template: str, name: str) -> tuple[int, ...] | None:
    """The numbers in a name, counted from 0; None where it is no name of the template."""
    pattern, ones = _pattern(template)
    found = pattern.fullmatch(name)
    return found and tuple(int(n) - one for n, one in zip(found.groups(), ones, strict=True))


def rows(
    *pairs: tuple[str, str], weight: tuple[str, str] = ("weight", "weight"),
    bias: tuple[str, str] | None = ("bias", "bias"), sep: str = ".", layout: Layout = SAME,
    bias_layout: Layout = SAME,
) -> list[Row]:  # fmt: skip
    """Rows of layers that have a weight and, unless `bias` is None, a bias."""
    table = []
    for ours, theirs in pairs:
        table.append(Row(f"{ours}.{weight[0]}", f"{theirs}{sep}{weight[1]}", layout))
        if bias:
            table.append(Row(f"{ours}.{bias[0]}", f"{theirs}{sep}{bias[1]}", bias_layout))
    return table


@dataclass
class Renamed:
    """Tensors of a file under our names, and how they got there."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)  # ours -> theirs
    used: dict[str, Row] = field(default_factory=dict)  # ours -> its row
    style: dict[str, int] = field(default_factory=dict)  # ours -> which of its rows, if not first
    incomplete: list[str] = field(default_factory=list)  # theirs that would complete a row


def rename(tensors: dict[str, Tensor], table: Sequence[Row]) -> Renamed:
    """Take from `tensors` what the table knows, under our names and in our layout.

    Each tensor leaves `tensors` as it is converted: a large file is never held twice.
    Raises ValueError where two tensors claim the same place.
    """
    groups: dict[tuple[int, tuple[int, ...]], dict[int, str]] = defaultdict(dict)
    for name, tensor in tensors.items():
        for i, j, at in _places(name, tensor.ndim, table):
            groups[i, at][j] = name
            break
    seen: dict[str, list[int]] = defaultdict(list)
    out = Renamed()
    for row_i, row in enumerate(table):
        seen[row.ours].append(row_i)
    for (i, at), names in groups.items():
        row, ours = table[i], fill(table[i].ours, at)
        if len(names) < len(row.parts):
            parts = enumerate(row.parts)
            out.incomplete += [fill(part, at) for j, part in parts if j not in names]
            continue
        theirs = [names[j] for j in sorted(names)]
        if ours in out.tensors:
            raise ValueError(f"{' and '.join(out.names[ours] + theirs)} stand for the same tensor")
        try:
            out.tensors[ours] = row.layout.join([tensors.pop(n) for n in theirs])
        except RuntimeError as e:
            raise ValueError(f"{', '.join(theirs)}: shapes do not fit together ({e})") from e
        out.names[ours], out.used[ours] = theirs, row
        if which := seen[row.ours].index(i):
            out.style[row.ours] = which
    return out


def _places(
    name: str, rank: int, table: Sequence[Row]
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    for i, row in enumerate(table):
        if row.layout.rank in (None, rank):
            for j, part in enumerate(row.parts):
                if (at := numbers(part, name)) is not None:
                    yield i, j, at


def spell(ours: str, table: Sequence[Row], style: Mapping[str, int]) -> tuple[list[str], Row]:
    """Their names of a tensor of ours, and its row; no names where the table has none."""
    for row in table:
        if (at := numbers(row.ours, ours)) is not None:
            chosen = [r for r in table if r.ours == row.ours][style.get(row.ours, 0)]
            return [fill(part, at) for part in chosen.parts], chosen
    return [], Row(ours, ours)
