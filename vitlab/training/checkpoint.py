"""Checkpoints: safetensors and JSON, never pickle, each whole or not there.

One file `checkpoints/<step>.safetensors` holds model, average and optimizer; its header's
metadata holds the state of the run as JSON. It is written aside, flushed and renamed, and older
ones are removed only then.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitlab.training.optim import Average
from vitlab.weights.bundle import written

KEEP = 2  # checkpoints kept: the newest, and one before it


def save(
    folder: Path,
    step: int,
    state: dict[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
) -> None:
    """Write the checkpoint of a step.

    Raises FloatingPointError, writing nothing, if a number is not finite; OSError if the disk
    refuses. The older checkpoints are intact in either case.
    """
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    tensors |= _optimizer_tensors(optimizer)
    if average:
        tensors |= {f"average.{k}": v for k, v in average.tensors.items()}
        state = {**state, "average_updates": average.updates}
    broken = [k for k, v in tensors.items() if not v.isfinite().all()]
    if broken:
        raise FloatingPointError(f"step {step}: {broken[0]} is not finite; nothing was saved")
    folder.mkdir(parents=True, exist_ok=True)
    with written(folder / f"{step:09d}.safetensors") as aside:
        metadata = {"state": json.dumps({"step": step, **state})}
        save_file(_on_cpu(tensors), aside, metadata=metadata)
    for old in checkpoints(folder)[:-KEEP]:
        old.unlink()


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.detach().cpu().contiguous() for k, v in tensors.items()}


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob("*.safetensors"))


def newest(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """(tensors, state, notes on damaged files) of the newest good checkpoint; empty if none."""
    notes: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            with safe_open(path, framework="pt") as f:
                state = json.loads(f.metadata()["state"])
                # Copied: the tensors of `f` lie in the file, mapped into memory.
                return {k: f.get_tensor(k).clone() for k in f.keys()}, state, notes  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as e:
            notes.append(f"{path}: damaged ({e}); going back to the one before it")
    if notes:
        notes.append(f"{folder}: no good checkpoint is left; starting again")
    return {}, {}, notes


def restore(
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
) -> None:
    """Put a checkpoint's tensors back, bit for bit."""
    model.load_state_dict(_part(tensors, "model."))
    if average:
        for name, tensor in _part(tensors, "average.").items():
            average.tensors[name].copy_(tensor)
        average.updates = state["average_updates"]
    entries: dict[int, dict[str, Tensor]] = {}
    for key, tensor in _part(tensors, "optimizer.").items():
        index, _, name = key.partition(".")
        entries.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"optimizer.{index}.{name}": value
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if isinstance(value, Tensor)
    }


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def save_best(out: Path, tensors: dict[str, Tensor]) -> None:
    """Keep weights as the best so far, in `checkpoints/best`, whole or not at all."""
    folder = out / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    with written(folder / "best") as aside:
        save_file(_on_cpu(tensors), aside)


def load_best(out: Path) -> dict[str, Tensor]:
    """The weights that `save_best` kept. Raises OSError if they are missing or damaged."""
    path = out / "checkpoints" / "best"
    try:
        return load_file(path)
    except (SafetensorError, OSError) as e:
        raise OSError(f"{path}: cannot be read ({e}); --overwrite starts anew") from e
