"""Published checkpoints by name: `google:`, `torchvision:`, `timm:`, `hf:`.

`google:` and `torchvision:` are files over HTTPS, `timm:NAME` and `hf:ORG/NAME` repositories of
the Hugging Face hub. What is at hand is never asked for again.
"""

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vitlab.weights import hub
from vitlab.weights.download import fetch
from vitlab.weights.foreign import IMAGENET, Facts, share

STORAGE = "https://storage.googleapis.com/"
PYTORCH = "https://download.pytorch.org/models/"
KINDS = ("google", "torchvision", "timm", "hf")
SWAG = "CC-BY-NC-4.0"  # github.com/facebookresearch/SWAG


@dataclass(frozen=True)
class Published:
    """A checkpoint that somebody published."""

    name: str  # as it is asked for
    model: str  # its name in `vitlab.models.zoo`, or a description
    image: int
    classes: int
    file: str = ""  # URL without its beginning; "": of the hub
    top1: float | None = None  # per cent of ImageNet's validation pictures, as `by` says
    by: str = ""  # who measured it
    licence: str = "Apache-2.0"
    resize: int | None = None  # torchvision's transform: the shorter side, before the crop


def _originals() -> list[Published]:
    """google-research/vision_transformer: the paper's models (2020), and its README's numbers."""
    sizes = [
        ("ViT-B_8", "vit-b8"), ("ViT-B_16", "vit-b16"), ("ViT-B_32", "vit-b32"),
        ("ViT-L_16", "vit-l16"), ("ViT-L_32", "vit-l32"), ("ViT-H_14", "vit-h14"),
        ("R50+ViT-B_16", "r50-vit-b16"), ("R50+ViT-L_32", "r50-vit-l32"),
        ("R26+ViT-B_32", "r26-vit-b32"),
    ]  # fmt: skip
    tuned: list[tuple[str, str, int, float | None, str]] = [
        ("ViT-B_8", "vit-b8", 384, None, ""),
        ("ViT-B_16-224", "vit-b16", 224, 81.2, "README"),
        ("ViT-B_16", "vit-b16", 384, 84.21, "timm"),
        ("ViT-B_32", "vit-b32", 384, None, ""),
        ("ViT-L_16-224", "vit-l16", 224, 82.7, "README"),
        ("ViT-L_16", "vit-l16", 384, None, ""),
        ("ViT-L_32", "vit-l32", 384, 81.51, "timm"),
        ("R50+ViT-B_16", "r50-vit-b16", 384, 84.99, "timm"),
    ]
    found, big, small = [], "imagenet21k", "imagenet21k+imagenet2012"
    for n, ours in sizes:
        file = f"vit_models/{big}/{n}.npz"
        found.append(Published(f"google:{n}-{big}", ours, 224, 21843, file))
    for n, ours, image, top1, by in tuned:
        file = f"vit_models/{small}/{n}.npz"
        found.append(Published(f"google:{n}-{small}", ours, image, 1000, file, top1, by))
    return found


# What the README of "How to train your ViT?" recommends: model, ours, upstream file, then the
# learning rate of its fine-tuning at 384 px and the accuracy after it.
AUGREG = [
    ("L_16", "vit-l16", "aug_strong1-wd_0.1-do_0.0-sd_0.0", "0.01", 85.59),
    ("B_16", "vit-b16", "aug_medium1-wd_0.1-do_0.0-sd_0.0", "0.03", 85.49),
    ("S_16", "vit-s16", "aug_light1-wd_0.03-do_0.0-sd_0.0", "0.03", 83.73),
    ("R50_L_32", "r50-vit-l32", "aug_medium1-wd_0.1-do_0.1-sd_0.1", "0.01", 85.99),
    ("R26_S_32", "r26-vit-s32", "aug_light1-wd_0.1-do_0.0-sd_0.0", "0.01", 83.85),
    ("Ti_16", "vit-ti16", "aug_none-wd_0.03-do_0.0-sd_0.0", "0.03", 78.22),
    ("B_32", "vit-b32", "aug_light1-wd_0.1-do_0.0-sd_0.0", "0.01", 83.59),
    ("S_32", "vit-s32", "aug_none-wd_0.1-do_0.0-sd_0.0", "0.01", 79.58),
    ("R_Ti_16", "r-vit-ti16", "aug_none-wd_0.03-do_0.0-sd_0.0", "0.03", 75.40),
]


