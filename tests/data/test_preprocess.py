"""The evaluation transform, against torchvision and against numbers."""

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode

from vitlab.data.preprocess import FILTERS, Preprocess, apply, fit, mean_colour, normalise

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
sides = st.integers(1, 90)
pictures = st.tuples(sides, sides, st.integers(0, 99))
modes = st.sampled_from(["crop", "squash", "pad"])


def noise(h: int, w: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (h, w, 3), dtype=np.uint8)


def fitted(preprocess: Preprocess, image: np.ndarray) -> np.ndarray:
    """[H, W, 3], as people look at pictures."""
    return fit(preprocess, [image])[0].permute(1, 2, 0).numpy()


# Against torchvision ---------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    pictures, st.integers(1, 64), st.sampled_from([1.0, 0.95, 0.9, 0.875, 224 / 256, 0.5]),
    st.sampled_from(list(FILTERS)),
)  # fmt: skip
def test_resize_and_centre_crop_are_torchvisions_bit_for_bit(
    picture: tuple[int, int, int], size: int, crop: float, interpolation: str
) -> None:
    image = noise(*picture)
    if max(image.shape[:2]) > 15 * min(image.shape[:2]):
        return
    preprocess = Preprocess(size=(size, size), crop=crop, interpolation=interpolation)
    theirs = v2.Compose([
        v2.Resize(math.floor(size / crop), InterpolationMode(interpolation)), v2.CenterCrop(size),
    ])  # fmt: skip
    expected = np.asarray(theirs(Image.fromarray(image)))
    assert np.array_equal(fitted(preprocess, image), expected)


@given(pictures, st.tuples(st.integers(8, 64), st.integers(8, 64)))
def test_a_crop_that_is_not_square_covers_and_cuts_the_middle(
    picture: tuple[int, int, int], size: tuple[int, int]
) -> None:
    image = noise(*picture)
    h, w = image.shape[:2]
    scale = max(Fraction(size[0], h), Fraction(size[1], w))
    if h * scale > 15 * size[0] or w * scale > 15 * size[1]:
        return  # a sliver
    covering = Image.fromarray(image).resize((int(w * scale), int(h * scale)), FILTERS["bicubic"])
    expected = np.asarray(v2.CenterCrop(size)(covering))
    assert np.array_equal(fitted(Preprocess(size=size), image), expected)


@given(pictures, st.tuples(st.integers(1, 64), st.integers(1, 64)), st.sampled_from([1.0, 0.875]))
def test_squash_is_torchvisions_resize(
    picture: tuple[int, int, int], size: tuple[int, int], crop: float
) -> None:
    image = noise(*picture)
    tall, wide = (math.floor(side / crop) for side in size)
    expected = v2.Resize((tall, wide), InterpolationMode.BICUBIC)(Image.fromarray(image))
    expected = np.asarray(v2.CenterCrop(size)(expected))
    preprocess = Preprocess(size=size, resize="squash", crop=crop)
    assert np.array_equal(fitted(preprocess, image), expected)


@given(pictures, st.tuples(st.integers(1, 64), st.integers(1, 64)), modes)
def test_without_antialias_it_is_torchs_interpolation(
    picture: tuple[int, int, int], size: tuple[int, int], mode: str
) -> None:
    image = noise(*picture)
    for interpolation in ("nearest", "bilinear", "bicubic"):
        preprocess = Preprocess(
            size=size, resize="squash", interpolation=interpolation, antialias=False
        )
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float()
        align = None if interpolation == "nearest" else False
        expected = F.interpolate(pixels, size, mode=interpolation, align_corners=align)
        result = fit(preprocess, [image])
        assert result.dtype == torch.float32
        assert torch.equal(result, expected)


# Geometry --------------------------------------------------------------------------------------


@given(pictures, st.tuples(sides, sides), modes, st.sampled_from([1.0, 0.875, 0.3]), st.booleans())
def test_any_picture_fits_any_size(
    picture: tuple[int, int, int], size: tuple[int, int], mode: str, crop: float, antialias: bool
) -> None:
    preprocess = Preprocess(size=size, resize=mode, crop=crop, antialias=antialias)
    image = noise(*picture)
    image.flags.writeable = False
    result = fit(preprocess, [image])
    assert result.shape == (1, 3, *size)
    assert result.dtype == (torch.uint8 if antialias else torch.float32)
    tensor = apply(preprocess, image)
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, normalise(preprocess, result)[0])


