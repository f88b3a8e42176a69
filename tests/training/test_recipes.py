"""Recipes: the values of the papers' tables, a short run of each, and how flags lie over them."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import toys
import yaml

import vitlab
from vitlab import flags
from vitlab.commands.train import Train
from vitlab.models import cost, zoo
from vitlab.models.resnet import BiTConfig
from vitlab.models.vit import ViTConfig
from vitlab.training import recipes
from vitlab.training.config import TrainConfig

# Table 3 of arXiv 2010.11929: models, epochs, base rate, decay, weight decay, dropout. All of it:
# Adam with betas 0.9 and 0.999, batch 4096, linear warm-up of 10,000 steps, 224 pixels.
TABLE_3 = [
    ("paper-jft-b", "vit-b16", (7,), 8e-4, "linear", 0.1, 0.0),
    ("paper-jft-l32", "vit-l32", (7,), 6e-4, "linear", 0.1, 0.0),
    ("paper-jft-l16", "vit-l16", (7, 14), 4e-4, "linear", 0.1, 0.0),
    ("paper-jft-h14", "vit-h14", (14,), 3e-4, "linear", 0.1, 0.0),
    ("paper-jft-r50", "bit-r50x1", (7,), 1e-3, "linear", 0.1, 0.0),
    ("paper-jft-r101", "bit-r101x1", (7,), 8e-4, "linear", 0.1, 0.0),
    ("paper-jft-r152", "bit-r152x1", (7,), 6e-4, "linear", 0.1, 0.0),
    ("paper-jft-r50-b", "r50-vit-b16", (7,), 8e-4, "linear", 0.1, 0.0),
    ("paper-jft-r50-l32", "r50-vit-l32", (7,), 2e-4, "linear", 0.1, 0.0),
    ("paper-jft-r50-l16", "r50-vit-l16", (7, 14), 4e-4, "linear", 0.1, 0.0),
    ("paper-i21k-b", "vit-b16", (90,), 1e-3, "linear", 0.03, 0.1),
    ("paper-i21k-l", "vit-l16", (30, 90), 1e-3, "linear", 0.03, 0.1),
    ("paper-imagenet", "vit-b16", (300,), 3e-3, "cosine", 0.3, 0.1),
]
# Table 4: steps and rates. SGD with momentum 0.9, batch 512, cosine, no decay, clip 1, 384 pixels;
# then the share held out to choose the rate (B.1.1) and the warm-up of the released code.
TABLE_4 = [
    ("imagenet", 20_000, (0.003, 0.01, 0.03, 0.06), 0.01, 500),
    ("cifar100", 10_000, (0.001, 0.003, 0.01, 0.03), 0.02, 500),
    ("cifar10", 10_000, (0.001, 0.003, 0.01, 0.03), 0.02, 500),
    ("pets", 500, (0.001, 0.003, 0.01, 0.03), 0.1, 100),
    ("flowers", 500, (0.001, 0.003, 0.01, 0.03), 0.1, 100),
    ("vtab", 2_500, 0.01, 0.2, 200),
]
# "How to train your ViT?": RandAugment's operations and magnitude, mixup.
AUGREG = {
    "none": (None, 0.0), "light1": ((2, 0), 0.0), "light2": ((2, 10), 0.2),
    "medium1": ((2, 15), 0.2), "medium2": ((2, 15), 0.5), "strong1": ((2, 20), 0.5),
    "strong2": ((2, 20), 0.8),
}  # fmt: skip


@pytest.mark.parametrize("row", TABLE_3, ids=lambda row: row[0])
def test_pre_training_is_table_3(row: tuple[Any, ...]) -> None:
    name, model, epochs, lr, schedule, weight_decay, dropout = row
    c = recipes.configure(name)
    assert (c.model, c.lr, c.schedule, c.weight_decay) == (model, lr, schedule, weight_decay)
    assert c.epochs in epochs
    assert (c.dropout or 0.0) == dropout
    assert (c.optimizer, c.batch, c.warmup, c.size) == ("adamw", 4096, 10_000, (224,))
    assert c.decay_with_lr, "decoupled as AdamW's, times the rate"
    assert c.clip == (1.0 if name == "paper-imagenet" else 0.0), "clipping on ImageNet alone"
    is_vit = not isinstance(zoo.MODELS[model], BiTConfig)
    assert c.tanh_head == is_vit
    assert c.loss == "sigmoid"
    assert c.lr_end == (1e-5 if schedule == "linear" else 0.0)
    assert (c.crop, c.augment_as, c.flip) == ((0.05, 1.0), "google", True)
    assert (c.randaugment, c.mixup, c.cutmix, c.erase, c.ema) == (None, 0, 0, 0, 0)


@pytest.mark.parametrize("row", TABLE_4, ids=lambda row: row[0])
def test_fine_tuning_is_table_4(row: tuple[Any, ...]) -> None:
    name, steps, lr, held_out, warmup = row
    c = recipes.configure(f"paper-finetune-{name}")
    assert (c.steps, c.lr, c.held_out, c.warmup) == (steps, lr, held_out, warmup)
    assert (c.optimizer, c.batch, c.schedule, c.weight_decay) == ("sgd", 512, "cosine", 0.0)
    assert (c.clip, c.size, c.label_smoothing, c.select) == (1.0, (384,), 0.0, "held-out")
    assert (c.model, c.dropout, c.mixup, c.ema) == (None, None, 0.0, 0.0)


@pytest.mark.parametrize("level", AUGREG)
def test_levels_of_augreg(level: str) -> None:
    c = recipes.configure(f"augreg-{level}")
    assert (c.randaugment, c.mixup) == AUGREG[level]
    assert (c.augment_as, c.crop, c.cutmix, c.flip) == ("google", (0.05, 1.0), 0.0, True)
    assert (c.lr, c.batch, c.warmup, c.schedule, c.clip) == (1e-3, 4096, 10_000, "cosine", 1.0)
    assert (c.epochs, c.weight_decay, c.loss, c.tanh_head) == (300, 0.1, "sigmoid", False)


@pytest.mark.parametrize("epochs", [90, 150, 300])
def test_better_plain_vit(epochs: int) -> None:
    c = recipes.configure(f"better-plain-{epochs}")
    assert (c.model, c.epochs, c.batch, c.lr, c.warmup) == ("vit-s16", epochs, 1024, 1e-3, 10_000)
    assert (c.weight_decay, c.decay_with_lr) == (1e-4, False)
    assert (c.randaugment, c.mixup, c.loss, c.label_smoothing) == ((2, 10), 0.2, "softmax", 0.0)
    assert (c.pool, c.positions, c.tanh_head, c.clip) == ("mean", "sincos", True, 1.0)
    assert c.eval_crop == 224 / 256


def test_the_small_model_that_ships() -> None:
    first, *later = (recipes.configure(f"nano-pretrain{stage}") for stage in ("", "-48", "-64"))
    shape = zoo.configure(first.model or "", image=first.size and first.size[0])
    assert isinstance(shape, ViTConfig)
    assert (shape.patch, shape.pool, shape.class_token) == ((8, 8), "mean", False)
    assert 2 * cost.parameters(zoo.MODELS["vit-nano8"]) < 8e6, "bytes in half precision"
    assert [(c.size, c.model) for c in later] == [((48,), None), ((64,), None)]
    assert zoo.MODELS["vit-nano8"].image == (64, 64), "where the stages end"


def test_every_recipe_says_how_where_how_long_and_what_to_expect() -> None:
    for name in recipes.names():
        head = (recipes.FOLDER / f"{name}.yaml").read_text().split("\n")
        for word in ("command:", "hardware:", "time:", "expected:"):
            assert any(line.startswith(f"# {word}") for line in head), f"{name}: {word}"
        assert any(f"--recipe {name} " in line for line in head), name
        page = Path(__file__).parents[2] / "docs" / "recipes.md"
        assert f"`{name}`" in page.read_text(), f"{name} is not on the page of recipes"


# A short run of each ---------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """ResNets and stems of one narrow unit a stage: what they are like is tested elsewhere."""
    for name, config in zoo.MODELS.items():
        if isinstance(config, BiTConfig):
            small: Any = replace(config, layers=(1, 1), width=8, groups=4)
        elif config.stem is not None:
            stem = replace(config.stem, layers=(1, 1), width=8, groups=4)
            small = replace(config, stem=stem, patch=(1, 1))
        else:
            continue
        monkeypatch.setitem(zoo.MODELS, name, small)


@pytest.mark.parametrize("name", recipes.names())
@pytest.mark.usefixtures("tiny")
def test_each_recipe_runs(name: str, tmp_path: Path) -> None:
    defaults = recipes.read(name)
    options: dict[str, Any] = {
        "size": (16,), "steps": 20, "batch": 8, "threads": 1, "held_out": 0.2, "warmup": 2,
        "select": "last", "out": str(tmp_path / "run"),
    }  # fmt: skip
    if defaults.get("lora"):
        pytest.importorskip("peft")
    if isinstance(defaults.get("lr"), tuple):
        options["lr"] = defaults["lr"][0]
    if "model" in defaults or name == "small-data":
        model = options["model"] = defaults.get("model", "vit-ti16")
        shape = dict(toys.SHAPE)
        if zoo.find(model).startswith("bit"):
            shape = {}
        elif zoo.MODELS[model].stem is not None:
            shape.pop("patch")
        options |= shape
    else:
        vitlab.save(toys.bundle(), tmp_path / "start")
        options["from_"] = str(tmp_path / "start")
    bundle = vitlab.train(toys.pictures(), recipes.configure(name, **options))
    assert 0 <= bundle.card.metrics["top1"] <= 1
    losses = [line["loss"] for line in toys.lines(tmp_path / "run") if line["kind"] == "train"]
    assert len(losses) == 20
    asked = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["asked"]
    assert asked["recipe"] == name
    for key, value in defaults.items():
        if key.rstrip("_") not in ("epochs", *options):
            plain = list(value) if isinstance(value, tuple) else value
            assert asked[key.rstrip("_")] == plain, "recorded like an option that was given"


# Flags over a recipe ---------------------------------------------------------------------------


def parse(*words: str) -> Any:
    return flags.parse(Train, "train", ["photos", *words])


def test_flags_lie_over_the_recipe() -> None:
    options = parse("--recipe", "layer-decay", "--layer-decay", "0.9", "--no-flip")
    assert (options.layer_decay, options.flip, options.mixup) == (0.9, False, 0.2)
    assert options.recipe == "layer-decay"
    plain = parse("--mixup", "0")  # also what equals the plain default counts as given
    assert plain.mixup == parse("--recipe", "layer-decay", "--mixup", "0").mixup == 0


@pytest.mark.parametrize("length", ["--epochs 3", "--steps 7", "--budget 3min", "--images 99"])
def test_a_length_takes_the_place_of_the_recipes(length: str) -> None:
    options = parse("--recipe", "better-plain-90", *length.split())
    given = {n: getattr(options, n) for n in ("epochs", "steps", "budget", "images")}
    assert sum(v is not None for v in given.values()) == 1
    assert parse("--recipe", "better-plain-90").epochs == 90


def test_a_recipe_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("# mine\nlr: 1e-4\nmodel: vit-s16\nrandaugment: [2, 9]\nlayer_decay: 0.8\n")
    options = parse("--recipe", str(path))
    assert (options.lr, options.model, options.randaugment) == (1e-4, "vit-s16", (2, 9))
    assert options.layer_decay == 0.8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rte: 1", "unknown key 'learning_rte': did you mean"),
        ("lr: fast", "lr: must be a number, not 'fast'"),
        ("lr: [", "while parsing"),
        ("- lr", "is no mapping"),
        ("out: here", "recipe and out are no defaults"),
        ("recipe: paper", "recipe and out are no defaults"),
    ],
)
def test_a_file_that_is_no_recipe(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"--recipe {path}: .*{said}") as caught:
        parse("--recipe", str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("augreg-medium", "unknown recipe 'augreg-medium': did you mean augreg-medium"),
        ("papr", "did you mean paper"),
        ("nowhere.yaml", "--recipe nowhere.yaml: there is no such file"),
    ],
)
def test_an_unknown_recipe(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse("--recipe", name)


def test_python_and_the_command_line_agree() -> None:
    words = ("--recipe", "augreg-light2", "--model", "vit-s32", "--steps", "9", "--out", "x")
    ours = recipes.configure("augreg-light2", model="vit-s32", steps=9, out="x")
    theirs = parse(*words)
    given = {f.name: getattr(theirs, f.name) for f in fields(TrainConfig)}
    assert TrainConfig(**given) == ours


def test_help_tells_of_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert flags.parse(Train, "train", ["--help"]) is None
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--recipe TEXT other defaults than these: a name of docs/recipes.md" in text
    assert "--lr FLOAT peak rate" in text
