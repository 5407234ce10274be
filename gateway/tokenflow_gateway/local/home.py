"""TokenFlow's home directory: where environments, models, downloads and logs lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenflow_gateway.local.errors import SetupError

__all__ = ["Home"]


@dataclass(frozen=True)
class Home:
    """Paths under ``TOKENFLOW_HOME`` (default ``~/.cache/tokenflow``). Nothing is made before `create`."""

    root: Path

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Home:
        """The home that the environment names."""
        given = environ.get("TOKENFLOW_HOME")
        return cls(Path(given).expanduser().absolute() if given else Path.home() / ".cache" / "tokenflow")

    @property
    def engine(self) -> Path:
        """The engine's virtual environment."""
        return self.root / "engine"

    @property
    def engine_python(self) -> Path:
        """The interpreter of the engine's environment."""
        return self.engine / "bin" / "python"

    @property
    def stamps(self) -> Path:
        """What has been installed into the engine's environment; goes when the environment goes."""
        return self.engine / ".tokenflow-stamps"

    @property
    def models(self) -> Path:
        """Converted models, a directory each."""
        return self.root / "models"

    @property
    def downloads(self) -> Path:
        """Files as they were downloaded."""
        return self.root / "downloads"

    @property
    def logs(self) -> Path:
        """Full output of everything that is started."""
        return self.root / "logs"

    def create(self) -> None:
        """Make the directories. Raises `SetupError` where that is not allowed."""
        try:
            for directory in (self.models, self.downloads, self.logs):
                directory.mkdir(parents=True, exist_ok=True)
            self.logs.chmod(0o700)
        except OSError as error:
            raise SetupError(
                f"{self.root} cannot be written ({error.strerror}): name another directory in TOKENFLOW_HOME"
            ) from error
