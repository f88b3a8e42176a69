"""Training's augmentation: per image from (seed, epoch, position), mixing from (seed, step)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitlab.data.decode import Box
from vitlab.data.preprocess import Preprocess, fit, mean_colour
from vitlab.data.randaugment import randaugment

# Where in an image's random numbers each step finds its own: none depends on what others do.
FLIP, RANDAUGMENT, ERASE, CROP = 0, 1, 2, 7
TRIES = 10  # of a random box; each takes an area and an aspect
DRAWS = CROP + 2 * TRIES + 2


@dataclass(frozen=True, kw_only=True)
class Augment:
    """What happens to a picture on its way into training, after decoding."""

    crop: tuple[float, float] | None = None  # area range of the random resized crop; None: as eval
    flip: bool = True  # mirror half of the pictures
    randaugment: tuple[int, int] | None = None  # operations a picture, magnitude 0 ... 30
    law: Literal["torchvision", "google"] = "torchvision"  # whose crops and whose RandAugment
    erase: float = 0.0  # probability of filling a random rectangle with the mean colour


def draw(seed: int, keys: np.ndarray) -> np.ndarray:
    """An image's random numbers: [B, DRAWS] float64 in [0, 1) for keys [B, k] of integers >= 0.

    Each is a hash of (seed, its key, its column), so a batch costs little more than an image, and
    who computes it does not matter.
    """
    state = scramble(np.array([seed % 2**64], dtype=np.uint64))
    for word in keys.T.astype(np.uint64):
        state = scramble(state ^ word)
    return _uniform(state, DRAWS)


def _uniform(states: np.ndarray, count: int) -> np.ndarray:
    """`count` numbers in [0, 1) from each state: [B] uint64 -> [B, count] float64."""
    columns = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (scramble(states[:, None] + columns) >> np.uint64(11)) * 2.0**-53


def scramble(x: np.ndarray) -> np.ndarray:
    """A step of splitmix64 (Steele, Lea and Flood, 2014), on uint64 of any shape."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_box(
    draws: np.ndarray, area: tuple[float, float], h: int, w: int, law: str = "torchvision"
) -> Box:
    """A random crop of a picture h high and w wide: area uniform, aspect log-uniform in 3/4 - 4/3.

    The law of torchvision's RandomResizedCrop: ten tries, then the largest central crop. With
    the law "google" it is `inception_box`.
    """
    if law == "google":
        return inception_box(draws, area, h, w)
    u = draws[CROP:].tolist()
    for area_draw, aspect_draw in zip(u[0:-2:2], u[1:-2:2], strict=True):
        size = h * w * (area[0] + area_draw * (area[1] - area[0]))
        aspect = math.exp((2 * aspect_draw - 1) * math.log(4 / 3))
        wide, tall = round(math.sqrt(size * aspect)), round(math.sqrt(size / aspect))
        if 0 < wide <= w and 0 < tall <= h:
            left, top = int(u[-2] * (w - wide + 1)), int(u[-1] * (h - tall + 1))
            return left, top, left + wide, top + tall
    wide, tall = min(w, round(h * 4 / 3)), min(h, round(w * 4 / 3))
    left, top = (w - wide) // 2, (h - tall) // 2
    return left, top, left + wide, top + tall


def inception_box(draws: np.ndarray, area: tuple[float, float], h: int, w: int) -> Box:
    """A random crop by the law of TensorFlow's `sample_distorted_bounding_box`, without a box.

    The aspect is uniform in 3/4 - 4/3, then the height among those that fit: smaller crops than
    torchvision's (mean area 0.34 instead of 0.42 of 500 x 375 pixels, from 5 %). The last row
    and column of offsets are never reached. What does not fit in ten tries is the whole picture.
    """
    u = draws[CROP:].tolist()
    least, most = area[0] * h * w, area[1] * h * w
    for aspect_draw, height_draw in zip(u[0:-2:2], u[1:-2:2], strict=True):
        aspect = 3 / 4 + aspect_draw * (4 / 3 - 3 / 4)
        highest = round(math.sqrt(most / aspect))
        if round(highest * aspect) > w:
            highest = int((w + 0.5 - 1e-7) / aspect)
            highest -= round(highest * aspect) > w
        highest = min(highest, h)
        tall = min(round(math.sqrt(least / aspect)), highest)
        tall += int(height_draw * (highest - tall + 1))
        # Rounding may have passed either bound by a row.
        tall += round(tall * aspect) * tall < least
        tall -= round(tall * aspect) * tall > most
        wide = round(tall * aspect)
        if 0 < wide <= w and 0 < tall <= h and least <= wide * tall <= most:
            left, top = int(u[-2] * max(1, w - wide)), int(u[-1] * max(1, h - tall))
            return left, top, left + wide, top + tall
    return 0, 0, w, h


