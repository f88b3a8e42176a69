"""A disk that runs full at each file of a run: one line, nothing lost, and with room it goes on."""

import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import toys

import vitlab
from vitlab.training import checkpoint, loop

FILES = (  # all that a run writes, in the order in which it does
    "run.yaml", "000000000.safetensors", "lines of metrics.jsonl", "best",
    "000000005.safetensors", "000000012.safetensors", "skipped.csv", "report.html",
    "model.safetensors",
)  # fmt: skip


def train(out: Path) -> None:
    vitlab.train(toys.pictures(), toys.config(out, select="loss", ema=0.9, save_every="0.000001s"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that had room."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(out)
    return out


class Disk:
    """A folder on a disk that can be filled to the last byte, and freed again."""

    def __init__(self, folder: Path, mount: bool) -> None:
        self.folder = folder
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
        self.mounted = False
        with contextlib.suppress(FileNotFoundError):  # there is no `mount`
            self.mounted = mount and not subprocess.run(command, capture_output=True).returncode

    def fill(self) -> None:
        if self.mounted:
            with open(self.folder / "filler", "wb", buffering=0) as f, contextlib.suppress(OSError):
                while True:
                    f.write(b"x" * 4096)
        else:  # as good as full: no file may grow
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, self.limits[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)
        (self.folder / "filler").unlink(missing_ok=True)

    def remount(self, how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(self.folder)], check=True)


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """A small file system; where mounting is not permitted, a limit to the size of files."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = Disk(folder, mount=request.param == "mounted")
    yield made
    made.free()
    if made.mounted:
        subprocess.run(["umount", str(folder)], check=True)


def before_writing(name: str, then: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Call `then` just before a file is written."""
    touch, write_line = Path.touch, loop._write_line

    def touching(self: Path, *args: Any, **kwargs: Any) -> None:
        touch(self, *args, **kwargs)
        if self.name == f".{name}.part":
            then()

    def writing(*args: Any, **kwargs: Any) -> None:
        then()
        write_line(*args, **kwargs)

    if name.startswith("lines"):
        patch.setattr(loop, "_write_line", writing)
    else:
        patch.setattr(Path, "touch", touching)


@pytest.mark.parametrize(
    ("name", "disk"),
    [*((name, "mounted") for name in FILES), ("lines of metrics.jsonl", "limited"),
     ("000000005.safetensors", "limited")],
    indirect=["disk"],
)  # fmt: skip
def test_a_full_disk_at_each_file(
    name: str, whole: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = disk.folder / "run"
    with monkeypatch.context() as patch:
        before_writing(name, disk.fill, patch)
        try:
            with pytest.raises(OSError) as caught:
                train(out)
        finally:
            disk.free()
    said, file = str(caught.value), name.rpartition(" ")[2]
    where = out / "checkpoints" if file == "best" or file.startswith("0") else out
    assert said.startswith(f"{where / file}: could not be written ("), said
    assert os.strerror(errno.ENOSPC if disk.mounted else errno.EFBIG) in said
    assert len(said.splitlines()) == 1
    assert not list(out.rglob("*.part"))
    assert not (out / "config.json").exists(), "it is not taken for finished"
    _, state, notes = checkpoint.newest(out / "checkpoints")
    assert not notes, "what was saved before is whole"
    assert bool(state) == (name not in ("run.yaml", "000000000.safetensors"))
    train(out)
    toys.same_run(whole, out)


@pytest.mark.parametrize("disk", ["mounted"], indirect=True)
def test_a_disk_that_turns_read_only(
    whole: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Linux does with a failing one."""
    if not disk.mounted:
        pytest.skip("mounting is not permitted here")
    out, plain = disk.folder / "run", checkpoint.save

    def save(folder: Path, step: int, *rest: Any, **options: Any) -> None:
        if step == 5:
            disk.remount("ro")
        plain(folder, step, *rest, **options)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "save", save)
            with pytest.raises(OSError) as caught:
                train(out)
        assert str(caught.value).startswith(f"{out}/checkpoints/000000005.safetensors: could not")
        assert os.strerror(errno.EROFS) in str(caught.value)
        with pytest.raises(ValueError, match="cannot be written to; choose another folder"):
            train(out)
    finally:
        disk.remount("rw")
    train(out)
    toys.same_run(whole, out)
