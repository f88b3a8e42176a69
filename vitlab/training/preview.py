"""What a model sees in training: a sheet of pictures, as evaluated and as augmented."""

import types
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image, ImageDraw

from vitlab.data import preprocess as preprocessing
from vitlab.data import sources
from vitlab.data.augment import mix
from vitlab.data.decode import Unreadable
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources import Source
from vitlab.data.writing import written
from vitlab.models import zoo
from vitlab.training import initial, loop, run
from vitlab.training.config import TrainConfig
from vitlab.training.parallel import Ranks
from vitlab.weights import formats

LEAST = 96  # pixels a side that a small picture is magnified to, by whole factors
GAP, LINE = 4, 14  # pixels between pictures; of a line of text
TRIES = 100  # unreadable pictures in a row before the next place is tried


def write(spec: str, config: TrainConfig, path: Path, rows: int, columns: int) -> None:
    """Write the sheet of `draw` as a PNG, aside and renamed.

    Raises ValueError for a set without a training part, and as `train` does for its options.
    """
    if min(rows, columns) < 1 or rows * columns > 10_000:
        raise ValueError(f"--rows {rows} --columns {columns}: a sheet of 1 to 10,000 pictures")
    whole = run.training_part(spec, sources.open_spec(spec))
    sheet = draw(whole, config, rows, columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written(path) as aside:
        sheet.save(aside, "PNG")


def draw(source: Source, config: TrainConfig, rows: int, columns: int) -> Image.Image:
    """Pictures from all over a source, one a row.

    First as the model sees it in evaluation, then as in columns - 1 epochs of training: by the
    very stream of training, over these pictures alone, mixed as there if the options say so.
    """
    preprocess = _preprocess(config)
    part = sources.select(source, _readable(source, rows), source.split)
    n = len(part)
    config = replace(config, batch=n, accumulate=1, balanced=False)
    plan = types.SimpleNamespace(workers=0)
    job = types.SimpleNamespace(
        config=config, plan=plan, train=part, preprocess=preprocess, ranks=Ranks()
    )
    sheets: list[dict[int, np.ndarray]] = [
        {i: _evaluated(preprocess, part.load(i)) for i in range(n)}
    ]
    for step, batch in enumerate(loop.batches(cast(Any, job), start=0, stop=columns - 1)):
        images = batch.images
        if config.mixup or config.cutmix:
            key = [config.seed, 3, step]
            floats = images.to(torch.float32)
            images, _ = mix(
                floats, batch.labels, len(part.classes), config.mixup, config.cutmix, key
            )
        pixels = images.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
        sheets.append(dict(zip(batch.rows, pixels, strict=True)))
    names = [part.classes[int(label)] for label in part.labels]
    return _sheet(sheets, names, preprocess.size)


def _preprocess(config: TrainConfig) -> Preprocess:
    """That of the run these options would make."""
    size = initial.image_size(config)
    if config.from_ is not None:
        start = formats.load(config.from_)
        own = replace(start.preprocess, size=size or start.preprocess.size)
    elif config.model is not None or size is not None:
        name = config.model or "vit-ti16"
        patch = config.patch if config.model else 1
        own = Preprocess(size=zoo.configure(name, classes=2, image=size, patch=patch).image)
    else:
        raise ValueError("give --model NAME, --from BUNDLE or --size H W")
    return initial.with_preprocess(config, own)


def _readable(source: Source, count: int) -> np.ndarray:
    """About `count` rows from all over a source, of pictures that can be read."""
    found = set()
    for at in np.unique(np.linspace(0, len(source) - 1, count).astype(int)).tolist():
        for row in range(at, min(at + TRIES, len(source))):
            try:
                source.load(row)
            except (Unreadable, OSError):
                continue
            found.add(row)
            break
    if not found:
        raise ValueError(f"{source.spec}: no readable pictures to show")
    return np.array(sorted(found))


def _evaluated(preprocess: Preprocess, image: np.ndarray) -> np.ndarray:
    """[H, W, 3] uint8 as evaluation has it, before it is normalised."""
    fitted = preprocessing.fit(preprocess, [image])[0]
    return fitted.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()


def _sheet(
    columns: list[dict[int, np.ndarray]], names: list[str], size: tuple[int, int]
) -> Image.Image:
    """Pictures on white, the classes' names above the first of each row."""
    factor = max(1, -(-LEAST // max(size)))
    h, w = size[0] * factor, size[1] * factor
    tall, wide = h + LINE + GAP, w + GAP
    heads = ["evaluation", *(f"epoch {i}" for i in range(len(columns) - 1))]
    sheet = Image.new("RGB", (GAP + len(columns) * wide, LINE + len(names) * tall), "white")
    pen = ImageDraw.Draw(sheet)
    for x, (head, column) in enumerate(zip(heads, columns, strict=True)):
        pen.text((GAP + x * wide, 2), head, fill="gray")
        for y, pixels in column.items():
            cell = Image.fromarray(pixels).resize((w, h), Image.Resampling.NEAREST)
            sheet.paste(cell, (GAP + x * wide, 2 * LINE + y * tall))
    for y, name in enumerate(names):
        text = name.encode("latin-1", "replace").decode("latin-1")
        pen.text((GAP, LINE + y * tall), text, fill="black")
    return sheet
