# ruff: noqa: T201 - a program that prints
"""A chat in the terminal that shows text as fast as it is read, with a key to pause.

    python examples/terminal_chat.py --rate 8

Space pauses and goes on, Ctrl-C ends an answer, Ctrl-D the chat. Nothing is fetched ahead of the reader: the
loop asks for the next piece of text when it is time to show it, and tokenflow_client tells the gateway. What
has been generated in the meantime waits there, and the engine serves those who wait for theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Any

import openai

import tokenflow_client
from tokenflow_client import TokenFlowReader

try:
    import termios
    import tty
except ImportError:  # no such terminals (Windows): no pause key, all else as here
    termios = None  # type: ignore[assignment]

PAUSE_KEY = b" "
PAUSED = " [paused: space goes on]"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
ERASE_PAUSED = f"\x1b[{len(PAUSED)}D\x1b[K"


class Keys:
    """The keyboard while an answer is shown; without a terminal, only the time that passes."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno()
        self._is_terminal = termios is not None and sys.stdin.isatty() and sys.stdout.isatty()

    @contextlib.contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Keys come as they are pressed, and are not shown."""
        if not self._is_terminal:
            yield
            return
        before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd)
        try:
            yield
        finally:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, before)

    def pause_pressed(self, *, within_s: float | None) -> bool:
        """Wait so long (None: for ever); True as soon as the pause key is pressed."""
        if not self._is_terminal:
            time.sleep(within_s or 0)
            return False
        until_s = None if within_s is None else time.monotonic() + within_s
        while True:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            if not select.select([self._fd], [], [], left_s)[0]:
                return False
            if os.read(self._fd, 1) == PAUSE_KEY:
                return True


def show(stream: Any, reader: TokenFlowReader, keys: Keys, *, rate: float) -> str:
    """Show an answer, a token at a time; returns its text."""
    text = ""
    for chunk in stream:
        piece = (chunk.choices and chunk.choices[0].delta.content) or ""
        if not piece:
            continue
        text += piece
        print(piece, end="", flush=True)
        if keys.pause_pressed(within_s=1 / rate):
            pause(reader, keys)
    return text


def pause(reader: TokenFlowReader, keys: Keys) -> None:
    """Until the key is pressed again."""
    print(DIM + PAUSED + PLAIN, end="", flush=True)
    with reader.paused():
        keys.pause_pressed(within_s=None)
    print(ERASE_PAUSED, end="", flush=True)


def chat(client: openai.OpenAI, model: str, *, rate: float) -> None:
    """Questions and answers until the input ends."""
    keys, messages = Keys(), []
    while (question := ask()) is not None:
        messages.append({"role": "user", "content": question})
        reader = TokenFlowReader(rate=rate)
        request: Any = {"model": model, "messages": messages, "extra_headers": reader.headers()}
        try:
            with client.chat.completions.create(stream=True, **request) as stream, keys.one_by_one():
                messages.append({"role": "assistant", "content": show(stream, reader, keys, rate=rate)})
        except KeyboardInterrupt:
            messages.pop()
        except openai.APIError as error:
            messages.pop()
            print(f"[{error}]", end="")
        print()


def ask() -> str | None:
    """The next question that is not empty; None at the end of the input."""
    try:
        while not (question := input("> " if sys.stdin.isatty() else "")):
            pass
    except (EOFError, KeyboardInterrupt):
        return None
    return question


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A chat that shows text as fast as it is read.")
    parser.add_argument("--base-url", default="http://localhost:8080/v1", help="the gateway (%(default)s)")
    parser.add_argument("--api-key", default="none", help="the tenant's key, where the gateway wants one")
    parser.add_argument("--model", help="by default the first one that the gateway lists")
    parser.add_argument("--rate", type=float, default=5.3, help="tokens per second (%(default)s)")
    given = parser.parse_args()
    if not given.rate > 0:
        parser.error("--rate must be above 0")
    return given


def main() -> None:
    given = arguments()
    http_client = tokenflow_client.http_client()
    with openai.OpenAI(base_url=given.base_url, api_key=given.api_key, http_client=http_client) as client:
        try:
            model = given.model or client.models.list().data[0].id
        except openai.APIError as error:
            sys.exit(f"No answer from {given.base_url}: {error}")
        chat(client, model, rate=given.rate)


if __name__ == "__main__":
    main()
