"""Tables that name pictures: CSV `path,label[,split][,group]`, or JSONL of the same keys.

Several labels of a picture are separated by `|`; then all of the table is multi-label.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vitlab.data.multilabel import MARK, spread
from vitlab.data.sources import SPLITS, Files, Source, assemble


def open_table(spec: str, path: Path) -> dict[str, Source]:
    """Sources by split; paths are relative to the table, rows without a split are training."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"{spec}: not UTF-8 text ({e.reason} at byte {e.start})") from e
    read = _jsonl if path.suffix.lower() == ".jsonl" else _csv
    rows = [_row(f"{spec}: line {line}", record) for line, record in read(spec, text)]
    if not rows:
        raise ValueError(f"{spec}: no rows")
    rest = "train" if any(split for _, _, split, _ in rows) else "all"
    rows = [(file, label, split or rest, group) for file, label, split, group in rows]
    labels = {label for _, label, _, _ in rows}
    several = any(MARK in label for label in labels)
    joined = tuple(sorted(labels)) if several else None
    parts = assemble(spec, rows, lambda ids: Files(str(path.parent), ids), joined)
    return spread(parts) if several else parts


def _row(where: str, record: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """(path, label, split, group); split and group are empty where there are none."""
    cells = {key: record.get(key) for key in ("path", "label", "split", "group")}
    for key, cell in cells.items():
        if cell is not None and not isinstance(cell, str | int):
            raise ValueError(f"{where}: {key} must be text or a whole number, not {cell!r}")
    file = str(cells["path"] or "")
    label, split, group = (
        "" if cells[key] is None else str(cells[key]).strip() for key in ("label", "split", "group")
    )
    if not file or not label:
        raise ValueError(f"{where} needs a path and a label")
    if any("\ud800" <= c <= "\udfff" for c in file):
        raise ValueError(f"{where}: the path is not UTF-8 text")
    if not all(map(str.strip, label.split(MARK))):
        raise ValueError(f"{where} has an empty label ({label})")
    if split and split.lower() not in SPLITS:
        raise ValueError(f"{where}: split {split!r} is not train, val or test")
    return file, label, SPLITS.get(split.lower(), ""), group


def _csv(spec: str, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [h.strip() for h in next(reader, [])]
        if not {"path", "label"} <= set(header) or len(set(header)) < len(header):
            raise ValueError(
                f"{spec}: the header must be path,label[,split][,group], found {','.join(header)}"
            )
        for cells in filter(None, reader):
            if len(cells) > len(header):
                raise ValueError(f"{spec}: line {reader.line_num} has more columns than the header")
            yield reader.line_num, dict(zip(header, cells, strict=False))
    except csv.Error as e:
        raise ValueError(f"{spec}: line {reader.line_num}: {e}") from e


def _jsonl(spec: str, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):  # JSON may hold other line ends
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{spec}: line {number} is not JSON ({e})") from e
        if not isinstance(record, dict):
            raise ValueError(f"{spec}: line {number} is not an object")
        yield number, record
