"""A few thousand mutated files; `make fuzz` feeds a million."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import toys

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
SCRIPT = Path(__file__).with_name("fuzz.py")
INPUTS = int(os.environ.get("VITLAB_FUZZ_INPUTS", 4800))


def start(*command: object, **more: str) -> subprocess.CompletedProcess[str]:
    environment = toys.environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", **more)
    environment["PYTHONPATH"] += os.pathsep + str(SCRIPT.parent)
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, env=environment
    )


def test_mutated_files_are_read_or_refused() -> None:
    """No crash, no undocumented error, no input over 5 s, bounded memory."""
    done = start(SCRIPT, VITLAB_FUZZ_INPUTS=str(INPUTS), VITLAB_FUZZ_START="0")
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr[-3000:]
    targets = re.findall(r"^(\w+): ([\d,]+) inputs, ([\d,]+) of them accepted$", done.stdout, re.M)
    counts = {name: [int(n.replace(",", "")) for n in numbers] for name, *numbers in targets}
    assert set(counts) == {"decoder", "tables", "archives", "shards", "bundles", "configurations"}
    for name, (fed, accepted) in counts.items():
        assert fed >= INPUTS // len(counts)
        assert 0.02 * fed < accepted < 0.98 * fed, f"{name}: both ends of the test are reached"


def test_every_kind_of_fault_is_found() -> None:
    """One input of a target each that crashes, hangs, hoards, or raises what it should not."""
    code = """
import os, fuzz
assert {fuzz.show("decoder", i) for i in range(40)} == {"accepted", "refused"}
assert [fuzz.show("tables", i) for i in range(9)] == [fuzz.show("tables", i) for i in range(9)]
fuzz.BLOCK, fuzz.HANG, fuzz.HOARD = 4, 1.0, 64
calls = {
    "crashes": os.abort, "raises": lambda: [][0], "hoards": lambda: bytearray(100 << 20),
    "talks": lambda: fuzz.refused(ValueError("a\\nb")),
}
def make(call):
    def feed(rng):
        if rng.getstate() == fuzz.numbers(name_of[call], 5).getstate():
            call()
        return True
    return lambda folder: feed
def hang():
    while True: pass
calls["hangs"] = hang
name_of = {call: name for name, call in calls.items()}
fuzz.TARGETS = {name: make(call) for name, call in calls.items()}
assert fuzz.run(40, 0, 2) == 5
"""
    done = start("-c", code)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("crashes 5: ends the process", "raises 5: ", "talks 5: ", "hangs 5: computes for"):
        assert said in done.stdout
    assert "hoards 4 ... 7: " in done.stdout
    assert re.search(r"IndexError: list index out of range", done.stdout)
    for name in ("crashes", "raises", "talks", "hangs", "hoards"):
        assert f"{name}: 8 inputs, " in done.stdout, "and what follows is fed, too"
