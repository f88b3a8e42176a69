"""Every rule of `vitlab.data.decode`, on pictures made here and on a folder of real odd ones."""

import io
import os
import re
import struct
import threading
import warnings
import zlib
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image, ImageFile, PngImagePlugin

from vitlab.data.decode import EXTENSIONS, MAX_PIXELS, Unreadable, decode, from_array, to_rgb

pytestmark = pytest.mark.filterwarnings("error")

DATA = Path(os.environ.get("VITLAB_TEST_DATA", Path(__file__).parents[2] / "../shared"))
ODD = DATA / "data" / "edge-cases"
FORMATS = ["JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "AVIF", "JPEG2000", "ICO", "DDS"]
FORMATS += ["QOI", "PCX", "SGI", "TGA"]
LOSSLESS = [("PNG", {}), ("TIFF", {}), ("WEBP", {"lossless": True})]
odd_files = pytest.mark.skipif(not ODD.is_dir(), reason="no odd pictures in the test data")


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(height: int = 20, width: int = 30) -> Image.Image:
    """A smooth picture, no row or column like another."""
    y, x = np.mgrid[:height, :width]
    red, green = 255 * y / max(1, height - 1), 255 * x / max(1, width - 1)
    return Image.fromarray(np.stack([red, green, (red + green) / 2], axis=2).astype(np.uint8))


def png(
    depth: int, colour: int, rows: list[bytes], width: int, height: int = 0, **chunks: bytes
) -> bytes:
    """A PNG by hand, for what Pillow does not write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    header = struct.pack(">IIBBBBB", width, height or len(rows), depth, colour, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = [(b"IHDR", header), *((name.encode(), part) for name, part in chunks.items())]
    parts += [(b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def icon(inside: bytes, side: int = 16) -> bytes:
    """An ICO whose directory announces side x side, whatever the PNG inside is."""
    entry = struct.pack("<BBBBHHII", side, side, 0, 0, 1, 32, len(inside), 22)
    return struct.pack("<HHH", 0, 1, 1) + entry + inside


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def assert_picture(pixels: np.ndarray) -> None:
    assert pixels.dtype == np.uint8
    assert pixels.shape[2:] == (3,)
    assert pixels.size > 0
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable


def refusal(source: object, **options: int) -> str:
    with pytest.raises(Unreadable) as caught:
        decode(source, **options)  # type: ignore[arg-type]
    return one_line(caught.value)


def one_line(error: Unreadable) -> str:
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) <= 200
    return str(error)


def gray_of(pixels: np.ndarray) -> list[list[int]]:
    """[h, w, 3] of three equal channels -> rows of numbers."""
    assert_picture(pixels)
    assert (pixels == pixels[:, :, :1]).all()
    return pixels[:, :, 0].tolist()


# What a source is


def test_a_path_bytes_and_a_stream_are_the_same(tmp_path):
    data = encode(picture(), "PNG")
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    expected = np.array(picture())
    stream = io.BytesIO(data)
    stream.seek(0, io.SEEK_END)  # as it stands after someone wrote to it
    with path.open("rb") as file:
        for source in (path, str(path), data, bytearray(data), memoryview(data), stream, file):
            pixels = decode(source)
            assert_picture(pixels)
            assert (pixels == expected).all()
        assert not file.closed
    assert not stream.closed


def test_a_stream_that_cannot_seek():
    class Pipe(io.RawIOBase):
        def __init__(self, data: bytes) -> None:
            self.data = io.BytesIO(data)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: memoryview) -> int:
            return self.data.readinto(buffer)

    assert decode(Pipe(encode(picture(), "JPEG"))).shape == (20, 30, 3)  # type: ignore[arg-type]
    assert refusal(Pipe(b"hello")) == "not an image"
    assert refusal(Pipe(b"")) == "empty file"


def test_content_decides_not_the_suffix(tmp_path):
    (tmp_path / "picture.jpg").write_bytes(encode(picture(), "WEBP", lossless=True))
    assert (decode(tmp_path / "picture.jpg") == np.array(picture())).all()


def test_a_missing_path_passes_through(tmp_path):
    (tmp_path / "dangling.jpg").symlink_to(tmp_path / "nowhere.jpg")
    for name in ("nowhere.jpg", "dangling.jpg"):
        with pytest.raises(FileNotFoundError):
            decode(tmp_path / name)


def test_what_is_not_a_readable_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    assert refusal(tmp_path) == "a folder, not a file"
    assert refusal(tmp_path / "pipe") == "not a regular file"
    assert refusal("x" * 5000) == "file name too long"
    assert "symbolic links" in refusal(tmp_path / "loop")
    assert "null byte" in refusal("nul\0.jpg")
    assert refusal(io.StringIO("text"))
    assert refusal(5)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "secret.png"
    path.write_bytes(encode(picture(), "PNG"))
    path.chmod(0)
    assert refusal(path) == "permission denied"


def test_refusals_do_not_name_the_path(tmp_path):
    path = tmp_path / "the-name.png"
    for data in (b"", b"text", encode(picture(), "PNG")[:60]):
        path.write_bytes(data)
        assert "the-name" not in refusal(path)


# Refusals


@pytest.mark.parametrize("data", [b"hello", b"<!DOCTYPE html><html>", b"%PDF-1.7", b"\0" * 100])
def test_not_an_image(data):
    assert refusal(data) == "not an image"


def test_an_empty_file(tmp_path):
    (tmp_path / "empty.jpg").touch()
    assert refusal(tmp_path / "empty.jpg") == refusal(b"") == "empty file"


def test_postscript_never_reaches_ghostscript():
    assert refusal(encode(picture(), "EPS")) == "not an image"


@pytest.mark.parametrize("kind", FORMATS)
def test_truncated_files(kind):
    data = encode(picture(64, 64), kind)
    assert decode(data).shape == (64, 64, 3)
    for part in (0.5, 0.7, 0.9):
        assert refusal(data[: int(len(data) * part)]).startswith("truncated")


def test_damaged_data_is_refused():
    data = bytearray(encode(picture(), "PNG"))
    start = data.index(b"IDAT") + 4
    data[start : start + 40] = bytes(40)
    assert refusal(bytes(data)) == "truncated or damaged data"
    assert refusal(png(8, 2, [], 4, height=4)) == "truncated file"  # whole, but with no rows


@pytest.mark.parametrize("kind", FORMATS)
def test_too_many_pixels(kind):
    data = icon(encode(picture(40, 30), "PNG")) if kind == "ICO" else encode(picture(40, 30), kind)
    assert decode(data, max_pixels=1200).shape == (40, 30, 3)
    assert refusal(data, max_pixels=1199) == "too large: 30x40 pixels, the limit is 1199"


def test_size_is_checked_before_decoding():
    # No pixel data at all, and Pillow would only warn of 90 million pixels.
    text = refusal(png(8, 2, [], 10_000, height=9_000))
    assert text == f"too large: 10000x9000 pixels, the limit is {MAX_PIXELS}"
    gif = b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b","
    gif += struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x02\x02\x4c\x01\x00;"
    assert "4294836225 pixels" in refusal(gif)  # more than twice the limit: Pillow's own refusal
    assert MAX_PIXELS == Image.MAX_IMAGE_PIXELS


def test_size_is_what_was_decoded_not_what_was_announced():
    data = icon(encode(picture(40, 30), "PNG"))  # the directory says 16x16
    assert decode(data).shape == (40, 30, 3)
    assert refusal(data, max_pixels=1000) == "too large: 30x40 pixels, the limit is 1000"


def test_size_is_checked_again_after_decoding(monkeypatch):
    def grow(image: ImageFile.ImageFile) -> None:
        image.im = Image.new("RGB", (99, 88)).im
        image._size = image.im.size

    data = encode(picture(), "PNG")
    monkeypatch.setattr(ImageFile.ImageFile, "load", grow)
    assert refusal(data, max_pixels=1000) == "too large: 99x88 pixels, the limit is 1000"


def test_no_pixels():
    for size in ((0, 5), (5, 0)):
        with pytest.raises(Unreadable, match="no pixels"):
            to_rgb(Image.new("RGB", size))
    assert refusal(b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, 0, 5, 1, 24, *[0] * 6))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TypeError("Missing\n dimensions"), "cannot be decoded: Missing dimensions"),
        (SyntaxError("broken PNG file"), "cannot be decoded: broken PNG file"),
        (struct.error("unpack requires a buffer of 4 bytes"), "truncated file"),
        (KeyError(), "cannot be decoded: KeyError"),
        (zlib.error("incorrect header check"), "cannot be decoded: incorrect header check"),
        (MemoryError(), "not enough memory to decode it"),
        (OverflowError("int too large"), "cannot be decoded: int too large"),
        (RecursionError("maximum depth"), "cannot be decoded: maximum depth"),
        (OSError("broken data stream when reading image file"), "truncated or damaged data"),
        (OSError(5, "Input/output error", "/a/path.png"), "input/output error"),
        (ValueError("x" * 500), "cannot be decoded: " + "x" * 150),
    ],
)
def test_whatever_pillow_raises(error, text, monkeypatch):
    def fail(*_: object) -> None:
        raise error

    data = encode(picture(), "PNG")
    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    assert refusal(data) == text


def test_interrupts_pass_through(monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ImageFile.ImageFile, "load", interrupt)
    with pytest.raises(KeyboardInterrupt):
        decode(encode(picture(), "PNG"))


# Orientation

STORED = [[10, 20, 30], [40, 50, 60]]
UPRIGHT = {
    1: [[10, 20, 30], [40, 50, 60]],
    2: [[30, 20, 10], [60, 50, 40]],
    3: [[60, 50, 40], [30, 20, 10]],
    4: [[40, 50, 60], [10, 20, 30]],
    5: [[10, 40], [20, 50], [30, 60]],
    6: [[40, 10], [50, 20], [60, 30]],
    7: [[60, 30], [50, 20], [40, 10]],
    8: [[30, 60], [20, 50], [10, 40]],
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize(("kind", "options"), LOSSLESS)
def test_orientation(orientation, kind, options):
    image = Image.fromarray(np.array(STORED, np.uint8))
    data = encode(image, kind, exif=exif(orientation), **options)
    assert gray_of(decode(data)) == UPRIGHT[orientation]


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_orientation_in_xmp_alone(orientation):
    text = PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", f'<rdf tiff:Orientation="{orientation}"/>')
    image = Image.fromarray(np.array(STORED, np.uint8))
    assert gray_of(decode(encode(image, "PNG", pnginfo=text))) == UPRIGHT[orientation]


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "LA", "CMYK", "I;16", "I", "F"])
def test_orientation_in_every_mode(mode):
    image = Image.fromarray(np.array([[0, 255, 255], [0, 0, 255]], np.uint8)).convert(mode)
    if mode == "I;16":
        image = Image.fromarray(np.array([[0, 65535, 65535], [0, 0, 65535]], np.uint16))
    if mode == "I":
        image = image.point(lambda value: value * 257)
    image.getexif()[0x0112] = 6
    assert gray_of(to_rgb(image)) == [[0, 0], [0, 255], [255, 255]]


def test_orientation_of_a_jpeg_red_on_the_left_blue_on_the_right():
    image = Image.new("RGB", (16, 8), "red")
    image.paste("blue", (8, 0, 16, 8))
    red, blue = (254, 0, 0), (0, 0, 254)

    turned = decode(encode(image, "JPEG", exif=exif(6), subsampling=0))
    assert turned.shape == (16, 8, 3)
    assert np.abs(turned[:8].astype(int) - red).max() <= 3
    assert np.abs(turned[8:].astype(int) - blue).max() <= 3

    upside_down = decode(encode(image, "JPEG", exif=exif(3), subsampling=0))
    assert upside_down.shape == (8, 16, 3)
    assert np.abs(upside_down[:, :8].astype(int) - blue).max() <= 3
    assert np.abs(upside_down[:, 8:].astype(int) - red).max() <= 3


BROKEN_EXIF = [
    b"Exif\0\0garbage",
    b"Exif\0\0II*\0\x08\0\0\0\xff\xff",
    b"Exif\0\0",
    b"Exif\0\0MM\0*\xff\xff\xff\xff",
]


@pytest.mark.parametrize("broken", BROKEN_EXIF)
def test_broken_exif_is_ignored(broken):
    assert decode(encode(picture(), "JPEG", exif=broken)).shape == (20, 30, 3)
    assert (decode(encode(picture(), "PNG", exif=broken)) == np.array(picture())).all()


def test_orientation_is_read_where_the_rest_of_exif_is_broken():
    # two entries: orientation 6, then a maker's name that lies beyond the end
    entries = struct.pack(">HHIHHHHIHH", 0x0112, 3, 1, 6, 0, 0x010F, 2, 65535, 65280, 0)
    broken = b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 2) + entries
    data = encode(picture(), "JPEG", exif=broken)
    with (
        pytest.warns(UserWarning, match="Tag data larger|Corrupt"),
        Image.open(io.BytesIO(data)) as image,
    ):
        image.getexif()
    assert decode(data).shape == (30, 20, 3)


def test_an_impossible_orientation_is_ignored():
    for value in (0, 9, 77):
        data = encode(picture(), "PNG", exif=exif(value))
        assert (decode(data) == np.array(picture())).all()


# Gray of more than 8 bits

DEEP = np.array([[0, 128, 255, 256], [1000, 20000, 40000, 65535]], np.uint16)
SHALLOW = [[0, 0, 1, 1], [4, 78, 156, 255]]


def test_16_bit_gray_in_every_byte_order():
    assert gray_of(decode(encode(Image.fromarray(DEEP), "PNG"))) == SHALLOW
    assert gray_of(decode(encode(Image.fromarray(DEEP), "TIFF"))) == SHALLOW
    big = Image.frombytes("I;16B", (4, 2), DEEP.astype(">u2").tobytes())
    assert gray_of(decode(encode(big, "TIFF"))) == SHALLOW
    assert gray_of(to_rgb(big)) == SHALLOW
    for mode in ("I;16", "I;16L"):
        little = Image.frombytes(mode, (4, 2), DEEP.astype("<u2").tobytes())
        assert gray_of(to_rgb(little)) == SHALLOW
    assert gray_of(to_rgb(Image.frombytes("I;16N", (4, 2), DEEP.tobytes()))) == SHALLOW


def test_16_bit_gray_is_not_stretched():
    for dtype in (np.uint16, np.int32):
        assert gray_of(to_rgb(Image.fromarray(np.array([[1000, 2000]], dtype)))) == [[4, 8]]
        assert gray_of(to_rgb(Image.fromarray(np.array([[20000, 65535]], dtype)))) == [[78, 255]]


def test_32_bit_gray_within_16_bits_is_16_bit_gray():
    assert gray_of(to_rgb(Image.fromarray(DEEP.astype(np.int32)))) == SHALLOW
    assert gray_of(decode(encode(Image.fromarray(DEEP.astype(np.int32)), "TIFF"))) == SHALLOW


def test_other_32_bit_gray_is_stretched():
    for values in ([-10, 10, 40], [70_000, 80_000, 95_000], [-(2**31), -429496730, 2**31 - 1]):
        image = Image.fromarray(np.array([values], np.int32))
        assert gray_of(to_rgb(image)) == [[0, 102, 255]]
    assert gray_of(to_rgb(Image.new("I", (2, 1), -5))) == [[0, 0]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.2, 0.2, 0.2], [51, 51, 51]),
        ([0.0, 0.6, 2.0], [0, 1, 2]),
        ([0.0, 99.6, 255.0], [0, 100, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([0.0, 500.0, 1000.0], [0, 128, 255]),
        ([-3e38, 0.0, 3e38], [0, 128, 255]),
        ([300.0, 300.0, 300.0], [0, 0, 0]),
    ],
)
def test_float_gray(values, expected):
    image = Image.fromarray(np.array([values], np.float32))
    assert gray_of(to_rgb(image)) == [expected]
    assert gray_of(decode(encode(image, "TIFF"))) == [expected]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_float_gray_that_is_not_finite(bad):
    data = encode(Image.fromarray(np.array([[0, bad]], np.float32)), "TIFF")
    assert refusal(data) == "NaN or infinity among the pixels"


def test_portable_maps_with_any_maximum():
    twelve_bits = struct.pack(">4H", 0, 1365, 2730, 4095)
    assert gray_of(decode(b"P5 4 1 4095\n" + twelve_bits)) == [[0, 85, 170, 255]]
    assert gray_of(decode(b"P2 4 1 4095\n0 1365 2730 4095\n")) == [[0, 85, 170, 255]]
    assert gray_of(decode(b"P5 4 2 65535\n" + DEEP.astype(">u2").tobytes())) == SHALLOW
    assert gray_of(decode(b"P5 3 1 100\n" + bytes([0, 20, 100]))) == [[0, 51, 255]]
    pixel = decode(b"P6 1 1 1023\n" + struct.pack(">3H", 0, 341, 1023))
    assert pixel.tolist() == [[[0, 85, 255]]]


def test_16_bit_colour_keeps_its_high_bytes():
    row = struct.pack(">3H", 0x1234, 0xFFFF, 0x00FF)
    assert decode(png(16, 2, [row], 1)).tolist() == [[[0x12, 0xFF, 0]]]


# Transparency

RED_CLEAR_HALF = np.array([[[255, 0, 0, 255], [255, 0, 0, 0], [255, 0, 0, 128]]], np.uint8)
ON_WHITE = [[[255, 0, 0], [255, 255, 255], [255, 127, 127]]]


@pytest.mark.parametrize(("kind", "options"), LOSSLESS)
def test_alpha_is_composited_on_white(kind, options):
    data = encode(Image.fromarray(RED_CLEAR_HALF), kind, exact=True, **options)
    assert decode(data).tolist() == ON_WHITE


def test_premultiplied_alpha():
    pixels = to_rgb(Image.fromarray(RED_CLEAR_HALF).convert("RGBa"))
    assert np.abs(pixels.astype(int) - ON_WHITE).max() <= 1
    gray = Image.fromarray(np.array([[[0, 255], [0, 0], [0, 128]]], np.uint8))
    assert gray.mode == "LA"
    assert gray_of(to_rgb(gray)) == gray_of(to_rgb(gray.convert("La"))) == [[0, 255, 127]]
    assert gray_of(decode(encode(gray, "PNG"))) == [[0, 255, 127]]


def test_palettes():
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8)).convert("P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    red, green, blue, white = [255, 0, 0], [0, 255, 0], [0, 0, 255], [255] * 3
    for kind in ("PNG", "GIF", "BMP", "TIFF"):
        assert decode(encode(image, kind)).tolist() == [[red, green, blue]]
    for kind in ("PNG", "GIF"):  # one entry
        assert decode(encode(image, kind, transparency=1)).tolist() == [[red, white, blue]]
    alphas = decode(encode(image, "PNG", transparency=bytes([255, 0, 128])))  # one alpha each
    assert alphas.tolist() == [[red, white, [127, 127, 255]]]
    with_alpha = Image.merge("PA", (image.convert("P").getchannel(0), Image.new("L", (3, 1), 0)))
    with_alpha.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    assert to_rgb(with_alpha).tolist() == [[white, white, white]]


def test_a_transparent_colour():
    gray = Image.fromarray(np.array([[10, 20, 30]], np.uint8))
    assert gray_of(decode(encode(gray, "PNG", transparency=20))) == [[10, 255, 30]]
    deep = Image.fromarray(np.array([[2570, 5140, 5141]], np.uint16))
    assert gray_of(decode(encode(deep, "PNG", transparency=5140))) == [[10, 255, 20]]
    colour = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    pixels = decode(encode(colour, "PNG", transparency=(4, 5, 6)))
    assert pixels.tolist() == [[[1, 2, 3], [255, 255, 255]]]


# Other modes, frames, profiles


def test_bilevel_is_black_and_white():
    image = Image.fromarray(np.array([[0, 255, 0]], np.uint8)).convert("1")
    for data in (*(encode(image, kind) for kind in ("PNG", "TIFF", "BMP")), b"P1 3 1 1 0 1"):
        assert gray_of(decode(data)) == [[0, 255, 0]]


def test_cmyk():
    red = Image.new("CMYK", (2, 2), (0, 255, 255, 0))
    for data in (encode(red, "JPEG", quality=100), encode(red, "TIFF")):
        assert np.abs(decode(data).astype(int) - [255, 0, 0]).max() <= 3


@pytest.mark.parametrize("mode", ["YCbCr", "HSV", "LAB", "RGBX"])
def test_other_colour_spaces(mode):
    if mode == "LAB":
        from PIL import ImageCms

        lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        image = ImageCms.profileToProfile(picture(), rgb, lab, outputMode="LAB")
    else:
        image = picture().convert(mode)
    assert image.mode == mode
    pixels = to_rgb(image)
    assert_picture(pixels)
    error = np.abs(pixels.astype(int) - np.array(picture()))
    assert error.mean() < 3
    assert error.max() < 40  # LAB in 8 bits


def test_the_first_frame_of_an_animation():
    red, blue = Image.new("RGB", (4, 3), "red"), Image.new("RGB", (4, 3), "blue")
    for kind, options in [
        ("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("MPO", {}),
    ]:  # fmt: skip
        data = encode(red, kind, save_all=True, append_images=[blue], **options)
        assert np.abs(decode(data).astype(int) - [255, 0, 0]).max() <= 3, kind


def test_an_open_image_stays_at_its_frame():
    red, blue = Image.new("RGB", (4, 3), "red"), Image.new("RGB", (4, 3), "blue")
    data = encode(red, "GIF", save_all=True, append_images=[blue])
    with Image.open(io.BytesIO(data)) as image:
        assert to_rgb(image)[0, 0].tolist() == [255, 0, 0]
        image.seek(1)
        assert to_rgb(image)[0, 0].tolist() == [0, 0, 255]
        assert image.tell() == 1


def test_to_rgb_leaves_the_image_as_it_was():
    image = Image.fromarray(RED_CLEAR_HALF)
    image.getexif()[0x0112] = 6
    assert to_rgb(image).shape == (3, 1, 3)
    assert (image.mode, image.size, image.getexif()[0x0112]) == ("RGBA", (3, 1), 6)
    assert (np.asarray(image) == RED_CLEAR_HALF).all()


def test_to_rgb_refuses_as_decode_does():
    image = Image.open(io.BytesIO(encode(picture(64, 64), "PNG")[:-100]))
    with pytest.raises(Unreadable, match="truncated"):
        to_rgb(image)


def test_colour_profiles_are_ignored():
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for icc in (profile, b"no profile at all"):
        assert (decode(encode(picture(), "PNG", icc_profile=icc)) == np.array(picture())).all()


def test_a_plain_jpeg_is_what_pillow_gives():
    data = encode(picture(), "JPEG")
    with Image.open(io.BytesIO(data)) as image:
        assert (decode(data) == np.array(image)).all()


def test_extensions():
    known = Image.registered_extensions()
    assert all(suffix == suffix.lower() and suffix in known for suffix in EXTENSIONS)
    assert {".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp", ".gif"} < EXTENSIONS
    assert not EXTENSIONS & {".pdf", ".eps", ".ps", ".svg", ".h5", ".mpg", ".mpeg", ".txt", ""}


def test_small_oddities():
    rows = [bytes(9)] * 2
    plain = png(8, 2, rows, 3)
    end = plain.index(b"IDAT") - 4
    assert decode(plain + plain[end:]).shape == (2, 3, 3)  # data after the end
    bomb = b"key\0\0" + zlib.compress(bytes(3 << 20))
    assert refusal(png(8, 2, rows, 3, zTXt=bomb)) == "a text chunk unpacks to more than is safe"
    short = png(8, 3, [bytes([0, 1, 0])], 3, PLTE=bytes([9, 8, 7]))  # of two colours, one
    assert decode(short)[0, 0].tolist() == [9, 8, 7]
    twelve_bits = bytearray(encode(picture(), "JPEG"))
    twelve_bits[twelve_bits.index(b"\xff\xc0") + 4] = 12
    assert refusal(bytes(twelve_bits)) == "truncated, damaged or of an unsupported kind"
    assert refusal(encode(picture(5000, 3), "JPEG")[:-3000]).startswith("truncated")
    assert refusal(b"II*\0\x08\0\0\0" + bytes(6))  # a TIFF without a size
    assert refusal(b"GIF89a" + struct.pack("<HHBBB", 0, 5, 0, 0, 0) + b";")
    assert decode(encode(picture(), "AVIF")).shape == (20, 30, 3)


# State


def test_nothing_global_changes():
    state = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, dict(os.environ)
    filters = list(warnings.filters)
    decode(encode(picture(), "PNG"))
    refusal(b"text")
    assert state == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, dict(os.environ))
    assert list(warnings.filters) == filters


def test_threads_leave_the_warning_filters_as_they_were():
    data = encode(picture(200, 200), "JPEG", exif=BROKEN_EXIF[1])  # Pillow warns of it
    filters, failures = list(warnings.filters), []

    def work() -> None:
        try:
            for _ in range(50):
                decode(data)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert list(warnings.filters) == filters


# Arrays

RGB = np.arange(2 * 5 * 3, dtype=np.uint8).reshape(2, 5, 3)
GRAY = RGB[:, :, 0]


def test_layouts():
    for array in (RGB, RGB.transpose(2, 0, 1), RGB.tolist(), np.asfortranarray(RGB)):
        pixels = from_array(array)
        assert_picture(pixels)
        assert (pixels == RGB).all()
    for array in (GRAY, GRAY[:, :, None], GRAY[None]):
        assert gray_of(from_array(array)) == GRAY.tolist()
    wide = np.tile(RED_CLEAR_HALF, (1, 2, 1))
    for array in (wide, wide.transpose(2, 0, 1)):
        assert from_array(array).tolist() == [ON_WHITE[0] * 2]


def test_where_both_layouts_fit_the_last_axis_is_the_channels():
    array = np.arange(3 * 5 * 4, dtype=np.uint8).reshape(3, 5, 4)
    assert from_array(array).shape == (3, 5, 3)
    assert from_array(np.zeros((3, 3, 3), np.uint8)).shape == (3, 3, 3)
    assert from_array(np.zeros((1, 7, 3), np.uint8)).shape == (1, 7, 3)


def test_the_result_is_a_copy():
    array = RGB.copy()
    from_array(array)[:] = 99
    assert (array == RGB).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_are_scaled_by_255(dtype):
    assert (from_array((RGB / 255).astype(dtype)) == RGB).all()
    assert gray_of(from_array(np.array([[0, 0.5, 1]], dtype))) == [[0, 128, 255]]


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint32, np.uint64])
def test_integers_are_taken_as_they_are(dtype):
    assert (from_array(RGB.astype(dtype)) == RGB).all()


def test_uint16_is_divided_by_257():
    assert gray_of(from_array(DEEP)) == gray_of(from_array(DEEP.astype(">u2"))) == SHALLOW
    assert gray_of(from_array(np.array([[200]], np.uint16))) == [[1]]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([[0.0, 1.5]]), "float64 [1, 2] with values 0.0..1.5"),
        (np.array([[-0.1, 1.0]], np.float32), "float32 [1, 2] with values -0.1"),
        (np.array([[0.0, np.nan]]), "nan..nan"),
        (np.array([[0.0, np.inf]]), "0.0..inf"),
        (np.array([[0, 256]]), "int64 [1, 2] with values 0..256"),
        (np.array([[-1, 5]], np.int8), "int8 [1, 2] with values -1..5"),
        (np.zeros((5, 4, 2), np.uint8), "[5, 4, 2]"),
        (np.zeros((2, 5, 7), np.uint8), "[2, 5, 7]"),
        (np.zeros((1, 4, 4, 3), np.uint8), "[1, 4, 4, 3]"),
        (np.zeros(4, np.uint8), "[4]"),
        (np.zeros((0, 4, 3), np.uint8), "[0, 4, 3]"),
        (np.zeros((3, 4, 0), np.uint16), "[3, 4, 0]"),
        (np.zeros((4, 4), bool), "bool"),
        (np.zeros((4, 4), complex), "complex128"),
        (np.array([["a"]]), "<U1"),
        (None, "object"),
        ([[1, 2], [3]], "not an array"),
    ],
)
def test_other_arrays_are_refused(array, words):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        from_array(array)
    assert "c = 1, 3" in str(caught.value) or words == "not an array"


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(RGB.copy())
    assert (from_array(tensor) == RGB).all()
    assert (from_array(tensor.permute(2, 0, 1)) == RGB).all()
    assert (from_array((tensor / 255).requires_grad_()) == RGB).all()
    assert gray_of(from_array(torch.tensor([[0, 0.5, 1]], dtype=torch.bfloat16))) == [[0, 128, 255]]


def test_pillow_images_count_as_arrays():
    image = Image.fromarray(np.array([[0, 1]], np.uint8)).convert("P")
    image.putpalette([9, 8, 7, 6, 5, 4])
    assert from_array(image).tolist() == [[[9, 8, 7], [6, 5, 4]]]


# Properties

pixels_of = hnp.arrays(np.uint8, st.tuples(st.integers(1, 12), st.integers(1, 12), st.just(3)))
SEEDS = [
    encode(picture(16, 12), "PNG", exif=exif(6)),
    encode(picture(16, 12).convert("P"), "PNG", transparency=bytes(range(100))),
    png(16, 0, [bytes(range(12))] * 6, 6, tRNS=b"\0\1"),
    encode(picture(16, 12), "JPEG", exif=exif(6)),
    encode(picture(16, 12).convert("CMYK"), "JPEG", progressive=True),
    encode(picture(16, 12), "GIF"),
    encode(picture(16, 12), "WEBP", exif=exif(6)),
    encode(picture(16, 12), "TIFF", exif=exif(6)),
    encode(picture(16, 12).convert("L"), "TIFF", compression="tiff_lzw"),
    encode(Image.fromarray(np.ones((9, 8), np.float32)), "TIFF"),
    encode(picture(16, 12), "BMP"),
    icon(encode(picture(16, 16), "PNG")),
]
# a decode that hangs is as bad as one that raises
slow = settings(max_examples=150, deadline=timedelta(seconds=5))


def check_any(data: bytes) -> None:
    try:
        pixels = decode(data)
    except Unreadable as error:
        one_line(error)
    else:
        assert_picture(pixels)


@given(pixels_of)
def test_png_keeps_every_picture(pixels):
    assert (decode(encode(Image.fromarray(pixels), "PNG")) == pixels).all()
    assert (from_array(pixels) == pixels).all()
    assert (to_rgb(Image.fromarray(pixels)) == pixels).all()


@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(4))))
def test_an_array_and_a_file_with_alpha_agree(pixels):
    result = decode(encode(Image.fromarray(pixels), "PNG"))
    assert (from_array(pixels) == result).all()
    alpha = pixels[:, :, 3:] / 255
    assert np.abs(result - (pixels[:, :, :3] * alpha + 255 * (1 - alpha))).max() <= 1


@given(st.binary(max_size=300))
@slow
def test_random_bytes(data):
    check_any(data)


@given(st.sampled_from(SEEDS), st.data())
@slow
def test_damaged_files(seed, data):
    damaged = bytearray(seed)
    for _ in range(data.draw(st.integers(1, 8))):
        near = data.draw(st.sampled_from([32, 256, len(seed)]))  # headers deserve more
        place = data.draw(st.integers(0, min(near, len(seed)) - 1))
        damaged[place] = data.draw(st.integers(0, 255))
    check_any(bytes(damaged))


@given(st.sampled_from(SEEDS), st.data())
@slow
def test_cut_and_spliced_files(seed, data):
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(seed))] * 2)))
    check_any(seed[:start])
    check_any(seed[:start] + seed[stop:])
    check_any(seed[:start] + data.draw(st.binary(max_size=40)) + seed[start:])


# A folder of real odd files: height and width once upright, or a word of the refusal

SHAPES = {
    "exif-orientation/Landscape_1.jpg": (1200, 1800),
    "exif-orientation/Landscape_6.jpg": (1200, 1800),
    "exif-orientation/Portrait_3.jpg": (1800, 1200),
    "exif-orientation/Portrait_5.jpg": (1800, 1200),
    "image-rs/anim.webp": (200, 200),
    "image-rs/basi0g16.png": (32, 32),
    "image-rs/basn6a16.png": (32, 32),
    "image-rs/cat.jpg": (240, 320),
    "image-rs/cmyk_u8_edge_case.tif": (1, 1),
    "image-rs/debug_triangle_corners_widescreen.png": (1000, 2000),
    "image-rs/issue#403.png": (50, 100),
    "image-rs/portrait_2.jpg": (150, 113),
    "libjpeg-turbo/monkey16.png": (227, 149),
    "libjpeg-turbo/testimgari.jpg": (149, 227),
    "libjpeg-turbo/testorig.jpg": (149, 227),
    "pillow/10ct_32bit_128.tiff": (128, 128),
    "pillow/16bit.cropped.tif": (64, 64),
    "pillow/apng_mode_16bit.png": (64, 128),
    "pillow/exif_imagemagick_orientation.png": (512, 512),
    "pillow/frozenpond.mpo": (480, 640),
    "pillow/hopper.Lab.tif": (128, 128),
    "pillow/hopper.avif": (128, 128),
    "pillow/hopper.iccprofile.tif": (128, 128),
    "pillow/hopper.jpg": (128, 128),
    "pillow/hopper.png": (128, 128),
    "pillow/hopper.webp": (128, 128),
    "pillow/hopper_16bit.pgm": (128, 128),
    "pillow/hopper_bad_exif.jpg": (500, 500),
    "pillow/hopper_gray.jpg": (128, 128),
    "pillow/hopper_idat_after_image_end.png": (128, 128),
    "pillow/hopper_orientation_2.jpg": (128, 128),
    "pillow/hopper_orientation_3.jpg": (128, 128),
    "pillow/hopper_orientation_4.jpg": (128, 128),
    "pillow/hopper_orientation_5.jpg": (128, 128),
    "pillow/hopper_orientation_6.jpg": (128, 128),
    "pillow/hopper_orientation_6.webp": (128, 128),
    "pillow/hopper_orientation_7.jpg": (128, 128),
    "pillow/hopper_orientation_8.jpg": (128, 128),
    "pillow/i_trns.png": (64, 64),
    "pillow/icc-after-SOF.jpg": (10, 10),
    "pillow/icc_profile_big.jpg": (250, 425),
    "pillow/invalid-exif.jpg": (200, 200),
    "pillow/iss634.apng": (245, 245),
    "pillow/iss634.gif": (245, 245),
    "pillow/iss634.webp": (245, 245),
    "pillow/junk_jpeg_header.jpg": (768, 1024),
    "pillow/l_trns.png": (64, 64),
    "pillow/multipage.tiff": (10, 10),
    "pillow/multipage_multiple_frame_loop.tiff": (10, 10),
    "pillow/no_palette.gif": (1, 1),
    "pillow/orientation_rectangle.jpg": (2, 1),
    "pillow/p_trns_single.png": (64, 64),
    "pillow/pil_sample_cmyk.jpg": (100, 100),
    "pillow/rgb_trns.png": (64, 64),
    "pillow/sugarshack_bad_mpo_header.jpg": (480, 640),
    "pillow/tRNS_null_1x1.png": (1, 1),
    "pillow/tiff_16bit_RGBa.tiff": (40, 100),
    "pillow/tiff_strip_cmyk_jpeg.tif": (100, 100),
    "pillow/transparent.png": (150, 200),
    "pillow/uncompressed_la.png": (128, 128),
    "pillow/xmp_tags_orientation.png": (268, 326),
}
REFUSALS = {
    "image-rs/Bad_reallybig.bmp": "too large",
    "image-rs/oss-fuzz-36829.jpeg": "damaged data",
    "image-rs/rgb32f_color.tiff": "unsupported kind",
    "libjpeg-turbo/monkey12.jpg": "unsupported kind",
    "pillow/broken.png": "damaged",
    "pillow/broken_data_stream.png": "damaged data",
    "pillow/crash-2020-10-test.tif": "damaged data",
    "pillow/decompression_bomb.gif": "too large",
    "pillow/decompression_bomb.ico": "too large",
    "pillow/oom-225817ca0f8c663be7ab4b9e717b02c661e66834.tif": "damaged",
    "pillow/png_decompression_dos.png": "more than is safe",
    "pillow/timeout-9139147ce93e20eb14088fe238e541443ffd64b3.fli": "not an image",
    "pillow/truncated_end_chunk.png": "truncated file",
    "pillow/truncated_image.png": "truncated file",
    "pillow/truncated_jpeg.jpg": "truncated file",
    "pillow/ultrahdr.jpg": "truncated file",
    "pillow/zero_width.gif": "damaged",
}


@odd_files
@pytest.mark.parametrize("name", SHAPES)
def test_odd_files_that_decode(name):
    pixels = decode(ODD / name)
    assert_picture(pixels)
    assert pixels.shape == (*SHAPES[name], 3)


@odd_files
@pytest.mark.parametrize("name", REFUSALS)
def test_odd_files_that_do_not(name):
    assert REFUSALS[name] in refusal(ODD / name)


@odd_files
def test_every_odd_file_is_in_a_table():
    manifest = (ODD / "manifest.txt").read_text().splitlines()
    names = {line.split("|")[0]: line.endswith("|ok") for line in manifest}
    assert names == dict.fromkeys(SHAPES, True) | dict.fromkeys(REFUSALS, False)


def distance(name: str, other: str) -> float:
    first, second = (decode(ODD / "pillow" / file).astype(float) for file in (name, other))
    return float(np.abs(first - second).mean())


@odd_files
def test_odd_files_of_one_picture_look_alike():
    for orientation in range(2, 9):
        assert distance(f"hopper_orientation_{orientation}.jpg", "hopper.jpg") < 8
    for name in ("hopper.Lab.tif", "hopper.avif", "hopper.webp", "hopper.iccprofile.tif"):
        assert distance(name, "hopper.png") < 8
    assert distance("hopper_orientation_6.webp", "hopper.webp") < 8
    assert distance("hopper_16bit.pgm", "hopper_gray.jpg") < 8
    assert distance("iss634.gif", "iss634.webp") < 8
    assert distance("pil_sample_cmyk.jpg", "tiff_strip_cmyk_jpeg.tif") < 8


@odd_files
def test_odd_files_with_transparency_lie_on_white():
    assert decode(ODD / "pillow" / "transparent.png")[0, 0].tolist() == [255, 255, 255]
    for name in ("p_trns_single.png", "l_trns.png", "i_trns.png", "rgb_trns.png"):
        assert decode(ODD / "pillow" / name)[32, 32].tolist() == [255, 255, 255], name
    assert decode(ODD / "pillow" / "tRNS_null_1x1.png").tolist() == [[[255, 255, 255]]]
