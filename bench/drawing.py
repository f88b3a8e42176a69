"""Shares and their intervals as plain SVG, for light and dark pages; used by other scripts."""

import math
from collections.abc import Iterable, Mapping, Sequence

Point = tuple[float, float, float]  # a share, and its interval from low to high
STYLE = """
:root { --paper: #fff; --ink: #1b2430; --dim: #5a6675; --rule: #d8dee6;
  --a: #b8500f; --b: #1668b8; --c: #0b7d5f; --d: #8244b8 }
@media (prefers-color-scheme: dark) { :root { --paper: #12161c; --ink: #e7eaef; --dim: #9ba6b5;
  --rule: #2d3541; --a: #f0995a; --b: #6cb2f5; --c: #4fcfa9; --d: #c79af0 } }
rect { fill: var(--paper) } text { font: 13px system-ui, sans-serif; fill: var(--ink) }
.dim { font-size: 11px; fill: var(--dim) } .middle { text-anchor: middle } .end { text-anchor: end }
path { fill: none; stroke: var(--rule) } g path { stroke: currentColor; stroke-width: 2 }
circle { fill: currentColor; stroke: currentColor; stroke-width: 2 }
.k0 { color: var(--a) } .k1 { color: var(--b) } .k2 { color: var(--c) }
.k3 { color: var(--d) } .k0 circle, .k3 circle { fill: var(--paper) }
"""


def dots(
    title: str, names: Mapping[str, str],
    groups: Mapping[tuple[str, str], Sequence[tuple[str, Point]]],
) -> str:  # fmt: skip
    """A dot and its interval a row, the rows of a group together.

    Args:
        names: key -> words, of whatever the colours stand for.
        groups: (label, second label) -> (key, share and interval) of each row.
    """
    keys = [key for rows in groups.values() for key, _ in rows]
    marks, y = _legend(names, [key for key in names if key in keys])
    left, right, top = 190, 650, y
    ticks = _ticks(point for rows in groups.values() for _, point in rows)

    def across(share: float) -> float:
        return left + (right - left) * (100 * share - ticks[0]) / (ticks[-1] - ticks[0])

    for (label, second), rows in groups.items():
        y += 20
        marks += [_text(8, y, label), _text(8, y + 15, second, "dim")]
        for key, (share, low, high) in rows:
            extent = f"M{across(low):.1f} {y - 4}H{across(high):.1f}"
            dot = _dot(across(share), y - 4)
            marks.append(_coloured(names, key, _path(extent), dot))
            marks.append(_text(across(high) + 8, y, f"{100 * share:.1f}", "dim"))
            y += 17
        y += 15 if len(rows) == 1 else 0  # room for the second label
    rules = []
    for tick in ticks:
        x = across(tick / 100)
        rules += [_path(f"M{x:.1f} {top}V{y}"), _text(x, y + 16, f"{tick} %", "dim middle")]
    return _page(title, 700, y + 28, [*rules, *marks])


def curves(
    title: str, names: Mapping[str, str], panels: Mapping[str, Mapping[str, Mapping[int, Point]]],
    below: str,
) -> str:  # fmt: skip
    """Panels side by side, each with a line a key over a logarithmic axis.

    Args:
        names: key -> words, of whatever the colours stand for.
        panels: title -> key -> position on the axis -> share and interval.
        below: what the axis is.
    """
    marks, top = _legend(names, list(names))
    top, wide, high = top + 24, 330, 190
    every = [lines for panel in panels.values() for lines in panel.values()]
    ticks = _ticks(point for lines in every for point in lines.values())
    places = sorted({x for lines in every for x in lines})

    def up(share: float) -> float:
        return top + high * (1 - (100 * share - ticks[0]) / (ticks[-1] - ticks[0]))

    for i, (label, panel) in enumerate(panels.items()):
        left = 44 + i * (wide + 16)
        across = {
            x: left + 16 + (wide - 56) * math.log(x / places[0]) / math.log(places[-1] / places[0])
            for x in places
        }
        marks.append(_text(left, top - 10, label))
        for tick in ticks:
            y = up(tick / 100)
            marks.insert(0, _path(f"M{left} {y:.1f}h{wide - 24}"))
            marks.append(_text(left - 6, y + 4, f"{tick} %", "dim end"))
        marks += [_text(x, top + high + 18, str(n), "dim middle") for n, x in across.items()]
        marks.append(_text(left + (wide - 24) / 2, top + high + 36, below, "dim middle"))
        for key, lines in panel.items():
            line = " ".join(f"{across[x]:.1f},{up(share):.1f}" for x, (share, *_) in lines.items())
            shapes = [_path(f"M{line}")]
            for x, (share, *ends) in lines.items():
                extent = "V".join(f"{up(end):.1f}" for end in ends)
                shapes += [_path(f"M{across[x]:.1f} {extent}"), _dot(across[x], up(share))]
            marks.append(_coloured(names, key, *shapes))
    return _page(title, 44 + len(panels) * (wide + 16), top + high + 48, marks)


def _ticks(points: Iterable[Point]) -> list[int]:
    """Round numbers of percent that enclose all intervals."""
    ends = [end for point in points for end in point]
    step = 10 if max(ends) - min(ends) <= 0.6 else 20
    first = step * math.floor(100 * min(ends) / step)
    return list(range(first, max(first + step, step * math.ceil(100 * max(ends) / step)) + 1, step))


def _legend(names: Mapping[str, str], shown: Sequence[str]) -> tuple[list[str], int]:
    """The marks of a legend, and where it ends."""
    marks: list[str] = []
    for i, key in enumerate(shown):
        marks.append(_coloured(names, key, _dot(14, 16 + 18 * i)))
        marks.append(_text(26, 20 + 18 * i, names[key]))
    return marks, 18 * len(shown) + 10


def _coloured(names: Mapping[str, str], key: str, *shapes: str) -> str:
    return f'<g class="k{list(names).index(key)}">{"".join(shapes)}</g>'


def _path(steps: str) -> str:
    return f'<path d="{steps}"/>'


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{text}</text>'


def _page(title: str, width: int, height: int, marks: Iterable[str]) -> str:
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f'<title>{title}</title><style>{STYLE}</style><rect width="100%" height="100%"/>',
        *marks, "</svg>\n",
    ])  # fmt: skip
