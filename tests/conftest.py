"""What the tests of training, weights, evaluation and the command line share."""

from pathlib import Path

import pytest
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
def bundle() -> Bundle:
    """Random weights, four classes, 16 x 16 pixels."""
    return toys.bundle()
