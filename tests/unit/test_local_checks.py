"""What blocks a start, each as one line that says what to do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tokenflow_gateway.local.checks import Place, check_machine, check_ports, require
from tokenflow_gateway.local.doctor import examine, table
from tokenflow_gateway.local.errors import SetupError
from tokenflow_gateway.local.home import Home
from tokenflow_gateway.local.machine import Machine

GIB = 1024**3
GOOD = {
    "platform": "linux",
    "python": (3, 12),
    "free_bytes": lambda _: 100 * GIB,
    "available_memory_bytes": lambda: 16 * GIB,
    "port_is_free": lambda _host, _port: True,
    "has_module": lambda _: True,
    "gpu_names": list,
}
GATEWAY = Place(name="gateway", host="127.0.0.1", port=8080, variable="TOKENFLOW_PORT")


def machine(**facts) -> Machine:
    return Machine(**{**GOOD, **facts})


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TOKENFLOW_RUNTIME_DIR", str(tmp_path / "runtime"))


def refusal(home: Path, **facts) -> str:
    with pytest.raises(SetupError) as failure:
        require(check_machine(machine(**facts), home=Home(home), device="cpu"))
    message = str(failure.value)
    assert "\n" not in message
    return message


def test_a_good_machine_passes(tmp_path: Path):
    require(check_machine(machine(), home=Home(tmp_path), device="cpu"))


@pytest.mark.parametrize(
    ("facts", "advice"),
    [
        ({"platform": "darwin"}, "use a Linux machine"),
        ({"python": (3, 10)}, "Python 3.10 is too old: install 3.11 or newer"),
        ({"has_module": lambda name: name != "ensurepip"}, "apt-get install python3-venv"),
        ({"free_bytes": lambda _: 2 * GIB}, "2.0 GiB free, 5.8 GiB needed. Make room"),
        ({"available_memory_bytes": lambda: GIB}, "Not enough memory: 1.0 GiB available, 3.5 GiB needed"),
    ],
)
def test_each_lack_is_one_line_that_says_what_to_do(facts, advice: str, tmp_path: Path):
    assert advice in refusal(tmp_path, **facts)


def test_a_home_below_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert "name another directory in TOKENFLOW_HOME" in refusal(tmp_path / "file" / "home")


def test_a_link_directory_that_others_can_enter_is_refused(tmp_path: Path):
    (tmp_path / "runtime").mkdir(mode=0o755)
    (tmp_path / "runtime").chmod(0o755)
    assert "TOKENFLOW_RUNTIME_DIR" in refusal(tmp_path)


def test_a_port_in_use_is_found_and_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = Place(name="gateway", host="127.0.0.1", port=port, variable="TOKENFLOW_PORT")
        with pytest.raises(SetupError, match=f"Port {port} for the gateway is in use") as failure:
            require(check_ports(Machine(), [place]))
    assert "TOKENFLOW_PORT=PORT" in str(failure.value)
    require(check_ports(Machine(), [place]))  # free again


def test_two_servers_on_one_port_are_refused():
    places = [Place(name=n, host="127.0.0.1", port=9, variable=n.upper()) for n in ("gateway", "engine")]
    with pytest.raises(SetupError, match="GATEWAY and ENGINE must be different ports"):
        require(check_ports(machine(port_is_free=lambda host, port: True), places))


@pytest.mark.parametrize(
    ("environ", "gpus", "device"),
    [
        ({}, [], "cpu"),
        ({}, ["NVIDIA L4"], "cuda"),
        ({"TOKENFLOW_DEVICE": "cpu"}, ["NVIDIA L4"], "cpu"),
        ({"TOKENFLOW_DEVICE": "cuda"}, [], "cuda"),
    ],
)
def test_the_device_is_a_gpu_if_there_is_one_or_what_the_environment_says(environ, gpus, device):
    assert machine(gpu_names=lambda: gpus).device(environ) == device


def test_an_unknown_device_is_refused():
    with pytest.raises(SetupError, match="must be cpu or cuda"):
        machine().device({"TOKENFLOW_DEVICE": "tpu"})


def test_the_table_marks_what_is_missing_and_says_what_to_do(tmp_path: Path):
    broken = machine(port_is_free=lambda _host, _port: False)
    text = table(examine(broken, home=Home(tmp_path), device="cpu", places=[GATEWAY]))
    assert "PROBLEM  gateway port  127.0.0.1:8080 is in use" in text
    assert "-> Port 8080 for the gateway is in use" in text
    assert "ok       memory" in text
    assert "not installed yet" in text
