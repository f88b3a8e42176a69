"""`vitlab.weights.huggingface`: against transformers itself, in float64, both ways."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from vitlab.data.preprocess import Preprocess, apply
from vitlab.weights import formats
from vitlab.weights.report import Refused

TINY = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32,
        "patch_size": 8}  # fmt: skip
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {  # model, configuration, what differs
    "classifier": ("ViTForImageClassification", "ViTConfig", {"num_labels": 5}),
    "pooler": ("ViTModel", "ViTConfig", {}),
    "narrow pooler": ("ViTModel", "ViTConfig", {"pooler_output_size": 24}),
    "tanh, eps": (
        "ViTForImageClassification", "ViTConfig",
        {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-5},
    ),
    "rectangle": ("ViTForImageClassification", "ViTConfig", {"image_size": [32, 64]}),
    "DINOv2": ("Dinov2Model", "Dinov2Config", {"mlp_ratio": 2}),
    "DINOv2, no mask": ("Dinov2Model", "Dinov2Config", {"mlp_ratio": 2, "use_mask_token": False}),
    "registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {"mlp_ratio": 2}),
}  # fmt: skip
DINO_S = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "image_size": 70,
          "patch_size": 14}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")


def create(kind: str, **changes: Any) -> nn.Module:
    model, config, fields = KINDS[kind]
    fields = {**TINY, **fields, **changes}
    if config == "ViTConfig":
        fields.setdefault("intermediate_size", 2 * fields["hidden_size"])
    return checkpoints.disturb(
        getattr(transformers, model)(getattr(transformers, config)(**fields))
    )


@torch.no_grad()
def run(model: nn.Module, x: Tensor) -> Tensor:
    """What corresponds to the output of vitlab's model."""
    out = model(x)
    if hasattr(out, "logits"):
        return out.logits
    pools = getattr(model, "pooler", None) is not None
    return out.pooler_output if pools else out.last_hidden_state[:, 0]


def pictures(model: nn.Module) -> Tensor:
    size = model.config.image_size
    h, w = (size, size) if isinstance(size, int) else size
    return torch.randn(2, 3, h, w).double()


def disk(folder: Path) -> dict[str, Tensor]:
    return checkpoints.tensors(folder / "model.safetensors")


def load(kind: str, folder: Path) -> nn.Module:
    """As a user of transformers: nothing may be missing, left over or of another shape."""
    model = getattr(transformers, KINDS[kind][0])
    loaded, info = model.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return loaded.eval()


def whole(p: Preprocess) -> Preprocess:
    """The same transform, its crop a share of whole pixels."""
    return replace(p, crop=min(p.size) / int(min(p.size) / p.crop))


def both_ways(kind: str, theirs: nn.Module, path: Path) -> None:
    theirs.save_pretrained(path / "theirs")
    bundle, report = formats.read(path / "theirs")
    assert not report.new + report.dropped
    assert len(report.read) + len(report.aside) == len(disk(path / "theirs"))
    formats.write(bundle, path / "ours", "huggingface")
    checkpoints.same(disk(path / "theirs"), disk(path / "ours"))
    loaded = load(kind, path / "ours")
    again, _ = formats.read(path / "ours")
    checkpoints.same_state(bundle, again)
    assert again.classes == bundle.classes
    assert whole(again.preprocess) == whole(bundle.preprocess)
    x = pictures(theirs)
    expected = run(theirs.double(), x)
    assert checkpoints.gap(expected, run(loaded.double(), x)) <= 1e-9
    assert checkpoints.gap(expected, checkpoints.run(bundle.model.double(), x)) <= 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models(kind: str, tmp_path: Path) -> None:
    both_ways(kind, create(kind), tmp_path)


