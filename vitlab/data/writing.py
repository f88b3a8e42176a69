"""Files that are whole or not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Where to write instead of `path`: once whole it is flushed and renamed, else removed.

    Nothing is written where the caller removes it.

    Raises OSError naming `path` if the disk refuses; what was there is intact.
    """
    aside = path.with_name(f".{path.name}.part")
    try:
        aside.touch()
        mode = aside.stat().st_mode  # what the user's umask gives; safetensors would give 0600
        yield aside
        if aside.exists():
            with open(aside, "rb+") as f:
                os.fsync(f.fileno())
            aside.chmod(mode)
            os.replace(aside, path)
    except BaseException as e:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        if isinstance(e, SafetensorError) or (isinstance(e, OSError) and e.strerror):
            why = getattr(e, "strerror", None) or str(e)
            raise OSError(f"{path}: could not be written ({why})") from e
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file: all of it, or what was there stays."""
    with written(path) as aside:
        aside.write_bytes(utf8(text))


def utf8(text: str) -> bytes:
    """Bytes of a text: names of files and classes may hold what is no text."""
    return text.encode("utf-8", "backslashreplace")
