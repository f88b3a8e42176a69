"""Augmentation: whose random numbers, which law, which pixels."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode

from vitlab.data import augment as module
from vitlab.data import randaugment as randaugment_module
from vitlab.data.augment import (
    CROP,
    DRAWS,
    ERASE,
    FLIP,
    Augment,
    augment,
    draw,
    inception_box,
    mix,
    random_box,
)
from vitlab.data.preprocess import Preprocess, fit
from vitlab.data.randaugment import operate

SIZE = Preprocess(size=(16, 16))
words = st.integers(0, 2**62)


def noise(h: int, w: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (h, w, 3), dtype=np.uint8)


def keys(n: int, epoch: int = 0) -> np.ndarray:
    return np.stack([np.full(n, epoch), np.arange(n)], axis=1)


def draws_with(column: int, values: list[float], n: int | None = None) -> np.ndarray:
    draws = np.full((n or 1, DRAWS), 0.75)
    draws[:, column : column + len(values)] = values
    return draws


# Random numbers --------------------------------------------------------------------------------


@given(words, st.lists(st.tuples(words, words), min_size=1, max_size=5))
def test_draws_depend_on_seed_and_key_alone(seed: int, several: list[tuple[int, int]]) -> None:
    together = draw(seed, np.array(several))
    assert together.shape == (len(several), DRAWS)
    assert together.dtype == np.float64
    assert (together >= 0).all()
    assert (together < 1).all()
    for i, key in enumerate(several):
        assert np.array_equal(draw(seed, np.array([key]))[0], together[i])


def test_draws_stay_the_same_from_release_to_release() -> None:
    """A run that is resumed by a later version must see the same pictures."""
    assert hex(module.scramble(np.zeros(1, np.uint64))[0]) == "0xe220a8397b1dcdaf"  # splitmix64's
    assert draw(0, np.array([[0, 0]]))[0, :2].tolist() == [0.1296456182997474, 0.049920065672091285]
    assert draw(7, np.array([[3, 12345]]))[0, -1] == 0.5052914662305887


def test_draws_are_uniform_and_independent() -> None:
    columns = {
        "positions": draw(0, keys(20_000)),
        "epochs": draw(0, keys(20_000)[:, ::-1].copy()),
        "seeds": np.concatenate([draw(seed, keys(1)) for seed in range(20_000)]),
    }
    for name, draws in columns.items():
        n = len(draws)
        for column in draws.T:
            counts = np.histogram(column, bins=20, range=(0, 1))[0]
            chi = ((counts - n / 20) ** 2 / (n / 20)).sum()
            assert chi < 50, name  # 19 degrees of freedom: 1e-4 is 51 for one, there are 29
        correlation = np.corrcoef(np.concatenate([draws, np.roll(draws, 1, axis=0)], axis=1).T)
        assert np.abs(correlation - np.eye(2 * DRAWS)).max() < 5.5 / math.sqrt(n), name
        assert len(np.unique(draws)) == draws.size, name


def test_no_two_workers_epochs_or_seeds_share_draws() -> None:  # report 155
    several = [draw(seed, keys(500, epoch)) for seed in range(3) for epoch in range(3)]
    assert len(np.unique(np.concatenate(several))) == 9 * 500 * DRAWS


# Crops -----------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(
    st.integers(1, 300), st.integers(1, 300), st.integers(0, 10**6),
    st.sampled_from([(0.08, 1.0), (0.35, 1.0), (0.01, 0.02), (1.0, 1.0)]),
)  # fmt: skip
def test_random_boxes_lie_within_and_obey_their_bounds(
    h: int, w: int, seed: int, area: tuple[float, float]
) -> None:
    left, top, right, bottom = random_box(draw(seed, keys(1))[0], area, h, w)
    assert 0 <= left < right <= w
    assert 0 <= top < bottom <= h
    wide, tall = right - left, bottom - top
    if min(wide, tall) >= 20 and (wide < w or tall < h):
        assert 0.7 < wide / tall < 1.43
        if area == (0.08, 1.0):
            assert wide * tall >= 0.07 * h * w


@pytest.mark.parametrize(("h", "w"), [(100, 140), (300, 200)])
def test_random_boxes_obey_torchvisions_law(h: int, w: int) -> None:
    n = 8_000
    image = torch.empty(3, h, w)
    torch.manual_seed(0)
    theirs = np.array([
        v2.RandomResizedCrop(8).make_params([image]) for _ in range(n)
    ])  # fmt: skip
    theirs = np.array([[p["left"], p["top"], p["width"], p["height"]] for p in theirs])
    ours = np.array([random_box(u, (0.08, 1.0), h, w) for u in draw(0, keys(n))])
    ours[:, 2:] -= ours[:, :2]
    for mine, other in ((ours, theirs),):
        for value in (
            lambda b: b[:, 2] * b[:, 3] / (h * w), lambda b: np.log(b[:, 2] / b[:, 3]),
            lambda b: b[:, 0] / w, lambda b: b[:, 1] / h,
        ):  # fmt: skip
            a, b = value(mine), value(other)
            error = math.hypot(a.std(), b.std()) / math.sqrt(n)
            assert abs(a.mean() - b.mean()) < 4 * error
            assert a.std() == pytest.approx(b.std(), rel=0.05)
            for q in (0.1, 0.5, 0.9):
                assert np.quantile(a, q) == pytest.approx(np.quantile(b, q), abs=0.03)


def test_random_boxes_reach_every_place() -> None:
    boxes = [random_box(u, (0.25, 0.25), 4, 5) for u in draw(0, keys(2000))]
    assert {box[0] for box in boxes if box[2] - box[0] == 2} == {0, 1, 2, 3}
    assert {box[1] for box in boxes if box[3] - box[1] == 2} == {0, 1, 2}


def test_boxes_that_never_fit_are_the_largest_central_ones() -> None:
    """torchvision's fallback, where a picture is longer than 4 / 3."""
    u = draws_with(CROP, [0.99] * (DRAWS - CROP))[0]
    assert random_box(u, (1.0, 1.0), 30, 300) == (130, 0, 170, 30)
    assert random_box(u, (1.0, 1.0), 300, 30) == (0, 130, 30, 170)
    assert random_box(draws_with(CROP, [0.5] * 22)[0], (1.0, 1.0), 7, 7) == (0, 0, 7, 7)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("size", [(16, 16), (40, 24)])
