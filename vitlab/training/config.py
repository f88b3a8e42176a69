"""What a training run is asked to do: one flat dataclass, from flags, a dict or YAML.

Imports no torch, so that a mistyped flag is answered at once.
"""

import difflib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "hour": 3600, "hours": 3600}


def _shown(metavar: str, name: str | None = None) -> Any:
    """How `--help` shows an option that is automatic by default."""
    return tyro.conf.arg(metavar=metavar, name=name, help_behavior_hint="")


Text = Annotated[str | None, _shown("TEXT")]
Whole = Annotated[int | None, _shown("INT")]
Number = Annotated[float | None, _shown("FLOAT")]
Rates = Annotated[float | tuple[float, ...] | None, _shown("FLOAT")]
Start = Annotated[str | None, _shown("BUNDLE", "from")]
Size = Annotated[tuple[int, ...] | None, _shown("H [W]")]
Pool = Annotated[Literal["token", "mean"] | None, _shown("{token,mean}")]
Area = Annotated[tuple[float, float] | None, tyro.conf.arg(metavar="LEAST MOST")]
RandAugment = Annotated[tuple[int, int] | None, _shown("N MAGNITUDE")]
Resize = Annotated[Literal["crop", "squash", "pad"] | None, _shown("{crop,squash,pad}")]
Filter = Annotated[
    Literal["nearest", "bilinear", "bicubic", "lanczos"] | None,
    _shown("{nearest,bilinear,bicubic,lanczos}"),
]
Choice = Annotated[bool | None, _shown("{true,false}")]
Precision = Annotated[
    Literal["float32", "bf16", "float64"] | None, _shown("{float32,bf16,float64}")
]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of a training run. None means: chosen automatically, and printed.

    `recipe` only names the recipe whose defaults these are: `recipes.configure` reads one.
    """

    recipe: Text = None  # other defaults than these: a name of docs/recipes.md, or a YAML file
    model: Text = None  # name of the model, see `vitlab models`
    from_: Start = None  # bundle to start from
    out: Text = None  # folder of the run; the same command resumes it

    # the model, where it differs from its name's
    size: Size = None  # image size H W in pixels, or one number
    patch: Whole = None  # P, patch size in pixels
    width: Whole = None  # D
    depth: Whole = None  # L
    heads: Whole = None  # k
    mlp_width: Whole = None  # hidden size of the MLP
    pool: Pool = None  # representation: class token or patch mean
    dropout: Number = None  # after E_pos and dense layers
    drop_path: Number = None  # stochastic depth of the last block
    tanh_head: bool = False  # pre-training's head: a tanh layer of D before the linear one
    head_bias: Number = None  # initial bias of a new head: softmax 0, sigmoid -log(classes)
    positions: Literal["learned", "sincos"] = "learned"  # E_pos: trained, or fixed 2-D sines

    # how long: at most one of these (default: 30 epochs, 10 when starting from a bundle)
    epochs: Number = None  # passes over the training part
    steps: Whole = None  # optimizer steps
    images: Whole = None  # pictures seen
    budget: Text = None  # time, as 90s, 3min or 2h: steps are planned from measured speed

    # what is learned
    task: Literal["single-label", "multi-label"] = "single-label"  # how many labels a picture has
    loss: Literal["softmax", "sigmoid"] = "softmax"  # sigmoid: one yes or no a class, summed
    class_weights: bool = False  # weigh each picture by how rare its class is, mean 1
    balanced: bool = False  # show each class as often: repeats pictures of the smaller ones
    freeze: Text = None  # tensors kept as they are: patterns as blocks.*,patch.*; or backbone
    head_first: float = 0.0  # steps that train the head alone; below 1: share of all steps
    layer_decay: float = 1.0  # rate of a block, as a share of that of the block above it
    lora: int = 0  # rank of adapters that are trained, with the head, instead of the model; 0: none

    # optimisation
    batch: int = 64  # pictures a step
    accumulate: int = 1  # parts a batch is cut into, to save memory; the result is the same
    optimizer: Literal["adamw", "sgd"] = "adamw"  # sgd has momentum 0.9
    lr: Rates = None  # peak rate (adamw 1e-3, sgd 0.03; a tenth with --from); 0.01,0.03: a sweep
    schedule: Literal["cosine", "linear"] = "cosine"  # decay after the warm-up
    lr_end: float = 0.0  # rate at the end of the decay
    warmup: float = 0.05  # steps of linear warm-up; below 1: share of all steps
    weight_decay: float = 0.05  # decoupled, on weight matrices only
    decay_with_lr: bool = True  # decay a step: times the rate; no: times the schedule alone
    clip: float = 1.0  # largest global norm of the gradient; 0: no clipping
    ema: float = 0.0  # decay of the moving average of the weights; 0: none
    label_smoothing: float = 0.1  # share of each target spread over all classes
    select: Literal["last", "top1", "loss", "held-out"] = "last"  # weights kept: last, or best on
    # validation; held-out: sweep --lr on a part of train, learn again from all of it, score test
    patience: int = 0  # evaluations without a better one (by --select) that end a run; 0: never
    seeds: int = 1  # runs, from --seed on; mean and interval of their scores are told

    # augmentation
    crop: Area = (0.35, 1.0)  # area of the random resized crop; none: whole
    flip: bool = True  # mirror half of the pictures
    randaugment: RandAugment = None  # operations a picture, magnitude 0 to 30 (google: 10 is full)
    augment_as: Literal["torchvision", "google"] = "torchvision"  # whose crops and RandAugment
    erase: float = 0.0  # probability of random erasing
    mixup: float = 0.0  # Beta parameter; 0: off
    cutmix: float = 0.0  # Beta parameter; 0: off

    # evaluation's picture, where it differs from the model's
    resize: Resize = None  # cover and crop, squash to the size, or pad to it
    eval_crop: Number = None  # share of the resized picture that the central crop keeps, per side
    interpolation: Filter = None  # filter of every resizing
    antialias: Choice = None  # false: plain interpolation, as TensorFlow's pipelines do

    # data
    held_out: float = 0.1  # share of train held out for validation where there is no val
    group: Text = None  # regular expression: what it finds in a path stays in one split (patients)
    strict: bool = False  # end the run at the first unreadable file instead of skipping it

    # machine
    device: Text = None  # cuda, mps or cpu
    precision: Precision = None  # arithmetic of the forward pass
    shard: bool = False  # under torchrun: parameters in parts (FSDP2) instead of copies (DDP)
    recompute: bool = False  # activations are computed again, not kept: less memory, more time
    compile: bool = False  # torch.compile; needs a C++ compiler, gives up bit-exact resuming
    threads: Whole = None  # CPU threads of this process
    workers: Whole = None  # processes that decode; they do not change the result
    seed: int = 0  # of initial weights, order, augmentation and dropout
    save_every: str = "5min"  # time between checkpoints
    nonfinite: int = 3  # steps skipped, in all, for a loss that is not finite; one more ends it
    tensorboard: bool = False  # write metrics as TensorBoard events too
    overwrite: bool = False  # start anew where a run exists

    def __post_init__(self) -> None:
        for name in ("out", "from_"):  # a Path will do
            if getattr(self, name) is not None:
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        if isinstance(self.size, int):
            object.__setattr__(self, "size", (self.size,))
        if isinstance(self.lr, (tuple, list)) and len(self.lr) == 1:
            object.__setattr__(self, "lr", self.lr[0])
        lengths = [n for n in LENGTHS if getattr(self, n) is not None]
        if len(lengths) > 1:
            raise ValueError(f"give only one of {' and '.join('--' + n for n in lengths)}")
        for name, low, high in _RANGES:
            given = getattr(self, name)
            for value in given if isinstance(given, tuple) else (given,):
                if value is None or low <= value <= high:
                    continue
                bound = f"at least {low:g}" if high >= _MAX else f"between {low:g} and {high:g}"
                if low == _TINY:
                    bound = "above 0" if high >= _MAX else f"above 0 and at most {high:g}"
                raise ValueError(f"--{name.replace('_', '-')} must be {bound}, not {value}")
        if self.size is not None and len(self.size) not in (1, 2):
            raise ValueError(f"--size takes one number or two (H W), not {len(self.size)}")
        if self.batch % self.accumulate:
            raise ValueError(
                f"--batch {self.batch} is not divisible by --accumulate {self.accumulate}"
            )
        if self.crop is not None and not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise ValueError(f"--crop must be two shares of the area, rising, not {self.crop}")
        if self.randaugment is not None and not (
            self.randaugment[0] >= 1 and 0 <= self.randaugment[1] <= 30
        ):
            raise ValueError(
                "--randaugment must be a count from 1 and a magnitude from 0 to 30,"
                f" not {self.randaugment}"
            )
        if isinstance(self.lr, tuple) and self.select != "held-out":
            raise ValueError("--lr: several rates are a sweep, which needs --select held-out")
        if self.select == "held-out" and not self.held_out:
            raise ValueError("--select held-out needs --held-out above 0")
        if self.task == "multi-label" and (self.class_weights or self.balanced):
            raise ValueError("--class-weights and --balanced are for single labels")
        if self.lora and self.freeze:
            raise ValueError("--lora freezes all but its adapters and the head; drop --freeze")
        if self.budget is not None:
            seconds(self.budget)
        seconds(self.save_every)


LENGTHS = ("epochs", "steps", "images", "budget")  # at most one of them is given
_MAX, _TINY = sys.float_info.max, sys.float_info.min  # so that infinity is refused, and zero
_RANGES = [  # field, least, most
    ("epochs", _TINY, 1e6), ("steps", 1, 1e12), ("images", 1, 1e15), ("batch", 1, _MAX),
    ("accumulate", 1, _MAX), ("lr", 0, _MAX), ("lr_end", 0, _MAX), ("warmup", 0, _MAX),
    ("weight_decay", 0, _MAX), ("clip", 0, _MAX), ("ema", 0, 1), ("label_smoothing", 0, 1),
    ("erase", 0, 1), ("mixup", 0, _MAX), ("cutmix", 0, _MAX), ("held_out", 0, 0.9),
    ("threads", 1, _MAX), ("workers", 0, 256), ("seed", 0, 2**63 - 1), ("head_bias", -1e3, 1e3),
    ("head_first", 0, _MAX), ("layer_decay", _TINY, 1), ("lora", 0, _MAX), ("patience", 0, _MAX),
    ("seeds", 1, 1000), ("eval_crop", _TINY, 1), ("nonfinite", 0, _MAX),
]  # fmt: skip


def seconds(text: str) -> float:
    """`90s`, `3min`, `1.5h`, `90` -> seconds. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = UNITS.get(match[2] or "s") if match else None
    if match is None or unit is None or not 0 < float(match[1]) < _MAX / unit:
        raise ValueError(f"{text!r} is no length of time: write 90s, 3min or 2h")
    return float(match[1]) * unit


