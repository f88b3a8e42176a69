"""`vitlab data check`, `preview` and `pack`: pictures before a model sees them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vitlab.training.config import Text, TrainConfig, Whole

if TYPE_CHECKING:
    from vitlab.data.doctor import Checked, Finding
    from vitlab.data.sources import Source

EXAMPLES = 3  # of each kind that the terminal shows


@dataclass(frozen=True, kw_only=True)
class Check:
    """Look at every picture: unreadable, twice, leaking, mislabelled, odd. Changes nothing."""

    spec: tyro.conf.Positional[str]  # the pictures, as for train
    against: Text = None  # another set: its test part (else val, else all) must not be in SPEC
    bundle: Text = None  # a model whose features tell labels unlike their neighbours'
    group: Text = None  # regular expression: what it finds in a path names a patient or video
    out: Text = None  # folder for index.html, all findings with thumbnails
    fix: Text = None  # CSV to write: the same set without what is wrong; SPEC stays as it is
    batch: int = 64  # pictures at once through the bundle
    device: Text = None  # of the bundle: cuda, mps or cpu
    threads: Whole = None  # CPU threads
    json: bool = False  # one JSON object a line: a finding
    debug: bool = False  # show where an error comes from


@dataclass(frozen=True, kw_only=True)
class Preview(TrainConfig):
    """Show what the model sees in training: the same options as train, --out is a PNG file."""

    spec: tyro.conf.Positional[str]  # the pictures, as for train
    rows: int = 6  # pictures shown, from all over the training part
    columns: int = 7  # the first as in evaluation, the others as in so many epochs
    debug: bool = False  # show where an error comes from


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Write pictures into tar shards with an index, for disks and networks that like large files.

    The same command finishes a packing that was interrupted.
    """

    spec: tyro.conf.Positional[str]  # the pictures, as for train
    to: Annotated[str, tyro.conf.arg(metavar="DIR")]  # folder of the shards; a spec from then on
    shard_size: Annotated[str, tyro.conf.arg(metavar="BYTES")] = "256MB"  # a full shard's
    group: Text = None  # regular expression: what it finds in a path names a patient or video
    seed: int = 0  # of the order in which pictures are packed
    verify: bool = True  # decode each picture, and leave out what cannot be
    threads: Whole = None  # CPU threads
    json: bool = False  # print the result as one JSON object
    debug: bool = False  # show where an error comes from


def check(options: Check) -> int:
    from vitlab.data import doctor, mending
    from vitlab.training.machine import cores

    parts = _open(options.spec, options.group)
    against = [_other(options.against)] if options.against else []
    for path, kind in ((options.out, "folder"), (options.fix, "file")):
        if path and Path(path).exists() and Path(path).is_dir() != (kind == "folder"):
            raise ValueError(f"{path}: is no {kind}")
    if options.fix:
        mending.refuse(parts, Path(options.fix))  # before minutes of work
    threads = options.threads or cores()
    done = doctor.check(parts, against, threads=threads, tick=_tick)
    _end()
    if options.bundle:
        done = _suspicious(done, options)
    shown = [json.dumps(f.to_dict()) for f in done.findings] if options.json else _table(done)
    for line in shown:
        print(line)
    if options.out:
        from vitlab.data import page

        page.write(Path(options.out), done)
        print(f"page: {options.out}/index.html", file=sys.stderr)
    if options.fix:
        kept = doctor.keep(done)
        mending.write(done, kept, Path(options.fix))
        dropped = int(done.starts[done.own]) - len(kept)
        print(f"{options.fix}: {len(kept):,} pictures, {dropped:,} left out", file=sys.stderr)
    return 1 if done.findings else 0