def test_crops_are_resized_as_pillow_does_within_one(
    interpolation: str, size: tuple[int, int]
) -> None:
    preprocess = Preprocess(size=size, interpolation=interpolation)
    smooth = v2.Resize((33, 29))(Image.fromarray(noise(5, 4)))
    regions = [np.asarray(smooth), np.asarray(smooth)[3:20, 5:28]]
    pixels = augment(Augment(crop=(0.1, 1), flip=False), preprocess, regions, draw(0, keys(2)))
    assert pixels.shape == (2, 3, *size)
    assert pixels.dtype == torch.uint8
    for region, result in zip(regions, pixels, strict=True):
        expected = v2.Resize(size, InterpolationMode(interpolation))(Image.fromarray(region))
        difference = result.permute(1, 2, 0).numpy().astype(int) - np.asarray(expected)
        if interpolation == "nearest":  # the two break ties differently
            assert np.mean(difference != 0) < 0.2
        else:
            assert np.abs(difference).max() <= 1


def test_crops_are_not_antialiased_where_evaluation_is_not() -> None:
    preprocess = Preprocess(size=(8, 8), interpolation="bilinear", antialias=False)
    region = noise(32, 32)
    config = Augment(crop=(0.5, 1), flip=False)
    result = augment(config, preprocess, [region], draw(0, keys(1)))
    plain = F.interpolate(
        torch.from_numpy(region).permute(2, 0, 1)[None].float(), (8, 8), mode="bilinear"
    )
    assert (result - plain).abs().max() <= 1


