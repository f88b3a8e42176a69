"""Repositories of the Hugging Face hub: read from, and written to."""

import re
from pathlib import Path
from typing import Any

from vitlab.weights.download import Offline, reach
from vitlab.weights.files import read_json

BESIDE = ["config.json", "preprocessor_config.json", "README.md"]
WEIGHTS = [
    "model*.safetensors*",
    "pytorch_model*.bin*",
]  # the second where there are none of the first
PUSHED = [
    "config.json", "README.md", "model.safetensors", "run.yaml", "metrics.jsonl", "report.html",
]  # fmt: skip


def _library(what: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as e:
        raise ValueError(f"{what}: needs the hub extra: pip install 'vitlab[hub]'") from e
    return huggingface_hub


def _check(repository: str) -> None:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(f"{repository}: a repository of the hub is called ORG/NAME")


def snapshot(repository: str, by_hand: Path) -> Path:
    """The folder of a repository: put there by hand, in the hub's own cache, or downloaded.

    Raises ValueError for a name that is none, OSError in one line if it cannot be had.
    """
    _check(repository)
    if by_hand.is_dir():
        return by_hand
    hub = _library(repository)
    remedy = f"or put its config.json and model.safetensors into {by_hand}"
    for pattern in WEIGHTS:
        try:
            local = hub.snapshot_download(
                repository, allow_patterns=[*BESIDE, pattern], local_files_only=True
            )
        except (OSError, ValueError):  # not in the cache
            continue
        if any(Path(local).glob(pattern)):
            return Path(local)
    try:
        if hub.constants.HF_HUB_OFFLINE:
            raise Offline("HF_HUB_OFFLINE is set, and it is not in the hub's cache")
        reach(hub.constants.ENDPOINT)
        for pattern in WEIGHTS:
            local = hub.snapshot_download(repository, allow_patterns=[*BESIDE, pattern])
            if any(Path(local).glob(pattern)):
                return Path(local)
    except Exception as e:  # of many kinds, as the hub's library changes
        reason = " ".join(str(e).split())[:200]
        raise OSError(f"{repository}: could not be downloaded ({reason}); {remedy}") from e
    raise OSError(f"{repository}: holds no safetensors or pytorch_model.bin; {remedy}")


def push(folder: Path, repository: str, private: bool = False) -> str:
    """Upload a bundle or run, without its checkpoints, to the hub; its address.

    Raises ValueError for a folder that is no bundle, OSError in one line if the hub refuses.
    """
    _check(repository)
    config = folder / "config.json"
    if not config.is_file() or read_json(config).get("format") != "vitlab":
        raise ValueError(f"{folder}: no bundle to push (there is no config.json of vitlab's)")
    hub = _library(repository)
    try:
        reach(hub.constants.ENDPOINT)
        api = hub.HfApi()
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, allow_patterns=PUSHED,
            commit_message="vitlab push",
        )  # fmt: skip
    except Exception as e:  # of many kinds, as the hub's library changes
        reason = " ".join(str(e).split())[:200]
        raise OSError(f"{repository}: could not be pushed ({reason})") from e
    return str(url)
