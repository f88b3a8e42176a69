"""The evaluation transform: one function, on torch and Pillow alone, that travels with the weights.

Training's evaluation, `evaluate`, `predict` and the server all call `apply`, so a picture gives
the same tensor everywhere, bit for bit.
"""

import math
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


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How a picture becomes what the model was trained on."""

    size: tuple[int, int]  # (h, w) that the model takes
    resize: str = "crop"  # crop: cover and cut the middle; squash: ignore aspect; pad: letterbox
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
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop must lie in (0, 1], not {self.crop}")
        if self.interpolation not in FILTERS:
            raise ValueError(
                f"interpolation must be one of {', '.join(FILTERS)}, not {self.interpolation!r}"
            )
        if not self.antialias and self.interpolation == "lanczos":
            raise ValueError("lanczos needs antialias")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError("mean and std must hold three values, std positive")


def apply(preprocess: Preprocess, image: np.ndarray) -> Tensor:
    """A picture [h, w, 3] uint8 -> what the model takes: [3, H, W] float32."""
    return normalise(preprocess, fit(preprocess, image))


def normalise(preprocess: Preprocess, images: Tensor) -> Tensor:
    """[..., 3, H, W] in 0 ... 255 of any dtype -> float32, mean subtracted, divided by std."""
    mean = torch.tensor(preprocess.mean, device=images.device).view(3, 1, 1)
    std = torch.tensor(preprocess.std, device=images.device).view(3, 1, 1)
    return images.to(torch.float32).div(255).sub_(mean).div_(std)


def fit(preprocess: Preprocess, image: np.ndarray) -> Tensor:
    """Resize and crop a picture [h, w, 3] uint8 to [3, H, W] (uint8; float32 without antialias)."""
    p, (h, w) = preprocess, image.shape[:2]
    (height, width) = p.size
    if p.resize == "squash":
        return _resize(p, image, (height, width))
    # As torchvision's Resize and CenterCrop: the tighter side is exact, the other rounds down.
    tall, wide = math.floor(height / p.crop), math.floor(width / p.crop)
    if (tall * w >= wide * h) == (p.resize == "crop"):
        new = (tall, max(1, tall * w // h))
    else:
        new = (max(1, wide * h // w), wide)
    resized = _resize(p, image, new)
    top, left = round((new[0] - height) / 2), round((new[1] - width) / 2)
    if p.resize == "pad":
        fill = torch.tensor(p.mean).mul(255).round().view(3, 1, 1)  # zero once normalised
        canvas = fill.to(resized.dtype).expand(3, height, width).clone()
        canvas[:, -top : new[0] - top, -left : new[1] - left] = resized
        return canvas
    return resized[:, top : top + height, left : left + width]


def _resize(p: Preprocess, image: np.ndarray, size: tuple[int, int]) -> Tensor:
    """[h, w, 3] uint8 -> [3, *size]; Pillow where antialiased, else torch on float32."""
    if not image.flags.writeable:  # torch warns of arrays it could write to but must not
        image = image.copy()
    if image.shape[:2] == size:
        return torch.from_numpy(image).permute(2, 0, 1)
    if p.antialias:
        resized = Image.fromarray(image).resize((size[1], size[0]), FILTERS[p.interpolation])
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1)
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].to(torch.float32)
    align = None if p.interpolation == "nearest" else False
    return F.interpolate(pixels, size=size, mode=p.interpolation, align_corners=align)[0]
