"""From files, open Pillow images and arrays to one kind of picture: upright RGB, uint8 `[h, w, 3]`.

What cannot become one is refused with `Unreadable` and one line that says why.
"""

import io
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, BinaryIO, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.Image import Transpose
from PIL.JpegImagePlugin import JpegImageFile

Pixels: TypeAlias = NDArray[np.uint8]
Source: TypeAlias = str | os.PathLike[str] | bytes | BinaryIO
Box: TypeAlias = tuple[int, int, int, int]  # left, top, right, bottom
Region: TypeAlias = Callable[[int, int], Box]  # height and width -> the part that is wanted

MAX_PIXELS = 89_478_485  # Pillow's own default: a quarter of a GiB at 3 bytes a pixel

# Lower-case suffixes, dot included, of the files that count as pictures in a folder.
EXTENSIONS: frozenset[str] = frozenset({
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".gif", ".bmp", ".dib", ".ppm",
    ".pgm", ".pbm", ".pnm", ".webp", ".tif", ".tiff", ".avif", ".avifs", ".jp2", ".j2k", ".j2c",
    ".jpc", ".jpf", ".jpx", ".ico", ".dds", ".qoi", ".pcx", ".sgi", ".tga"})  # fmt: skip
# The formats behind them, told by content. No others: an upload must not reach Ghostscript (EPS)
# or a parser nobody needs. The common ones come first, TGA last because it has no signature.
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "AVIF", "JPEG2000", "ICO", "DDS",
            "QOI", "PCX", "SGI", "TGA")  # fmt: skip
_KNOWN = re.compile(rb"(?s)\xff\xd8\xff|.PNG|GIF8|RIFF....WEBP|II\*\0|MM\0\*|\0\0\x01\0|....ftyp")
_UPRIGHT = {  # EXIF orientation -> what turns the picture upright
    2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE, 6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90}  # fmt: skip
_ON_THEIR_SIDE = [_UPRIGHT[tag] for tag in (5, 6, 7, 8)]  # height and width change places
_PLAIN_WORDS = {  # what a decoder raises -> what a person can use
    r"^MemoryError|out of memory|unable to allocate": "not enough memory to decode it",
    r"size \((\d+) pixels\) exceeds limit of (\d+)": r"too large: \1 pixels, the limit is \2",
    r"truncat|not enough|EOF|unexpected end|not large|a buffer of|only got": "truncated file",
    r"data stream|decod(er|ing) |cannot load|overrun|failed|literal": "truncated or damaged data",
    r"MAX_TEXT_": "a text chunk unpacks to more than is safe",
}
_IGNORE_PILLOW = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


class Unreadable(ValueError):  # noqa: N818  the word that callers and reports use
    """A picture that cannot be used; `str(error)` is one short line why, without the path."""


class Away(OSError):  # noqa: N818  a place, not a mistake
    """Where pictures lie cannot be reached, which is no fault of theirs: none is skipped for it."""


def why_skipped(error: Unreadable | OSError) -> str:
    """Why a picture is left out, without its path. Raises the error again if it is `Away`."""
    if isinstance(error, Away):
        raise error
    return str(error) if isinstance(error, Unreadable) else (error.strerror or str(error)).lower()