def from_dict(values: Mapping[str, Any], where: str = "configuration") -> TrainConfig:
    """A configuration from plain values, as YAML gives them.

    Unknown keys are refused with the nearest known one; numbers written as text (YAML reads
    `1e-4` as a string) are converted, anything else of a wrong type is refused.
    """
    return TrainConfig(**convert_all(values, where))


def convert_all(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Plain values as those of fields; what is unknown or of a wrong type is refused."""
    hints = get_type_hints(TrainConfig)
    known = {f.name.rstrip("_"): f.name for f in fields(TrainConfig)}
    converted = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0)[0]
            raise ValueError(f"{where}: unknown key {key!r}: did you mean {near}?")
        try:
            converted[known[key]] = convert(value, hints[known[key]])
        except (TypeError, ValueError) as e:
            raise ValueError(f"{where}: {key}: {e}") from None
    return converted


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Plain values for YAML; the inverse of `from_dict`."""
    values = {f.name.rstrip("_"): getattr(config, f.name) for f in fields(config)}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def convert(value: Any, kind: Any) -> Any:
    """A plain value, or text, as the type of a field. Raises ValueError saying what it must be."""
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if value is None:
        if NoneType in options:
            return None
        raise ValueError("needs a value")
    kind, *several = (o for o in options if o is not NoneType)
    if several:  # one, or several by commas
        value = value.split(",") if isinstance(value, str) and "," in value else value
        kind = several[0] if isinstance(value, (list, tuple)) else kind
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"must be one of {', '.join(get_args(kind))}, not {value!r}")
        return value
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        parts = value if isinstance(value, (list, tuple)) else [value]
        expected = [a for a in get_args(kind) if a is not ...]
        if ... not in get_args(kind) and len(parts) != len(expected):
            raise ValueError(f"needs {len(expected)} values, not {', '.join(map(repr, parts))}")
        return tuple(convert(v, item) for v in parts)
    wrong = ValueError(f"must be {_WORDS[kind]}, not {value!r}")
    if kind is bool and value in ("true", "false"):
        return value == "true"
    if kind is bool or isinstance(value, bool):
        if kind is bool and isinstance(value, bool):
            return value
        raise wrong
    if kind is str and not isinstance(value, (str, os.PathLike)):
        raise wrong
    if kind is int and isinstance(value, float) and not value.is_integer():
        raise wrong
    try:
        return os.fspath(value) if kind is str else kind(value)
    except (TypeError, ValueError, OverflowError):
        raise wrong from None
