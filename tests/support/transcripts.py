"""Recorded answers of a real engine: the bytes of each body, and when each part of it arrived."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["FORMAT", "TRANSCRIPTS", "Read", "Transcript", "load", "names", "streams"]

FORMAT = 1
TRANSCRIPTS = Path(__file__).resolve().parent.parent / "data" / "transcripts"


class Read(NamedTuple):
    """One part of a body as it came, `delta_ms` after the one before it (the first: after the request)."""

    delta_ms: float
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """One request and its answer. `headers` are those that say how the body is to be read."""

    name: str
    engine: str
    model: str
    method: str
    path: str
    body: str | None
    status: int
    headers: Mapping[str, str]
    reads: tuple[Read, ...]

    @property
    def data(self) -> bytes:
        return b"".join(read.data for read in self.reads)

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def request_json(self) -> Any:
        """The request body parsed. Raises `ValueError` where it was malformed on purpose."""
        return json.loads(self.body or "null")

    def save(self, folder: Path = TRANSCRIPTS) -> Path:
        """Write the recording under its name, one read a line, so that differences can be read."""
        head = {
            "format": FORMAT,
            "engine": self.engine,
            "model": self.model,
            "request": {"method": self.method, "path": self.path, "body": self.body},
            "status": self.status,
            "headers": dict(self.headers),
        }
        reads = ",\n".join("  " + json.dumps(_pack(read), ensure_ascii=False) for read in self.reads)
        text = json.dumps(head, ensure_ascii=False, indent=1).removesuffix("\n}")
        path = folder / f"{self.name}.json"
        path.write_text(f'{text},\n "reads": [\n{reads}\n ]\n}}\n')
        return path


def load(name: str, *, folder: Path = TRANSCRIPTS) -> Transcript:
    """The recording of this name."""
    path = folder / f"{name}.json"
    if not path.exists():
        raise FileNotFoundError(f"no transcript {name!r}; there are: {', '.join(names(folder=folder))}")
    raw = json.loads(path.read_text())
    if raw["format"] != FORMAT:
        raise ValueError(f"{path.name} has format {raw['format']}, this is {FORMAT}: record it again")
    return Transcript(
        name=name,
        engine=raw["engine"],
        model=raw["model"],
        **raw["request"],
        status=raw["status"],
        headers=raw["headers"],
        reads=tuple(_unpack(read) for read in raw["reads"]),
    )


def names(*, folder: Path = TRANSCRIPTS) -> list[str]:
    """The names of all recordings, sorted."""
    return sorted(path.stem for path in folder.glob("*.json"))


def streams() -> list[Transcript]:
    """All recordings of event streams."""
    return [transcript for transcript in map(load, names()) if transcript.is_stream]


def _pack(read: Read) -> list[Any]:
    """Text where the part is whole UTF-8, else base64."""
    try:
        return [read.delta_ms, read.data.decode()]
    except UnicodeDecodeError:
        return [read.delta_ms, {"base64": base64.b64encode(read.data).decode()}]


def _unpack(packed: list[Any]) -> Read:
    delta_ms, data = packed
    return Read(delta_ms, data.encode() if isinstance(data, str) else base64.b64decode(data["base64"]))
