"""A run or an evaluation as one self-contained HTML page: no script, no request to a server."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitlab.data import decode, sources
from vitlab.data.page import escape, uri
from vitlab.data.writing import write_text
from vitlab.evaluation.metrics import Metrics, wilson
from vitlab.evaluation.multilabel import MultiMetrics
from vitlab.evaluation.scoring import Scores

WIDE = 30  # with more classes the matrix is an image, and its largest entries are a table
THUMBNAIL, TINY = 192, 64  # pixels: no picture is larger; up to here it is magnified crisply
LISTED = 100  # skipped files


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A picture that the model got wrong."""

    image: np.ndarray  # [h, w, 3] uint8, as stored
    id: str  # path or number
    truth: str
    predicted: str
    probability: float  # of the predicted class


def mistakes(source: sources.Source, scores: Scores, limit: int = 24) -> list[Mistake]:
    """The surest wrong answers first, ties by row; pictures that no longer load are left out."""
    classes, sure = scores.metrics.classes, scores.probabilities.max(axis=1)
    matched = sources.match_classes(source, classes)
    labels = matched.labels[scores.rows]
    predicted = scores.probabilities.argmax(axis=1)
    wrong = predicted != labels
    if matched.many is not None:  # any of its labels is right
        wrong = ~matched.many[scores.rows, predicted]
    worst = np.lexsort((scores.rows, -sure))
    found: list[Mistake] = []
    for at in worst[wrong[worst]]:
        if len(found) >= limit:
            break
        row = int(scores.rows[at])
        with suppress(decode.Unreadable, OSError):
            found.append(Mistake(
                image=source.load(row), id=source.id(row), truth=classes[labels[at]],
                predicted=classes[predicted[at]], probability=float(sure[at]),
            ))  # fmt: skip
    return found


