"""Where the two ends of a link meet, and the secret they share.

On one machine neither has to be configured: the engine listens on a socket named after its HTTP port in a
directory that only this user can enter, and the secret lies beside it. Both can be set:

- ``TOKENFLOW_LINK``: a ZeroMQ endpoint (``ipc://...`` or ``tcp://host:port``) for the engine's side;
- ``TOKENFLOW_LINK_SECRET``: the secret, on both sides.

A ``tcp://`` endpoint is encrypted and authenticated with CURVE, loopback included, where anybody on the
machine could connect; the key pairs are derived from the secret, so there is nothing else to distribute.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tempfile
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

__all__ = [
    "CurveKeys",
    "EndpointError",
    "curve_keys",
    "default_endpoint",
    "is_encrypted",
    "link_secret",
    "runtime_dir",
]


class EndpointError(RuntimeError):
    """The link cannot be set up as asked; the message says what to do."""


class CurveKeys(NamedTuple):
    """A CURVE key pair in Z85 (40 ASCII bytes each)."""

    public: bytes
    secret: bytes


def runtime_dir() -> Path:
    """Directory for sockets and the secret: private to this user, made if missing.

    Raises `EndpointError` if it exists and somebody else could have put things into it.
    """
    base = os.environ.get("TOKENFLOW_RUNTIME_DIR")
    path = Path(base) if base else Path(tempfile.gettempdir()) / f"tokenflow-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if path.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise EndpointError(
            f"{path} must be a directory that only you can enter: "
            "remove it, or name another in TOKENFLOW_RUNTIME_DIR"
        )
    return path


def default_endpoint(engine_port: int) -> str:
    """The endpoint of the engine whose HTTP server listens on `engine_port` of this machine."""
    return f"ipc://{runtime_dir()}/engine-{engine_port}.link"


def link_secret() -> str:
    """The secret of ``TOKENFLOW_LINK_SECRET``, or this user's, made at first use (64 hex digits)."""
    given = os.environ.get("TOKENFLOW_LINK_SECRET")
    if given:
        return given
    path = runtime_dir() / "link.secret"
    try:
        return _read_secret(path)
    except FileNotFoundError:
        pass
    draft = path.with_suffix(f".{os.getpid()}.{secrets.token_hex(4)}")
    draft.touch(mode=0o600, exist_ok=False)
    draft.write_text(secrets.token_hex(32))
    try:
        os.link(draft, path)  # the first of two racing processes wins, whole or not at all
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return _read_secret(path)


def _read_secret(path: Path) -> str:
    secret = path.read_text().strip()
    if not secret:
        raise EndpointError(f"{path} is empty: remove it, and a new secret is made")
    return secret


def is_encrypted(endpoint: str) -> bool:
    """Whether both sides of a link over this endpoint use CURVE."""
    return endpoint.startswith("tcp://")


def curve_keys(secret: str, role: str) -> CurveKeys:
    """The CURVE key pair of `role` (``"engine"`` or ``"gateway"``) under a shared secret."""
    raw = hmac.digest(secret.encode(), b"tokenflow link " + role.encode(), hashlib.sha256)
    private = z85.encode(raw)
    return CurveKeys(public=zmq.curve_public(private), secret=private)
