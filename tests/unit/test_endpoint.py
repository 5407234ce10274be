"""Where links meet, and who may enter."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from tokenflow_engine.control import endpoint
from tokenflow_engine.control.endpoint import (
    EndpointError,
    curve_keys,
    default_endpoint,
    is_encrypted,
    link_secret,
    runtime_dir,
)


@pytest.fixture(autouse=True)
def private_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run"
    monkeypatch.setenv("TOKENFLOW_RUNTIME_DIR", str(path))
    monkeypatch.delenv("TOKENFLOW_LINK_SECRET", raising=False)
    return path


def test_the_directory_and_the_secret_are_this_users_alone(private_runtime: Path) -> None:
    link_secret()
    assert stat.S_IMODE(private_runtime.stat().st_mode) == 0o700
    assert stat.S_IMODE((private_runtime / "link.secret").stat().st_mode) == 0o600


def test_a_directory_others_can_enter_is_refused(private_runtime: Path) -> None:
    private_runtime.mkdir(mode=0o755)
    with pytest.raises(EndpointError, match="only you can enter"):
        runtime_dir()


def test_a_link_in_place_of_the_directory_is_refused(private_runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    private_runtime.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EndpointError):
        runtime_dir()


def test_racing_processes_agree_on_one_secret() -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(link_secret())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(found[0]) == 64


def test_a_given_secret_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENFLOW_LINK_SECRET", "given")
    assert link_secret() == "given"


def test_an_empty_secret_file_is_not_a_secret(private_runtime: Path) -> None:
    runtime_dir()
    (private_runtime / "link.secret").touch()
    with pytest.raises(EndpointError, match="is empty"):
        link_secret()


def test_the_endpoint_is_named_after_the_port(private_runtime: Path) -> None:
    assert default_endpoint(30000) == f"ipc://{private_runtime}/engine-30000.link"


@pytest.mark.parametrize(
    ("address", "encrypted"),
    [
        ("ipc:///run/x", False),
        ("tcp://127.0.0.1:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://engine.example:1", True),
        ("tcp://*:1", True),
    ],
)
def test_whatever_others_could_reach_is_encrypted(address: str, *, encrypted: bool) -> None:
    assert is_encrypted(address) is encrypted


def test_keys_depend_on_secret_and_role_alone() -> None:
    assert curve_keys("s", "engine") == curve_keys("s", "engine")
    assert len({curve_keys(secret, role) for secret in "st" for role in ("engine", "gateway")}) == 4
    assert {len(key) for key in curve_keys("s", "engine")} == {40}


def test_the_socket_path_fits_into_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unix sockets allow 107 bytes; the default directory must stay well below."""
    monkeypatch.delenv("TOKENFLOW_RUNTIME_DIR")
    monkeypatch.setattr(endpoint.tempfile, "gettempdir", lambda: "/" + "t" * 40)
    monkeypatch.setattr(Path, "mkdir", lambda *a, **k: None)
    monkeypatch.setattr(
        Path, "stat", lambda self, **k: os.stat_result((0o40700, 0, 0, 0, os.getuid(), 0, 0, 0, 0, 0))
    )
    assert len(default_endpoint(65535).removeprefix("ipc://")) < 100
