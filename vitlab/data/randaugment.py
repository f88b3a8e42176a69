"""RandAugment as AugReg trained with it (arXiv 2106.10270): 16 operations, extrapolated.

The operations and their strengths are those of big_vision's `randaug`, where magnitude 10 is full
strength and more extrapolates; Pillow does the pixels. It differs from torchvision's: there are
inversion, cutout and "solarize add", no identity, shifts are in pixels, and each operation is
always applied. Magnitude 0 is not nothing: it inverts, equalizes and posterizes.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

GRAY = (128, 128, 128)  # what geometry uncovers
Strength = Callable[[float], Any]


def randaugment(picture: np.ndarray, count: int, magnitude: float, draws: np.ndarray) -> np.ndarray:
    """Apply `count` operations, each chosen among the 16, one after another.

    Args:
        picture: [h, w, 3] uint8.
        count: N of the paper.
        magnitude: M; 10 is full strength, 15 and 20 go beyond it.
        draws: [4 * count] random numbers in [0, 1): operation, sign and place (y, x) of each.

    Returns [h, w, 3] uint8.
    """
    image = Image.fromarray(picture)
    names = list(OPERATIONS)
    for own in draws.reshape(count, 4).tolist():
        image = operate(image, names[int(own[0] * len(names))], magnitude, own[1:])
    return np.asarray(image)


def operate(image: Image.Image, name: str, magnitude: float, draws: list[float]) -> Image.Image:
    """One operation at a magnitude; `draws` are its sign and its place (y, x)."""
    apply, strength, signed = OPERATIONS[name]
    level = strength(magnitude / 10)
    if name == "cutout":
        return apply(image, level, draws[1], draws[2])
    return apply(image, -level if signed and draws[0] < 0.5 else level)


def _affine(image: Image.Image, a: float, b: float, c: float, d: float, e: float, f: float) -> Any:
    """Take the pixel at (x, y) from (a x + b y + c, d x + e y + f), the nearest one."""
    return image.transform(image.size, Image.Transform.AFFINE, (a, b, c, d, e, f), fillcolor=GRAY)


def _rotate(image: Image.Image, degrees: float) -> Image.Image:
    return image.rotate(degrees, fillcolor=GRAY)


def _posterize(image: Image.Image, bits: int) -> Image.Image:
    # A shift by all 8 bits leaves one in TensorFlow; magnitudes above 20 leave all.
    return ImageOps.posterize(image, min(max(bits, 1), 8))


def _solarize(image: Image.Image, threshold: int) -> Image.Image:
    return ImageOps.solarize(image, threshold)


@lru_cache(maxsize=32)
def _added(addition: int) -> tuple[int, ...]:
    return tuple(min(value + addition, 255) if value < 128 else value for value in range(256)) * 3


def _solarize_add(image: Image.Image, addition: int) -> Image.Image:
    """Brighten the darker half of the values."""
    return image.point(_added(addition))


def _enhance(kind: Any) -> Callable[[Image.Image, float], Image.Image]:
    return lambda image, factor: kind(image).enhance(factor)


def _cutout(image: Image.Image, pad: int, y: float, x: float) -> Image.Image:
    """A gray square of 2 x pad pixels a side about a point of the picture, cut off at its edges."""
    w, h = image.size
    top, left = int(y * h), int(x * w)
    box = (max(0, left - pad), max(0, top - pad), min(w, left + pad), min(h, top + pad))
    image = image.copy()
    if pad:
        image.paste(GRAY, box)
    return image


def _factor(share: float) -> float:
    return 1.8 * share + 0.1


# name -> what it does, its strength from magnitude / 10, does it take either sign
OPERATIONS: dict[str, tuple[Callable[..., Any], Strength, bool]] = {
    "autocontrast": (lambda image, _: ImageOps.autocontrast(image), lambda s: 0, False),
    "equalize": (lambda image, _: ImageOps.equalize(image), lambda s: 0, False),
    "invert": (lambda image, _: ImageOps.invert(image), lambda s: 0, False),
    "rotate": (_rotate, lambda s: 30 * s, True),
    "posterize": (_posterize, lambda s: math.floor(4 * s), False),
    "solarize": (_solarize, lambda s: math.floor(256 * s), False),
    "color": (_enhance(ImageEnhance.Color), _factor, False),
    "contrast": (_enhance(ImageEnhance.Contrast), _factor, False),
    "brightness": (_enhance(ImageEnhance.Brightness), _factor, False),
    "sharpness": (_enhance(ImageEnhance.Sharpness), _factor, False),
    "shear_x": (lambda image, k: _affine(image, 1, k, 0, 0, 1, 0), lambda s: 0.3 * s, True),
    "shear_y": (lambda image, k: _affine(image, 1, 0, 0, k, 1, 0), lambda s: 0.3 * s, True),
    "translate_x": (lambda image, t: _affine(image, 1, 0, t, 0, 1, 0), lambda s: 100 * s, True),
    "translate_y": (lambda image, t: _affine(image, 1, 0, 0, 0, 1, t), lambda s: 100 * s, True),
    "cutout": (_cutout, lambda s: math.floor(40 * s), False),
    "solarize_add": (_solarize_add, lambda s: math.floor(110 * s), False),
}