@pytest.mark.parametrize("kind", ["DINOv2", "registers"])
def test_dinov2_small(kind: str, tmp_path: Path) -> None:
    both_ways(kind, create(kind, **DINO_S, **{"mlp_ratio": 4}), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_transformers_5_in_memory(kind: str, tmp_path: Path) -> None:
    """`torch.save(model.state_dict())`: other names than on disk, written back under those."""
    theirs = create(kind)
    names = set(theirs.state_dict())
    assert any("q_proj" in name for name in names)
    torch.save({"state_dict": theirs.state_dict()}, tmp_path / "memory.pth")
    theirs.save_pretrained(tmp_path / "theirs")
    config = theirs.config
    bundle, report = formats.read(
        tmp_path / "memory.pth", heads=3, norm_eps=config.layer_norm_eps,
        activation={"gelu": "gelu"}.get(config.hidden_act, "gelu_tanh"),
        stored=config.image_size,
    )  # fmt: skip
    assert {n.removeprefix("vit.") for n in names} == {*report.read, *report.aside}
    assert any("no config.json" in note for note in report.notes)
    plain, _ = formats.read(tmp_path / "memory.pth", heads=3, stored=config.image_size)
    assert plain.model.config.norm_eps == type(config)().layer_norm_eps  # as transformers has it
    formats.write(bundle, tmp_path / "ours", "huggingface")
    checkpoints.same(disk(tmp_path / "theirs"), disk(tmp_path / "ours"))
    x = pictures(theirs)
    assert checkpoints.gap(run(theirs, x.float()), checkpoints.run(bundle.model, x.float())) <= 1e-5


def test_tokens_agree_at_every_layer(tmp_path: Path) -> None:
    theirs = create("registers")
    theirs.save_pretrained(tmp_path)
    bundle, _ = formats.read(tmp_path)
    x = pictures(theirs)
    with torch.no_grad():
        hidden = theirs.double()(x, output_hidden_states=True).hidden_states
        ours = list(bundle.model.double().layers(x))
    assert len(hidden) == len(ours) == 3
    for one, other in zip(hidden, ours, strict=True):
        assert checkpoints.gap(one, other) <= 1e-9


def test_the_mask_token_is_kept_aside(tmp_path: Path) -> None:
    """Training alone reads it: it is in the report, travels along, and returns to the bit."""
    theirs = create("registers")
    theirs.save_pretrained(tmp_path / "theirs")
    mask = theirs.state_dict()["embeddings.mask_token"]
    assert mask.any()
    came, went = formats.convert(tmp_path / "theirs", tmp_path / "timm.safetensors", "timm")
    assert came.aside == ("embeddings.mask_token",)
    assert any("mask_token" in note for note in went.notes)
    formats.convert(tmp_path / "timm.safetensors", tmp_path / "back", "huggingface")
    assert torch.equal(disk(tmp_path / "back")["embeddings.mask_token"], mask)
    fresh = checkpoints.bundle(registers=2, layer_scale=0.1, classes=0)
    report = formats.write(fresh, tmp_path / "fresh", "huggingface")
    assert report.new == ("embeddings.mask_token",)
    assert not disk(tmp_path / "fresh")["embeddings.mask_token"].any()
    load("registers", tmp_path / "fresh")


# Preprocessing and class names


def test_preprocessing_and_labels_follow_the_folder(tmp_path: Path) -> None:
    theirs = create("classifier", id2label={0: "ant", 1: "bee", 2: "cat", 3: "dog", 4: "eel"})
    theirs.save_pretrained(tmp_path)
    processor = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3], resample=3
    )
    processor.save_pretrained(tmp_path)
    bundle, report = formats.read(tmp_path)
    p = bundle.preprocess
    assert (p.resize, p.crop, p.interpolation, p.mean) == ("squash", 1, "bicubic", (0.1, 0.2, 0.3))
    assert bundle.classes == ("ant", "bee", "cat", "dog", "eel")
    assert report.notes == ()
    formats.write(bundle, tmp_path / "ours", "huggingface")
    again = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    assert again.id2label == theirs.config.id2label


@pytest.mark.parametrize(
    ("processor", "fields"),
    [
        ({"crop_size": 224, "size": 256, "do_center_crop": True}, ("crop", 0.875)),
        (
            {"crop_size": {"height": 224, "width": 224}, "size": {"shortest_edge": 249},
             "do_center_crop": True},
            ("crop", 224 / 249),
        ),
        ({"size": {"height": 224, "width": 224}}, ("squash", 1.0)),
        ({"size": 224, "do_normalize": False}, ("squash", 1.0)),
    ],
)  # fmt: skip
def test_processors_of_every_age(
    processor: dict[str, Any], fields: tuple[str, float], tmp_path: Path
) -> None:
    create("pooler").save_pretrained(tmp_path)
    whole = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2, **processor}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(whole))
    p = formats.read(tmp_path)[0].preprocess
    assert (p.resize, pytest.approx(p.crop, abs=1e-12)) == fields
    assert int(224 / p.crop) == {0.875: 256, 1.0: 224}.get(fields[1], 249)
    assert p.mean == ((0.5,) * 3 if processor.get("do_normalize", True) else (0.0,) * 3)


