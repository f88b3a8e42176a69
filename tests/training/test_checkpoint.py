"""Checkpoints hold everything bit for bit, and are whole or not there."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from vitlab.training import checkpoint
from vitlab.training.optim import Average, make_optimizer


def trained(seed: int, optimizer: str = "adamw", steps: int = 2):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    optim = make_optimizer(model, optimizer, 0.1)
    average = Average(model, 0.9)
    for _ in range(steps):
        model(torch.randn(4, 5)).square().sum().backward()
        for group in optim.param_groups:
            group["lr"] = 0.01
        optim.step()
        optim.zero_grad()
        average.update(model)
    return model, optim, average


def state_of(model: nn.Module, optim: torch.optim.Optimizer, average: Average):
    moments = optim.state_dict()["state"]
    return {
        **{f"m.{k}": v for k, v in model.state_dict().items()},
        **{f"o.{i}.{k}": v for i, entry in moments.items() for k, v in entry.items()},
        **{f"a.{k}": v for k, v in average.tensors.items()},
        "updates": torch.tensor(average.updates),
    }


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_everything_comes_back_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    one = trained(0, optimizer)
    checkpoint.save(tmp_path, 2, {"best": 0.1 + 0.2, "skipped": {"ä\udcff": "why"}}, *one)
    other = trained(1, optimizer, steps=1)
    tensors, state, notes = checkpoint.newest(tmp_path)
    checkpoint.restore(tensors, state, *other)
    expected, found = state_of(*one), state_of(*other)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[k], found[k]) for k in expected)
    assert len(found) >= 19
    assert (state["step"], state["best"], notes) == (2, 0.1 + 0.2, [])
    assert state["skipped"] == {"ä\udcff": "why"}


def test_before_the_first_update_there_is_no_momentum(tmp_path: Path) -> None:
    one = trained(0, "sgd", steps=0)
    checkpoint.save(tmp_path, 0, {}, *one)
    other = trained(1, "sgd", steps=0)
    checkpoint.restore(*checkpoint.newest(tmp_path)[:2], *other)
    assert all(
        torch.equal(a, b)
        for a, b in zip(state_of(*one).values(), state_of(*other).values(), strict=True)
    )


def test_what_comes_back_does_not_lie_in_the_file(tmp_path: Path) -> None:
    """A mapped file that is cut short would end the process; its addresses change rounding."""
    checkpoint.save(tmp_path, 1, {}, *trained(0))
    tensors, _, _ = checkpoint.newest(tmp_path)
    before = {k: v.clone() for k, v in tensors.items()}
    (tmp_path / "000000001.safetensors").write_bytes(b"")
    assert all(torch.equal(tensors[k], before[k]) for k in before)


def test_two_are_kept(tmp_path: Path) -> None:
    for step in range(1, 13):
        checkpoint.save(tmp_path, step, {}, *trained(0, steps=0))
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        "000000011.safetensors", "000000012.safetensors",
    ]  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_files_have_the_mode_that_the_user_asks_of_new_files(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    checkpoint.save(tmp_path, 1, {}, *trained(0, steps=0))
    checkpoint.save_best(tmp_path, {"a": torch.zeros(1)})
    expected = stat.S_IMODE((tmp_path / "mine").stat().st_mode)
    for path in (tmp_path / "000000001.safetensors", tmp_path / "checkpoints" / "best"):
        assert stat.S_IMODE(path.stat().st_mode) == expected


def damages() -> dict[str, object]:
    def cut(share: float):
        return lambda data: data[: int(len(data) * share)]

    return {
        "empty": lambda data: b"",
        "cut in the header": cut(0.02),
        "cut in half": cut(0.5),
        "last byte": lambda data: data[:-1],
        "longer": lambda data: data + b"\0",
        "noise": lambda data: bytes(range(256)) * 9,
        "huge header": lambda data: b"\xff" * 7 + b"\x7f" + data[8:],
        "no state": None,
        "state is no JSON": None,
    }


@pytest.mark.parametrize("damage", damages())
def test_a_damaged_one_is_told_and_passed_over(damage: str, tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {}, *trained(0, steps=step))
    newest = tmp_path / "000000002.safetensors"
    if (spoil := damages()[damage]) is not None:
        newest.write_bytes(spoil(newest.read_bytes()))
    else:
        metadata = {} if damage == "no state" else {"state": "{"}
        checkpoint.save_file({"model.a": torch.zeros(1)}, newest, metadata=metadata)
    _, state, notes = checkpoint.newest(tmp_path)
    assert state["step"] == 1
    assert len(notes) == 1
    assert notes[0].startswith(f"{newest}: damaged (")
    assert "\n" not in notes[0]


def test_where_none_is_good_it_says_so(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {}, *trained(0))
    (tmp_path / "000000001.safetensors").write_bytes(b"x")
    tensors, state, notes = checkpoint.newest(tmp_path)
    assert (tensors, state) == ({}, {})
    assert "no good checkpoint is left" in notes[-1]
    assert checkpoint.newest(tmp_path / "nothing") == ({}, {}, [])


def test_a_full_disk_leaves_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, {}, *trained(0))
    before = (tmp_path / "000000001.safetensors").read_bytes()

    def full(tensors, path, metadata=None):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match=r"000000002.safetensors: could not be written \(No space"):
        checkpoint.save(tmp_path, 2, {}, *trained(0))
    with pytest.raises(OSError, match=r"best: could not be written \(No space"):
        checkpoint.save_best(tmp_path, {"a": torch.zeros(1)})
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["000000001.safetensors"]
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert (tmp_path / "000000001.safetensors").read_bytes() == before


@pytest.mark.parametrize("where", ["model", "optimizer", "average"])
def test_what_is_not_finite_is_not_saved(where: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {}, *trained(0))
    model, optim, average = trained(0)
    tensor = {
        "model": model[2].bias.data,
        "optimizer": optim.state_dict()["state"][0]["exp_avg"],
        "average": average.tensors["2.bias"],
    }[where]
    tensor.view(-1)[0] = float("nan")
    with pytest.raises(FloatingPointError, match=rf"step 2: {where}\..* is not finite"):
        checkpoint.save(tmp_path, 2, {}, model, optim, average)
    assert [p.name for p in tmp_path.iterdir()] == ["000000001.safetensors"]


def test_best_weights(tmp_path: Path) -> None:
    checkpoint.save_best(tmp_path, {"a": torch.arange(3.0)})
    checkpoint.save_best(tmp_path, {"a": torch.arange(3.0) + 1})
    assert torch.equal(checkpoint.load_best(tmp_path)["a"], torch.arange(3.0) + 1)
    (tmp_path / "checkpoints" / "best").write_bytes(b"x")
    with pytest.raises(OSError, match="best: cannot be read"):
        checkpoint.load_best(tmp_path)


def test_nothing_in_it_needs_pickle(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"lines": 3}, *trained(0))
    with safe_open(tmp_path / "000000001.safetensors", framework="pt") as f:
        state = json.loads(f.metadata()["state"])
        names = set(f.keys())
    assert state == {"step": 1, "lines": 3, "average_updates": 2}
    assert {"model.0.weight", "average.0.weight", "optimizer.0.exp_avg"} <= names
