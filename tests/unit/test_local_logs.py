"""Logs may quote what people asked: nobody else on the machine reads them."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

from tokenflow_gateway.local.home import Home
from tokenflow_gateway.local.logfile import open_log
from tokenflow_gateway.local.process import run_logged


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_directory_of_logs_is_this_users_alone_also_where_it_was_made_before(tmp_path: Path):
    home = Home(tmp_path)
    home.logs.mkdir(mode=0o755)
    home.create()
    assert mode(home.logs) == 0o700


def test_the_output_of_what_is_started_is_this_users_alone(tmp_path: Path):
    log = tmp_path / "made" / "engine.log"
    assert run_logged([sys.executable, "-c", "print('asked')"], log, lambda _line: None) == 0
    assert "asked" in log.read_text()
    assert (mode(log), mode(log.parent)) == (0o600, 0o700)


def test_a_log_that_everybody_could_read_is_closed_to_them_when_it_is_opened(tmp_path: Path):
    log = tmp_path / "engine.log"
    log.write_text("before\n")
    log.chmod(0o644)
    with open_log(log) as file:
        file.write(b"after\n")
    assert (mode(log), log.read_text()) == (0o600, "before\nafter\n")
    open_log(log, afresh=True).close()
    assert log.read_text() == ""