def write(
    path: str | Path, *, title: str, metrics: Metrics,
    history: Sequence[Mapping[str, Any]] = (), settings: Mapping[str, Any] = {},
    mistakes: Sequence[Mistake] = (), skipped: Sequence[tuple[str, str]] = (),
) -> None:  # fmt: skip
    """Write the page, aside and renamed. What is empty is left out of it.

    `history` is the lines of metrics.jsonl; `settings` may be nested one level; `skipped` names
    the files that could not be read, and why.
    """
    lost = (_row(name, escape(why)) for name, why in skipped[:LISTED])
    more = f", the first {LISTED} are listed" if len(skipped) > LISTED else ""
    sections = {
        "Training, by epoch": _curves(history),
        "Confusion matrix": _confusion(metrics),
        "Classes": _classes(metrics),
        "Worst mistakes, the surest first": _pictures(mistakes),
        f"Skipped files ({len(skipped):,}{more})": _table("Skipped files", ("File", "Why"), lost),
        "Settings": _settings(settings),
    }
    body = "".join(f"<section><h2>{k}</h2>\n{v}</section>\n" for k, v in sections.items() if v)
    version = ""
    with suppress(metadata.PackageNotFoundError):  # not installed: run from a checkout
        version = metadata.version("vitlab")
    write_text(Path(path), f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style></head>
<body><main><h1>{escape(title)}</h1>
{_headline(metrics)}{body}</main><footer>Made by vitlab {version}</footer></body></html>
""")  # fmt: skip


def _finite(value: object) -> bool:
    """A number that can be drawn: not None, not NaN, far from overflow."""
    return isinstance(value, int | float) and abs(value) < 1e100


def _row(name: str, *cells: str) -> str:
    return f'<th scope="row">{escape(name)}</th>' + "".join(f"<td>{c}</td>" for c in cells)


def _table(label: str, head: Sequence[str], rows: Iterable[str], kind: str = "words") -> str:
    """A table in its own box: where it is too wide, the box scrolls and not the page."""
    heads = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in head)
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    box = f'<div class="scroll {kind}" role="region" aria-label="{label}" tabindex="0">'
    table = f"<table><thead><tr>{heads}</tr></thead>\n<tbody>{body}</tbody></table>"
    return f"{box}{table}</div>\n" if body else ""


def _headline(metrics: Metrics) -> str:
    low, high = metrics.top1_interval
    facts = {
        "Right answers": f"{int(metrics.confusion.trace()):,} of {metrics.n:,}",
        "95% interval": f"{low:.2%} to {high:.2%}",
        "Scored on": escape(metrics.scored_on),
        "Top-5 accuracy": "" if metrics.top5 is None else f"{metrics.top5:.2%}",
        "Loss": f"{metrics.loss:.4f}" if _finite(metrics.loss) else "n/a",
        "Unreadable": f"{metrics.skipped:,}",
    }
    if isinstance(metrics, MultiMetrics):
        facts |= {"Mean average precision": f"{metrics.mean_ap:.2%}", "F1": f"{metrics.f1:.2%}"}
    rows = "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>\n" for k, v in facts.items() if v)
    score = f'<p class="score"><strong>{metrics.top1:.2%}</strong> accuracy</p>\n'
    named = [escape(metrics.classes[j]) for j in np.flatnonzero(metrics.confusion.sum(axis=0))]
    if len(named) == 1:  # the accuracy may be high all the same
        score += f'<p class="warning">Warning: all predictions fall into “{named[0]}”.</p>\n'
    return f"{score}<dl>{rows}</dl>\n"


def _classes(metrics: Metrics) -> str:
    if isinstance(metrics, MultiMetrics):
        return _several(metrics)
    columns = metrics.confusion.diagonal(), metrics.confusion.sum(axis=0), metrics.support
    rows = (
        _row(name, f"{n:,}", _share(right, named), _share(right, n))
        for name, right, named, n in zip(metrics.classes, *columns, strict=True)
    )
    intro = """<p>Precision: of the pictures given this name, how many are right. Recall: of the
pictures of this class, how many are found. In small type: 95% intervals.</p>\n"""
    return intro + _table("Classes", ("Class", "Pictures", "Precision", "Recall"), rows, "numbers")


def _several(metrics: MultiMetrics) -> str:
    """The classes of a multi-label model."""
    columns = metrics.average_precision, metrics.class_f1, metrics.thresholds
    rows = (
        _row(name, f"{ap:.1%}" if _finite(ap) else "n/a", f"{f1:.1%}", f"{level:.3f}")
        for name, ap, f1, level in zip(metrics.classes, *columns, strict=True)
    )
    intro = "<p>A class is said to be there where its probability reaches the threshold.</p>\n"
    head = ("Class", "Average precision", "F1", "Threshold")
    return intro + _table("Classes", head, rows, "numbers")


def _share(part: int, whole: int) -> str:
    low, high = wilson(part, whole)
    return f"{part / whole:.1%} <small>{100 * low:.1f}&ndash;{high:.1%}</small>" if whole else "n/a"


def _confusion(metrics: Metrics) -> str:
    """The matrix: rows are the truth, columns the prediction, tints the share of the row."""
    shares = metrics.confusion / np.maximum(metrics.support, 1)[:, None]
    if len(shares) > WIDE:
        return _large(metrics, shares)
    rows = []
    for i, name in enumerate(metrics.classes):
        cells = (  # the root shows rare confusions, too; 0.65 leaves the number readable
            f'<td class="{"right" if i == j else ""}" style="--a: {0.65 * share**0.5:.2f}">'
            f"{count or '<i>0</i>'}</td>"
            for j, (count, share) in enumerate(zip(metrics.confusion[i], shares[i], strict=True))
        )
        rows.append(_row(name) + "".join(cells))
    intro = "<p>Rows: truth. Columns: prediction. A strong tint is a large share of the row.</p>\n"
    return intro + _table("Confusion matrix", ("", *metrics.classes), rows, "matrix")


def _large(metrics: Metrics, shares: np.ndarray) -> str:
    """A matrix too large to print: its largest entries off the diagonal, and an image."""
    wrong = metrics.confusion * ~np.eye(len(shares), dtype=bool)
    largest = np.argsort(-wrong, axis=None, kind="stable")[:WIDE]
    names, at = metrics.classes, zip(*np.unravel_index(largest, wrong.shape), strict=True)
    rows = (
        _row(names[i], escape(names[j]), f"{wrong[i, j]:,}", f"{shares[i, j]:.1%}")
        for i, j in at if wrong[i, j]
    )  # fmt: skip
    image = Image.fromarray((255 - 255 * shares**0.5).astype(np.uint8))
    image.thumbnail((1000, 1000))
    return f"""<p>The most frequent confusions:</p>
{_table("Confusions", ("Truth", "Predicted", "Times", "Of the truth"), rows, "pairs")}
<figure class="map"><img class="crisp" src="{uri(image, "PNG")}" alt="The matrix as an image">
<figcaption>All {len(shares)} classes: truth from top to bottom, prediction from left to right.
</figcaption></figure>"""


def _pictures(found: Sequence[Mistake]) -> str:
    figures = []
    for mistake in found:
        image = Image.fromarray(mistake.image)
        kind, format = ("crisp", "PNG") if max(image.size) <= TINY else ("smooth", "JPEG")
        image.thumbnail((THUMBNAIL, THUMBNAIL))  # never enlarges
        truth, predicted, name = map(escape, (mistake.truth, mistake.predicted, mistake.id))
        sure = f"{mistake.probability:.1%}" if _finite(mistake.probability) else "n/a"
        figures.append(
            f'<figure><img class="{kind}" src="{uri(image, format)}" alt="{name}: {truth}, taken '
            f'for {predicted}"><figcaption><span>truth</span> <b>{truth}</b><br><span>predicted'
            f"</span> <b>{predicted}</b> {sure}<br><code>{name}</code>"
            "</figcaption></figure>\n"
        )
    return f'<div class="pictures">{"".join(figures)}</div>\n' if found else ""


def _settings(settings: Mapping[str, Any]) -> str:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        nested = isinstance(value, Mapping)
        flat |= {f"{key}.{k}": v for k, v in value.items()} if nested else {key: value}
    plain = {"None": "none", "True": "yes", "False": "no"}
    rows = (_row(key, escape(plain.get(str(value), value))) for key, value in flat.items())
    return _table("Settings", ("Setting", "Value"), rows)


def _curves(history: Sequence[Mapping[str, Any]]) -> str:
    charts = _chart("Loss", history, "loss") + _chart("Accuracy, %", history, "top1", 100)
    charts += _chart("Learning rate", history, "lr")
    lost = sum(not _finite(line.get("loss")) for line in history)
    note = f"<p>Not drawn: {lost:,} points whose loss is not a number.</p>\n" if lost else ""
    return f'<div class="curves">{charts}</div>\n{note}' if history else ""


def _chart(title: str, history: Sequence[Mapping[str, Any]], key: str, scale: float = 1) -> str:
    """One number over epochs; of a long line, 300 means. Lines are styled by their names."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in history:
        if _finite(row.get("epoch")) and _finite(row.get(key)):
            name = "train" if row["kind"] == "train" else f"validation {row['weights']}"
            lines.setdefault(escape(name), []).append((row["epoch"], scale * row[key]))
    if not lines:
        return ""
    epochs, values = np.concatenate(list(lines.values())).T
    end, up = epochs.max() or 1, _ticks(values.min(), values.max())

    def at(epoch: float, value: float) -> str:
        return f"{58 + 292 * epoch / end:.1f},{170 - 160 * (value - up[0]) / (up[-1] - up[0]):.1f}"

    grid = [(at(0, value), "h292", value) for value in up]  # lines across, and small ticks below
    grid += [(at(epoch, up[0]), "v4", epoch) for epoch in _ticks(0, end) if epoch <= end]
    marks = [
        f'<g class="{line}" transform="translate({place})"><path d="M0 0{line}"/>'
        f"<text>{number:.6g}</text></g>" for place, line, number in grid
    ]  # fmt: skip
    for name, points in lines.items():
        means = [np.mean(p, axis=0) for p in np.array_split(points, min(300, len(points)))]
        path = " ".join(at(*mean) for mean in [means[0], *means])  # so that a single one is a dot
        marks.append(f'<polyline class="{name}" points="{path}"/>')
    keys = "".join(f'<span class="{name}">{name.removesuffix(" last")}</span>' for name in lines)
    return (
        f'<figure><figcaption><b>{title}</b>{keys}</figcaption><svg viewBox="0 0 360 195" '
        f'role="img" aria-label="{title} over epochs">{"".join(marks)}</svg></figure>\n'
    )


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that enclose a range."""
    span = max(high - low, abs(high) / 1000) or 1
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= span / 4)
    first = math.floor(low / step)
    return [step * i for i in range(first, max(first + 1, math.ceil(high / step)) + 1)]


_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b2430; --dim: #5a6675; --rule: #d8dee6 }
@media screen and (prefers-color-scheme: dark) { .map img { filter: invert(1) }
  :root { --paper: #12161c; --ink: #e7eaef; --dim: #9ba6b5; --rule: #2d3541 } }
* { box-sizing: border-box; print-color-adjust: exact } dd, figure { margin: 0 }
body { margin: 0 auto; padding: 1rem; max-width: 64rem; font: 1rem/1.4 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.25 } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem }
p, dt, small, i, span, footer { color: var(--dim); font-style: normal } footer { margin: 3rem 0 }
.score { margin: 0 } .score strong { font-size: 3rem; line-height: 1.1; color: var(--ink) }
.warning { padding: .6rem .8rem; border: 3px solid #d99a00; color: var(--ink); font-weight: 600 }
dl, .curves, .pictures { display: grid; gap: 1rem; margin: 1rem 0; --least: 9rem;
  grid-template-columns: repeat(auto-fill, minmax(min(var(--least), 100%), 1fr)) }
.curves { --least: 19rem } code { font-size: .75rem } .crisp { image-rendering: pixelated }
img { width: 100%; border: 1px solid var(--rule); background: var(--rule) }
.pictures img { aspect-ratio: 1; object-fit: contain } .map { max-width: 32rem; margin-top: 1rem }
.scroll { overflow: auto; max-height: 48rem } .matrix { max-height: none }
figcaption, table { font-size: .875rem } .numbers, .matrix, thead { overflow-wrap: break-word }
table { border-collapse: collapse; font-variant: tabular-nums } small { white-space: nowrap }
th, td { padding: .35rem; border-bottom: 1px solid var(--rule); text-align: left }
th { position: sticky; background: var(--paper) } thead th { top: 0; vertical-align: bottom }
tbody th { left: 0; font-weight: 500; min-width: 5rem; max-width: max(9rem, 20vw) }
.numbers :not(:first-child), .pairs td + td { text-align: right } .words td { min-width: 5rem }
.matrix table { width: max-content }
.matrix thead span { writing-mode: vertical-rl; max-height: 8rem; overflow: hidden }
.matrix td { background: rgb(226 82 54 / var(--a)); text-align: center }
.matrix .right { background: rgb(34 160 90 / var(--a)); font-weight: 600 }
svg text { font-size: 11px; fill: var(--dim); text-anchor: end; transform: translate(-8px, 4px) }
.v4 text { text-anchor: middle; transform: translate(0, 18px) } path { stroke: var(--rule) }
polyline { fill: none; stroke: var(--c); stroke-width: 2; stroke-linecap: round }
.train { --c: #8a94a3 } .last { --c: #3d8bfd } .ema { --c: #e0651a }
span[class] { margin-left: .5rem; white-space: nowrap; font-size: .8rem }
span[class]::before { content: "● "; color: var(--c) }
@media (max-width: 50rem) { small { display: block } }
@media print { .scroll { overflow: visible; max-height: none } figure, tr { break-inside: avoid } }
"""