# Pixels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("antialias", [True, False])
def test_without_augmentation_pictures_are_those_of_evaluation(antialias: bool) -> None:
    preprocess = Preprocess(size=(16, 16), antialias=antialias)
    images = [noise(20, 30), noise(16, 16), noise(40, 8)]
    result = augment(Augment(flip=False), preprocess, images, draw(0, keys(3)))
    expected = fit(preprocess, images)
    assert result.dtype == torch.uint8
    assert torch.equal(result, expected.round().clamp(0, 255).to(torch.uint8))


@pytest.mark.parametrize("crop", [None, (0.2, 1.0)])
def test_half_of_the_pictures_are_mirrored_by_their_own_draw(crop: tuple | None) -> None:
    draws = draw(0, keys(64))
    images = [noise(16, 16, i) for i in range(64)]
    plain = augment(Augment(crop=crop, flip=False), SIZE, images, draws)
    result = augment(Augment(crop=crop), SIZE, images, draws)
    mirrored = draws[:, FLIP] < 0.5
    assert 16 < mirrored.sum() < 48
    for i in range(64):
        assert torch.equal(result[i], plain[i].flip(2) if mirrored[i] else plain[i])
    assert np.array_equal(images[0], noise(16, 16, 0))  # the source's pictures stay as they are


def test_erasing_fills_a_rectangle_with_the_mean_colour() -> None:
    preprocess = Preprocess(size=(32, 32), mean=(0.485, 0.456, 0.406))
    images = [np.zeros((32, 32, 3), np.uint8)] * 400
    draws = draw(1, keys(400))
    result = augment(Augment(flip=False, erase=0.5), preprocess, images, draws)
    shares = []
    for pixels, u in zip(result, draws, strict=True):
        changed = (pixels != 0).all(0)
        assert changed.any() == (u[ERASE] < 0.5)
        if changed.any():
            rows, columns = changed.any(1).nonzero()[:, 0], changed.any(0).nonzero()[:, 0]
            assert changed.sum() == len(rows) * len(columns)
            assert rows[-1] - rows[0] == len(rows) - 1
            assert columns[-1] - columns[0] == len(columns) - 1
            assert (torch.tensor([124, 116, 104]) == pixels[:, changed].T).all()
            shares.append(changed.sum().item() / 1024)
    assert 150 < len(shares) < 250
    assert 0.01 < min(shares) < 0.05
    assert 0.27 < max(shares) <= 0.36
    assert np.mean(shares) == pytest.approx(0.17, abs=0.02)


def test_randaugment_draws_from_its_own_numbers_and_leaves_torchs_alone() -> None:
    images = [noise(16, 16)] * 20
    config = Augment(flip=False, randaugment=(2, 15))
    state = torch.get_rng_state()
    first = augment(config, SIZE, images, draw(0, keys(20)))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(augment(config, SIZE, images, draw(0, keys(20))), first)
    assert not torch.equal(augment(config, SIZE, images, draw(0, keys(20, epoch=1))), first)
    assert len({x.numpy().tobytes() for x in first}) > 10
    assert first.dtype == torch.uint8


