"""Files over HTTP(S): whole or not at all, resumed, checked, and soon refused when offline."""

import base64
import hashlib
import http.client
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, getproxies, proxy_bypass, urlopen

PATIENCE = 4.0  # seconds until a server that does not answer counts as out of reach
STALL = 30.0  # seconds without a byte that end a download
CHUNK = 1 << 20
TRIES = 3  # a connection that broke is taken up again


class Offline(OSError):  # noqa: N818  a state
    """A server is out of reach."""


def fetch(url: str, path: Path, sha256: str | None = None) -> Path:
    """Download a file, unless it is there: into a `.part` beside it, which a later call resumes.

    Args:
        url: http or https.
        path: where it belongs; a file that somebody put there is taken as it is.
        sha256: hexadecimal, or how it begins; a download of another one is refused.

    Raises OSError in one line that says what to fetch by hand and where to put it.
    """
    if path.is_file():
        return path
    remedy = f"fetch it yourself and put it at {path}"
    try:
        reach(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        for tried in range(1, TRIES + 1):
            before = _size(part)
            try:
                checks = _continue(url, part)
                break
            except (http.client.HTTPException, ConnectionError, TimeoutError) as e:
                if tried == TRIES or _size(part) == before:
                    raise OSError(f"the connection broke ({e}); the same call resumes") from e
        _verify(part, {**checks, **({"sha256": sha256} if sha256 else {})})
    except HTTPError as e:
        raise OSError(f"{url}: the server says {e.code} {e.reason}; or {remedy}") from e
    except OSError as e:
        reason = getattr(e, "reason", None) or e
        raise (
            type(e)(f"{url}: {reason}; or {remedy}")
            if isinstance(e, Offline)
            else OSError(f"{url}: could not be downloaded: {reason}; or {remedy}")
        ) from e
    os.replace(part, path)
    _tag(part).unlink(missing_ok=True)
    return path


def reach(url: str, patience: float = PATIENCE) -> None:
    """Raise `Offline` unless somebody listens behind a URL (or behind the proxy for it)."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    if proxy and not proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    host, port = parts.hostname or "", parts.port or {"http": 80}.get(parts.scheme, 443)
    reason: list[str] = [f"no answer in {patience:g} s"]

    def knock() -> None:
        try:
            socket.create_connection((host, port), timeout=patience).close()
            reason.clear()
        except OSError as e:
            reason[:] = [str(e)]

    thread = threading.Thread(target=knock, daemon=True)  # a name server can keep one waiting
    thread.start()
    thread.join(patience)
    if reason:
        raise Offline(f"{host} is out of reach ({reason[0]})")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _tag(part: Path) -> Path:
    return part.with_name(f"{part.name}.tag")


def _continue(url: str, part: Path) -> dict[str, str]:
    """Fetch what is missing of a file; returns the digests that the server tells of it."""
    have, tag = _size(part), _tag(part)
    headers = {"User-Agent": "vitlab"}
    if have and tag.is_file():  # only while the server still has the same file
        headers |= {"Range": f"bytes={have}-", "If-Range": tag.read_text()}
    try:
        response = urlopen(Request(url, headers=headers), timeout=STALL)
    except HTTPError as e:
        if e.code != 416:  # nothing is missing, or another file is there by now
            raise
        part.unlink()
        response = urlopen(Request(url, headers={"User-Agent": "vitlab"}), timeout=STALL)
    with response:
        have = have if response.status == 206 else 0
        told = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if told and not told.startswith("W/"):
            tag.write_text(told)
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        with open(part, "ab" if have else "wb") as f, _bar(part, have, total) as bar:
            while chunk := response.read(CHUNK):
                f.write(chunk)
                bar.advance(len(chunk))
        if total is not None and _size(part) < total:
            raise ConnectionError(f"cut off at {_size(part):,} of {total:,} bytes")
        hashes = response.headers.get("x-goog-hash", "").split(",")  # of Google's storage
    digests = dict(h.strip().split("=", 1) for h in hashes if "=" in h)
    return {"md5": base64.b64decode(digests["md5"]).hex()} if "md5" in digests else {}


def _verify(path: Path, digests: dict[str, str]) -> None:
    """Raise OSError, and remove the file, unless its digests begin as they should."""
    for name, wanted in digests.items():
        with open(path, "rb") as f:
            found = hashlib.file_digest(f, name).hexdigest()
        if not found.startswith(wanted.lower()):
            path.unlink()
            raise OSError(f"{name} is {found}, not {wanted}: another file, or damaged on the way")


class Bar(Protocol):
    """Shows how far a download is."""

    def advance(self, step: int) -> None: ...


@contextmanager
def _bar(path: Path, have: int, total: int | None) -> Iterator[Bar]:
    """A progress bar on a terminal; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    name = path.name.removeprefix(".").removesuffix(".part")
    shown: list[Any] = [
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    ]
    console = Console(stderr=True)
    with Progress(*shown, console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(name, total=total, completed=have)

        class Advance:
            def advance(self, step: int) -> None:
                progress.advance(task, step)

        yield Advance()