def _augreg() -> list[Published]:
    found = []
    for name, ours, recipe, lr, top1 in AUGREG:
        file = f"vit_models/augreg/{name}-i21k-300ep-lr_0.001-{recipe}"
        tuned = f"{file}--imagenet2012-steps_20k-lr_{lr}-res_384.npz"
        found += [
            Published(f"google:{name}-augreg-imagenet21k", ours, 224, 21843, f"{file}.npz"),
            Published(f"google:{name}-augreg-imagenet2012", ours, 384, 1000, tuned, top1, "README"),
        ]
    return found


def _bit() -> list[Published]:
    """google-research/big_transfer: S was trained on ImageNet-1k, M on 21k."""
    found = []
    for size in ("R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4"):
        ours = "BiT R50x3" if size == "R50x3" else f"bit-{size.lower()}"
        best = {"R152x4": 85.39}.get(size)
        for kind, image, classes, top1 in (
            (f"BiT-S-{size}", 224, 1000, None),
            (f"BiT-M-{size}", 224, 21843, None),
            (f"BiT-M-{size}-ILSVRC2012", 480, 1000, best),
        ):
            file, by = f"bit_models/{kind}.npz", "paper" if top1 else ""
            found.append(Published(f"google:{kind}", ours, image, classes, file, top1, by))
    return found


def _torchvision() -> list[Published]:
    """torchvision.models: name, file, image, shorter side, accuracy, licence."""
    bsd = "BSD-3-Clause"
    table = [
        ("vit_b_16.IMAGENET1K_V1", "vit_b_16-c867db91", 224, 256, 81.072, bsd),
        ("vit_b_16.IMAGENET1K_SWAG_E2E_V1", "vit_b_16_swag-9ac1b537", 384, 384, 85.304, SWAG),
        ("vit_b_16.IMAGENET1K_SWAG_LINEAR_V1", "vit_b_16_lc_swag-4e70ced5", 224, 224, 81.886, SWAG),
        ("vit_b_32.IMAGENET1K_V1", "vit_b_32-d86f8d99", 224, 256, 75.912, bsd),
        ("vit_l_16.IMAGENET1K_V1", "vit_l_16-852ce7e3", 224, 242, 79.662, bsd),
        ("vit_l_16.IMAGENET1K_SWAG_E2E_V1", "vit_l_16_swag-4f3808c9", 512, 512, 88.064, SWAG),
        ("vit_l_16.IMAGENET1K_SWAG_LINEAR_V1", "vit_l_16_lc_swag-4d563306", 224, 224, 85.146, SWAG),
        ("vit_l_32.IMAGENET1K_V1", "vit_l_32-c7638314", 224, 256, 76.972, bsd),
        ("vit_h_14.IMAGENET1K_SWAG_E2E_V1", "vit_h_14_swag-80465313", 518, 518, 88.552, SWAG),
        ("vit_h_14.IMAGENET1K_SWAG_LINEAR_V1", "vit_h_14_lc_swag-c1eb923e", 224, 224, 85.708, SWAG),
    ]
    return [
        Published(
            f"torchvision:{name}", re.sub(r"vit_(.)_(\d+)\..*", r"vit-\1\2", name), image, 1000,
            f"{file}.pth", top1, "torchvision", licence, side,
        )
        for name, file, image, side, top1, licence in table
    ]  # fmt: skip


