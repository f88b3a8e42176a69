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

from vitlab.data.writing import written
from vitlab.training import parallel
from vitlab.training.optim import Average

KEEP = 2  # checkpoints kept: the newest, and one before it


def save(
    folder: Path,
    step: int,
    state: dict[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
    write: bool = True,
) -> None:
    """Write the checkpoint of a step; `write` on one of several processes, called by all.

    It is the same file whether the model is sharded or not, on any number of processes.

    Raises FloatingPointError, writing nothing, if a number is not finite; OSError if the disk
    refuses. The older checkpoints are intact in either case.
    """
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    tensors |= _optimizer_tensors(optimizer)
    if average:
        tensors |= {f"average.{k}": v for k, v in average.tensors.items()}
        state = {**state, "average_updates": average.updates}
    tensors = _on_cpu(tensors, write)
    broken = parallel.first_says(  # it alone has the tensors, and all must end
        parallel.current(), lambda: [k for k, v in tensors.items() if not v.isfinite().all()]
    )
    if broken:
        raise FloatingPointError(f"step {step}: {broken[0]} is not finite; nothing was saved")
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with written(folder / f"{step:09d}.safetensors") as aside:
        save_file(tensors, aside, metadata={"state": json.dumps({"step": step, **state})})
    for old in checkpoints(folder)[:-KEEP]:
        old.unlink()


def _on_cpu(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors, gathered one at a time from sharded ones; none where they are not kept."""
    kept = {}
    for name, tensor in tensors.items():
        gathered = parallel.whole(tensor.detach())
        if keep:
            kept[name] = gathered.cpu().contiguous()
    return kept


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
    load(model, _part(tensors, "model."))
    if average:
        for name, tensor in _part(tensors, "average.").items():
            average.tensors[name].copy_(parallel.like(tensor, average.tensors[name]))
        average.updates = state["average_updates"]
    entries: dict[int, dict[str, Tensor]] = {}
    for key, tensor in _part(tensors, "optimizer.").items():
        index, _, name = key.partition(".")
        entries.setdefault(int(index), {})[name] = tensor
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, entry in ((parameters[i], entry) for i, entry in entries.items()):
        for name, tensor in entry.items():
            if tensor.shape == parameter.shape:  # a moment, not a count
                entry[name] = parallel.like(tensor, parameter)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})


def load(model: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    """Whole tensors into a model, sharded or not."""
    own = model.state_dict()
    model.load_state_dict({k: parallel.like(v, own[k]) for k, v in tensors.items()})


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"optimizer.{index}.{name}": value
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if isinstance(value, Tensor)
    }


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def save_best(out: Path, tensors: dict[str, Tensor], write: bool = True) -> None:
    """Keep weights as the best so far, in `checkpoints/best`, whole or not at all."""
    folder = out / "checkpoints"
    tensors = _on_cpu(tensors, write)
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with written(folder / "best") as aside:
        save_file(tensors, aside)


def load_best(out: Path) -> dict[str, Tensor]:
    """The weights that `save_best` kept. Raises OSError if they are missing or damaged."""
    path = out / "checkpoints" / "best"
    try:
        return load_file(path)
    except (SafetensorError, OSError) as e:
        raise OSError(f"{path}: cannot be read ({e}); --overwrite starts anew") from e
