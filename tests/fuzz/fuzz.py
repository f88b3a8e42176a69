"""Mutated real files for every reader: an answer or a documented refusal, soon, in little memory.

`python fuzz.py` feeds $VITLAB_FUZZ_INPUTS inputs (a million), split among the targets, from number
$VITLAB_FUZZ_START of each on. Input i of a target is a function of i alone, so a campaign goes on
where it was stopped, and `python fuzz.py decoder 12345` shows what one input does. Children that
are forked feed BLOCK inputs each: one that crashes, hangs or hoards memory is known by its number.
"""

import io
import json
import logging
import mmap
import os
import random
import re
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import toys
import yaml
from PIL import Image

import vitlab
from vitlab.data import streams
from vitlab.data.decode import Unreadable, decode
from vitlab.data.packing import pack
from vitlab.data.sources import open_spec
from vitlab.training import config as configs
from vitlab.training import folder as folders
from vitlab.training import machine

BLOCK = 200  # inputs of one child
HANG = 5.0  # seconds of computing on one input
STUCK = 60.0  # seconds of any kind: the machine may be busy
PIXELS = 4 << 20  # of a picture at most, so that the next limit means something
HOARD = 512  # MiB that a child may grow by
LARGEST = 1 << 20  # bytes of an input
Feed = Callable[[random.Random], bool]  # is the input accepted (or refused, as documented)


# Mutations -------------------------------------------------------------------------------------

NUMBERS = (
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    1 << 24,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
)
VALUES: tuple[Any, ...] = (  # in place of a leaf of JSON or YAML
    None, True, False, 0, -1, 1, 2, 7, 16, 10**9, 10**30, 10**400, 0.5, 3.0, -0.5, 1e-300, 1e300,
    float("nan"), float("inf"), "", "x", "16", "1e400", "two\nlines", "\ud800", "y" * 2000, [], [0],
    [1, 2, 3], [None], ["a", "a"], {}, {"a": 1}, [[[]]],
)  # fmt: skip