def _hub() -> list[Published]:
    """Repositories of the hub that are worth a line; any other of theirs is read as well."""
    timm: list[tuple[str, str, int, int, float | None]] = [
        ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", "vit-ti16", 224, 1000, 75.45),
        ("vit_small_patch16_224.augreg_in21k_ft_in1k", "vit-s16", 224, 1000, 81.40),
        ("vit_small_patch16_384.augreg_in21k_ft_in1k", "vit-s16", 384, 1000, 83.81),
        ("vit_base_patch16_224.augreg_in21k_ft_in1k", "vit-b16", 224, 1000, 84.53),
        ("vit_base_patch16_384.augreg_in21k_ft_in1k", "vit-b16", 384, 1000, 86.01),
        ("vit_large_patch16_384.augreg_in21k_ft_in1k", "vit-l16", 384, 1000, 87.10),
        ("vit_small_patch14_dinov2.lvd142m", "DINOv2 S/14", 518, 0, None),
        ("vit_base_patch14_dinov2.lvd142m", "DINOv2 B/14", 518, 0, None),
        ("vit_large_patch14_dinov2.lvd142m", "DINOv2 L/14", 518, 0, None),
        ("vit_small_patch14_reg4_dinov2.lvd142m", "DINOv2 S/14, registers", 518, 0, None),
        ("deit3_small_patch16_224.fb_in1k", "DeiT III S/16", 224, 1000, None),
        ("deit3_base_patch16_224.fb_in1k", "DeiT III B/16", 224, 1000, None),
    ]
    hf = [
        ("google/vit-base-patch16-224", "vit-b16", 224, 1000),
        ("google/vit-base-patch16-224-in21k", "vit-b16", 224, 0),
        ("facebook/dinov2-small", "DINOv2 S/14", 518, 0),
        ("facebook/dinov2-with-registers-small", "DINOv2 S/14, registers", 518, 0),
    ]
    return [
        *(
            Published(f"timm:{n}", ours, image, classes, top1=top1, by="timm" if top1 else "")
            for n, ours, image, classes, top1 in timm
        ),
        *(Published(f"hf:{n}", m, i, c) for n, m, i, c in hf),
    ]


TABLE = {p.name: p for p in (*_originals(), *_augreg(), *_bit(), *_torchvision(), *_hub())}


def is_name(text: Any) -> bool:
    """Is it the name of a published checkpoint, and no path?"""
    kind, colon, _ = str(text).partition(":")
    return bool(colon) and kind in KINDS


def folder() -> Path:
    """Where downloads are kept: below `$VITLAB_CACHE`, else the user's cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("VITLAB_CACHE") or base / "vitlab") / "weights"


def find(name: str) -> tuple[Path, Facts]:
    """A published checkpoint on this machine, downloaded if need be, and what is known of it.

    Raises ValueError for a name that nobody published, OSError in one line if it cannot be had.
    """
    kind, _, rest = name.partition(":")
    if kind in ("timm", "hf"):
        repository = f"timm/{rest}" if kind == "timm" else rest
        return hub.snapshot(repository, folder() / "hf" / repository), Facts()
    if kind == "torchvision":  # vit_b_16 alone is the first of its weights
        name = next((n for n in TABLE if n.startswith(f"{name}.")), name)
    known = TABLE.get(name)
    if known is None and kind == "google" and "/" in rest:  # any file of the bucket
        known = Published(name, "", 0, 0, f"vit_models/{rest.removesuffix('.npz')}.npz")
    if known is None:
        near = difflib.get_close_matches(name, TABLE, n=1, cutoff=0)[0]
        raise ValueError(f"{name}: nobody published that; did you mean {near}?")
    site = PYTORCH if kind == "torchvision" else STORAGE
    digest = re.search(r"-([0-9a-f]{8})\.pth$", known.file)
    target = folder() / kind / known.file
    path = fetch(site + quote(known.file), target, digest and digest[1])
    facts = Facts(licence=known.licence)
    if "bit" in known.model.lower():  # which no shape tells
        facts.config["image"] = (known.image, known.image)
    if known.resize:
        how = "bilinear" if known.licence != SWAG else "bicubic"
        facts.preprocess = {
            "crop": share(known.image, known.resize), "interpolation": how, **IMAGENET,
        }  # fmt: skip
    return path, facts
