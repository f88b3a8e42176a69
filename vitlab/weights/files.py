"""Files of tensors, opened and written safely: `.npz`, `.safetensors`, torch's pickles, folders.

What a file is, its content decides. No pickle is executed: of torch's files tensors and plain
values are read, of numpy's arrays alone. Each tensor has memory of its own, which goes once it is
converted: a large model is never held twice.
"""

import argparse
import hashlib
import json
import re
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = (  # names of weights in a folder, best first
    "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json",
    "pytorch_model.bin", "model.npz", "model.pth",
)  # fmt: skip
SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin", ".ckpt", ".tar")
OTHERS = {  # how other files begin -> what they are
    b"\x89HDF": "an HDF5 file, as Keras writes",
    b"\x08": "perhaps an ONNX file",
    b"<": "a web page, not weights",
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself: `git lfs pull`",
}
COMMENT = 65_000  # bytes that a zip archive's comment holds


@dataclass
class Opened:
    """What stands in a file or folder."""

    tensors: dict[str, Any]  # names -> tensors; of pickles also other values, and nested
    files: tuple[Path, ...]
    sep: str = "."
    record: dict[str, Any] = field(default_factory=dict)  # what vitlab left there
    config: dict[str, Any] = field(default_factory=dict)  # config.json
    processor: dict[str, Any] = field(default_factory=dict)  # preprocessor_config.json
    licence: str | None = None  # as README.md says

    def sha256(self) -> str:
        """Of the file; of several, of all their bytes in order."""
        digest = hashlib.sha256()
        for path in self.files:
            with open(path, "rb") as f:
                while block := f.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()


def open_any(path: Path) -> Opened:
    """Open a file of weights, or the folder it is in.

    Raises FileNotFoundError, or ValueError with the file and the reason.
    """
    if path.is_dir():
        return _open_folder(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no bundle or file of weights (there is no such path)")
    known = path.name in WEIGHTS or path.name == "config.json"
    if known and (path.parent / "config.json").is_file():
        return _open_folder(path.parent)
    return _open_file(path)


def _open_folder(folder: Path) -> Opened:
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        found = sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES and p.is_file())
        if len(found) != 1:
            names = f" ({', '.join(p.name for p in found[:5])}): say which" if found else ""
            raise FileNotFoundError(
                f"{folder}: {len(found) or 'no bundle and no'} files of weights{names}"
            )
        path = found[0]
    opened = _open_shards(path) if path.name.endswith(".index.json") else _open_file(path)
    for name, key in (("config.json", "config"), ("preprocessor_config.json", "processor")):
        if (folder / name).is_file():
            setattr(opened, key, read_json(folder / name))
    opened.record = _record(json.dumps(opened.config.get("vitlab"))) or opened.record
    if (folder / "README.md").is_file():
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
        found_licence = re.match(r"---\n(?:.*\n)*?license: *(\S+)", text)
        opened.licence = found_licence and found_licence[1]
    return opened


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: damaged, not JSON ({e})") from e
    if not isinstance(value, dict):
        raise ValueError(f"{path}: no JSON object, so not the configuration of a vitlab bundle")
    return value


def _open_shards(index: Path) -> Opened:
    names = sorted(set((read_json(index).get("weight_map") or {}).values()))
    if not names or any(Path(name).name != name for name in names):
        raise ValueError(f"{index}: does not name its files")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{index.parent / missing[0]}: is missing, {index.name} names it")
    parts = [_open_file(index.parent / name) for name in names]
    tensors = {k: v for part in parts for k, v in part.tensors.items()}
    return Opened(tensors, tuple(p for part in parts for p in part.files), record=parts[0].record)