def test_what_a_centre_crop_squash_and_letterbox_show() -> None:  # report 012
    image = np.zeros((224, 448, 3), np.uint8)
    image[:, :100] = 255
    size = (224, 224)
    assert fitted(Preprocess(size=size), image).max() == 0
    squashed = fitted(Preprocess(size=size, resize="squash", interpolation="nearest"), image)
    assert (squashed[:, :50] == 255).all()
    assert (squashed[:, 50:] == 0).all()
    padded = fitted(Preprocess(size=size, resize="pad", interpolation="nearest"), image)
    band = padded[56:168]
    assert (band[:, :50] == 255).all()
    assert (band[:, 50:] == 0).all()
    assert (np.delete(padded, range(56, 168), 0) == 128).all()  # mean 0.5


@given(st.tuples(sides, sides), st.tuples(sides, sides))
def test_letterbox_is_torchvisions_resize_and_padding(
    picture: tuple[int, int], size: tuple[int, int]
) -> None:
    image = noise(*picture)
    scale = min(Fraction(size[0], picture[0]), Fraction(size[1], picture[1]))
    new = tuple(max(1, int(side * scale)) for side in picture)
    resized = Image.fromarray(image).resize(new[::-1], FILTERS["bicubic"])
    preprocess = Preprocess(size=size, resize="pad", mean=(0.0, 0.0, 0.0))
    assert np.array_equal(fitted(preprocess, image), np.asarray(v2.CenterCrop(size)(resized)))


@given(st.tuples(sides, sides), st.tuples(sides, sides))
def test_letterbox_keeps_the_whole_picture_and_its_aspect(
    picture: tuple[int, int], size: tuple[int, int]
) -> None:
    image = np.full((*picture, 3), 200, np.uint8)
    canvas = fitted(Preprocess(size=size, resize="pad", mean=(0.0, 0.0, 0.0)), image)
    rows, columns = (np.flatnonzero((canvas == 200).all(2).any(axis)) for axis in (1, 0))
    assert set(np.unique(canvas)) <= {0, 200}
    h, w = len(rows), len(columns)
    assert h == size[0] or w == size[1]
    scale = min(size[0] / picture[0], size[1] / picture[1])
    assert abs(h - max(1, picture[0] * scale)) < 1
    assert abs(w - max(1, picture[1] * scale)) < 1
    for side, whole, found in ((h, size[0], rows), (w, size[1], columns)):
        assert found.tolist() == list(range(found[0], found[0] + side))
        assert abs(found[0] - (whole - side) / 2) <= 0.5


def test_the_crop_share_counts_where_nothing_is_to_be_resized() -> None:
    image = noise(256, 256)
    result = fitted(Preprocess(size=(224, 224), crop=0.875), image)
    assert np.array_equal(result, image[16:240, 16:240])


def test_letterbox_may_zoom_in() -> None:
    """The same picture through `pad` and a crop share: a central crop of the letterbox."""
    image = noise(40, 80)
    zoomed = fitted(Preprocess(size=(28, 28), resize="pad", crop=0.875), image)
    whole = fitted(Preprocess(size=(32, 32), resize="pad"), image)
    assert np.array_equal(zoomed, whole[2:30, 2:30])


