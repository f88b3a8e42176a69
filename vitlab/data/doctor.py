"""What is wrong with a set of pictures: `check` finds it, `keep` says what is left without it.

Unreadable files, the same picture twice (in one split, in two, in another set, under two labels),
groups in two splits, odd files, classes out of balance, and labels unlike their neighbours'.
Pictures are only ever read.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vitlab.data import duplicates
from vitlab.data.looks import Looks, look, same_pictures
from vitlab.data.multilabel import MARK
from vitlab.data.sources import Source

KINDS = {  # what can be found, the gravest first
    "unreadable": "cannot be read",
    "conflict": "one picture under two labels",
    "leak": "one picture in two splits",
    "overlap": "also in the other set",
    "group": "one group in two splits",
    "duplicate": "the same pixels more than once",
    "near-duplicate": "nearly the same picture more than once",
    "suspicious": "another label than its neighbours",
    "rotated": "stored on its side, upright by its EXIF tag",
    "mode": "stored in an unusual way",
    "size": "of an unusual size",
    "imbalance": "classes of very different sizes",
}
PLAIN = {"RGB", "L", "P"}  # modes that nothing happens to
RATIO = 10  # of the largest to the smallest class that is told
SMALL, LONG = 4, 4.0  # times smaller than the median, times longer than wide: unusual
NEIGHBOURS = 10  # that vote on a label
AGREED = 0.7  # share of votes for one other label that makes the own suspicious
MOST = 50_000  # neighbours are looked for among that many pictures
RANK = {"test": 0, "val": 1}  # of two copies, that of the lower split is kept


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One of the pictures of a finding."""

    split: str  # train, val, test or all; of another set, its spec and split
    file: str
    label: str
    row: int  # among all that were checked


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    kind: str  # of KINDS
    pictures: tuple[Picture, ...]  # whom it concerns; for classes: none
    note: str  # what exactly

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        pictures = [{"split": p.split, "file": p.file, "label": p.label} for p in self.pictures]
        return {"kind": self.kind, "pictures": pictures, "note": self.note}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """All pictures that were looked at, in a row: the set's splits, then the other set's."""

    parts: list[Source]
    own: int  # of the parts, the first so many are the set's
    starts: np.ndarray  # [parts + 1] int64: first row of each
    first: np.ndarray  # [N] int64: first row with the same pixels
    near: np.ndarray  # [P, 2] int64: such first rows that hold nearly the same picture
    findings: list[Finding] = field(default_factory=list)

    def place(self, row: int) -> tuple[Source, int]:
        """The part that a row lies in, and its number there."""
        part = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.parts[part], row - int(self.starts[part])

    def label(self, row: int) -> str:
        """The class of a row's picture; of several, all, as a table has them."""
        source, i = self.place(row)
        if source.many is None:
            return source.classes[int(source.labels[i])]
        return MARK.join(source.classes[k] for k in np.flatnonzero(source.many[i]).tolist())

    def picture(self, row: int) -> Picture:
        """As findings tell of it."""
        source, i = self.place(row)
        theirs = row >= self.starts[self.own]
        split = f"{source.spec} {source.split}" if theirs else source.split
        return Picture(split=split, file=source.id(i), label=self.label(row), row=row)


def check(
    parts: Mapping[str, Source], against: Sequence[Source] = (), *, threads: int = 1,
    tick: Callable[[int], None] = lambda n: None,
) -> Checked:  # fmt: skip
    """Look at every picture of a set once, and find what is wrong with it.

    Args:
        parts: the set, by split.
        against: other sets, such as the test sets of what a model will be compared on: pictures
            that are in both are found.
        threads: that read and decode.
        tick: called with the number of pictures after each piece of work.
    """
    sources = [*parts.values(), *against]
    starts = np.cumsum([0, *map(len, sources)])
    looks = look(sources, threads, tick)
    first, near = same_pictures(sources, starts, looks, threads)
    done = Checked(parts=sources, own=len(parts), starts=starts, first=first, near=near)
    findings = [*_files(done, looks), *_copies(done), *_groups(done), *_balance(done)]
    order = {kind: i for i, kind in enumerate(KINDS)}
    return replace(done, findings=sorted(findings, key=lambda f: order[f.kind]))


# Finding ---------------------------------------------------------------------------------------


