"""One run on several processes: the same numbers on any number of them, whatever happens."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import toys

import vitlab
from vitlab.data import loader
from vitlab.data.augment import Augment
from vitlab.data.preprocess import Preprocess
from vitlab.training import checkpoint, parallel, run
from vitlab.training.parallel import Ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no distribution")
DOUBLE = {"precision": "float64"}


def torchrun(out: Path, processes: int, restarts: int = 0, **changes: Any) -> tuple[int, str]:
    """(exit code, everything it said) of a run on so many processes; upper-case: environment."""
    variables = {k: str(v) for k, v in changes.items() if k.isupper()}
    flags = [
        text for k, v in changes.items() if not k.isupper() for text in (f"--{k}", repr(v))
    ]  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts",
        str(restarts), "--monitor-interval", "0.5", "--nproc-per-node", str(processes),
        ranks.__file__, str(out), *flags,
    ]  # fmt: skip
    environment = toys.environment(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", **variables)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    return done.returncode, done.stdout + done.stderr


def history(out: Path) -> list[float]:
    """Every number of metrics.jsonl."""
    return [
        float(value) for line in toys.lines(out) for key, value in sorted(line.items())
        if key not in ("kind", "weights") and value is not None
    ]  # fmt: skip


def weights(out: Path) -> torch.Tensor:
    tensors, _, _ = checkpoint.newest(out / "checkpoints")
    return torch.cat([tensors[k].double().flatten() for k in sorted(tensors)])


def agree(one: Path, other: Path, rtol: float = 1e-9) -> None:
    np.testing.assert_allclose(history(other), history(one), rtol=rtol, atol=rtol / 100)
    torch.testing.assert_close(weights(other), weights(one), rtol=100 * rtol, atol=100 * rtol)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, in float64."""
    out = tmp_path_factory.mktemp("alone") / "run"
    vitlab.train(toys.pictures(45), ranks.config(out, **DOUBLE))
    assert len(toys.lines(out)) > ranks.STEPS
    return out


