"""Class folders, on disk or in a zip: [split/]class/.../picture.

Both are read as a list of relative names, those of folders end with "/": a folder and its zip
give the same pictures.
"""

import os
import unicodedata
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from vitlab.data.decode import EXTENSIONS
from vitlab.data.sources import SPLITS, Files, Load, Members, Row, Source, assemble, listing

# What file managers and systems leave behind, besides all names that begin with a dot.
LEFTOVERS = {"__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN", "System Volume Information"}


def open_folder(spec: str, root: Path) -> dict[str, Source]:
    """Sources by split from a folder; links are followed, and each folder is entered once."""
    names: list[str] = []
    seen: set[tuple[int, int]] = set()

    def fail(error: OSError) -> None:
        raise error  # a folder that cannot be listed must not make the set smaller in silence

    for at, inner, files in os.walk(root, followlinks=True, onerror=fail):
        stat = os.stat(at)
        if (stat.st_dev, stat.st_ino) in seen:  # a link back, or to a folder seen before
            inner.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        here = (os.path.relpath(at, root).replace(os.sep, "/") + "/").removeprefix("./")
        names += [f"{here}{name}/" for name in inner]
        names += [f"{here}{name}" for name in files]
        inner[:] = sorted(name for name in inner if not _leftover(name))  # the same everywhere
    return _sources(spec, names, lambda ids: Files(str(root), ids))


def open_zip(spec: str, path: Path) -> dict[str, Source]:
    """Sources by split from a zip; a folder around everything is looked into."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
        rows = {info.filename.replace("\\", "/"): row for row, info in enumerate(infos)}
        methods = [-1 if info.flag_bits & 1 else info.compress_type for info in infos]
        numbers = [(info.header_offset, info.compress_size, info.CRC) for info in infos]
        entries = np.column_stack([np.array(numbers, np.int64).reshape(-1, 3), methods])
    except Exception as e:  # hostile archives raise everything from OverflowError to struct.error
        raise ValueError(f"{spec}: not a readable zip ({str(e) or type(e).__name__})") from e
    inner = {name[: name.rfind("/") + 1] for name in rows}
    folders = {name[: at + 1] for name in inner for at, c in enumerate(name) if c == "/"}
    top = _around(folders)
    names = [name for name in {*rows, *folders} if name.startswith(top) and name != top]
    return _sources(
        spec, [name[len(top) :] for name in names],
        lambda ids: Members(str(path), entries[[rows[top + os.fsdecode(bytes(i))] for i in ids]]),
        [name for name in rows if not name.startswith(top)],
    )  # fmt: skip


def _around(folders: Iterable[str]) -> str:
    """The folder around everything in an archive, or nothing."""
    clear = [f for f in folders if not _hidden(f)]
    tops = [f for f in clear if f.count("/") == 1]
    if len(tops) != 1 or tops[0][:-1].lower() in SPLITS or len(clear) == 1:
        return ""
    return tops[0]


def _sources(
    spec: str, names: Iterable[str], reader: Callable[[np.ndarray], Load],
    outside: Iterable[str] = (),
) -> dict[str, Source]:  # fmt: skip
    names = sorted(names)
    tops = {n[:-1] for n in names if n.endswith("/") and n.count("/") == 1 and not _hidden(n)}
    splits = {top: SPLITS[top.lower()] for top in tops if top.lower() in SPLITS}
    if "train" not in splits.values() and tops - splits.keys():
        splits = {}  # a class may be called "test"
    if len(set(splits.values())) < len(splits):
        raise ValueError(f"{spec}: two folders for one split: {listing(sorted(splits))}")
    level = 1 if splits else 0
    rows: list[Row] = []
    ignored = dict.fromkeys(outside)  # in order, each once
    empty: dict[str, None] = {}
    loose = False
    for name in names:
        parts = name.removesuffix("/").split("/")
        folder = name.endswith("/")
        placed = len(parts) > level + (not folder) and (not level or parts[0] in splits)
        picture = not folder and os.path.splitext(name)[1].lower() in EXTENSIONS
        if hidden := _hidden(name):
            ignored[hidden] = None
        elif picture and placed:
            empty.pop("/".join(parts[: level + 1]), None)
            label = unicodedata.normalize("NFC", parts[level])  # macOS takes letters apart
            rows.append((name, label, splits[parts[0]] if level else "all", ""))
        elif not folder:
            ignored[name] = None
            loose |= picture
        elif placed and len(parts) == level + 1 and splits.get(parts[0], "train") == "train":
            empty[name[:-1]] = None
    if not rows:
        raise ValueError(
            f"{spec}: no pictures in class folders"
            f"{' (pictures lie loose, not in a folder a class)' if loose else ''};"
            f" looked for {' '.join(sorted(EXTENSIONS))}"
        )
    if empty:
        raise ValueError(
            f"{spec}: class folder without pictures: {listing(list(empty))}; fill or remove it"
        )
    used = {row[2] for row in rows}
    ignored |= dict.fromkeys(f"{top}/" for top, split in splits.items() if split not in used)
    notes = (f"{spec}: ignored, as no pictures in a class: {listing(list(ignored))}",)
    return assemble(spec, rows, reader, notes=notes if ignored else ())


def _leftover(name: str) -> bool:
    return name[:1] in ("", ".") or name in LEFTOVERS


def _hidden(name: str) -> str:
    """The leftover that a name is or lies in, else nothing."""
    parts = name.removesuffix("/").split("/")
    at = next((at for at, part in enumerate(parts, start=1) if _leftover(part)), 0)
    return "/".join(parts[:at]) + "/" * (0 < at < len(parts) or name.endswith("/")) if at else ""
