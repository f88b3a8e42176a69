"""The parity fixtures: numbers of the original JAX code, and its weights under our names."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vitlab.models.vit import ViT

DATA = Path(os.environ.get("VITLAB_TEST_DATA", Path(__file__).parents[2] / "../shared"))
FOLDER = DATA / "fixtures" / "original-code"


@dataclass(frozen=True)
class Case:
    """One case of the manifest."""

    config: dict[str, Any]
    weights: dict[str, Tensor]  # our names; heads are merged, kernels transposed
    expected: dict[str, Tensor]  # images [B, 3, H, W] under "image", the rest as it was recorded
    tolerance: dict[str, float]

    def fill(self, model: ViT, dtype: torch.dtype) -> tuple[ViT, Tensor]:
        """The model with the original's weights, and the images it saw."""
        model.load_state_dict(self.weights)
        return model.to(dtype).eval(), self.expected["image"].to(dtype)

    def check(self, name: str, found: Tensor) -> None:
        """Compare at the manifest's tolerance; a float64 result with the float64 record."""
        name += "_float64" if found.dtype == torch.float64 else ""
        if name in self.expected:  # of the inner arrays there is only a float32 record
            difference = (found - self.expected[name]).abs().max().item()
            assert found.shape == self.expected[name].shape, name
            assert difference <= self.tolerance[name], (name, difference)


def load(name: str) -> Case:
    """Read a case; skips the test, and says so, where the fixtures are absent."""
    manifest = FOLDER / "manifest.json"
    if not manifest.is_file():
        pytest.skip(f"no parity fixtures in {FOLDER} (VITLAB_TEST_DATA names their folder)")
    case = next(c for c in json.loads(manifest.read_text())["cases"] if c["name"] == name)
    with np.load(FOLDER / case["checkpoint"]) as file:
        weights = rename({k.removeprefix("params/"): torch.from_numpy(file[k]) for k in file})
    with np.load(FOLDER / case["io"]) as file:
        expected = {k: torch.from_numpy(file[k]) for k in file}
    expected["image"] = expected["image"].permute(0, 3, 1, 2)
    return Case(case["config"], weights, expected, case["tolerance"])


OURS = [  # the end of a name of theirs -> ours
    (r"^cls$", "class_token"),
    (r"^embedding", "patch"),
    (r"^pos_embedding$|^Transformer/posembed_input/pos_embedding$", "positions"),
    (r"^Transformer/encoder_norm", "norm"),
    (r"^pre_logits", "hidden"),
    (r"^conv_root", "stem.conv"),
    (r"^gn_root", "stem.norm"),
    (r"^Transformer/encoderblock_(\d+)/", r"blocks.\1."),
    (r"^block(\d+)/unit(\d+)/", lambda m: f"stem.stages.{int(m[1]) - 1}.{int(m[2]) - 1}."),
    (r"LayerNorm_0", "norm1"),
    (r"LayerNorm_[12]", "norm2"),
    (r"MultiHeadDotProductAttention_\d", "attention"),
    (r"MlpBlock_\d/Dense_0", "mlp.up"),
    (r"MlpBlock_\d/Dense_1", "mlp.down"),
    (r"conv_proj", "project"),
    (r"gn_proj", "project_norm"),
    (r"gn(\d)", r"norm\1"),
    (r"/(kernel|scale)$", ".weight"),
    (r"/bias$", ".bias"),
    (r"/", "."),
]


def rename(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The original's arrays under our names, in our layouts."""
    ours: dict[str, Tensor] = {}
    for name, array in theirs.items():
        if "/gn" in f"/{name}":
            array = array.flatten()
        elif "MultiHead" in name and not name.endswith("out/bias"):
            # Kernels are [D, k, D_h], of out [k, D_h, D]; biases [k, D_h].
            array = array.flatten(0, 1) if "/out/" in name else array.flatten(-2)
        if name.endswith("kernel"):
            array = array.permute(3, 2, 0, 1) if array.ndim == 4 else array.T
        for pattern, ours_is in OURS:
            name = re.sub(pattern, ours_is, name)
        ours[name] = array
    for name in [n for n in ours if ".query." in n]:
        parts = [ours.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        ours[name.replace("query", "qkv")] = torch.cat(parts)
    return ours