def _open_file(path: Path) -> Opened:
    with open(path, "rb") as f:
        head = f.read(64)
    if not head:
        raise ValueError(f"{path}: is empty")
    try:
        if head[:4] == b"PK\x03\x04":
            with zipfile.ZipFile(path) as z:
                names, comment = z.namelist(), z.comment
            npz = any(name.endswith(".npy") for name in names)
            return _open_npz(path, comment) if npz else _open_torch(path)
        if head[8:9] == b"{":
            return _open_safetensors(path)
        if head[:1] == b"\x80" or head[257:262] == b"ustar":
            return _open_torch(path)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, SafetensorError) as e:
        raise ValueError(f"{path}: damaged or cut off ({_short(e)})") from e
    what = next((w for magic, w in OTHERS.items() if head.startswith(magic)), None)
    raise ValueError(
        f"{path}: {what or 'not a file of weights'}; .npz, .safetensors and torch's .pth are read"
    )


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _open_safetensors(path: Path) -> Opened:
    with safe_open(path, "pt") as f:
        metadata = f.metadata() or {}
    # Read, not mapped: a mapping stays whole until its last tensor has gone, and whoever copies
    # another file over this one would change the model.
    tensors = load_file(path, backend="pread")
    return Opened(dict(tensors), (path,), record=_record(metadata.get("vitlab")))


def _open_npz(path: Path, comment: bytes) -> Opened:
    tensors: dict[str, Any] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            try:
                tensors[name] = _tensor(arrays[name])
            except ValueError as e:
                what = "Python objects, which only executing code could restore"
                reason = what if "pickle" in str(e) else f"damaged ({_short(e)})"
                raise ValueError(f"{path}: {name} holds {reason}") from e
    return Opened(tensors, (path,), sep="/", record=_record(comment))


def _tensor(array: np.ndarray) -> Any:
    """A numpy array as a tensor; JAX's bfloat16 arrives as two bytes without a type."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array) if array.dtype.kind in "fiub" else array


def _record(text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        return {}  # somebody else's
    known = isinstance(value, dict) and isinstance(value.get("model"), dict)
    return value if known else {}


def _open_torch(path: Path) -> Opened:
    # Options of a training script beside the weights; plain values, no code.
    allowed: list[Any] = [argparse.Namespace]
    try:
        with torch.serialization.safe_globals(allowed), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of protocols and old forms of files
            value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # a damaged file raises errors of every kind
        found = re.search(r"GLOBAL ([\w.]+)", str(e)) or re.search(r"class ([\w.]+)", str(e))
        if "TorchScript" in str(e):
            raise ValueError(f"{path}: a TorchScript program; save its state_dict() instead") from e
        if "Unsupported operand" in str(e):
            raise ValueError(
                f"{path}: a pickle that torch did not write, and could run code"
            ) from e
        if found:
            raise ValueError(
                f"{path}: holds an object of type {found[1]}, and restoring it could run code;"
                " vitlab reads tensors alone. Where you trust the file, save"
                " `model.state_dict()` anew and read that"
            ) from e
        raise ValueError(f"{path}: damaged or cut off ({_short(e)})") from e
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}: holds a {type(value).__name__}, not tensors by name")
    metadata = getattr(value, "_metadata", None) or {}
    return Opened(dict(value), (path,), record=_record(metadata.get("vitlab")))


# Writing


def write_npz(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """An uncompressed `.npz`, array after array; the record is the archive's comment."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as z:
        for name, tensor in tensors.items():
            with z.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as f:
                np.lib.format.write_array(f, _array(tensor), allow_pickle=False)
        text = json.dumps(record).encode()
        if len(text) > COMMENT:
            text = json.dumps({k: v for k, v in record.items() if k != "classes"}).encode()
        z.comment = text if len(text) <= COMMENT else b""


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("V2")
    return tensor.numpy()


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """A `.safetensors` file; the record is in its metadata."""
    metadata = {"format": "pt", "vitlab": json.dumps(record)}
    plain: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        tied = tensor.data_ptr() in seen  # the format has no tensors that share memory
        seen.add(tensor.data_ptr())
        plain[name] = tensor.clone() if tied else tensor
    save_file(plain, path, metadata)


def write_torch(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """A state dict by `torch.save`; the record is in its metadata, which torch passes by."""
    plain = torch.contiguous_format  # views would carry all that they are cut from
    state = OrderedDict(
        (k, v.detach().cpu().clone(memory_format=plain)) for k, v in tensors.items()
    )
    state._metadata = OrderedDict(vitlab=json.dumps(record))  # type: ignore[attr-defined]
    torch.save(state, path)


def save(suffix: str, path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Write tensors in the container that a suffix stands for."""
    writers = {".npz": write_npz, ".safetensors": write_safetensors}
    writers.get(suffix, write_torch)(path, tensors, record)


def names(tensors: Iterable[str], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    listed = list(tensors)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
