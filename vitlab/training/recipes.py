"""Recipes: other defaults for the options of training, as YAML files beside the package's code.

The head of each file says the command, the hardware, the time, and the expected score with its
source. Imports no torch, so that a mistyped name is answered at once.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitlab.training.config import LENGTHS, TrainConfig, convert_all

FOLDER = Path(__file__).parents[1] / "recipes"


def names() -> list[str]:
    """The recipes that ship, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read(name: str) -> dict[str, Any]:
    """What a recipe sets, by field of TrainConfig.

    Args:
        name: a recipe that ships, or the path of a YAML file of options.

    Raises ValueError for an unknown name (with the nearest), an unknown key or a wrong value.
    """
    import yaml  # not for a command line without a recipe

    path = FOLDER / f"{name}.yaml"
    if name not in names():
        path = Path(name).expanduser()
        if not path.is_file():
            if path.suffix.lower() in (".yaml", ".yml"):
                raise ValueError(f"--recipe {name}: there is no such file")
            near = difflib.get_close_matches(name, names(), n=1, cutoff=0)[0]
            raise ValueError(f"unknown recipe {name!r}: did you mean {near}? (docs/recipes.md)")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise ValueError(f"--recipe {name}: {' '.join(str(e).split())}") from e
    if not isinstance(values, Mapping):
        raise ValueError(f"--recipe {name}: is no mapping of options to values")
    if {"recipe", "out"} & values.keys():
        raise ValueError(f"--recipe {name}: recipe and out are no defaults; give them as flags")
    return convert_all(values, f"--recipe {name}")


def under(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options as given, over the defaults of the recipe that they name, if any.

    A length given (`epochs`, `steps`, `images`, `budget`) takes the place of the recipe's own.
    """
    if given.get("recipe") is None:
        return dict(given)
    defaults = read(given["recipe"])
    if any(given.get(name) is not None for name in LENGTHS):
        defaults = {k: v for k, v in defaults.items() if k not in LENGTHS}
    return {**defaults, **given}


def configure(recipe: str, **options: Any) -> TrainConfig:
    """The configuration of a recipe, with some options given: what `--recipe` is for Python."""
    return TrainConfig(**under({"recipe": recipe, **options}))