def test_the_fill_is_zero_once_normalised() -> None:
    preprocess = Preprocess(size=(4, 4), resize="pad", **IMAGENET)
    edge = apply(preprocess, noise(2, 4))[:, 0]
    assert edge.abs().max() < 0.5 / 255 / 0.2
    assert mean_colour(preprocess).tolist() == [124, 116, 104]
    assert mean_colour(Preprocess(size=(1, 1), mean=(-1, 2, 0.5))).tolist() == [0, 255, 128]


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1), (3, 5_000)])
def test_slivers_take_no_gigabytes(size: tuple[int, int]) -> None:
    """224 / 1 x 60,000 x 3 bytes would be 9 GB; only the middle is asked for."""
    image = np.zeros((*size, 3), np.uint8)
    middle = (size[0] // 2, size[1] // 2)
    image[middle[0] - 1 : middle[0] + 1, middle[1] - 1 : middle[1] + 1] = 255
    tracemalloc.start()
    result = fitted(Preprocess(size=(64, 64)), image)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20
    assert result.shape == (64, 64, 3)
    assert result[32, 32].min() > 240


# Values ----------------------------------------------------------------------------------------


def test_normalisation_constants() -> None:  # report 009
    white, black = np.full((2, 2, 3), 255, np.uint8), np.zeros((2, 2, 3), np.uint8)
    google = Preprocess(size=(2, 2))
    assert apply(google, white).unique().tolist() == [1.0]
    assert apply(google, black).unique().tolist() == [-1.0]
    deit = Preprocess(size=(2, 2), **IMAGENET)
    assert apply(deit, white)[:, 0, 0].tolist() == pytest.approx([2.2489, 2.4286, 2.6400], abs=5e-5)
    assert apply(deit, black)[:, 0, 0].tolist() == pytest.approx(
        [-2.1179, -2.0357, -1.8044], abs=5e-5
    )


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
def test_a_checkerboard_becomes_gray(interpolation: str) -> None:  # report 008
    y, x = np.mgrid[:512, :512]
    image = np.repeat(((y + x) % 2 * 255).astype(np.uint8)[:, :, None], 3, 2)
    preprocess = Preprocess(size=(224, 224), interpolation=interpolation)
    inner = apply(preprocess, image)[:, 2:-2, 2:-2]
    assert inner.abs().max() < 0.2
    aliased = Preprocess(size=(224, 224), interpolation="bilinear", antialias=False)
    assert apply(aliased, image)[:, 2:-2, 2:-2].std() > 0.2


def test_a_picture_of_the_size_passes_unchanged_and_is_a_copy() -> None:
    image = noise(8, 6)
    for mode in ("crop", "squash", "pad"):
        result = fit(Preprocess(size=(8, 6), resize=mode), [image, image])
        assert np.array_equal(result[0].permute(1, 2, 0).numpy(), image)
        result.zero_()
        assert image.any()


@given(st.lists(pictures, min_size=1, max_size=4), modes, st.booleans(), st.sampled_from([1, 0.9]))
def test_a_batch_gives_each_picture_what_it_gets_alone(
    several: list[tuple[int, int, int]], mode: str, antialias: bool, crop: float
) -> None:  # reports 008, 158
    preprocess = Preprocess(size=(16, 24), resize=mode, antialias=antialias, crop=crop, **IMAGENET)
    images = [noise(*picture) for picture in several] + [noise(16, 24)]
    together = normalise(preprocess, fit(preprocess, images))
    assert together.is_contiguous()
    for one, image in zip(together, images, strict=True):
        assert torch.equal(one, apply(preprocess, image))


def test_normalise_leaves_its_input_alone() -> None:
    pixels = torch.full((1, 3, 2, 2), 255.0)
    assert normalise(Preprocess(size=(2, 2)), pixels).unique().tolist() == [1.0]
    assert pixels.unique().tolist() == [255.0]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"size": (224,)}, "size"),
        ({"size": (0, 224)}, "size"),
        ({"resize": "stretch"}, "resize must be crop, squash or pad, not 'stretch'"),
        ({"crop": 0}, "crop"),
        ({"crop": 1e-9}, "crop must lie in"),
        ({"crop": 1.1}, "crop"),
        ({"crop": float("nan")}, "crop"),
        ({"interpolation": "cubic"}, "nearest, bilinear, bicubic, lanczos, not 'cubic'"),
        ({"interpolation": "lanczos", "antialias": False}, "lanczos"),
        ({"std": (1, 1, 0)}, "std"),
        ({"std": (float("nan"), 1, 1)}, "std"),
        ({"mean": (0.5,)}, "mean"),
    ],
)
def test_wrong_values_are_named(wrong: dict, words: str) -> None:
    with pytest.raises(ValueError) as error:
        Preprocess(**{"size": (224, 224)} | wrong)
    assert words in str(error.value)


def test_lists_from_json_become_tuples() -> None:
    preprocess = Preprocess(size=[4, 6], mean=[0, 0, 0], std=[1, 1, 1])
    assert preprocess == Preprocess(size=(4, 6), mean=(0, 0, 0), std=(1, 1, 1))
    assert hash(preprocess)
