"""Class names of the public heads: ImageNet-1k, and the 21,843 classes of ImageNet-21k."""

import gzip
from collections import Counter
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "assets" / "imagenet"
SETS = {1000: "imagenet1k", 21843: "imagenet21k"}  # outputs -> whose they are


@cache
def synsets(count: int) -> tuple[tuple[str, str], ...]:
    """(WordNet id, name) of each output of a head with so many, in its order; else nothing."""
    if count not in SETS:
        return ()
    with gzip.open(FOLDER / f"{SETS[count]}.txt.gz", "rt", encoding="utf-8") as f:
        pairs = (line.rstrip("\n").partition(" ") for line in f)
        return tuple((synset, name) for synset, _, name in pairs)


def translate(names: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """WordNet ids (`n01443537`, as folders are called) in the words of `known`, if those are of
    ImageNet; other names stay as they are.
    """
    if set(names) <= set(known):
        return names
    for count in SETS:
        if set(known) <= set(imagenet(count)):
            ids = (synset for synset, _ in synsets(count))
            words = dict(zip(ids, imagenet(count), strict=True))
            return tuple(words.get(name, name) for name in names)
    return names


@cache
def imagenet(count: int) -> tuple[str, ...]:
    """Names of the outputs, each its own: what several share, the WordNet id tells apart."""
    pairs = synsets(count)
    often = Counter(name for _, name in pairs)
    return tuple(f"{name} ({synset})" if often[name] > 1 else name for synset, name in pairs)
