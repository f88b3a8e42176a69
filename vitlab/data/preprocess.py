"""The evaluation transform: one function, on torch and Pillow alone, that travels with the weights.

Training's evaluation, `evaluate`, `predict` and the server all call `apply`, so a picture gives
the same tensor everywhere, bit for bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
SLIVER = 16  # times the crop: what sticks out further is not even resized
SMALLEST = 0.02  # crop: the picture that it is cut from may be 50 times as high and wide, no more


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How a picture becomes what the model was trained on."""

    size: tuple[int, int]  # (h, w) that the model takes
    resize: str = "crop"  # crop: cover; squash: ignore the aspect; pad: letterbox
    crop: float = 1.0  # share of the resized picture that the central crop keeps, per side
    interpolation: str = "bicubic"  # nearest, bilinear, bicubic or lanczos
    antialias: bool = True  # False: torch's plain interpolation, as TensorFlow's pipelines do
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)  # subtracted after scaling to [0, 1]
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)  # divided by

    def __post_init__(self) -> None:
        for name in ("size", "mean", "std"):  # lists, when read from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.size) != 2 or min(self.size) < 1:
            raise ValueError(f"size must be (h, w), not {self.size}")
        if self.resize not in ("crop", "squash", "pad"):
            raise ValueError(f"resize must be crop, squash or pad, not {self.resize!r}")
        if not SMALLEST <= self.crop <= 1:
            raise ValueError(f"crop must lie in [{SMALLEST}, 1], not {self.crop}")
        if self.interpolation not in FILTERS:
            raise ValueError(
                f"interpolation must be one of {', '.join(FILTERS)}, not {self.interpolation!r}"
            )
        if not self.antialias and self.interpolation == "lanczos":
            raise ValueError("lanczos needs antialias")
        if len(self.mean) != 3 or len(self.std) != 3 or not min(self.std) > 0:
            raise ValueError("mean and std must hold three values, std positive")


def apply(preprocess: Preprocess, image: np.ndarray) -> Tensor:
    """A picture [h, w, 3] uint8 -> what the model takes: [3, H, W] float32."""
    return normalise(preprocess, fit(preprocess, [image]))[0]


def normalise(preprocess: Preprocess, images: Tensor) -> Tensor:
    """[..., 3, H, W] in 0 ... 255 of any dtype -> float32, mean subtracted, divided by std."""
    mean = torch.tensor(preprocess.mean, device=images.device).view(3, 1, 1)
    std = torch.tensor(preprocess.std, device=images.device).view(3, 1, 1)
    return images.to(torch.float32).div(255).sub_(mean).div_(std)


def fit(preprocess: Preprocess, images: Sequence[np.ndarray]) -> Tensor:
    """Resize and crop pictures [h, w, 3] uint8, as torchvision's Resize and CenterCrop do.

    Returns [B, 3, *size], a copy: uint8, or without antialias float32 in 0 ... 255.
    """
    height, width = preprocess.size
    tall, wide = math.floor(height / preprocess.crop), math.floor(width / preprocess.crop)
    if (tall, wide) != (height, width) or any(image.shape[:2] != (tall, wide) for image in images):
        images = [_fit(preprocess, image, tall, wide) for image in images]
    fitted = torch.from_numpy(np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2)))
    return fitted if preprocess.antialias else fitted.to(torch.float32)


def _fit(p: Preprocess, image: np.ndarray, tall: int, wide: int) -> np.ndarray:
    """[h, w, 3] -> [*p.size, 3], by way of a picture that covers, fits into or is (tall, wide)."""
    h, w = image.shape[:2]
    if p.resize == "crop":  # what sticks out far is cut off first: whole, it could take gigabytes
        image = _middle(image, max(1, SLIVER * tall * w // wide), max(1, SLIVER * wide * h // tall))
        h, w = image.shape[:2]
    # The side that decides is exact, the other rounds down.
    if p.resize == "squash":
        size = tall, wide
    elif (tall * w >= wide * h) == (p.resize == "crop"):
        size = tall, max(1, tall * w // h)
    else:
        size = max(1, wide * h // w), wide
    resized = _middle(_resize(p, image, size), *p.size)
    h, w = resized.shape[:2]
    if (h, w) == p.size:
        return resized
    canvas = np.full((*p.size, 3), mean_colour(p), dtype=resized.dtype)
    top, left = (p.size[0] - h) // 2, (p.size[1] - w) // 2
    canvas[top : top + h, left : left + w] = resized
    return canvas


def mean_colour(preprocess: Preprocess) -> np.ndarray:
    """[3] uint8: the colour nearest to zero once normalised."""
    return np.rint(np.array(preprocess.mean) * 255).clip(0, 255).astype(np.uint8)


def _middle(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """At most [height, width] of an array [h, w, 3], cut as torchvision's CenterCrop cuts."""
    top = max(0, round((image.shape[0] - height) / 2))
    left = max(0, round((image.shape[1] - width) / 2))
    return image[top : top + height, left : left + width]


def _resize(p: Preprocess, image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """[h, w, 3] uint8 -> [*size, 3]; by Pillow where antialiased, else by torch in float32."""
    if image.shape[:2] == size:
        return image
    if p.antialias:
        resized = Image.fromarray(image).resize((size[1], size[0]), FILTERS[p.interpolation])
        return np.asarray(resized)
    pixels = torch.from_numpy(image.astype(np.float32)).permute(2, 0, 1)[None]
    align = None if p.interpolation == "nearest" else False
    floats = F.interpolate(pixels, size=size, mode=p.interpolation, align_corners=align)[0]
    return floats.permute(1, 2, 0).numpy()
