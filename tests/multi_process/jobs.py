"""Starts the processes of a job on this machine, and calls functions in them.

A process takes seconds to import TensorFlow, so tests share a job among many cases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import tpu_embedding as te

PACKAGE = pathlib.Path(te.__file__).parents[1]  # What is under test, in any folder.
TESTS = pathlib.Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a function raised in a process, after so many seconds."""

    kind: str
    text: str
    seconds: float


class Process:
    """One process of a job, which runs a module that calls `worker.serve`."""

    def __init__(
        self, environment: Mapping[str, str], module: str = "multi_process.worker"
    ) -> None:
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it.
        self._number = 0  # Of the last request.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, f"{requests}", f"{replies}"],
            env={**os.environ, **environment},
            pass_fds=(requests, replies),
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        os.close(requests)
        os.close(replies)

    def send(self, function: str, arguments: tuple[Any, ...]) -> None:
        self._number += 1
        content = pickle.dumps((self._number, function, arguments))
        os.write(self._requests, struct.pack("q", len(content)))
        with contextlib.suppress(BrokenPipeError):
            written = 0
            while written < len(content):
                written += os.write(self._requests, content[written : written + 65536])

    def receive(self, timeout: float) -> Any:
        """What the function returned, or a Failure; also of a process that ended."""
        deadline = time.monotonic() + timeout
        while True:
            number, result = self._receive(deadline)
            if number == self._number:
                return result  # Others answer requests that nobody waits for.

    def _receive(self, deadline: float) -> tuple[int, Any]:
        size = struct.unpack("q", self._read(8, deadline) or b"\xff" * 8)[0]
        if size < 0:
            self._process.wait(10)
            code = self._process.returncode
            return self._number, Failure("Ended", f"exit code {code}", 0.0)
        content = self._read(size, deadline)
        assert content is not None
        return pickle.loads(content)

    def _read(self, size: int, deadline: float) -> bytes | None:
        content = b""
        while len(content) < size:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._replies], [], [], left)[0]:
                raise TimeoutError(f"A process did not answer.\n{self.printed()}")
            more = os.read(self._replies, size - len(content))
            if not more:
                return None
            content += more
        return content

    def printed(self) -> str:
        """The end of what the process printed."""
        self.output.seek(0)
        return self.output.read().decode(errors="replace")[-4000:]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._requests)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._replies)
        self.output.close()


class Job:
    """Processes of one MultiWorkerMirroredStrategy over free ports of this machine."""

    def __init__(self, size: int, environment: Mapping[str, str] | None = None) -> None:
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(size)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            ports = [one.getsockname()[1] for one in sockets]
        cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
        path = os.pathsep.join([str(TESTS), str(PACKAGE)])
        self.processes = [
            Process(
                {
                    "PYTHONPATH": path,
                    "CUDA_VISIBLE_DEVICES": "-1",
                    **(environment or {}),
                    "TF_CONFIG": json.dumps(
                        {"cluster": cluster, "task": {"type": "worker", "index": rank}}
                    ),
                }
            )
            for rank in range(size)
        ]

    def run(
        self, function: str, *arguments: Any, timeout: float = TIMEOUT_SECONDS
    ) -> list[Any]:
        """Calls "module.function", or a function of `calls`; all results."""
        found = self.attempt(function, *arguments, timeout=timeout)
        for process, result in zip(self.processes, found, strict=True):
            assert not isinstance(result, Failure), f"{result}\n{process.printed()}"
        return found

    def attempt(
        self, function: str, *arguments: Any, timeout: float = TIMEOUT_SECONDS
    ) -> list[Any]:
        """As `run`, with a Failure for each process in which it fails."""
        for process in self.processes:
            process.send(function, arguments)
        return [process.receive(timeout) for process in self.processes]

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self.processes:
            process.close()
