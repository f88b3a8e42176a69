"""A clean table of a set: what `doctor.keep` keeps, as a CSV that is a spec. No picture changes."""

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vitlab.data.doctor import Checked
from vitlab.data.sources import Chosen, Files, Load, Source, listing
from vitlab.data.writing import written


def refuse(parts: Mapping[str, Source], path: Path) -> None:
    """Raise ValueError where a table could not be written: pictures that are no files of their own.

    Also where it would replace the table that is checked.
    """
    for source in parts.values():
        if len(source) and _file(source.load, 0) is None:
            raise ValueError(
                f"--fix {path}: {source.spec} holds no picture files of their own; unpack it first"
            )
        if os.path.realpath(os.path.expanduser(source.spec)) == os.path.realpath(path):
            raise ValueError(f"--fix {path}: is the table that is checked; choose another name")


def write(done: Checked, rows: np.ndarray, path: Path) -> None:
    """Write `path,label[,split][,group]` of some rows of the set, aside and renamed.

    Paths are relative to the table. Raises ValueError for names that no table can hold.
    """
    own = done.parts[: done.own]
    splits = any(source.split != "all" for source in own)
    grouped = any(source.groups is not None for source in own)
    root = os.path.realpath(path.parent)
    header = ["path", "label", *["split"] * splits, *["group"] * grouped]
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(header)
    for row in rows.tolist():
        source, i = done.place(row)
        file = os.path.relpath(os.path.abspath(_file(source.load, i) or ""), root)
        group = -1 if source.groups is None else int(source.groups[i])
        cells = [file, done.label(row)]
        cells += [source.split] * splits + ([str(group) if group >= 0 else ""] if grouped else [])
        table.writerow(cells)
    try:
        data = text.getvalue().encode()
    except UnicodeEncodeError as e:
        names = listing([ascii(e.object[max(0, e.start - 30) : e.end])])
        raise ValueError(f"--fix {path}: a picture's name is not UTF-8 text ({names})") from e
    path.parent.mkdir(parents=True, exist_ok=True)
    with written(path) as aside:
        aside.write_bytes(data)


def _file(load: Load, i: int) -> str | None:
    if isinstance(load, Chosen):
        return _file(load.load, int(load.rows[i]))
    return load.file(i) if isinstance(load, Files) else None
