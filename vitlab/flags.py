"""From the words of a command line to a dataclass of options; what is wrong is one line."""

import contextlib
import difflib
from collections.abc import Iterable
from dataclasses import MISSING, fields
from itertools import takewhile
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import tyro

from vitlab.training import recipes
from vitlab.training.config import convert

POSITIONAL = get_args(tyro.conf.Positional[str])[1]  # how tyro marks what has no flag
SWITCH = {"true": True, "yes": True, "false": False, "no": False}


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that looks most like it."""
    return difflib.get_close_matches(word, known, n=1, cutoff=0)[0]


def parse(kind: type, verb: str, arguments: list[str]) -> Any:
    """Options from flags; None if help was asked for. Raises ValueError, in one line."""
    if any(word in ("-h", "--help") for word in arguments):
        with contextlib.suppress(SystemExit):
            tyro.cli(kind, prog=f"vitlab {verb}", args=["--help"], description=kind.__doc__,
                     config=(tyro.conf.PositionalMetavarFromFieldName,))  # fmt: skip
        return None
    hints = get_type_hints(kind)
    positional = [name for name, hint in get_type_hints(kind, include_extras=True).items()
                  if POSITIONAL in get_args(hint)]  # fmt: skip
    known = {f"--{name.rstrip('_').replace('_', '-')}": name for name in hints}
    known |= {f"--no-{o[2:]}": name for o, name in known.items() if hints[name] is bool}
    values: dict[str, Any] = {}
    loose: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        option = option.replace("_", "-")
        if word == "--":
            loose, words = loose + words, []
        elif not option.startswith("-"):
            loose.append(word)
        elif option not in known or known[option] in positional:
            near = nearest(option, [o for o in known if known[o] not in positional])
            raise ValueError(f"unknown option {option}: did you mean {near}?")
        else:
            words = [value, *words] if equals else words
            try:
                values[known[option]] = _take(words, hints[known[option]], bool(equals))
            except ValueError as e:
                raise ValueError(f"{option} {e}") from None
            if option.startswith("--no-") and hints[known[option]] is bool:
                values[known[option]] = not values[known[option]]
    for name in positional:
        if loose:
            several = get_origin(hints[name]) is tuple
            values[name] = tuple(loose) if several else loose[0]
            loose = [] if several else loose[1:]
    if loose:
        raise ValueError(f"unexpected: {' '.join(loose)}")
    if "recipe" in hints:  # other defaults, under what was given
        values = recipes.under(values)
    needed = [f.name for f in fields(kind) if f.default is MISSING]
    if not values.keys() >= set(needed):
        names = " ".join(needed).upper()
        raise ValueError(f"{verb} needs {names}; see vitlab {verb} --help")
    return kind(**values)


def _take(words: list[str], hint: Any, given: bool) -> Any:
    """The value of an option from the words that follow it, which are used up; `given` after =."""
    if hint is bool:
        if given and words[0].lower() not in SWITCH:
            raise ValueError(f"is on or off: true or false, not {words[0]!r}")
        return SWITCH[words.pop(0).lower()] if words and words[0].lower() in SWITCH else True
    if not words or (words[0].startswith("--") and not given):
        raise ValueError("needs a value")
    several = get_origin(hint) is tuple
    kind = hint if several else next((k for k in get_args(hint) if k is not NoneType), hint)
    if words[0] == "none" and NoneType in get_args(hint) and kind is not str:
        words.pop(0)
        return None
    if get_origin(kind) is not tuple:
        return convert(words.pop(0), hint)
    _, *others = get_args(kind)
    following = list(takewhile(lambda w: not w.startswith("--"), words))
    if others == [...]:  # as many as can be read as one
        following = [following[0], *takewhile(lambda w: w.isdigit(), following[1:])]
    else:
        following = following[: 1 + len(others)]
    del words[: len(following)]
    return convert(following, hint)