def decode(
    source: Source, *, max_pixels: int = MAX_PIXELS, region: Region | None = None,
    least: tuple[int, int] = (1, 1),
) -> Pixels:  # fmt: skip
    """The picture in a file, in bytes or in a binary stream (read from its start, left open).

    `region` takes the upright height and width, whatever they are, and says which part to return:
    (left, top, right, bottom). A JPEG is then decoded at 1/2, 1/4 or 1/8, if the part keeps
    `least` (h, w) pixels; its edges are rounded to the pixels of that scale.

    Returns a writable uint8 array `[h, w, 3]`, C-contiguous if whole; `to_rgb` has the rules.
    Raises FileNotFoundError where the path leads nowhere, else `Unreadable`, also for a header
    that announces more than `max_pixels`. (Pillow refuses twice its `Image.MAX_IMAGE_PIXELS` in
    any case, and that alone bounds a picture inside an ICO while it is decoded.)
    """
    with _refusals(), _file(source) as file:
        try:
            image = Image.open(file, formats=_FORMATS)
        except UnidentifiedImageError as error:
            file.seek(0)
            head = file.read(16)
            if _KNOWN.match(head):
                raise Unreadable("truncated, damaged or of an unsupported kind") from error
            raise Unreadable("not an image" if head else "empty file") from error
        _check_size(image.size, max_pixels)  # from the header, before memory is taken
        box, scale = _shrink(image, region, least) if region else (None, 1)
        image.load()
        _check_size(image.size, max_pixels)  # some formats learn their true size only now
        pixels = to_rgb(image)
        if region is None:
            return pixels
        box = box or region(*pixels.shape[:2])
        left, top, right, bottom = ((edge + scale // 2) // scale for edge in box)
        return pixels[top:bottom, left:right]


def to_rgb(image: Image.Image) -> Pixels:
    """An open Pillow image at the frame it stands at: the first, where it was just opened.

    Returns a writable, C-contiguous uint8 array `[h, w, 3]`; raises `Unreadable`.

    - EXIF or XMP orientation is applied; where it cannot be read, it is ignored.
    - Alpha, transparent palette entries and a transparent colour are composited on white.
    - 16-bit gray is divided by 257 and rounded, 32-bit integers within 0..65535 likewise. Floats
      within [0, 1] are scaled by 255, within [0, 255] rounded. Any other range is stretched:
      minimum to 0, maximum to 255. NaN and infinity are refused.
    - Palettes, bilevel, CMYK, YCbCr, LAB and HSV become RGB; 16-bit colour keeps its high bytes.
    - ICC profiles are ignored: numbers count as sRGB, as in the data that models are trained on.
    """
    with _refusals():
        image.load()
        _check_size(image.size)
        turn = _turn(image)
        image = image if turn is None else image.transpose(turn)
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            return np.repeat(_gray(image)[:, :, None], 3, axis=2)  # convert() would clip it
        if image.has_transparency_data:
            # premultiplied gray has no way to RGBA but through LA
            layer = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
            image = Image.new("RGB", image.size, "white")
            image.paste(layer, mask=layer)
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def from_array(array: Any) -> Pixels:
    """A picture held as numbers: numpy array, torch tensor, nested lists (or a Pillow image).

    Shapes: `[h, w]`, `[h, w, c]`, `[c, h, w]`, c = 1, 3 or 4 (alpha goes on white). Where both fit,
    the last axis is the channels: `[3, 5, 4]` is 3 rows of 5 RGBA pixels. Values: integers in
    0..255; uint16, which is divided by 257; floats in [0, 1], which are scaled by 255.

    Returns a new, writable, C-contiguous uint8 array `[h, w, 3]`; raises ValueError otherwise.
    """
    if isinstance(array, Image.Image):
        return to_rgb(array)  # as an array, a palette image would be its indices
    try:
        if hasattr(array, "detach"):  # a torch tensor: it may need a gradient, or be on a GPU
            array = array.detach().cpu()
            array = array.float() if array.is_floating_point() else array  # numpy has no bfloat16
        values = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"not an array: {_reason(error)}") from error

    shape, kind = values.shape, values.dtype.kind
    low, high = (values.min(), values.max()) if values.size and kind in "iuf" else (np.nan, np.nan)
    if len(shape) == 3 and shape[2] not in (1, 3, 4):
        values = values.transpose(1, 2, 0)
    fits = values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (1, 3, 4))
    top = 1 if kind == "f" else 65535 if kind == "u" and values.dtype.itemsize == 2 else 255
    if not (fits and low >= 0 and high <= top):  # NaN fails, too
        raise ValueError(
            f"not a picture: {values.dtype} {list(shape)} with values {low}..{high}; it takes "
            "[h, w], [h, w, c] or [c, h, w], c = 1, 3, 4, as integers 0..255, uint16 or floats 0..1"
        )
    if values.dtype != np.uint8:
        values = np.rint(values * np.float64(255 / top)).astype(np.uint8)
    values = values.reshape(*values.shape[:2], -1)
    if values.shape[2] == 4:
        return to_rgb(Image.fromarray(values))
    return np.broadcast_to(values, (*values.shape[:2], 3)).copy()


