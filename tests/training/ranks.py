"""One of the processes that test_parallel.py starts by torchrun.

`ranks.py OUT [--NAME VALUE ...]` trains the run OUT on toy pictures with these changes to its
configuration. Environment: DIE="rank:step" kills that process there, once; TERMINATE="rank:step"
sends it SIGTERM.
"""

import ast
import os
import signal
import sys
from pathlib import Path
from typing import Any

import toys

import vitlab
from vitlab.training import loop
from vitlab.training.parallel import current

STEPS = 50
SHARED = {k: v for k, v in toys.RICH.items() if k not in ("dropout", "drop_path")}


def config(out: Path, **changes: Any) -> Any:
    return toys.config(
        out, **{"steps": STEPS, "held_out": 0.15, "save_every": "0.01s", **SHARED, **changes}
    )


def arm(name: str, number: int) -> None:
    """Send this process a signal after the step that an environment variable names."""
    rank, _, step = os.environ.get(name, ":").partition(":")
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not rank or int(rank) != int(os.environ["RANK"]) or again:
        return
    plain = loop.update

    def update(job: Any, forward: Any, batch: Any, at: int) -> Any:
        result = plain(job, forward, batch, at)
        if at == int(step):
            os.kill(os.getpid(), number)
        return result

    loop.update = update


if __name__ == "__main__":
    arm("DIE", signal.SIGKILL)
    arm("TERMINATE", signal.SIGTERM)
    flags = sys.argv[2:]
    changes = {k[2:]: ast.literal_eval(v) for k, v in zip(flags[::2], flags[1::2], strict=True)}
    try:
        bundle = vitlab.train(toys.pictures(45), config(Path(sys.argv[1]), **changes))
    except loop.Stopped:
        sys.exit(143)
    assert all(p.device.type == "cpu" for p in bundle.model.parameters())
    assert current().world == 1, "the processes have parted"