def test_a_processor_for_another_size_than_the_positions_is_said(tmp_path: Path) -> None:
    """As DINOv2's: 518 pixels in the table, 224 in the processor."""
    create("DINOv2").save_pretrained(tmp_path)
    cut = {"crop_size": {"height": 24, "width": 24}, "size": {"shortest_edge": 28},
           "do_center_crop": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(cut))
    bundle, report = formats.read(tmp_path)
    assert bundle.preprocess.size == (32, 32)
    assert any("crops to 24 px, its positions are for 32" in note for note in report.notes)


@pytest.mark.parametrize("resize", ["squash", "crop"])
def test_processors_that_are_written_do_as_ours(resize: str, tmp_path: Path) -> None:
    """transformers' own processor gives the same pixels, up to how it rounds."""
    bundle = checkpoints.bundle(image=32, classes=0)
    crop = 0.875 if resize == "crop" else 1.0
    p = replace(bundle.preprocess, resize=resize, crop=crop, mean=(0.4, 0.5, 0.6))
    bundle = replace(bundle, preprocess=p)
    formats.write(bundle, tmp_path, "huggingface")
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    picture = np.random.default_rng(0).integers(0, 255, (48, 60, 3), dtype=np.uint8)
    expected = theirs(Image.fromarray(picture), return_tensors="pt")["pixel_values"][0]
    assert (apply(p, picture) - expected).abs().max() < 1e-5


def test_a_processor_that_cannot_tell_all_is_said(tmp_path: Path) -> None:
    bundle = checkpoints.bundle(classes=0)
    p = replace(bundle.preprocess, resize="pad", antialias=False)
    bundle = replace(bundle, preprocess=p)
    notes = formats.write(bundle, tmp_path, "huggingface").notes
    assert any("by pad" in note for note in notes)
    assert any("without antialias" in note for note in notes)


# What differs between libraries


def test_eps_and_gelu_are_fields_of_the_file(tmp_path: Path) -> None:
    """Report 037: on faint pictures eps shows; it is written, read, and never the default."""
    bundle = checkpoints.bundle(width=32, heads=2, norm_eps=1e-6, activation="gelu_tanh")
    x = 1e-4 * torch.randn(1, 3, 32, 32)
    expected = checkpoints.run(bundle.model, x)
    formats.write(bundle, tmp_path / "hf", "huggingface")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["layer_norm_eps"], config["hidden_act"]) == (1e-6, "gelu_pytorch_tanh")
    loaded = load("classifier", tmp_path / "hf")
    assert checkpoints.gap(expected, run(loaded, x)) <= 1e-5
    back, _ = formats.read(tmp_path / "hf")
    checkpoints.same_state(bundle, back)
    assert checkpoints.gap(expected, checkpoints.run(back.model, x)) == 0


def test_a_fine_tuned_copy_of_what_vitlab_wrote(tmp_path: Path) -> None:
    """A record of vitlab's in config.json must not outlive what it tells of."""
    formats.write(checkpoints.bundle(activation="gelu"), tmp_path / "ours", "huggingface")
    kind = transformers.ViTForImageClassification
    theirs = kind.from_pretrained(
        tmp_path / "ours", num_labels=3, ignore_mismatched_sizes=True, image_size=32
    )
    theirs.save_pretrained(tmp_path / "tuned")
    bundle, _ = formats.read(tmp_path / "tuned")
    assert bundle.classes == ("LABEL_0", "LABEL_1", "LABEL_2")
    x = torch.randn(1, 3, 32, 32)
    assert (run(theirs.eval(), x) - checkpoints.run(bundle.model, x)).abs().max() <= 1e-5


