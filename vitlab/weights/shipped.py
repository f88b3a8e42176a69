"""The pre-trained models inside the package: bundles in half precision, loaded by name."""

import os
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "assets"


def names() -> tuple[str, ...]:
    """What ships."""
    return tuple(sorted(config.parent.name for config in FOLDER.glob("*/config.json")))


def find(name: str | os.PathLike[str]) -> Path | None:
    """The folder of a shipped bundle; None for other names, and where a file has that name."""
    known = isinstance(name, str) and name in names() and not Path(name).exists()
    return FOLDER / str(name) if known else None