def augment(
    config: Augment, preprocess: Preprocess, images: Sequence[np.ndarray], draws: np.ndarray
) -> Tensor:
    """Pictures [h, w, 3] uint8 -> [B, 3, H, W] uint8, by their random numbers [B, DRAWS].

    Where `config.crop` is set, `images` are the regions that `random_box` chose.
    """
    if config.crop is None:
        pixels = fit(preprocess, images)
        if pixels.dtype != torch.uint8:
            pixels = pixels.round_().clamp_(0, 255).to(torch.uint8)
    else:
        pixels = torch.cat([_stretch(preprocess, image) for image in images])
    if config.flip:
        array, chosen = pixels.numpy(), draws[:, FLIP] < 0.5
        # torch mirrors fast and selects slowly, numpy the reverse
        array[chosen] = torch.from_numpy(array[chosen]).flip(3).numpy()
    if config.randaugment:
        for i, u in enumerate(draws[:, RANDAUGMENT].tolist()):
            operate = _operate if config.law == "google" else _randaugment
            pixels[i] = operate(config.randaugment, pixels[i], int(u * 2**53))
    for i in np.flatnonzero(draws[:, ERASE] < config.erase).tolist():
        _erase(pixels[i], draws[i], mean_colour(preprocess))
    return pixels


def _stretch(preprocess: Preprocess, region: np.ndarray) -> Tensor:
    """[h, w, 3] uint8 -> [1, 3, H, W] uint8; torch's filters are Pillow's within 1, 3 x faster."""
    mode = preprocess.interpolation
    pixels = torch.from_numpy(region.copy()).permute(2, 0, 1)[None]
    if mode == "nearest":
        return F.interpolate(pixels, preprocess.size, mode="nearest-exact")
    return F.interpolate(
        pixels, preprocess.size, mode=mode, align_corners=False, antialias=preprocess.antialias
    )


def _randaugment(config: tuple[int, int], pixels: Tensor, seed: int) -> Tensor:
    """torchvision's RandAugment, which draws from torch's own generator."""
    from torchvision.transforms import v2

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return v2.RandAugment(*config, fill=[128] * 3)(pixels)


def _operate(config: tuple[int, int], pixels: Tensor, seed: int) -> Tensor:
    """The originals' RandAugment; the picture's random number is hashed into all that it takes."""
    state = scramble(np.array([seed], dtype=np.uint64))
    draws = _uniform(state, 4 * config[0])[0]
    picture = np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())
    return torch.from_numpy(randaugment(picture, *config, draws).copy()).permute(2, 0, 1)


def _erase(pixels: Tensor, draws: np.ndarray, colour: np.ndarray) -> None:
    """Random erasing (arXiv 1708.04896), in place: 2 to 33 % of the area, aspect 0.3 to 3.3."""
    h, w = pixels.shape[1:]
    area, aspect, y, x = draws[ERASE + 1 : CROP].tolist()
    size = h * w * (0.02 + area * 0.31)
    ratio = math.exp(math.log(0.3) + aspect * math.log(11))
    tall = min(h, max(1, round(math.sqrt(size * ratio))))
    wide = min(w, max(1, round(math.sqrt(size / ratio))))
    top, left = int(y * (h - tall + 1)), int(x * (w - wide + 1))
    pixels[:, top : top + tall, left : left + wide] = torch.from_numpy(colour)[:, None, None]


def mix(
    images: Tensor, labels: Tensor, classes: int, mixup: float, cutmix: float, key: list[int]
) -> tuple[Tensor, Tensor]:
    """Mixup (arXiv 1710.09412) or CutMix (1905.04899) of a batch with one ratio, from (seed, step).

    The partner of position p is p XOR 1; the last of an odd batch is its own. With both on, each
    batch takes one of them by a coin toss.

    Args:
        images: [B, 3, H, W] float, normalised.
        labels: [B] int64, or [B, K] where a picture may have several.
        classes: K.
        mixup, cutmix: parameter of the Beta distribution of the ratio; 0 turns it off.

    Returns:
        images [B, 3, H, W] and soft targets [B, K] float32.
    """
    targets = (F.one_hot(labels, classes) if labels.ndim == 1 else labels).to(torch.float32)
    if not (mixup or cutmix):
        return images, targets
    rng = np.random.default_rng(key)
    use_cutmix = cutmix > 0 and (mixup == 0 or rng.random() < 0.5)
    alpha = cutmix if use_cutmix else mixup
    ratio = float(rng.beta(alpha, alpha))
    partner = torch.arange(len(images), device=images.device) ^ 1
    partner.clamp_(max=len(images) - 1)
    if use_cutmix:
        h, w = images.shape[2:]
        tall, wide = round(h * math.sqrt(1 - ratio)), round(w * math.sqrt(1 - ratio))
        y, x = int(rng.integers(h)), int(rng.integers(w))  # the centre; the box may be cut off
        top, bottom = max(0, y - tall // 2), min(h, y - tall // 2 + tall)
        left, right = max(0, x - wide // 2), min(w, x - wide // 2 + wide)
        ratio = 1 - max(0, bottom - top) * max(0, right - left) / (h * w)
        source = images[partner, :, top:bottom, left:right]
        images = images.clone()
        images[:, :, top:bottom, left:right] = source
    else:
        images = images.lerp(images[partner], 1 - ratio)
    return images, targets.lerp(targets[partner], 1 - ratio)