@pytest.mark.parametrize("shard", [False, True], ids=["copies", "shards"])
def test_two_processes_learn_what_one_learns(alone: Path, tmp_path: Path, shard: bool) -> None:
    code, said = torchrun(tmp_path / "run", 2, shard=shard, **DOUBLE)
    assert code == 0, said
    agree(alone, tmp_path / "run")
    assert vitlab.load(tmp_path / "run").card.metrics["n"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("shard", [False, True], ids=["copies", "shards"])
def test_float32_is_as_near_as_float32_can_be(tmp_path: Path, processes: int, shard: bool) -> None:
    vitlab.train(toys.pictures(45), ranks.config(tmp_path / "alone", batch=16))
    code, said = torchrun(tmp_path / "run", processes, shard=shard, batch=16)
    assert code == 0, said
    agree(tmp_path / "alone", tmp_path / "run", rtol=1e-3)


def test_a_process_that_dies_is_started_again(alone: Path, tmp_path: Path) -> None:
    code, said = torchrun(tmp_path / "run", 2, restarts=1, DIE="1:23", **DOUBLE)
    assert code == 0, said
    agree(alone, tmp_path / "run")


def test_a_death_ends_the_others_and_the_run_goes_on_elsewhere(alone: Path, tmp_path: Path) -> None:
    code, said = torchrun(tmp_path / "run", 2, DIE="1:17", **DOUBLE)
    assert code != 0
    assert "another process of this run has ended" in said
    assert not (tmp_path / "run" / "config.json").exists()
    vitlab.train(toys.pictures(45), ranks.config(tmp_path / "run", **DOUBLE))
    agree(alone, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("death", ["0:3", "1:11", "0:29", "1:44"])
@pytest.mark.parametrize("shards", [(False, False), (False, True), (True, False), (True, True)])
def test_killed_and_resumed_any_way(
    alone: Path, tmp_path: Path, death: str, shards: tuple[bool, bool]
) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    before, after = shards
    assert torchrun(killed, 2, shard=before, DIE=death, **DOUBLE)[0] != 0
    code, said = torchrun(killed, 2, shard=after, **DOUBLE)
    assert code == 0, said
    agree(alone, killed)
    if before == after:
        code, said = torchrun(undisturbed, 2, shard=before, **DOUBLE)
        assert code == 0, said
        toys.same_run(undisturbed, killed)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_to_stop_reaches_all(alone: Path, tmp_path: Path, rank: int) -> None:
    code, said = torchrun(tmp_path / "run", 2, TERMINATE=f"{rank}:13", save_every="1h", **DOUBLE)
    assert code != 0
    assert [p.stem for p in checkpoint.checkpoints(tmp_path / "run" / "checkpoints")] == [
        "000000014"
    ], said
    vitlab.train(toys.pictures(45), ranks.config(tmp_path / "run", save_every="1h", **DOUBLE))
    agree(alone, tmp_path / "run")


def test_what_is_wrong_is_said_once(tmp_path: Path) -> None:
    photos = toys.write_folder(tmp_path / "photos")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "vitlab", "train", str(photos), *toys.FLAGS, "--batch", "7", "--out",
        str(tmp_path / "run"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=toys.environment())
    assert done.returncode != 0
    assert done.stderr.count("--batch 7 cannot be cut into 2 processes") == 1
    assert not (tmp_path / "run").exists()


def test_odd_shares_cannot_be_mixed(tmp_path: Path) -> None:
    """A partner on another process would be out of reach."""
    config = toys.config(tmp_path / "run", batch=6, mixup=0.2)
    with pytest.raises(ValueError, match=r"--batch 6: mixing pairs pictures.* multiple of 4"):
        run._prepare(
            config, torch.device("cpu"), toys.source(), None, None, None, Ranks(rank=0, world=2)
        )


def test_shards_need_processes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="torchrun"):
        vitlab.train(toys.pictures(), toys.config(tmp_path / "run", shard=True))


def test_recomputing_changes_no_bit(tmp_path: Path) -> None:
    for recompute in (False, True):
        vitlab.train(
            toys.pictures(),
            toys.config(tmp_path / str(recompute), recompute=recompute, **toys.RICH),
        )
    toys.same_run(tmp_path / "False", tmp_path / "True")


def test_shares_make_up_the_batches() -> None:
    source, augment = toys.source(30), Augment(crop=(0.5, 1.0))
    how = {"batch": 8, "seed": 3, "start": 2, "stop": 6}

    def stream(**share: Any) -> list[loader.Batch]:
        return list(
            loader.train_batches(source, augment, Preprocess(size=(16, 16)), **how, **share)
        )

    for world in (2, 4):
        shares = [stream(share=(rank, world)) for rank in range(world)]
        for whole, *parts in zip(stream(), *shares, strict=True):
            assert torch.equal(whole.images, torch.cat([p.images for p in parts]))
            assert whole.rows == [row for p in parts for row in p.rows]


@pytest.mark.parametrize("n", [1, 5, 8, 9, 17])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_picture_is_evaluated_by_one_process(n: int, world: int) -> None:
    source = toys.source(n)
    shares = [
        list(loader.eval_batches(source, Preprocess(size=(16, 16)), batch=4, share=(rank, world)))
        for rank in range(world)
    ]
    assert len({len(batches) for batches in shares}) == 1, "all run the model as often"
    rows = [row for batches in shares for batch in batches for row in batch.rows]
    assert sorted(rows) == list(range(n))


def test_one_process_asks_nobody() -> None:
    assert parallel.first_says(Ranks(), lambda: 3) == 3
    assert parallel.total(Ranks(), 1.5, 2) == [1.5, 2]
    assert parallel.gather(Ranks(), "x") == ["x"]
    assert parallel.current() == Ranks(0, 1)
    assert "RANK" not in os.environ
