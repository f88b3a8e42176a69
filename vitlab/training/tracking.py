"""metrics.jsonl as TensorBoard shows it: an events file made from the same lines."""

import json
from pathlib import Path

FOLDER = "tensorboard"  # in the folder of a run
ABOUT = ("kind", "step", "weights", "n", "seconds")  # of a line: what is no curve


def require() -> None:
    """Raise ValueError, saying what to install, where TensorBoard is missing."""
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        raise ValueError("--tensorboard needs it: pip install 'vitlab[track]'") from None


def write_events(out: Path) -> None:
    """Write the run's metrics.jsonl as one events file, in the place of an older one.

    A file that is made whole each time is right after any kill and resumption, as the lines are.
    """
    from torch.utils.tensorboard import SummaryWriter

    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    folder = out / FOLDER
    older = list(folder.glob("events.*"))
    with SummaryWriter(str(folder)) as writer:
        for line in map(json.loads, lines):
            part = line["kind"] + (f"-{line['weights']}" if "weights" in line else "")
            for name, value in line.items():
                if name not in ABOUT and isinstance(value, (int, float)):
                    writer.add_scalar(f"{part}/{name}", value, line["step"])
    for file in older:
        file.unlink()
