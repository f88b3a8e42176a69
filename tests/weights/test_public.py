"""`vitlab.weights.public` and `download`: by a real HTTP server on this machine, and offline."""

import base64
import hashlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest

from vitlab.models import zoo
from vitlab.models.resnet import BiTConfig
from vitlab.weights import download, formats, hub, public
from vitlab.weights.download import fetch

BODY = bytes(range(256)) * 5000


class Server(ThreadingHTTPServer):
    """Serves `files`, with ranges, and can be told to misbehave."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {"/a.npz": BODY}
        self.log: list[tuple[str, str | None]] = []  # path, Range
        self.tag: str | None = '"one"'
        self.cut: list[int] = []  # bytes after which each of the next answers breaks off
        self.digest: str | None = None
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *arguments: Any) -> None: ...

    def do_GET(self) -> None:
        asked, server = self.headers.get("Range"), self.server
        server.log.append((self.path, asked))
        body = server.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        start = int(asked[6:-1]) if asked and self.headers["If-Range"] == server.tag else 0
        if start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if server.tag:
            self.send_header("ETag", server.tag)
        if server.digest:
            self.send_header("x-goog-hash", f"crc32c=AAAAAA==, md5={server.digest}")
        self.end_headers()
        stop = server.cut.pop(0) if server.cut else len(body)
        self.wfile.write(body[start : start + stop])


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_a_file_is_fetched_once(server: Server, tmp_path: Path) -> None:
    path = fetch(f"{server.url}/a.npz", tmp_path / "deep" / "a.npz")
    assert path.read_bytes() == BODY
    assert [p.name for p in path.parent.iterdir()] == ["a.npz"]
    fetch(f"{server.url}/a.npz", path)
    assert server.log == [("/a.npz", None)]


def test_a_broken_connection_is_taken_up_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.cut = [400_000, 300_000]
    path = fetch(f"{server.url}/a.npz", tmp_path / "a.npz")
    assert path.read_bytes() == BODY
    assert server.log == [
        ("/a.npz", None), ("/a.npz", "bytes=400000-"), ("/a.npz", "bytes=700000-"),
    ]  # fmt: skip


def test_a_later_call_resumes(server: Server, tmp_path: Path) -> None:
    server.cut = [400_000, 0, 0, 0]
    with pytest.raises(OSError, match=r"cut off at 400,000 of 1,280,000 bytes.* resumes"):
        fetch(f"{server.url}/a.npz", tmp_path / "a.npz")
    assert not (tmp_path / "a.npz").exists()
    assert (tmp_path / ".a.npz.part").stat().st_size == 400_000
    server.cut.clear()
    assert fetch(f"{server.url}/a.npz", tmp_path / "a.npz").read_bytes() == BODY
    assert server.log[-1] == ("/a.npz", "bytes=400000-")
    assert [p.name for p in tmp_path.glob("*a.npz*")] == ["a.npz"]


@pytest.mark.parametrize("tag", ['"two"', None])
def test_another_file_is_not_patched_onto_the_first(
    tag: str | None, server: Server, tmp_path: Path
) -> None:
    if tag is None:
        server.tag = None
    server.cut = [400_000, 0, 0]
    with pytest.raises(OSError, match="cut off"):
        fetch(f"{server.url}/a.npz", tmp_path / "a.npz")
    server.files["/a.npz"], server.tag = BODY[::-1], tag
    server.cut.clear()
    assert fetch(f"{server.url}/a.npz", tmp_path / "a.npz").read_bytes() == BODY[::-1]


def test_a_part_that_is_whole_or_longer_starts_anew(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".a.npz.part").write_bytes(bytes(len(BODY)))
    (tmp_path / ".a.npz.part.tag").write_text('"one"')
    assert fetch(f"{server.url}/a.npz", tmp_path / "a.npz").read_bytes() == BODY
    assert server.log[0] == ("/a.npz", f"bytes={len(BODY)}-")


def test_digests_are_checked(server: Server, tmp_path: Path) -> None:
    right = hashlib.sha256(BODY).hexdigest()
    for sha256 in (right, right[:8], right[:8].upper()):
        fetch(f"{server.url}/a.npz", tmp_path / sha256, sha256)
    wrong = "0" * 8
    with pytest.raises(OSError, match=rf"sha256 is {right}, not {wrong}.* put it at .*/w\.npz"):
        fetch(f"{server.url}/a.npz", tmp_path / "w.npz", wrong)
    assert not [*tmp_path.glob("*w.npz*part")]
    md5 = hashlib.md5(BODY, usedforsecurity=False).digest()
    server.digest = base64.b64encode(md5).decode()  # as Google's storage sends it
    fetch(f"{server.url}/a.npz", tmp_path / "md5.npz")
    server.files["/a.npz"] = BODY[::-1]
    with pytest.raises(OSError, match="md5 is"):
        fetch(f"{server.url}/a.npz", tmp_path / "x.npz")


def test_a_missing_file_is_said(server: Server, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"b\.npz: the server says 404 .* put it at .*/b\.npz"):
        fetch(f"{server.url}/b.npz", tmp_path / "b.npz")
    assert not [*tmp_path.glob("*b.npz*")]


def test_offline_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens; or the name server never answers."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(
        download.Offline, match=r"127\.0\.0\.1 is out of reach .*put it at .*a\.npz"
    ):
        fetch(f"http://127.0.0.1:{port}/a.npz", tmp_path / "a.npz")
    assert time.monotonic() - began < 2

    def never(*arguments: Any, **options: Any) -> None:
        time.sleep(3)
        raise OSError("too late")

    monkeypatch.setattr(download.socket, "create_connection", never)
    began = time.monotonic()
    with pytest.raises(download.Offline, match=r"no answer in 0\.2 s"):
        download.reach("https://storage.googleapis.com/", patience=0.2)
    assert time.monotonic() - began < 2
    assert download.PATIENCE < 5


def unreachable(url: str, patience: float = 0) -> None:
    raise download.Offline(f"{url} is out of reach")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "reach", unreachable)
    monkeypatch.setattr(hub, "reach", unreachable)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", sorted(public.TABLE))
def test_every_name_says_what_to_fetch_and_where_to_put_it(name: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(OSError, match=r"put (it|its)") as caught:
        formats.read(name)
    assert time.monotonic() - began < 5
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "cache") in str(caught.value)


@pytest.mark.usefixtures("offline")
def test_files_put_there_by_hand_are_found(tmp_path: Path) -> None:
    bundle = checkpoints.bundle(classes=1000)
    with pytest.raises(OSError, match="put it at") as caught:
        formats.read("google:ViT-B_16-imagenet21k")
    where = Path(re.search(r"put it at (\S+)$", str(caught.value))[1])
    where.parent.mkdir(parents=True)
    formats.write(bundle, where, "google")
    read, report = formats.read("google:ViT-B_16-imagenet21k")
    checkpoints.same_state(bundle, read)
    source = read.card.source
    assert (source["name"], source["licence"]) == ("google:ViT-B_16-imagenet21k", "Apache-2.0")
    assert source["sha256"] == report.sha256
    with pytest.raises(OSError, match=r"config\.json and model\.safetensors into") as caught:
        formats.read("timm:vit_tiny_patch16_224.augreg_in21k")
    folder = Path(re.search(r"into (\S+)$", str(caught.value))[1])
    formats.write(bundle, folder, "timm")
    checkpoints.same_state(bundle, formats.read("timm:vit_tiny_patch16_224.augreg_in21k")[0])


@pytest.mark.usefixtures("offline")
def test_the_image_size_of_a_bit_is_that_of_the_table(tmp_path: Path) -> None:
    bundle = checkpoints.wrap(BiTConfig(layers=(1, 1), width=32, classes=1000))
    name = "google:BiT-M-R50x1-ILSVRC2012"
    where = public.folder() / "google" / public.TABLE[name].file
    where.parent.mkdir(parents=True)
    formats.write(bundle, where, "google")
    np.savez(where, **checkpoints.tensors(where))  # without what vitlab leaves in a file
    read, _ = formats.read(name)
    assert read.model.config.image == read.preprocess.size == (480, 480)
    assert read.preprocess.resize == "squash"
    assert formats.read(name, image=128)[0].preprocess.size == (128, 128)
    with pytest.raises(ValueError, match="a BiT ResNet has no heads"):
        formats.read(name, heads=3)


def test_a_name_is_fetched_read_and_remembered(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and classes come from the file; preprocessing and licence from the table."""
    monkeypatch.setattr(public, "PYTORCH", f"{server.url}/")
    bundle = checkpoints.bundle(classes=1000, activation="gelu")
    formats.write(bundle, tmp_path / "a.pth", "torchvision")
    body = (tmp_path / "a.pth").read_bytes()
    digest = hashlib.sha256(body).hexdigest()[:8]
    name, file = "torchvision:vit_l_16.IMAGENET1K_V1", f"vit_l_16-{digest}.pth"
    entry = public.Published(name, "vit-l16", 224, 1000, file, licence="BSD-3-Clause", resize=242)
    monkeypatch.setitem(public.TABLE, name, entry)
    server.files[f"/{file}"] = body
    read, _ = formats.read("torchvision:vit_l_16")
    p = read.preprocess
    assert (p.interpolation, p.mean[0], int(224 / p.crop)) == ("bilinear", 0.485, 242)
    assert read.card.source["licence"] == "BSD-3-Clause"
    checkpoints.same_state(bundle, read)
    server.shutdown()
    checkpoints.same_state(bundle, formats.read("torchvision:vit_l_16", heads=3)[0])
    assert len(server.log) == 1


