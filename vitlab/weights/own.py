"""vitlab's own names without a bundle around them: a state dict that somebody saved."""

from vitlab.weights import timm
from vitlab.weights.foreign import HALF, Facts, Format, Seen
from vitlab.weights.tables import Row


def _table(theirs: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows of a format that has all of our tensors, with our names on both sides."""
    return tuple(Row(ours, ours) for ours in dict.fromkeys(row.ours for row in theirs))


def _facts(seen: Seen) -> Facts:
    notes = ["no config.json: activation, epsilons and preprocessing taken as vitlab's defaults"]
    return Facts({}, {**HALF}, notes=notes)


VIT = Format(
    name="vitlab",
    table=_table(timm.TABLE),
    anchors=("patch.weight", "positions", "blocks.0.attention.qkv.weight"),
    file="model.safetensors",
    suffixes=(),
    facts=_facts,
    lacks=lambda config: [],
)
BIT = Format(
    name="vitlab",
    family="bit",
    table=_table(timm.BIT.table),
    anchors=("conv.weight", "stages.0.0.conv1.weight", "norm.weight"),
    file="model.safetensors",
    suffixes=(),
    facts=_facts,
    lacks=lambda config: [],
)
