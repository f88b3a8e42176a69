"""What became of every tensor: nothing is dropped or left random in silence."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vitlab.weights.files import names


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a reading or a writing did. Names are those of the file unless said otherwise."""

    format: str  # google, big_vision, timm, huggingface, torchvision or vitlab
    sha256: str = ""  # of the file
    read: tuple[str, ...] = ()  # tensors that are in the model; of a writing: in the file
    renamed: Mapping[str, str] = field(default_factory=dict)  # theirs -> ours, where they differ
    reshaped: tuple[str, ...] = ()  # those that lie otherwise here and there
    interpolated: tuple[str, ...] = ()  # ours, and how
    new: tuple[str, ...] = ()  # ours, that are as initialised
    aside: tuple[str, ...] = ()  # kept, though no model of vitlab's reads them
    dropped: tuple[str, ...] = ()  # left out
    refused: tuple[str, ...] = ()  # what has no place here, and stopped the work
    notes: tuple[str, ...] = ()  # what was assumed or should be known

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people: what happened, one thing a line."""
        digest = f", sha256 {self.sha256[:12]}" if self.sha256 else ""
        first = (
            f"{self.format}: {len(self.read)} tensors, {len(self.renamed)} renamed,"
            f" {len(self.reshaped)} reshaped{digest}"
        )
        lists = {
            name: getattr(self, name)
            for name in ("interpolated", "new", "aside", "dropped", "refused")
        }
        return [
            first,
            *(f"{name}: {names(listed, 4)}" for name, listed in lists.items() if listed),
            *(f"note: {note}" for note in self.notes),
        ]


class Refused(ValueError):  # noqa: N818  a verdict
    """A file or model that is not read or written as asked; `report` says how far it went."""

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report
