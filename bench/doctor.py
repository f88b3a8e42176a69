"""Plant faults in a copy of a set of pictures, and measure what `vitlab data check` finds.

    python bench/doctor.py $VITLAB_TEST_DATA/data/{imagenette-128,cifar10-12k}.zip
    python bench/doctor.py $VITLAB_TEST_DATA/data/tiny-imagenet-64.zip --pictures 20000

The thresholds were chosen on Tiny-ImageNet: what is found in other sets says more. The copy is a
folder with train/ and val/. Planted into val/ are pictures of train/: byte-identical, encoded again
(JPEG, quality 75), resized to 90 %, and cropped by 5 % (a random part of 95 % of each side); into
train/ damaged files, and copies under another label. Near pairs that were not planted are counted:
`--out` has them all, as the doctor's page, to be looked at.
"""

import argparse
import io
import json
import os
import shutil
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from vitlab.data import doctor, page, sources
from vitlab.training.machine import cores

COPIES = ("identical", "encoded", "resized", "cropped")


def unpack(archive: Path, folder: Path, pictures: int, rng: np.random.Generator) -> None:
    """Write some of the pictures of a zip of split/class/picture into a folder."""
    with zipfile.ZipFile(archive) as file:
        names = [n for n in file.namelist() if not n.endswith("/") and n.count("/") >= 2]
        if pictures and pictures < len(names):
            names = [names[i] for i in np.sort(rng.choice(len(names), pictures, replace=False))]
        for name in names:
            at = folder / "/".join(name.split("/")[-3:])
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_bytes(file.read(name))


def altered(image: Image.Image, how: str, rng: np.random.Generator) -> bytes:
    """A copy that is not byte-identical, as a JPEG."""
    w, h = image.size
    if how == "resized":
        image = image.resize((round(0.9 * w), round(0.9 * h)), Image.Resampling.BICUBIC)
    elif how == "cropped":
        wide, tall = round(0.95 * w), round(0.95 * h)
        left, top = rng.integers(w - wide + 1), rng.integers(h - tall + 1)
        image = image.crop((left, top, left + wide, top + tall))
    data = io.BytesIO()
    image.save(data, "JPEG", quality=75 if how == "encoded" else 90)
    return data.getvalue()


def plant(
    folder: Path, each: int, corrupt: int, conflicts: int, rng: np.random.Generator
) -> dict[str, list[tuple[str, ...]]]:
    """Put the faults in; what was done, by kind: the files that belong together."""
    train = sorted(folder.glob("train/*/*"))
    classes = sorted(p.name for p in (folder / "train").iterdir())
    chosen = rng.choice(len(train), 4 * each + corrupt + conflicts, replace=False)
    files = [train[i] for i in chosen]
    done: dict[str, list[tuple[str, ...]]] = {}

    def name(path: Path) -> str:
        return path.relative_to(folder).as_posix()

    for how in COPIES:
        for number in range(each):
            origin = files.pop()
            suffix = origin.suffix if how == "identical" else ".jpg"
            copy = folder / "val" / origin.parent.name / f"planted-{how}-{number}{suffix}"
            copy.parent.mkdir(parents=True, exist_ok=True)
            if how == "identical":
                shutil.copy(origin, copy)
            else:
                with Image.open(origin) as image:
                    copy.write_bytes(altered(image.convert("RGB"), how, rng))
            done.setdefault(how, []).append((name(origin), name(copy)))
    for number in range(corrupt):
        origin = files.pop()
        data = origin.read_bytes()
        copy = origin.with_name(f"planted-corrupt-{number}{origin.suffix}")
        copy.write_bytes(data[: len(data) // 2] if number % 2 else b"\0" * len(data))
        done.setdefault("corrupt", []).append((name(copy),))
    for number in range(conflicts):
        origin = files.pop()
        others = [c for c in classes if c != origin.parent.name]
        other = folder / "train" / others[rng.integers(len(others))]
        copy = other / f"planted-conflict-{number}{origin.suffix}"
        shutil.copy(origin, copy)
        done.setdefault("conflict", []).append((name(origin), name(copy)))
    return done


def score(found: list[doctor.Finding], planted: dict[str, list[tuple[str, ...]]]) -> None:
    """Print how much of what was planted was found under its name."""
    sets: dict[str, list[set[str]]] = {}
    for finding in found:
        sets.setdefault(finding.kind, []).append({p.file for p in finding.pictures})
    kinds = {"corrupt": "unreadable", "conflict": "conflict"}
    for how, files in planted.items():
        there = sets.get(kinds.get(how, "leak"), [])
        hits = sum(any(set(together) <= one for one in there) for together in files)
        print(f"{how:<10} {hits} of {len(files)} found")


def measure(archive: Path, folder: Path, options: argparse.Namespace) -> None:
    """Plant into a copy of one set, check it, print what was found."""
    plan = folder / "planted.json"
    if not plan.exists():
        rng = np.random.default_rng(0)
        unpack(archive, folder / "set", options.pictures, rng)
        plan.write_text(json.dumps(plant(folder / "set", options.each, 20, 20, rng)))
    recorded = json.loads(plan.read_text())
    planted = {how: [tuple(f) for f in files] for how, files in recorded.items()}
    began, cpu = time.perf_counter(), time.process_time()
    done = doctor.check(sources.open_spec(str(folder / "set")), threads=options.threads)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    n = int(done.starts[-1])
    print(f"{archive.stem}: {n:,} pictures, {n / seconds:,.0f} a second on"
          f" {options.threads} threads ({seconds:.1f} s; {cpu:.1f} s of CPU;"
          f" load {os.getloadavg()[0]:.1f})")  # fmt: skip
    score(done.findings, planted)
    ours = {file for files in planted.values() for together in files for file in together}
    pairs = [tuple(done.picture(i).file for i in pair) for pair in done.near.tolist()]
    native = [pair for pair in pairs if not set(pair) & ours]
    print(f"{len(native):,} near pairs that were not planted: to be looked at")
    if options.out:
        page.write(options.out / archive.stem, done)
        (options.out / archive.stem / "pairs.json").write_text(json.dumps(native))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archives", type=Path, nargs="+")
    parser.add_argument("--pictures", type=int, default=0, help="0: all")
    parser.add_argument("--each", type=int, default=50)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--out", type=Path, help="folder for the pages and for pairs.json")
    parser.add_argument("--work", type=Path, help="folder for the copies; else a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for archive in options.archives:
            measure(archive, (options.work or Path(name)) / archive.stem, options)


if __name__ == "__main__":
    main()
