"""What the tests of training, weights, evaluation and the command line share."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import toys

import vitlab
from vitlab.weights.bundle import Bundle


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 pictures in four class folders; not to be written to."""
    return toys.write_folder(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on `photos` that gets everything right; not to be written to."""
    out = tmp_path_factory.mktemp("trained") / "run"
    vitlab.train(str(photos), toys.config(out, steps=60, lr=3e-3))
    return out


@pytest.fixture
def shared_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command line sets up its process; tests share one."""
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    logger, threads = logging.getLogger("vitlab"), torch.get_num_threads()
    handlers, level = logger.handlers, logger.level
    yield
    logger.handlers, logger.level = handlers, level
    torch.set_num_threads(threads)


@pytest.fixture
def bundle() -> Bundle:
    """Random weights, four classes, 16 x 16 pixels."""
    return toys.bundle()
