"""A plain HTTP client on a raw socket, which takes tokens out of the kernel one by one."""

from __future__ import annotations

import array
import fcntl
import http.client
import json
import socket
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from urllib.parse import urlsplit

from tokenflow_bench.readers.accuracy.pace import pace
from tokenflow_bench.readers.accuracy.reader_process import Reading, Task
from tokenflow_bench.readers.accuracy.truth import person_behind

__all__ = ["EventSocket"]

_READ_BYTES = 256
"""Less than an event: nothing is taken from the kernel before the reader needs it."""
_LOOK_S = 0.05
_REPORT_S = 0.2


class EventSocket:
    """One streamed chat. `receive_buffer_bytes` is set before the connection is made."""

    def __init__(
        self,
        url: str,
        *,
        model: str,
        headers: Mapping[str, str] | None = None,
        receive_buffer_bytes: int | None = None,
    ) -> None:
        where = urlsplit(url)
        self._socket = socket.socket()
        if receive_buffer_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self._socket.connect((where.hostname, where.port))
        body = json.dumps(
            {"model": model, "stream": True, "messages": [{"role": "user", "content": "Go on."}]}
        )
        given = {"Host": where.netloc, "Content-Type": "application/json", "Content-Length": str(len(body))}
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**given, **(headers or {})}.items())
        self._socket.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{lines}\r\n{body}".encode())
        self._raw = bytearray()
        self._taken_bytes = 0
        self.headers = self._read_head()
        self._tokens = self._read_tokens()
        self.taken = 0

    def take(self) -> float:
        """Take the next token, waiting for it; returns when it was taken."""
        next(self._tokens)
        self.taken += 1
        return time.monotonic()

    @property
    def unread_bytes(self) -> int:
        """What lies in the kernel's receive buffer (FIONREAD)."""
        count = array.array("i", [0])
        fcntl.ioctl(self._socket, termios.FIONREAD, count)
        return count[0]

    @property
    def receive_buffer_bytes(self) -> int:
        """The kernel's present limit of that buffer, its own bookkeeping included."""
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    @property
    def bytes_per_token(self) -> float | None:
        return self._taken_bytes / self.taken if self.taken else None

    def close(self) -> None:
        self._socket.close()

    def _read_tokens(self) -> Iterator[None]:
        """Once for each event with content."""
        buffer = bytearray()
        for part in self._read_parts():
            buffer += part
            while (end := buffer.find(b"\n\n")) >= 0:
                event = bytes(buffer[:end]).removeprefix(b"data: ")
                del buffer[: end + 2]
                if json.loads(event)["choices"][0]["delta"].get("content"):
                    yield

    def _read_parts(self) -> Iterator[bytearray]:
        """Out of HTTP's chunks, a few bytes at a time: many events may have come in one chunk."""
        while True:
            left = int(self._until(b"\r\n"), 16)
            while left:
                if not self._raw:
                    self._receive()
                part = self._raw[:left]
                del self._raw[:left]
                left -= len(part)
                yield part
            self._until(b"\r\n")

    def _read_head(self) -> dict[str, str]:
        status, *lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        if " 200 " not in status:
            raise RuntimeError(f"not answered: {status}")
        fields = (line.partition(":") for line in lines)
        return {name.lower(): value.strip() for name, _, value in fields}

    def _until(self, mark: bytes) -> bytes:
        while (at := self._raw.find(mark)) < 0:
            self._receive()
        found = bytes(self._raw[:at])
        del self._raw[: at + len(mark)]
        return found

    def _receive(self) -> None:
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise RuntimeError("the answer ended before its reader")
        self._taken_bytes += len(data)
        self._raw += data


class _Reports:
    """Says `factor` times the true position: 1 is honest, all else is for the control."""

    def __init__(self, stream: EventSocket, url: str, factor: float) -> None:
        self._stream, self._factor = stream, factor
        self._id, _, self._capability = stream.headers["x-tokenflow-stream"].partition(".")
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=5)
        self._seq = 0
        self._due = 0.0

    def maybe_send(self) -> None:
        if not self._factor or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _REPORT_S
        self._seq += 1
        report = {"seq": self._seq, "tokens": self._factor * self._stream.taken}
        body = json.dumps({"capability": self._capability, "reports": [report]})
        self._connection.request("POST", f"/v1/streams/{self._id}/progress", body)
        self._connection.getresponse().read()


def read(task: Task) -> Reading:
    """Follow the task's segments to the token."""
    options, reading = task.options, Reading()
    declared = options.get("declared_rate")
    headers = {"X-TokenFlow-Rate": f"{declared:g}"} if declared else {}
    buffer_bytes = options.get("receive_buffer_bytes")
    begun = time.monotonic()
    with closing(
        EventSocket(task.url, model=task.model, headers=headers, receive_buffer_bytes=buffer_bytes)
    ) as stream:
        if options.get("takes_all"):
            _take_all(stream, task, reading)
        else:
            reports = _Reports(stream, task.url, options.get("reports_times", 0.0))
            _take_paced(stream, task, reading, reports)
        reading.receive_buffer_bytes = stream.receive_buffer_bytes
        reading.bytes_per_token = stream.bytes_per_token
        reading.window = (begun, time.monotonic())
    return reading


def _take_paced(stream: EventSocket, task: Task, reading: Reading, reports: _Reports) -> None:
    def pause(seconds: float) -> None:
        begin = time.monotonic()
        while (left := begin + seconds - time.monotonic()) > 0:
            reading.unread.append((time.monotonic(), stream.unread_bytes))
            time.sleep(min(left, _LOOK_S))
        reading.pauses.append((begin, time.monotonic()))

    reading.positions.append((stream.take(), stream.taken))
    for _ in pace(task.segments, pause=pause):
        reading.unread.append((time.monotonic(), stream.unread_bytes))
        reading.positions.append((stream.take(), stream.taken))
        reports.maybe_send()


def _take_all(stream: EventSocket, task: Task, reading: Reading) -> None:
    """Everything as it comes; the person behind reads at the one rate there is."""
    ((seconds, rate),) = task.segments
    arrivals = [stream.take()]
    while arrivals[-1] < arrivals[0] + seconds:
        arrivals.append(stream.take())
    read_at = person_behind(arrivals, rate=rate)
    reading.positions = [(at, number) for number, at in enumerate(read_at, start=1) if at <= arrivals[-1]]


if __name__ == "__main__":
    read(Task.from_stdin()).to_stdout()