def _files(done: Checked, looks: Looks) -> Iterator[Finding]:
    """What a file alone tells: unreadable, turned, of an odd mode or size. Of the set's own."""

    def one(kind: str, row: int, note: str) -> Finding:
        return Finding(kind=kind, pictures=(done.picture(row),), note=note)

    end = int(done.starts[done.own])
    for row, why in looks.why.items():
        if row < end:
            yield one("unreadable", row, why)
    readable = looks.sizes[:end, 0] > 0
    if not readable.any():
        return
    for row in np.flatnonzero(looks.turned[:end]).tolist():
        yield one("rotated", row, "vitlab turns it upright; other programs may not")
    usual = Counter(mode for mode in looks.modes[:end] if mode).most_common(1)
    for row, mode in enumerate(looks.modes[:end]):
        if mode and mode not in PLAIN and mode != usual[0][0]:
            yield one("mode", row, f"{mode}, others are {usual[0][0]}")
    short, long = looks.sizes[:end].min(axis=1), looks.sizes[:end].max(axis=1)
    h, w = np.median(looks.sizes[:end][readable], axis=0).astype(int).tolist()
    aspect = long / np.maximum(short, 1)
    small = short * SMALL < np.median(short[readable])
    narrow = (aspect > LONG) & (aspect > LONG / 2 * np.median(aspect[readable]))
    for row in np.flatnonzero(readable & (small | narrow)).tolist():
        tall, wide = looks.sizes[row].tolist()
        yield one("size", row, f"{wide} x {tall} pixels, the median is {w} x {h}")


def _copies(done: Checked) -> Iterator[Finding]:
    """The same picture in several places, and what is wrong with that."""
    end = done.starts[done.own]
    others = np.flatnonzero(done.first != np.arange(len(done.first)))
    pairs = np.concatenate([np.stack([done.first[others], others], axis=1), done.near])
    for rows in duplicates.groups(pairs):
        own = [row for row in rows if row < end]
        if not own:
            continue
        pictures = tuple(map(done.picture, rows))
        mine = pictures[: len(own)]
        equal = len(set(done.first[rows].tolist())) == 1
        how = "the same pixels" if equal else "nearly the same"
        labels = sorted({p.label for p in mine})
        splits = list(dict.fromkeys(p.split for p in mine))
        kinds = {}
        if len(labels) > 1:
            kinds["conflict"] = f"{how}, under {' and '.join(labels)}"
        if len(splits) > 1:
            kinds["leak"] = f"{how}, in {' and '.join(splits)}"
        if len(own) < len(rows):
            there = " and ".join(dict.fromkeys(p.split for p in pictures[len(own) :]))
            kinds["overlap"] = f"{how}, also in {there}"
        if not kinds:
            kinds["duplicate" if equal else "near-duplicate"] = how
        for kind, note in kinds.items():
            shown = pictures if kind == "overlap" else mine
            yield Finding(kind=kind, pictures=shown, note=note)


def _groups(done: Checked) -> Iterator[Finding]:
    """Groups (patients, videos) with pictures in two splits."""
    rows, numbers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for start, source in zip(done.starts.tolist(), done.parts[: done.own], strict=False):
        if source.groups is not None:
            named = np.flatnonzero(source.groups >= 0)
            rows.append(start + named)
            numbers.append(source.groups[named])
    row, number = np.concatenate(rows), np.concatenate(numbers)
    part = np.searchsorted(done.starts, row, side="right")
    order = np.argsort(number, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(number[order])) + 1):
        if len(members) and (part[members] != part[members[0]]).any():
            pictures = tuple(map(done.picture, row[members].tolist()))
            counts = Counter(p.split for p in pictures)
            note = ", ".join(f"{n:,} in {split}" for split, n in counts.items())
            yield Finding(kind="group", pictures=pictures, note=note)


def shared_groups(parts: Mapping[str, Source]) -> list[str]:
    """A line for each other part that has groups of the training part: what it costs, an example.

    Nothing is read for it but the sources' numbers of groups.
    """
    train, lines = parts.get("train"), list[str]()
    if train is None or train.groups is None:
        return lines
    for split, part in parts.items():
        if part is train or part.groups is None:
            continue
        rows = np.flatnonzero(np.isin(part.groups, train.groups) & (part.groups >= 0))
        if len(rows):
            numbers = part.groups[rows]
            one, twin = int(rows[0]), int(np.flatnonzero(train.groups == numbers[0])[0])
            lines.append(
                f"{part.spec}: {len(rows):,} of {len(part):,} pictures in {split} are of groups in"
                f" train (groups: {len(np.unique(numbers)):,}, such as that of {part.id(one)} and"
                f" {train.id(twin)}), which flatters its score; `vitlab data check --fix` keeps"
                " each group in one split"
            )
    return lines