def _shrink(image: Image.Image, region: Region, least: tuple[int, int]) -> tuple[Box | None, int]:
    """Have a JPEG decoded at 1 / scale: the region's box at full size, and the scale."""
    if not isinstance(image, JpegImageFile):
        return None, 1
    w, h = image.size[::-1] if _turn(image) in _ON_THEIR_SIDE else image.size
    left, top, right, bottom = box = region(h, w)
    fits = min((bottom - top) // (least[0] + 1), (right - left) // (least[1] + 1))
    scale = max(s for s in (1, 2, 4, 8) if s <= max(1, fits))
    image.draft("", (image.width // scale, image.height // scale))
    return box, scale


def _turn(image: Image.Image) -> Transpose | None:
    """What turns the picture upright, where its orientation is given and can be read."""
    with suppress(Exception):  # EXIF breaks in many ways, and the picture is still good
        return _UPRIGHT[image.getexif()[ExifTags.Base.Orientation]]
    return None


def _gray(image: Image.Image) -> Pixels:
    """Gray of 16 or 32 bits, or of floats -> uint8 `[h, w]`."""
    values = np.asarray(image)
    if not np.isfinite(values).all():
        raise Unreadable("NaN or infinity among the pixels")
    low, high = float(values.min()), float(values.max())
    for top in (1, 255) if image.mode == "F" else (65535,):
        if low >= 0 and high <= top:
            low, high = 0, top
            break
    stretched = values.astype(np.float64)  # the difference of extremes overflows 32 bits
    stretched -= low
    stretched *= 255 / ((high - low) or 1)  # 65535 / 255 = 257: no tie, so rint is to the nearest
    gray = np.rint(stretched).astype(np.uint8)
    if image.info.get("transparency") is not None:
        gray[values == image.info["transparency"]] = 255  # on white
    return gray


def _check_size(size: tuple[int, int], limit: float = np.inf) -> None:
    if min(size) < 1:
        raise Unreadable(f"no pixels: {size[0]}x{size[1]}")
    if size[0] * size[1] > limit:
        raise Unreadable(f"too large: {size[0]}x{size[1]} pixels, the limit is {limit}")


def _file(source: Source) -> AbstractContextManager[BinaryIO]:
    if isinstance(source, (bytes, bytearray, memoryview)):
        return io.BytesIO(source)
    if isinstance(source, (str, os.PathLike)):
        if stat.S_ISREG(mode := os.stat(source).st_mode):
            return open(source, "rb")  # a pipe or a device may never end
        raise Unreadable("a folder, not a file" if stat.S_ISDIR(mode) else "not a regular file")
    return nullcontext(source) if source.seekable() else io.BytesIO(source.read())


@contextmanager
def _refusals() -> Iterator[None]:
    """Whatever a decoder raises inside becomes `Unreadable`; what Pillow warns of is dropped."""
    # Not with catch_warnings(): it swaps the one list of all threads, and overlapping decodes
    # would leave it changed. Each puts one filter in and takes one out.
    cast("list[Any]", warnings.filters).insert(0, _IGNORE_PILLOW)
    try:
        yield
    except (Unreadable, FileNotFoundError):
        raise
    except Exception as error:  # hostile files raise everything from TypeError to MemoryError
        raise Unreadable(_reason(error)) from error
    finally:
        with suppress(ValueError):
            cast("list[Any]", warnings.filters).remove(_IGNORE_PILLOW)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()  # the operating system's words, without the path
    text = " ".join(str(error).split())[:150] or type(error).__name__
    for pattern, words in _PLAIN_WORDS.items():
        if match := re.search(pattern, text, re.IGNORECASE):
            return match.expand(words)
    return f"cannot be decoded: {text}"
