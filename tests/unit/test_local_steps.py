"""Installation steps: done once, resumed where they stopped, done again after a change."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tokenflow_gateway.local.errors import SetupError
from tokenflow_gateway.local.progress import Progress
from tokenflow_gateway.local.steps import Step, pending, run_steps


class FakeRunner:
    """Records what it is asked to run; `fails` maps the first word of a command to its last output."""

    def __init__(self, **fails: str) -> None:
        self.fails = fails
        self.ran: list[str] = []

    def __call__(self, argv, log: Path, on_line) -> int:
        self.ran.append(argv[0])
        on_line("working")
        if argv[0] not in self.fails:
            return 0
        with log.open("a") as file:
            file.write(self.fails[argv[0]] + "\n")
        return 1


def steps_of(*names: str, content: str = "") -> list[Step]:
    return [Step(name=name, title=f"the {name}", argv=(name,), content=content) for name in names]


@pytest.fixture
def install(tmp_path: Path):
    def run(steps: list[Step], runner: FakeRunner) -> list[str]:
        progress = Progress(len(steps), stream=io.StringIO())
        log = tmp_path / "logs" / "install.log"
        run_steps(steps, stamps=tmp_path / "stamps", log=log, run=runner, progress=progress)
        return runner.ran

    return run


def test_a_second_installation_runs_nothing(install):
    assert install(steps_of("a", "b"), FakeRunner()) == ["a", "b"]
    assert install(steps_of("a", "b"), FakeRunner()) == []


def test_an_interrupted_installation_continues_at_the_step_where_it_stopped(install):
    with pytest.raises(SetupError):
        install(steps_of("a", "b", "c"), FakeRunner(b="ERROR: connection lost"))
    assert install(steps_of("a", "b", "c"), FakeRunner()) == ["b", "c"]


def test_changed_content_runs_its_step_and_all_after_it(install):
    install(steps_of("a", "b", "c"), FakeRunner())
    changed = [*steps_of("a"), *steps_of("b", content="new pins"), *steps_of("c")]
    assert install(changed, FakeRunner()) == ["b", "c"]


def test_a_changed_step_that_fails_leaves_no_valid_stamp_behind(install, tmp_path: Path):
    """Going back to the old content must not find the old stamp: the step may have half changed things."""
    install(steps_of("a", "b"), FakeRunner())
    with pytest.raises(SetupError):
        install([*steps_of("a"), *steps_of("b", content="new")], FakeRunner(b="boom"))
    assert pending(steps_of("a", "b"), stamps=tmp_path / "stamps") == 1


def test_ctrl_c_leaves_no_stamp(install, tmp_path: Path):
    def interrupted(argv, log, on_line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install(steps_of("a"), interrupted)
    assert pending(steps_of("a"), stamps=tmp_path / "stamps") == 1


def test_a_failure_is_one_line_with_the_cause_and_the_log(install):
    output = "Collecting x\nERROR: No matching distribution found for x==9\nsome hint"
    with pytest.raises(SetupError) as failure:
        install(steps_of("a"), FakeRunner(a=output))
    message = str(failure.value)
    assert "the a failed: ERROR: No matching distribution found for x==9" in message
    assert "install.log" in message
    assert "\n" not in message


def test_a_full_disk_is_named_as_such(install):
    output = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    with pytest.raises(SetupError, match=r"the disk is full\. Free some space"):
        install(steps_of("a"), FakeRunner(a=output))


def test_a_lost_network_is_named_rather_than_what_pip_concludes_from_it(install):
    output = "WARNING: Retrying: 'NewConnectionError(...)'\nERROR: No matching distribution found"
    with pytest.raises(SetupError, match=r"the download failed\. Check the network") as failure:
        install(steps_of("a"), FakeRunner(a=output))
    assert "\n" not in str(failure.value)


def test_stages_are_numbered_over_skipped_ones(tmp_path: Path):
    stream = io.StringIO()
    stamps, log = tmp_path / "stamps", tmp_path / "log"
    run_steps(steps_of("a"), stamps=stamps, log=log, run=FakeRunner(), progress=Progress(2, stream=stream))
    stream.truncate(0)
    progress = Progress(2, stream=stream)
    run_steps(steps_of("a", "b"), stamps=stamps, log=log, run=FakeRunner(), progress=progress)
    assert "[2/2] the b done" in stream.getvalue()
    assert "the a" not in stream.getvalue()