def _balance(done: Checked) -> Iterator[Finding]:
    for source in done.parts[: done.own]:
        if source.split not in ("train", "all"):
            continue
        counts = np.bincount(source.labels, minlength=len(source.classes))
        most, least = int(counts.argmax()), int(counts.argmin())
        if counts[most] >= RATIO * max(1, counts[least]):
            note = (
                f"{source.split}: {source.classes[most]} has {counts[most]:,} pictures,"
                f" {source.classes[least]} {counts[least]:,}"
            )
            yield Finding(kind="imbalance", pictures=(), note=note)


def suspicious(
    done: Checked, features: np.ndarray, rows: np.ndarray, k: int = NEIGHBOURS
) -> list[Finding]:
    """Labels that the pictures most like theirs do not share.

    Args:
        done: what `check` found.
        features: [n, D] float32, of a model that was not trained on these labels at best.
        rows: [n] int64, whose features they are; only the set's own are judged.

    A label is suspicious where AGREED of the k nearest pictures (by cosine, other than copies)
    have one other label, and none, or one of ten, has its own.
    """
    features = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    labels = np.array([done.label(row) for row in rows.tolist()])
    known = np.arange(len(rows))
    if len(rows) > MOST:
        known = np.sort(np.random.default_rng(0).choice(len(rows), MOST, replace=False))
    first, linked = done.first.tolist(), _linked(done.near)
    found = []
    for at in range(0, len(rows), 1024):
        near = features[at : at + 1024] @ features[known].T
        width = min(2 * k + 1, len(known))
        nearest = np.argpartition(-near, width - 1, axis=1)[:, :width]
        for i, others in enumerate(nearest, start=at):
            best = known[others[np.argsort(-near[i - at, others], kind="stable")]]
            row = int(rows[i])
            copies = {first[row], *linked.get(first[row], ())}
            votes = [j for j in best if first[int(rows[j])] not in copies][:k]
            counts = Counter(labels[votes].tolist())
            if not counts:
                continue
            label, n = counts.most_common(1)[0]
            if label != labels[i] and n >= AGREED * len(votes) and counts[labels[i]] <= k // 10:
                note = f"{n} of its {len(votes)} nearest are {label}"
                found.append(Finding(kind="suspicious", pictures=(done.picture(row),), note=note))
    return found


def _linked(pairs: np.ndarray) -> dict[int, set[int]]:
    """Row -> the rows it is paired with."""
    linked: dict[int, set[int]] = {}
    for i, j in pairs.tolist():
        linked.setdefault(i, set()).add(j)
        linked.setdefault(j, set()).add(i)
    return linked


# Mending ---------------------------------------------------------------------------------------


def keep(done: Checked) -> np.ndarray:
    """Rows of the set that a clean table keeps, rising: [K] int64.

    Without the unreadable; without pictures under two labels, as nobody knows which is right; of
    the same picture, one is kept: none where it is in the other set, else that of test, then val,
    then the first. Of a group in several splits, the pictures of one split are kept, likewise.
    What only looks odd stays.
    """
    end = int(done.starts[done.own])
    drop = {p.row for f in done.findings if f.kind in ("unreadable", "conflict")
            for p in f.pictures}  # fmt: skip

    def rank(row: int) -> tuple[int, int]:
        return (-1 if row >= end else RANK.get(done.place(row)[0].split, 2)), row

    kept: set[int] = set()  # by their `first`
    linked = _linked(done.near)
    first, times = done.first.tolist(), np.bincount(done.first)
    several = {row for row, i in enumerate(first) if times[i] > 1 or i in linked} - drop
    for row in sorted(several, key=rank):
        if row < end and not kept.isdisjoint((first[row], *linked.get(first[row], ()))):
            drop.add(row)
        else:
            kept.add(first[row])
    for finding in done.findings:
        if finding.kind == "group":
            left = {p.row: rank(p.row)[0] for p in finding.pictures if p.row not in drop}
            drop |= {row for row, own in left.items() if own > min(left.values())}
    return np.setdiff1d(np.arange(end), sorted(drop))