@given(st.integers(0, 99))
def test_an_option_does_not_change_what_the_others_do(seed: int) -> None:
    """Erasing on top of a crop: outside the rectangle, all is as without it."""
    images = [noise(24, 20, seed)] * 4
    draws = draw(seed, keys(4))
    plain = augment(Augment(crop=(0.3, 1)), SIZE, images, draws)
    erased = augment(Augment(crop=(0.3, 1), erase=1.0), SIZE, images, draws)
    same = (plain == erased).all(1)
    for i in range(4):
        rows, columns = (~same[i]).any(1).nonzero(), (~same[i]).any(0).nonzero()
        inside = erased[i][:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert (inside == 128).all()


# Mixing ----------------------------------------------------------------------------------------


def batch(n: int, h: int = 8, w: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures of one value each, so that a pixel tells whose it is."""
    values = torch.arange(1.0, n + 1)
    return values[:, None, None, None].expand(n, 3, h, w).clone(), torch.arange(n) % 3


partners = [1, 0, 3, 2, 5, 4, 6]  # p XOR 1; the odd one is its own


@given(
    st.integers(1, 7), st.sampled_from([(0.2, 0.0), (0.0, 1.0), (0.8, 1.0)]), st.integers(0, 999)
)
def test_mixing_is_with_the_partner_and_targets_say_how_much(
    n: int, alphas: tuple[float, float], step: int
) -> None:  # report 083: any batch, odd ones and single pictures too
    images, labels = batch(n)
    before = images.clone()
    mixed, targets = mix(images, labels, 3, *alphas, [0, 3, step])
    assert torch.equal(images, before)
    assert mixed.shape == images.shape
    assert targets.shape == (n, 3)
    assert targets.dtype == torch.float32
    assert torch.allclose(targets.sum(1), torch.ones(n), atol=1e-6)
    assert (targets >= 0).all()
    ratios = []
    for p in range(n):
        partner = partners[p] if partners[p] < n else p
        own, other = images[p, 0, 0, 0].item(), images[partner, 0, 0, 0].item()
        if partner == p:
            assert torch.equal(mixed[p], images[p])
            assert targets[p, labels[p]] == 1
            continue
        # As much of the partner as the mean of the pixels says, pasted or blended.
        ratio = (mixed[p].mean().item() - other) / (own - other)
        expected = torch.zeros(3)
        expected[labels[p]] += ratio
        expected[labels[partner]] += 1 - ratio
        assert torch.allclose(targets[p], expected, atol=1e-5)
        ratios.append(ratio)
    assert np.ptp(ratios or [0]) < 1e-5  # one ratio a batch


def test_cutmix_pastes_a_rectangle() -> None:
    images, labels = batch(2, 20, 30)
    areas = []
    for step in range(200):
        mixed, targets = mix(images, labels, 3, 0.0, 1.0, [0, 3, step])
        pasted = mixed[0, 0] == 2
        assert torch.equal(pasted.expand(3, -1, -1), mixed[0] == 2)
        assert (mixed[0][:, ~pasted] == 1).all()
        assert torch.equal(mixed[1, 0] == 1, pasted)
        assert pasted.any(1).sum() * pasted.any(0).sum() == pasted.sum()
        assert targets[0, 1].item() == pytest.approx(pasted.float().mean().item(), abs=1e-6)
        areas.append(pasted.float().mean().item())
    # 1 - ratio is uniform, less what falls off the edge
    assert np.mean(areas) == pytest.approx(0.33, abs=0.06)


def test_mixup_ratios_follow_beta_and_the_step() -> None:
    images, labels = batch(2)
    ratios = [mix(images, labels, 3, 0.4, 0.0, [0, 3, s])[1][0, 0].item() for s in range(1000)]
    assert np.mean(ratios) == pytest.approx(0.5, abs=0.05)
    assert np.var(ratios) == pytest.approx(1 / (4 * (2 * 0.4 + 1)), abs=0.02)
    assert len(set(ratios)) > 900
    assert mix(images, labels, 3, 0.4, 0.0, [0, 3, 5])[1][0, 0].item() == ratios[5]
    assert mix(images, labels, 3, 0.4, 0.0, [1, 3, 5])[1][0, 0].item() != ratios[5]


def test_with_both_each_batch_takes_one() -> None:
    images, labels = batch(2)
    blended = [
        bool(((m := mix(images, labels, 3, 1.0, 1.0, [0, 3, s])[0]) % 1 != 0).any())
        for s in range(200)
    ]
    assert m.shape == images.shape
    assert 60 < sum(blended) < 140


def test_with_neither_nothing_is_mixed() -> None:
    images, labels = batch(3)
    mixed, targets = mix(images, labels, 3, 0.0, 0.0, [0, 3, 0])
    assert torch.equal(mixed, images)
    assert torch.equal(targets, F.one_hot(labels, 3).float())


def test_soft_targets_in_the_loss() -> None:  # report 084
    logits, label = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0])
    assert F.cross_entropy(logits, label).item() == pytest.approx(0.16985, abs=1e-4)
    smooth = F.cross_entropy(logits, label, label_smoothing=0.1).item()
    assert smooth == pytest.approx(0.33651, abs=1e-4)
    soft = F.cross_entropy(logits, torch.tensor([[0.7, 0.3, 0.0]])).item()
    assert soft == pytest.approx(0.76985, abs=1e-4)
    # Unmixed soft targets cost what hard ones do, smoothed or not; mixed ones, the mixture.
    images, labels = batch(2)
    _, hard = mix(images[:1], label, 3, 0.0, 0.0, [0])
    assert F.cross_entropy(logits, hard, label_smoothing=0.1).item() == pytest.approx(smooth)
    _, targets = mix(images, labels, 3, 0.8, 0.0, [0, 3, 1])
    ratio = targets[0, 0].item()
    expected = ratio * 0.169846 + (1 - ratio) * 2.169846
    assert F.cross_entropy(logits, targets[:1]).item() == pytest.approx(expected, abs=1e-4)


def test_the_layout_of_draws_leaves_each_its_own() -> None:
    assert module.RANDAUGMENT not in (FLIP, ERASE)
    assert CROP - ERASE == 5  # whether, area, aspect, y, x
    assert DRAWS - CROP == 2 * module.TRIES + 2


# As the originals do ---------------------------------------------------------------------------


@settings(max_examples=300)
@given(
    st.integers(1, 300), st.integers(1, 300), st.integers(0, 10**6),
    st.sampled_from([(0.05, 1.0), (0.35, 1.0), (0.01, 0.02), (1.0, 1.0)]),
)  # fmt: skip
def test_inception_boxes_lie_within(h: int, w: int, seed: int, area: tuple[float, float]) -> None:
    left, top, right, bottom = inception_box(draw(seed, keys(1))[0], area, h, w)
    assert 0 <= left < right <= w
    assert 0 <= top < bottom <= h
    if (right - left, bottom - top) != (w, h):
        assert area[0] * h * w <= (right - left) * (bottom - top) <= area[1] * h * w
        # An offset is below what is left over: the last row and column are never reached.
        assert right < w or right - left == w
        assert bottom < h or bottom - top == h


@pytest.mark.parametrize(
    ("h", "w", "area", "small"), [(375, 500, 0.343, (0.40, 0.43)), (400, 400, 0.376, None)]
)
def test_inception_boxes_obey_tensorflows_law(
    h: int, w: int, area: float, small: tuple[float, float] | None
) -> None:
    """Means measured with tf.image.sample_distorted_bounding_box; torchvision's: 0.421, 0.477."""
    boxes = np.array([random_box(u, (0.05, 1.0), h, w, law="google") for u in draw(0, keys(9000))])
    wide, tall = (boxes[:, 2:] - boxes[:, :2]).T
    shares = wide * tall / (h * w)
    assert shares.mean() == pytest.approx(area, abs=0.01)
    if small:
        assert small[0] < (shares < 0.25).mean() < small[1]
    inside = shares < 0.9
    aspects = (wide / tall)[inside]
    assert aspects.min() > 0.73
    assert aspects.max() < 1.37


def as_image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels)


PICTURE = np.random.default_rng(1).integers(30, 220, (40, 50, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("name", "magnitude", "by_hand"),
    [
        ("invert", 3, lambda p: 255 - p),
        ("solarize", 0, lambda p: 255 - p),
        ("solarize", 5, lambda p: np.where(p < 128, p, 255 - p)),
        ("solarize", 10, lambda p: p),
        ("solarize", 15, lambda p: p),
        ("solarize_add", 10, lambda p: np.where(p < 128, np.minimum(p + 110, 255), p)),
        ("solarize_add", 20, lambda p: np.where(p < 128, np.minimum(p + 220, 255), p)),
        ("posterize", 10, lambda p: p // 16 * 16),
        ("posterize", 15, lambda p: p // 4 * 4),
        ("posterize", 20, lambda p: p),
        ("posterize", 0, lambda p: p // 128 * 128),
        ("brightness", 5, lambda p: p),
        ("brightness", 0, lambda p: p * 0.1),
        ("brightness", 15, lambda p: np.minimum(p * 2.8, 255)),
        ("color", 5, lambda p: p),
        ("contrast", 5, lambda p: p),
        ("sharpness", 5, lambda p: p),
        ("autocontrast", 9, lambda p: (p - p.min((0, 1))) * 255.0 / np.ptp(p, (0, 1))),
        ("translate_x", 1, lambda p: np.pad(p, ((0, 0), (0, 10), (0, 0)),
                                            constant_values=128)[:, 10:]),
        ("translate_y", 2, lambda p: np.pad(p, ((0, 20), (0, 0), (0, 0)),
                                            constant_values=128)[20:]),
        ("translate_x", 20, lambda p: np.full_like(p, 128)),
    ],
)  # fmt: skip
def test_operations_of_the_originals_by_hand(name: str, magnitude: float, by_hand) -> None:
    done = np.asarray(operate(as_image(PICTURE), name, magnitude, [0.9, 0.5, 0.5]))
    assert done.dtype == np.uint8
    assert np.abs(done.astype(float) - by_hand(PICTURE.astype(int))).max() <= 1


def test_geometry_grows_with_magnitude_and_takes_either_sign() -> None:
    ramp = np.tile(np.arange(120, dtype=np.uint8)[:, None, None], (1, 120, 3))
    for name in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y"):
        one, other = (np.asarray(operate(as_image(ramp), name, 5, [sign, 0, 0]))
                      for sign in (0.2, 0.8))  # fmt: skip
        assert not np.array_equal(one, other), name
        uncovered = [
            (np.asarray(operate(as_image(ramp), name, m, [0.8, 0, 0])) == 128).all(2).sum()
            for m in (0, 5, 10, 15)
        ]
        assert uncovered == sorted(uncovered), name
        assert uncovered[0] == 0 < uncovered[1], name
    sheared = np.asarray(operate(as_image(ramp), "shear_y", 10, [0.8, 0, 0]))
    assert abs(int(sheared[10, 100, 0]) - (10 + 0.3 * 100)) <= 1


def test_cutout_is_a_square_about_its_place() -> None:
    picture = np.zeros((100, 100, 3), np.uint8)
    done = np.asarray(operate(as_image(picture), "cutout", 5, [0, 0.5, 0.1]))
    gray = (done == 128).all(2)
    assert gray[30:70, :30].all()
    assert gray.sum() == 40 * 30, "cut off at the edge"
    assert not picture.any(), "the picture given is left alone"


@pytest.mark.parametrize("level", [(2, 0), (2, 10), (3, 20)])
def test_randaugment_of_the_originals_draws_by_picture(level: tuple[int, int]) -> None:
    config = Augment(randaugment=level, law="google", flip=False)
    images = [noise(16, 16, seed) for seed in range(64)]
    together = augment(config, SIZE, images, draw(0, keys(64)))
    alone = augment(config, SIZE, images[5:6], draw(0, keys(64))[5:6])
    assert torch.equal(together[5:6], alone)
    plain = torch.stack([torch.from_numpy(i).permute(2, 0, 1) for i in images])
    assert (together != plain).flatten(1).any(1).float().mean() > 0.7


def test_all_operations_are_as_likely() -> None:
    seen = []
    plain = randaugment_module.operate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            randaugment_module, "operate", lambda i, name, m, d: seen.append((name, d)) or i
        )
        augment(Augment(randaugment=(2, 9), law="google", flip=False), Preprocess(size=(2, 2)),
                [noise(2, 2)] * 4000, draw(0, keys(4000)))  # fmt: skip
    assert plain is randaugment_module.operate
    names = [name for name, _ in seen]
    assert len(names) == 8000
    counts = [names.count(name) for name in randaugment_module.OPERATIONS]
    assert len(counts) == 16
    assert min(counts) > 400
    assert max(counts) < 600
    pairs = {(a, b) for a, b in zip(names[::2], names[1::2], strict=True)}
    assert len(pairs) == 256, "the second does not depend on the first"
    assert 0.45 < np.mean([d[0] < 0.5 for _, d in seen]) < 0.55