def preview(options: Preview) -> int:
    from vitlab.training import preview as previews

    config = TrainConfig(**{f.name: getattr(options, f.name) for f in fields(TrainConfig)})
    if not config.out:
        raise ValueError("data preview needs --out FILE.png")
    if Path(config.out).suffix.lower() != ".png":
        raise ValueError(f"--out {config.out}: must end in .png")
    previews.write(options.spec, config, Path(config.out), options.rows, options.columns)
    print(config.out)
    return 0


def pack(options: Pack) -> int:
    from vitlab.data import packing
    from vitlab.training.machine import cores

    parts = _open(options.spec, options.group)
    done = packing.pack(
        parts, Path(options.to), shard_size=packing.size(options.shard_size), seed=options.seed,
        verify=options.verify, threads=options.threads or cores(), tick=_tick,
    )  # fmt: skip
    _end()
    for file, why in done.left_out:
        print(f"{file}: left out: {why}", file=sys.stderr)
    if options.json:
        print(json.dumps({"to": options.to, "pictures": done.pictures, "shards": done.shards,
                          "bytes": done.bytes, "left_out": len(done.left_out)}))  # fmt: skip
    else:
        print(f"{options.to}: {done.pictures:,} pictures in {done.shards:,} shards,"
              f" {done.bytes / 1e6:,.1f} MB")  # fmt: skip
    return 1 if done.left_out else 0


def _open(spec: str, group: str | None) -> dict[str, Source]:
    from vitlab.data import sources

    parts = sources.open_spec(spec)
    for note in next(iter(parts.values())).notes:
        print(note, file=sys.stderr)
    return sources.regroup(parts, group) if group else parts


def _other(spec: str) -> Source:
    """What of another set must stay unseen."""
    from vitlab.data import sources

    parts = sources.open_spec(spec)
    return parts.get("test") or parts.get("val") or next(iter(parts.values()))


def _tick(done: int) -> None:
    """A dot a piece of work, for people who wait."""
    if sys.stderr.isatty():
        print(".", end="", file=sys.stderr, flush=True)


def _end() -> None:
    """The line of dots is over."""
    if sys.stderr.isatty():
        print(file=sys.stderr)


def _table(done: Checked) -> list[str]:
    """What was found, a line or a few a kind."""
    from vitlab.data.doctor import KINDS

    own = done.parts[: done.own]
    sizes = ", ".join(f"{len(source):,} {source.split}" for source in own)
    lines = [f"{own[0].spec}: {sizes}; {len(own[0].classes):,} classes"]
    for kind, meaning in KINDS.items():
        found = [f for f in done.findings if f.kind == kind]
        if not found:
            continue
        lines.append(f"\n{kind}: {len(found):,}  ({meaning})")
        lines += [f"  {_line(f)}" for f in found[:EXAMPLES]]
        if len(found) > EXAMPLES:
            lines.append(f"  ... and {len(found) - EXAMPLES:,} more (--json, --out)")
    return lines if done.findings else [*lines, "nothing found"]


def _line(finding: Finding) -> str:
    named = [f"{p.file} ({p.label}, {p.split})" for p in finding.pictures[:4]]
    more = ["..."] if len(finding.pictures) > 4 else []
    return ": ".join(filter(None, (" = ".join([*named, *more]), finding.note)))


def _suspicious(done: Checked, options: Check) -> Checked:
    """With the labels that a bundle's features make doubtful."""
    from dataclasses import replace

    import numpy as np

    from vitlab.commands import use
    from vitlab.data import doctor
    from vitlab.evaluation import probes

    bundle = use.load(options)
    features, rows = [], []
    for start, source in zip(done.starts.tolist(), done.parts[: done.own], strict=False):
        for x, part in probes.represented(bundle, source, batch=options.batch):
            features.append(x)
            rows += [start + row for row in part.rows]
    if not rows:
        return done
    found = doctor.suspicious(done, np.concatenate(features), np.array(rows))
    order = list(doctor.KINDS)
    findings = sorted([*done.findings, *found], key=lambda f: order.index(f.kind))
    return replace(done, findings=findings)