def test_plus_signs_of_names_are_quoted(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public, "STORAGE", f"{server.url}/")
    formats.write(checkpoints.bundle(), tmp_path / "a.npz", "google")
    path = "/vit_models/imagenet21k%2Bimagenet2012/R50%2BViT-B_16.npz"
    server.files[path] = (tmp_path / "a.npz").read_bytes()
    formats.read("google:R50+ViT-B_16-imagenet21k+imagenet2012")
    raw = "/vit_models/augreg/S_16-i1k-300ep.npz"
    server.files[raw] = (tmp_path / "a.npz").read_bytes()
    formats.read("google:augreg/S_16-i1k-300ep")  # any file of the bucket
    assert [path for path, _ in server.log] == [path, raw]


def test_repositories_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What huggingface_hub is asked for, first on this machine, then on the hub."""
    import huggingface_hub

    formats.write(checkpoints.bundle(), tmp_path / "repo", "huggingface")
    (tmp_path / "empty").mkdir()
    asked: list[tuple[str, bool]] = []

    def snapshot(repository: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
        asked.append((repository, local_files_only))
        if local_files_only and len(asked) < 3:
            raise FileNotFoundError("not in the cache")
        return str(tmp_path / "repo")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "reach", lambda url: None)
    bundle, report = formats.read("hf:google/vit-base-patch16-224")
    assert report.format == "huggingface"
    assert bundle.card.source["name"] == "hf:google/vit-base-patch16-224"
    assert asked == [("google/vit-base-patch16-224", True)] * 2 + [
        ("google/vit-base-patch16-224", False)
    ]
    formats.read("timm:deit3_small_patch16_224.fb_in1k")
    assert asked[-1] == ("timm/deit3_small_patch16_224.fb_in1k", True)  # at hand: no more is asked
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path / "empty")
    )
    with pytest.raises(OSError, match=r"holds no safetensors or pytorch_model\.bin"):
        formats.read("hf:some/body")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="HF_HUB_OFFLINE is set"):
        formats.read("hf:some/body")
    with pytest.raises(ValueError, match="is called ORG/NAME"):
        formats.read("hf:nobody")


def test_a_bundle_is_pushed_without_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked: list[Any] = []

    class Api:
        def create_repo(self, name: str, **options: Any) -> str:
            asked.append((name, options))
            return f"https://huggingface.co/{name}"

        def upload_folder(self, **options: Any) -> None:
            asked.append(options)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(hub, "reach", lambda url: None)
    formats.write(checkpoints.bundle(), tmp_path / "b")
    url = hub.push(tmp_path / "b", "me/photos", private=True)
    assert url == "https://huggingface.co/me/photos"
    assert asked[0] == ("me/photos", {"private": True, "exist_ok": True})
    files = [
        "config.json",
        "model.safetensors",
        "README.md",
        "checkpoints/1.safetensors",
        ".a.part",
    ]
    sent = filter_repo_objects(files, allow_patterns=asked[1]["allow_patterns"])
    assert [*sent] == files[:3]
    formats.write(checkpoints.bundle(), tmp_path / "hf", "huggingface")
    with pytest.raises(ValueError, match="no bundle to push"):
        hub.push(tmp_path / "hf", "me/photos")
    monkeypatch.setattr(hub, "reach", unreachable)
    with pytest.raises(OSError, match=r"could not be pushed .* out of reach"):
        hub.push(tmp_path / "b", "me/photos")


def test_names_that_nobody_published() -> None:
    with pytest.raises(ValueError, match="did you mean google:ViT-B_16-imagenet21k"):
        formats.read("google:ViT-B16-imagenet21k")
    for text in ("runs/a", "C:/weights.npz", "a:b", "google", Path("google/a")):
        assert not public.is_name(text)


def test_the_table() -> None:
    """Names of ours that exist, and torchvision's own numbers."""
    from torchvision.models import get_model_weights

    assert len(public.TABLE) > 60
    for name, entry in public.TABLE.items():
        assert entry.name == name
        if entry.model.islower():
            assert zoo.find(entry.model) == entry.model
        assert entry.classes in (0, 1000, 21843)
        assert (entry.top1 is None) == (not entry.by)
        assert entry.top1 is None or 70 < entry.top1 < 90
    theirs = {
        f"torchvision:{model}.{w.name}": w
        for model in ("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14")
        for w in get_model_weights(model)
    }
    ours = {n: e for n, e in public.TABLE.items() if n.startswith("torchvision:")}
    assert set(ours) == set(theirs)
    for name, weights in theirs.items():
        entry, transform = ours[name], weights.transforms()
        assert weights.url == public.PYTORCH + entry.file
        assert weights.meta["_metrics"]["ImageNet-1K"]["acc@1"] == entry.top1
        assert transform.crop_size == [entry.image]
        assert transform.resize_size == [entry.resize]
        bicubic = transform.interpolation.value == "bicubic"
        assert bicubic == (entry.licence == public.SWAG)
        assert ("SWAG" in str(weights.meta.get("license"))) == (entry.licence == public.SWAG)


def test_the_recommended_files_of_augreg() -> None:
    """google-research/vision_transformer's README: nine, with the accuracy of the tuned one."""
    tuned = {n: e for n, e in public.TABLE.items() if n.endswith("-augreg-imagenet2012")}
    assert {e.model: e.top1 for e in tuned.values()} == {
        "vit-l16": 85.59, "vit-b16": 85.49, "vit-s16": 83.73, "r50-vit-l32": 85.99,
        "r26-vit-s32": 83.85, "vit-ti16": 78.22, "vit-b32": 83.59, "vit-s32": 79.58,
        "r-vit-ti16": 75.40,
    }  # fmt: skip
    assert tuned["google:B_16-augreg-imagenet2012"].file == (
        "vit_models/augreg/B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0"
        "--imagenet2012-steps_20k-lr_0.03-res_384.npz"
    )
