"""The examples as a person runs them: in a process of their own, with and without a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

import tokenflow_client
from support.python_client_server import ProgressServer, eventually
from support.scenarios import faults, recordings, replay
from support.transcripts import load

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[2]
ANSWER = "The capital of France is Paris."
MODEL = "smollm2-135m"
PAUSED = "[paused: space goes on]\x1b[0m"
CHAT = load("chat_stream_usage")
SCRIPTS = {MODEL: replay(CHAT), "/v1/models": replay(load("models")), **faults(CHAT)}
CLIENT = {"PYTHONPATH": str(Path(tokenflow_client.__file__).parents[1])}


async def run(
    name: str, *arguments: str, stdin: str = "", env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """An example without a terminal: its exit code, and all that it wrote."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, ROOT / "examples" / name, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **CLIENT, **(env or {})},
    )
    out, _ = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_the_sdk_script() -> None:
    """With nothing of ours in it: asks which model there is, and prints the answer."""
    async with ProgressServer(SCRIPTS) as server:
        code, out = await run("openai_sdk.py", "What?", env={"OPENAI_BASE_URL": f"{server.base_url}/v1"})
    assert (code, out) == (0, ANSWER + "\n")
    assert server.requests[-1].json()["messages"][0]["content"] == "What?"
    assert "tokenflow" not in (ROOT / "examples" / "openai_sdk.py").read_text().replace("TokenFlow", "")
    assert not server.posts


async def test_the_chat_without_a_terminal() -> None:
    """Two questions through a pipe; the second one is asked with the first answer before it."""
    async with ProgressServer(SCRIPTS) as server:
        where = ("--base-url", f"{server.base_url}/v1", "--rate", "100")
        code, out = await run("terminal_chat.py", *where, stdin="What?\n\nReally?\n")
        assert (code, out) == (0, f"{ANSWER}\n{ANSWER}\n")
        asked = [seen.json() for seen in server.requests if seen.path.endswith("/completions")]
        assert [message["content"] for message in asked[1]["messages"]] == ["What?", ANSWER, "Really?"]
        assert server.received[-1]["tokens"] == 7
        assert not server.faults


async def test_the_chat_shows_at_reading_pace() -> None:
    """Seven tokens, which come all at once, take 0.7 s at 10 a second. Control: not so at 1000 a second."""
    loop = asyncio.get_running_loop()

    async def reading_s(rate: str) -> float:
        async with ProgressServer(recordings("chat_stream_usage")) as server:
            where = ("--base-url", f"{server.base_url}/v1", "--model", "chat_stream_usage", "--rate", rate)
            process = asyncio.create_task(run("terminal_chat.py", *where, stdin="What?\n"))
            await server.request(0)
            began_s = loop.time()
            assert await process == (0, ANSWER + "\n")
            return loop.time() - began_s

    assert await reading_s("10") - await reading_s("1000") > 0.4


async def test_errors_are_one_line() -> None:
    """Nobody there; a bad rate; an answer that breaks, after which the chat goes on."""
    code, out = await run("terminal_chat.py", "--base-url", "http://127.0.0.1:1/v1", stdin="What?\n")
    assert (code, out) == (1, "No answer from http://127.0.0.1:1/v1: Connection error.\n")
    code, out = await run("terminal_chat.py", "--rate", "0")
    assert (code, out.splitlines()[-1]) == (2, "terminal_chat.py: error: --rate must be above 0")
    async with ProgressServer(SCRIPTS) as server:
        where = ("--base-url", f"{server.base_url}/v1", "--model", "closes-mid-event", "--rate", "100")
        code, out = await run("terminal_chat.py", *where, stdin="What?\nAnd now?\n")
    assert code == 0
    assert out.count("[Connection error.]\n") == 2


class Terminal:
    """A person at a terminal: what is on the screen so far, and the keys."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.screen = ""
        asyncio.get_running_loop().add_reader(fd, self._read)

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def leave(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)

    async def shows(self, text: str) -> None:
        await eventually(lambda: text in self.screen, f"{text!r} is shown")

    def _read(self) -> None:
        try:
            self.screen += os.read(self._fd, 65536).decode()
        except OSError:  # the program has ended
            asyncio.get_running_loop().remove_reader(self._fd)


@asynccontextmanager
async def at_terminal(
    name: str, *arguments: str
) -> AsyncIterator[tuple[Terminal, asyncio.subprocess.Process]]:
    """An example at a terminal, which is its controlling one, so that Ctrl-C works."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import fcntl, os, signal, sys, termios; "
          "fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
          "signal.signal(signal.SIGINT, signal.SIG_DFL); "  # which background jobs of a shell ignore
          "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"),
        *(ROOT / "examples" / name, *arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, **CLIENT, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    terminal = Terminal(ours)
    try:
        yield terminal, process
    finally:
        terminal.leave()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_the_pause_key() -> None:
    """Told to the gateway at once, as its end; Ctrl-C ends an endless answer, Ctrl-D the chat."""
    async with ProgressServer(SCRIPTS) as server:
        where = ("--base-url", f"{server.base_url}/v1", "--model", "endless", "--rate", "20")
        async with at_terminal("terminal_chat.py", *where) as (terminal, process):
            await terminal.shows("> ")
            terminal.press("What?\n")
            await terminal.shows("The capital")
            terminal.press("x ")
            await terminal.shows(PAUSED)
            pause = await server.reported(lambda report: report["paused"])
            assert terminal.screen.endswith(PAUSED), "nothing is shown in the meantime"
            shown = terminal.screen
            terminal.press(" ")
            await server.reported(lambda report: not report["paused"], after=server.received.index(pause))
            await eventually(lambda: len(terminal.screen) > len(shown) + 20, "the text goes on")
            terminal.press("\x03")
            await server.requests[0].disconnected.wait()
            await terminal.shows("\n> ")
            terminal.press("\x04")
            assert await process.wait() == 0
        assert not server.faults