def test_sharded_folders(tmp_path: Path) -> None:
    theirs = create("classifier")
    theirs.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 1
    bundle, report = formats.read(tmp_path)
    x = pictures(theirs).float()
    assert checkpoints.gap(run(theirs, x), checkpoints.run(bundle.model, x)) <= 1e-5
    assert len(report.sha256) == 64
    sorted(tmp_path.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(FileNotFoundError, match="is missing"):
        formats.read(tmp_path)


# What is refused


def test_dinov2_with_a_classifier_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.Dinov2Config(**TINY, mlp_ratio=2, num_labels=3)
    theirs = checkpoints.disturb(transformers.Dinov2ForImageClassification(config))
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Dinov2ForImageClassification's classifier"):
        formats.read(tmp_path)
    bundle, report = formats.read(tmp_path, drop="classifier.*")
    assert set(report.dropped) == {"classifier.weight", "classifier.bias"}
    assert bundle.model.config.classes == 0


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "deit"}, "model type 'deit'"),
        ({"use_swiglu_ffn": True}, "SwiGLU"),
        ({"qkv_bias": False}, "without bias"),
        ({"hidden_act": "quick_gelu"}, "activation 'quick_gelu'"),
        ({"pooler_act": "relu"}, "pooler 'relu'"),
    ],
)
def test_other_kinds_are_refused_by_name(
    changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    create("pooler").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=what) as caught:
        formats.read(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


def test_tensors_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    config = transformers.Dinov2Config(**TINY, use_swiglu_ffn=True)
    swiglu = transformers.Dinov2Model(config).state_dict()
    deit = transformers.DeiTModel(
        transformers.DeiTConfig(**TINY, intermediate_size=96)
    ).state_dict()
    masked = transformers.ViTForMaskedImageModeling(
        transformers.ViTConfig(**TINY, intermediate_size=96, encoder_stride=8)
    ).state_dict()
    for tensors, what in ((swiglu, "SwiGLU"), (deit, "distilled DeiT"), (masked, "decoder")):
        save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "x.safetensors")
        with pytest.raises(Refused, match=what):
            formats.read(tmp_path / "x.safetensors", heads=3)


def test_what_it_cannot_hold_is_refused(tmp_path: Path) -> None:
    for changes, what in (
        ({"registers": 2}, "registers without LayerScale"),
        ({"layer_scale": 0.1}, "a head on DINOv2's class token alone"),
        ({"layer_scale": 0.1, "classes": 0, "head_hidden": 48}, "DINOv2 with a tanh layer"),
        ({"layer_scale": 0.1, "classes": 0, "mlp_width": 100}, "no multiple of the width"),
        ({"head_hidden": 48}, "the tanh layer before a head"),
        ({"pool": "mean"}, "mean pooling"),
        ({"pool": "mean", "class_token": False}, "without class token"),
        ({"norm": "after_pool"}, "norm after pooling"),
    ):
        with pytest.raises(Refused, match=what):
            formats.write(checkpoints.bundle(**changes), tmp_path / "x", "huggingface")
    with pytest.raises(ValueError, match="is written to a folder"):
        formats.write(checkpoints.bundle(), tmp_path / "x.safetensors", "huggingface")
    assert not list(tmp_path.iterdir())
    report = formats.write(
        checkpoints.bundle(head_hidden=48), tmp_path / "x", "huggingface", drop=("hidden.*",)
    )
    assert set(report.dropped) == {"hidden.weight", "hidden.bias"}
    load("classifier", tmp_path / "x")


def test_features_without_a_pooler(tmp_path: Path) -> None:
    """transformers would add a random one: that is said, and how to do without."""
    create("classifier").save_pretrained(tmp_path / "theirs")
    bundle, _ = formats.read(tmp_path / "theirs", classes=0)
    report = formats.write(bundle, tmp_path / "ours", "huggingface")
    assert any("add_pooling_layer=False" in note for note in report.notes)
    model, info = transformers.ViTModel.from_pretrained(
        tmp_path / "ours", add_pooling_layer=False, output_loading_info=True
    )
    assert not any(info.values())
    x = checkpoints.images(bundle)
    assert checkpoints.gap(run(model.eval(), x), checkpoints.run(bundle.model, x)) <= 1e-5


def test_a_table_without_class_slot_gets_one_of_zeros(tmp_path: Path) -> None:
    bundle = checkpoints.bundle(class_position=False)
    report = formats.write(bundle, tmp_path, "huggingface")
    assert any("row of zeros" in note for note in report.notes)
    loaded, x = load("classifier", tmp_path), checkpoints.images(bundle)
    assert loaded.config.hidden_act == "gelu_pytorch_tanh"
    assert checkpoints.gap(checkpoints.run(bundle.model, x), run(loaded, x)) <= 1e-5
