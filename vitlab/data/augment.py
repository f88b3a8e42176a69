"""Training's augmentation: per image from (seed, epoch, position), mixing from (seed, step)."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vitlab.data.preprocess import FILTERS, Preprocess, fit


@dataclass(frozen=True, kw_only=True)
class Augment:
    """What happens to a picture on its way into training, after decoding."""

    crop: tuple[float, float] | None = None  # area range of the random resized crop; None: as eval
    flip: bool = True  # mirror half of the pictures
    randaugment: tuple[int, int] | None = None  # operations a picture, magnitude 0 ... 30
    erase: float = 0.0  # probability of filling a random rectangle with the mean colour


def augment(config: Augment, preprocess: Preprocess, image: np.ndarray, key: list[int]) -> Tensor:
    """A picture [h, w, 3] uint8 -> [3, H, W] uint8, drawn from `key` (seed, epoch, position)."""
    rng = np.random.default_rng(key)
    if config.crop is None:
        pixels = fit(preprocess, image)
        if pixels.dtype != torch.uint8:
            pixels = pixels.round_().clamp_(0, 255).to(torch.uint8)
    else:
        height, width = preprocess.size
        box = random_box(rng, image.shape[0], image.shape[1], config.crop)
        resized = Image.fromarray(image).resize(
            (width, height), FILTERS[preprocess.interpolation], box=box
        )
        pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1)
    if config.flip and rng.random() < 0.5:
        pixels = pixels.flip(2)
    if config.randaugment:
        pixels = _randaugment(config.randaugment, pixels, int(rng.integers(2**63)))
    if config.erase and rng.random() < config.erase:
        pixels = _erase(rng, pixels, preprocess)
    return pixels


def random_box(
    rng: np.random.Generator, h: int, w: int, area: tuple[float, float]
) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of a random crop: area uniform, aspect log-uniform in 3/4 - 4/3.

    The law of torchvision's RandomResizedCrop: ten tries, then the largest central crop.
    """
    low, high = math.log(3 / 4), math.log(4 / 3)
    for _ in range(10):
        size = h * w * rng.uniform(*area)
        aspect = math.exp(rng.uniform(low, high))
        wide, tall = round(math.sqrt(size * aspect)), round(math.sqrt(size / aspect))
        if 0 < wide <= w and 0 < tall <= h:
            left, top = int(rng.integers(w - wide + 1)), int(rng.integers(h - tall + 1))
            return left, top, left + wide, top + tall
    wide, tall = min(w, round(h * 4 / 3)), min(h, round(w * 4 / 3))
    left, top = (w - wide) // 2, (h - tall) // 2
    return left, top, left + wide, top + tall


def _randaugment(config: tuple[int, int], pixels: Tensor, seed: int) -> Tensor:
    """torchvision's RandAugment, which draws from torch's own generator."""
    from torchvision.transforms import v2

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return v2.RandAugment(*config, fill=[128] * 3)(pixels.contiguous())


def _erase(rng: np.random.Generator, pixels: Tensor, preprocess: Preprocess) -> Tensor:
    """Random erasing (arXiv 1708.04896): 2 to 33 % of the area, aspect log-uniform 0.3 - 3.3."""
    h, w = pixels.shape[1:]
    size = h * w * rng.uniform(0.02, 0.33)
    aspect = math.exp(rng.uniform(math.log(0.3), math.log(3.3)))
    tall = min(h, max(1, round(math.sqrt(size * aspect))))
    wide = min(w, max(1, round(math.sqrt(size / aspect))))
    top, left = int(rng.integers(h - tall + 1)), int(rng.integers(w - wide + 1))
    mean = torch.tensor(preprocess.mean).mul(255).round().to(torch.uint8).view(3, 1, 1)
    pixels = pixels.clone()
    pixels[:, top : top + tall, left : left + wide] = mean
    return pixels


def mix(
    images: Tensor, labels: Tensor, classes: int, mixup: float, cutmix: float, key: list[int]
) -> tuple[Tensor, Tensor]:
    """Mixup (arXiv 1710.09412) or CutMix (1905.04899) of a batch with one ratio, from (seed, step).

    The partner of position p is p XOR 1; the last of an odd batch is its own. With both on, each
    batch takes one of them by a coin toss.

    Args:
        images: [B, 3, H, W] float, normalised.
        labels: [B] int64.
        classes: K.
        mixup, cutmix: parameter of the Beta distribution of the ratio; 0 turns it off.

    Returns:
        images [B, 3, H, W] and soft targets [B, K] float32.
    """
    targets = F.one_hot(labels, classes).to(torch.float32)
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
