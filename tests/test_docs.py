"""The commands and code of README and docs run, at a reduced length, on pictures made here."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORTER = [  # a page's command -> what the test runs in its place
    (r"--(budget|epochs|steps) \S+", "--steps 2"),
    (r"^vitlab demo$", "vitlab demo --epochs 0.05"),
    (r"--model vit-ti16 --size 128", "--model vit-ti16 --size 32 --depth 2"),
    (r"--size 160", "--size 48"),
]
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with photos/, labels.csv and picture.jpg, as the pages suppose."""
    desk = tmp_path_factory.mktemp("desk")
    rng = np.random.default_rng(0)
    rows = ["path,label"]
    for name, colour in (("cat", 60), ("dog", 190)):
        folder = desk / "photos" / name
        folder.mkdir(parents=True)
        for i in range(12):
            noise = rng.integers(-40, 40, (48, 64, 3))
            Image.fromarray((colour + noise).astype(np.uint8)).save(folder / f"{i}.jpg")
            rows.append(f"photos/{name}/{i}.jpg,{name}")
    (desk / "labels.csv").write_text("\n".join(rows) + "\n")
    (desk / "photos/cat/0.jpg").rename(desk / "picture.jpg")
    (desk / "labels.csv").write_text("\n".join(r for r in rows if "cat/0.jpg" not in r) + "\n")
    return desk


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_and_code_of_the_page_run(page, desk, monkeypatch):
    monkeypatch.chdir(desk)
    if not (desk / "runs/photos").exists():
        command(
            "vitlab train photos/ --model vit-ti16 --size 32 --depth 2 --steps 2 --out runs/photos"
        )
    for kind, text in BLOCK.findall(page.read_text()):
        if kind == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(text.replace("epochs=2", "steps=2"), str(page), "exec"), {})
        for line in (
            re.findall(r"^\$ (vitlab .*)$", text, re.MULTILINE) if kind == "console" else []
        ):
            for pattern, shorter in SHORTER:
                line = re.sub(pattern, shorter, line)
            if "--out runs/photos" in line and "train" in line:
                line += " --overwrite"
            command(line)


def command(line: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", *shlex.split(line)], capture_output=True, text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )  # fmt: skip
    assert run.returncode == 0, f"{line}\n{run.stdout}{run.stderr}"


def test_example_runs(desk):
    run = subprocess.run(
        [sys.executable, ROOT / "examples/plain_loop.py", "--steps", "3"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.search(r"\d+ of 2000 right", run.stdout)


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