def mutate(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Bytes flipped, cut, repeated, lengths changed, spliced; a few of these."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        end = len(data)
        at = rng.randrange(min(end, rng.choice((32, 256, end))) + 1)  # headers deserve more
        size = min(end - at, rng.choice((1, 2, 4, 16, rng.randrange(end + 1))))
        kind = rng.randrange(7)
        if kind == 0:
            data = data[:at] + rng.randbytes(size) + data[at + size :]
        elif kind == 1 and at < end:
            data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        elif kind == 2:
            data = data[:at] + data[at + size :]
        elif kind == 3:
            data = data[:at]
        elif kind == 4:
            data = data[:at] + data[at : at + size] * rng.choice((2, 3, 50)) + data[at + size :]
        elif kind == 5:  # a length, an offset, a size
            width, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
            number = rng.choice(NUMBERS) % (1 << 8 * width)
            data = data[:at] + number.to_bytes(width, order) + data[at + width :]
        else:
            other = rng.choice(others)
            data = data[:at] + other[rng.randrange(len(other) + 1) :]
    return data[:LARGEST]


def graft(rng: random.Random, tree: Any) -> Any:
    """A copy of JSON or YAML values with one leaf or branch replaced, lost or renamed."""
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        key = rng.choice(list(tree))
        fate = rng.random()
        if fate < 0.05:
            return {k: v for k, v in tree.items() if k != key}
        if fate < 0.1:
            return {(k if k != key else f"{k}\n"): v for k, v in tree.items()}
        return {**tree, key: graft(rng, tree[key])}
    if isinstance(tree, list) and tree and rng.random() < 0.6:
        at = rng.randrange(len(tree))
        return [*tree[:at], graft(rng, tree[at]), *tree[at + 1 :]]
    return rng.choice(VALUES)


def refused(error: Exception, names: Path = Path()) -> bool:
    """A refusal is one line of some length."""
    text = str(error)
    assert str(names).strip(".") in text, f"no file is named: {error!r}"
    assert text, f"{error!r} says nothing"
    assert len(text.splitlines()) == 1, f"more than one line: {error!r}"
    return False


# Targets: what makes a feed, in a folder of its own --------------------------------------------


def pictures() -> list[bytes]:
    """Small files of every common format, plain and odd."""
    y, x = np.mgrid[:24, :33]
    image = Image.fromarray(np.stack([y * 10, x * 7, y + x], axis=2).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = Image.fromarray((np.arange(24 * 33).reshape(24, 33) * 80).astype(np.uint16))
    frames: dict[str, Any] = {"save_all": True, "append_images": [image.rotate(90)]}
    files: list[bytes] = []
    for picture, kind, options in [
        (image, "JPEG", {"exif": exif}), (image, "JPEG", {"progressive": True}),
        (image.convert("CMYK"), "JPEG", {}), (image.convert("L"), "JPEG", {}),
        (image, "PNG", {"exif": exif}), (deep, "PNG", {}), (image.convert("P"), "PNG", {}),
        (image.convert("RGBA"), "PNG", {}), (image, "PNG", frames),
        (image, "WEBP", {"lossless": True}), (image, "WEBP", frames), (image, "GIF", frames),
        (image, "TIFF", {}), (deep, "TIFF", {"compression": "tiff_lzw"}),
        (image.convert("L"), "TIFF", {"compression": "tiff_adobe_deflate"}), (image, "BMP", {}),
        (image.convert("P"), "BMP", {}),
    ]:  # fmt: skip
        file = io.BytesIO()
        picture.save(file, kind, **options)
        files.append(file.getvalue())
    return files


def decoder(folder: Path) -> Feed:
    seeds = pictures()

    def middle(height: int, width: int) -> tuple[int, int, int, int]:
        return width // 4, height // 4, max(1, width // 2), max(1, height // 2)

    def feed(rng: random.Random) -> bool:
        data = mutate(rng, rng.choice(seeds), seeds)
        region = rng.choice((None, middle))
        try:
            pixels = decode(data, max_pixels=PIXELS, region=region, least=(4, 4))
        except Unreadable as e:
            return refused(e)
        assert (pixels.dtype, pixels.ndim, pixels.shape[2]) == (np.uint8, 3, 3)
        assert pixels.size <= 3 * PIXELS
        return True

    return feed


def read_all(spec: str | Path, within: Path | None = None) -> bool:
    """Open a set and every picture in it, from one folder where that is given; or be refused."""
    try:
        parts = open_spec(str(spec))
    except (ValueError, FileNotFoundError) as e:
        return refused(e)
    assert parts
    for part in parts.values():
        files = getattr(part.load, "files", ()) if within else ()
        assert {Path(name.removeprefix("file://")).parent for name in files} <= {within}
        for row in range(len(part)):
            assert part.id(row)
            try:
                part[row]
            except Unreadable as e:
                refused(e)
            except OSError:
                pass
    return True


def tables(folder: Path) -> Feed:
    rows = "path,label,split,group\n" + "".join(
        f'{i}.png,"{toys.CLASSES[i % 4]}",{("train", "val", "")[i % 3]},g{i // 2}\r\n'
        for i in range(12)
    )
    lines = [json.dumps({"path": f"{i}.png", "label": i % 4, "more": [1, "é"]}) for i in range(9)]
    seeds = {
        "set.csv": [rows.encode("utf-8-sig"), b"path,label\na.png,cat\nb.png,dog\n"],
        "set.jsonl": ["\n".join(lines).encode()],
    }

    def feed(rng: random.Random) -> bool:
        name = rng.choice(("set.csv", "set.csv", "set.jsonl"))
        path = folder / name
        path.write_bytes(
            mutate(rng, rng.choice(seeds[name]), [s for v in seeds.values() for s in v])
        )
        return read_all(path)

    return feed


def archives(folder: Path) -> Feed:
    files = pictures()
    seeds: list[bytes] = []
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", method) as archive:
            for i, data in enumerate(files[:6]):
                archive.writestr(f"photos/{('train', 'val')[i // 4]}/{'ab'[i % 2]}/{i}.png", data)
        seeds.append(file.getvalue())
    path = folder / "set.zip"

    def feed(rng: random.Random) -> bool:
        data = rng.choice(seeds)
        if rng.random() < 0.5:  # the directory, at the end, deserves more
            at = data.index(b"PK\1\2")
            data = data[:at] + mutate(rng, data[at:], seeds)
        else:
            data = mutate(rng, data, seeds)
        path.write_bytes(data)
        return read_all(path)

    return feed


def tars() -> list[bytes]:
    """Shards that anybody may have written, in both forms of long names."""
    found = []
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=form) as tar:
            for i, picture in enumerate(pictures()[:4]):
                key = f"{'long' * 40 * (i % 2)}{i}"
                for kind, data in (("png", picture), ("cls", b"%d" % i), ("json", b'{"a": 1}')):
                    info = tarfile.TarInfo(f"{key}.{kind}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        found.append(file.getvalue())
    return found


def mutate_tar(rng: random.Random, tar: bytes, others: list[bytes]) -> bytes:
    """Headers deserve more, and mostly checksums that are right."""
    if rng.random() < 0.7:
        at = rng.choice([m.start() - 257 for m in re.finditer(b"ustar", tar)])
        header = mutate(rng, tar[at : at + 512], others)[:512].ljust(512, b"\0")
        if rng.random() < 0.8:
            total = sum(header[:148]) + 8 * ord(" ") + sum(header[156:])
            header = header[:148] + b"%06o\0 " % total + header[156:]
        return tar[:at] + header + tar[at + 512 :]
    return mutate(rng, tar, others)


def shards(folder: Path) -> Feed:
    """A packed folder, read from here or as from afar, with a file changed; or somebody's tar."""
    packed, cache, labels = folder / "packed", folder / "cache", np.arange(8) % 4
    whole = replace(toys.source(8), groups=labels // 2, many=np.eye(4, dtype=bool)[labels])
    pack({"train": whole, "val": whole}, packed, shard_size=9000)
    files = {path: path.read_bytes() for path in sorted(packed.iterdir())}
    others, loose = list(files.values()), tars()
    streams.PAUSES = ()  # what does not come once does not come

    def change(rng: random.Random, path: Path, data: bytes) -> bytes:
        if path.suffix == ".json" and rng.random() < 0.8:
            return json.dumps(graft(rng, json.loads(data))).encode()
        if path.suffix == ".tar":  # the index knows its length
            return mutate_tar(rng, data, others)[: len(data)].ljust(len(data), b"\0")
        return mutate(rng, data, others)

    def feed(rng: random.Random) -> bool:
        os.environ["VITLAB_CACHE"] = str(cache)
        shutil.rmtree(cache, ignore_errors=True)
        streams._kept.clear()
        if rng.random() < 0.4:
            path = folder / "set.tar"
            path.write_bytes(mutate_tar(rng, rng.choice(loose), others))
            return read_all(path, folder)
        suffix = rng.choice((".json", ".npy", ".tar"))
        path = rng.choice([path for path in files if path.suffix == suffix])
        path.write_bytes(change(rng, path, files[path]))
        try:
            return read_all(rng.choice((f"{packed}", f"file://{packed}")), packed)
        finally:
            path.write_bytes(files[path])

    return feed


def bundles(folder: Path) -> Feed:
    seeds = []
    for bundle in (toys.bundle(), toys.resnet()):
        vitlab.save(bundle, folder)
        config, weights = (
            (folder / name).read_bytes() for name in ("config.json", "model.safetensors")
        )
        seeds.append((config, weights))
    others = [file for pair in seeds for file in pair]
    picture = np.zeros((20, 24, 3), np.uint8)

    def change(rng: random.Random, config: bytes, weights: bytes) -> tuple[bytes, bytes]:
        kind = rng.randrange(5)
        if kind < 2:  # still JSON
            return json.dumps(graft(rng, json.loads(config))).encode(), weights
        if kind == 2:
            return mutate(rng, config, others), weights
        if kind == 3:
            end = 8 + int.from_bytes(weights[:8], "little")
            header = json.dumps(graft(rng, json.loads(weights[8:end]))).encode()
            return config, len(header).to_bytes(8, "little") + header + weights[end:]
        return config, mutate(rng, weights, others)

    def feed(rng: random.Random) -> bool:
        config, weights = change(rng, *rng.choice(seeds))
        (folder / "config.json").write_bytes(config)
        (folder / "model.safetensors").write_bytes(weights)
        try:
            bundle = vitlab.load(folder)
        except (ValueError, OSError) as e:
            return refused(e, names=folder)
        if bundle.classes:
            (answer,) = bundle.predict(picture)
            assert (answer.label in bundle.classes) != (answer.error is not None)
        return True

    return feed


def configurations(folder: Path) -> Feed:
    asked = toys.config(folder / "run", steps=1, **toys.RICH)
    vitlab.train(toys.pictures(), asked)
    (folder / "run" / "config.json").unlink()  # as if unfinished
    path = folder / "run" / "run.yaml"
    record, values = path.read_bytes(), configs.to_dict(asked)
    tree = yaml.safe_load(record)

    def resume(rng: random.Random) -> bool:
        if rng.random() < 0.5:
            path.write_bytes(mutate(rng, record, [record]))
        else:
            path.write_text(yaml.safe_dump(graft(rng, tree)), encoding="utf-8")
        try:
            found = folders.recorded(folder / "run", asked)
        except ValueError as e:
            return refused(e)
        assert found
        return True

    def feed(rng: random.Random) -> bool:
        if rng.random() < 0.2:  # YAML is slow to read
            return resume(rng)
        changed = graft(rng, values)
        for _ in range(rng.randrange(3)):
            changed = graft(rng, changed) if isinstance(changed, dict) else values
        try:
            config = configs.from_dict(changed if isinstance(changed, dict) else {}, "recipe.yaml")
        except ValueError as e:
            return refused(e)
        assert configs.from_dict(configs.to_dict(config)) == config
        return True

    return feed


TARGETS: dict[str, Callable[[Path], Feed]] = {
    "decoder": decoder, "tables": tables, "archives": archives, "shards": shards,
    "bundles": bundles, "configurations": configurations,
}  # fmt: skip


# Feeding ---------------------------------------------------------------------------------------


@dataclass
class Child:
    """A forked process that feeds inputs first ... last - 1."""

    target: str
    first: int
    last: int
    at: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 8))  # the input it works on
    result: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 1 << 20))

    def start(self, feed: Feed) -> int:
        """Its process id."""
        pid = os.fork()
        if pid:
            return pid
        try:
            self.result.write(json.dumps(self.work(feed)).encode())
            os._exit(0)
        finally:
            os._exit(1)

    def work(self, feed: Feed) -> dict[str, Any]:
        for number in (signal.SIGPROF, signal.SIGALRM):  # they end a process, even inside C
            signal.signal(number, signal.SIG_DFL)
        faults: list[str] = []
        opened, slowest, before = 0, 0.0, peak()
        for i in range(self.first, self.last):
            self.at[:8] = i.to_bytes(8, "little")
            signal.setitimer(signal.ITIMER_PROF, HANG)
            signal.setitimer(signal.ITIMER_REAL, STUCK)
            began = time.monotonic()
            try:
                opened += feed(numbers(self.target, i))
            except Exception:
                faults.append(f"{self.target} {i}: {traceback.format_exc(limit=-4)}"[:5000])
            slowest = max(slowest, time.monotonic() - began)
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        grown = peak() - before
        if grown > HOARD:
            faults.append(f"{self.target} {self.first} ... {self.last - 1}: {grown:.0f} MiB")
        return {
            "opened": opened, "slowest": slowest, "grown": grown, "faults": faults[:10],
            "faulty": len(faults),
        }  # fmt: skip

    def outcome(self, status: int) -> tuple[dict[str, Any], int]:
        """(what it found, the first input that it did not come to)."""
        if status == 0:
            return json.loads(self.result[:].rstrip(b"\0")), self.last
        at = int.from_bytes(self.at[:8], "little")
        signals = {signal.SIGPROF: f"computes for {HANG} s", signal.SIGALRM: f"takes {STUCK} s"}
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        how = signals.get(number, f"ends the process (status {status}, signal {number})")
        fault = {"faults": [f"{self.target} {at}: {how}"], "faulty": 1}
        return {"opened": 0, "slowest": 0.0, "grown": 0.0, **fault}, at + 1


def numbers(target: str, i: int) -> random.Random:
    """Random numbers for input i, the same on every machine."""
    return random.Random(f"{target} {i}")


def peak() -> float:
    """The most memory that this process has held, in MiB."""
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def blocks(names: list[str], start: int, stop: int) -> Iterator[Child]:
    for first in range(start, stop, BLOCK):
        for name in names:
            yield Child(name, first, min(first + BLOCK, stop))


def run(inputs: int, start: int, jobs: int) -> int:
    """Feed so many inputs, split among the targets; how many faults there were."""
    logging.getLogger("vitlab").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # a child of a process with OpenMP threads would hang
    began = said = time.monotonic()
    stop = start + -(-inputs // len(TARGETS))
    opened, fed, slowest, grown, faulty = Counter[str](), Counter[str](), 0.0, 0.0, 0
    with tempfile.TemporaryDirectory() as temporary:
        feeds = []
        for job in range(jobs):  # a folder each, so that no two write the same file
            places = {name: Path(temporary) / f"{name}{job}" for name in TARGETS}
            for place in places.values():
                place.mkdir()
            feeds.append({name: make(places[name]) for name, make in TARGETS.items()})
        idle, todo = list(range(jobs)), blocks(list(TARGETS), start, stop)
        running: dict[int, tuple[Child, int]] = {}
        again: list[Child] = []
        while True:
            while idle and (child := again.pop() if again else next(todo, None)):
                job = idle.pop()
                running[child.start(feeds[job][child.target])] = child, job
            if not running:
                break
            pid, status = os.wait()
            child, job = running.pop(pid)
            idle.append(job)
            found, reached = child.outcome(status)
            if reached < child.last:
                again.append(Child(child.target, reached, child.last))
            opened[child.target] += found["opened"]
            fed[child.target] += reached - child.first
            slowest, grown = max(slowest, found["slowest"]), max(grown, found["grown"])
            faulty += found["faulty"]
            for fault in found["faults"]:
                print(fault, flush=True)
            if time.monotonic() - said > 10 or not (running or again):
                said = time.monotonic()
                undone = [c.first for c, _ in running.values()]
                behind = min([child.first, *undone]) if running else stop
                print(
                    f"{sum(fed.values()):,} of {inputs:,} in {said - began:.0f} s, {faulty} faults,"
                    f" slowest {slowest:.2f} s, +{grown:.0f} MiB;"
                    f" VITLAB_FUZZ_START={behind} goes on", flush=True,
                )  # fmt: skip
    for name in TARGETS:
        print(f"{name}: {fed[name]:,} inputs, {opened[name]:,} of them accepted")
    return faulty


def show(target: str, i: int) -> str:
    """What becomes of one input; a fault is raised."""
    with tempfile.TemporaryDirectory() as folder:
        return "accepted" if TARGETS[target](Path(folder))(numbers(target, i)) else "refused"


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(show(sys.argv[1], int(sys.argv[2])))
        sys.exit()
    count = int(os.environ.get("VITLAB_FUZZ_INPUTS", 1_000_000))
    sys.exit(min(run(count, int(os.environ.get("VITLAB_FUZZ_START", 0)), machine.cores()), 99))
