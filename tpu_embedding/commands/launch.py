"""`python -m tpu_embedding launch`: starts the processes of a job, and ends them.

A process that fails ends all others. With restarts the job begins again, and its
program goes on from its last checkpoint; a failed worker of parameter servers starts
again alone.

Processes learn of each other from TF_CONFIG, and the launcher learns from exit codes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any

from tpu_embedding.cluster_config import STATUS_VARIABLE, replace_file
from tpu_embedding.commands.meeting import Cluster, Meeting

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 10.0  # Between SIGTERM and SIGKILL.
_SERVER = ("-m", "tpu_embedding", "server")
_PR_SET_PDEATHSIG = 1


class _JobError(Exception):
    """Raised when a process fails; `code` is the exit code of the launcher."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class _Options:
    """The checked options of the command line.

    Attributes:
      address: HOST:PORT at which hosts meet; None for one host.
      hosts: The numbers of hosts that may take part.
      servers: The number of parameter servers of this host.
      command: The arguments of `python` that run the program.
      restarts: How often the job, or a worker of servers, may start again.
      timeout: Seconds to wait for other hosts.
      status: The file of the status, or None.
      status_interval: Seconds between two writes of this file.
      exit_timeout: Seconds that processes may run after the first one is done.
    """

    def __init__(self, parsed: argparse.Namespace) -> None:
        self._processes = _numbers("--processes", parsed.processes, ",", 1)
        hosts = _numbers("--hosts", parsed.hosts, ":", 1)
        if len(hosts) > 2 or hosts[0] > hosts[-1]:
            raise ValueError(
                "`--hosts` must be a number, or the smallest and largest number, as in "
                f"2:4. Received: {parsed.hosts!r}."
            )
        self.hosts = range(hosts[0], hosts[-1] + 1)
        self.address = self._checked_address(parsed.address)
        (self.servers,) = _numbers("--servers", str(parsed.servers), None, 0)
        (self.restarts,) = _numbers("--restarts", str(parsed.restarts), None, 0)
        self.exit_timeout = parsed.exit_timeout
        several = self.address is not None
        self.timeout = _seconds(
            "--timeout", parsed.timeout, 600.0, "--hosts", needed_is_given=several
        )
        self.status, kept = parsed.status, parsed.status is not None
        status = pathlib.Path(self.status or "").absolute()
        if kept and (status.is_dir() or not status.parent.is_dir()):
            raise ValueError(
                "`--status` must be a file in an existing folder. Received: "
                f"{self.status!r}."
            )
        self.status_interval = _seconds(
            "--status-interval",
            parsed.status_interval,
            60.0,
            "--status",
            needed_is_given=kept,
        )
        if not parsed.module and not pathlib.Path(parsed.program).is_file():
            raise ValueError(f"The program {parsed.program!r} is not a file.")
        self.command = [*(["-m"] if parsed.module else []), parsed.program]
        self.command += parsed.arguments

    def _checked_address(self, address: str | None) -> str | None:
        if self.hosts == range(1, 2):
            if address is not None:
                raise ValueError("`--address` needs `--hosts` with more than one host.")
        elif address is None or not re.fullmatch(r".+:\d{1,5}", address):
            raise ValueError(
                "More than one host needs `--address HOST:PORT`, one of the hosts and "
                f"a port that the others can reach. Received: {address!r}."
            )
        return address

    def tasks(self, start: int) -> dict[str, int]:
        """Returns how many tasks of each kind this host has in a start (1, 2, ...)."""
        processes = self._processes[min(start, len(self._processes)) - 1]
        chiefs = int(self.servers > 0)
        return {"chief": chiefs, "ps": self.servers, "worker": processes}


class _Process:
    """A task, in a process group of its own, which ends with the launcher."""

    def __init__(
        self,
        kind: str,
        index: int,
        cluster: Cluster,
        command: Sequence[str],
        status: str | None,
    ) -> None:
        self.kind, self.name = kind, f"{kind} {index}"
        # The file in which te.Telemetry tells how the training goes.
        self._status = None if status is None else f"{status}.{kind}_{index}"
        config = {"cluster": cluster, "task": {"type": kind, "index": index}}
        self._command = [sys.executable, *command]
        self._environment = {"PYTHONUNBUFFERED": "1", "TF_CONFIG": json.dumps(config)}
        if self._status is not None:
            self._environment[STATUS_VARIABLE] = os.path.abspath(self._status)
        self.start()

    def start(self) -> None:
        self.remove_status()
        self._process = subprocess.Popen(
            self._command,
            env={**os.environ, **self._environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - The launcher has one thread.
        )
        pipes = (self._process.stdout, self._process.stderr)
        self.outputs = [
            _Lines(pipe, to, f"[{self.name}] ")
            for pipe, to in zip(pipes, (sys.stdout, sys.stderr), strict=True)
            if pipe is not None
        ]

    @property
    def exit_code(self) -> int | None:
        """The exit code, None while the process runs; -n if signal n ended it."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and to what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Kills what runs of the process, and prints its last lines."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        for lines in self.outputs:
            lines.close()

    def remove_status(self) -> None:
        if self._status is not None:
            pathlib.Path(self._status).unlink(missing_ok=True)

    def status(self) -> dict[str, Any]:
        """Returns the name, process id, exit code, CPU seconds and memory in bytes.

        It also contains the last status that te.Telemetry wrote, if any.
        """
        pid = self._process.pid
        status = {"name": self.name, "pid": pid, "exit_code": self.exit_code}
        if status["exit_code"] is None:
            folder = pathlib.Path("/proc", str(pid))
            times = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
            status["cpu_seconds"] = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
            pages = int((folder / "statm").read_text().split()[1])
            status["resident_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
        said = pathlib.Path(self._status) if self._status else None
        if said is not None and said.exists():
            status["telemetry"] = json.loads(said.read_text())
        return status


class _Lines:
    """Prints the lines of a pipe, each after the name of its process."""

    def __init__(self, pipe: IO[bytes], target: IO[str], prefix: str) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.pipe, self._target, self._prefix = pipe, target, prefix
        self._begun = b""

    def forward(self) -> bool:
        """Prints the whole lines that have come. Returns whether more can come."""
        content = self.pipe.read()
        *lines, self._begun = (self._begun + (content or b"")).split(b"\n")
        for line in lines:
            self._print(line)
        return content != b""

    def close(self) -> None:
        """Prints what has come, including an unfinished last line."""
        if not self.pipe.closed:
            self.forward()
            self.pipe.close()
        if self._begun:
            self._print(self._begun)
        self._begun = b""

    def _print(self, line: bytes) -> None:
        text = f"{self._prefix}{line.decode(errors='replace')}"
        print(text, file=self._target, flush=True)


class _Job:
    """The processes of this host in one start of the job."""

    def __init__(self, options: _Options, start: int, restarts: int) -> None:
        """Prepares start number `start`, from 1.

        Args:
          options: The command line.
          start: The number of the start, which decides the number of processes.
          restarts: How often a worker of parameter servers may start again.
        """
        self._options, self._start_number = options, start
        self.restarts = restarts
        self._selector = selectors.DefaultSelector()
        self.processes: list[_Process] = []
        self._first_done: float | None = None
        # Tasks of this kind run the program; tasks of other kinds are servers.
        self._trains = "chief" if options.servers else "worker"

    def run(self, status: _Status) -> None:
        """Runs the processes to their end, and keeps the status up to date.

        Raises:
          _JobError: If a process of this or another host failed.
        """
        options = self._options
        with contextlib.closing(Meeting(options.address, options.hosts)) as meeting:
            ports = _free_ports(options.tasks(self._start_number))
            meeting.join(ports, options.timeout)
            with _ended_together(self.processes):
                self._begin(meeting, ports)
                while not self._is_done(meeting):
                    self._forward()
                    self._replace_workers()
                    status.write("running", self.processes)

    def _begin(self, meeting: Meeting, ports: Mapping[str, Sequence[int]]) -> None:
        for kind, first in meeting.first.items():
            trains = kind == self._trains
            command = self._options.command if trains else _SERVER
            for index in range(first, first + len(ports[kind])):
                process = _Process(
                    kind, index, meeting.cluster, command, self._options.status
                )
                self.processes.append(process)
                self._watch(process)

    def _watch(self, process: _Process) -> None:
        for lines in process.outputs:
            self._selector.register(lines.pipe, selectors.EVENT_READ, lines)

    def _forward(self) -> None:
        for key, _ in self._selector.select(_POLL_SECONDS):
            if not key.data.forward():
                self._selector.unregister(key.fileobj)
                key.data.close()
        if not self._selector.get_map():
            time.sleep(_POLL_SECONDS)

    def _replace_workers(self) -> None:
        """Starts failed workers of parameter servers again; others fail the job."""
        for process in self.processes:
            if process.exit_code in (None, 0):
                continue
            text = f"{process.name} {_ended(process.exit_code)}"
            if process.kind in (self._trains, "ps") or not self.restarts:
                raise _JobError(text, _shell_code(process.exit_code))
            self.restarts -= 1
            _say(f"{text} and starts again; {self.restarts} restarts are left.")
            for lines in process.outputs:
                if not lines.pipe.closed:
                    self._selector.unregister(lines.pipe)
            process.close()
            process.start()
            self._watch(process)

    def _is_done(self, meeting: Meeting) -> bool:
        programs = [one for one in self.processes if one.kind == self._trains]
        running = [one for one in programs if one.exit_code is None]
        ended = [one for one in programs if one.exit_code == 0]
        if ended and self._first_done is None:
            self._first_done = time.monotonic()
        limit = self._options.exit_timeout
        if running and ended and time.monotonic() - self._first_done > limit:
            raise _JobError(
                f"{running[0].name} still ran {limit:g} s after {ended[0].name} ended "
                "with exit code 0 (`--exit-timeout`)",
                1,
            )
        try:
            return meeting.all_done(len(ended) == len(programs))
        except OSError as error:
            raise _JobError(str(error), 1) from error


class _Status:
    """Writes one line of JSON about the job to a file, at intervals."""

    def __init__(self, path: str | None, interval: float) -> None:
        self._path, self._interval = path, interval
        self._began, self._due = time.time(), 0.0
        self._problem = ""
        self.start = 0

    def write(self, state: str, processes: Sequence[_Process] = ()) -> None:
        """Replaces the file if the state has changed or the interval is over.

        An error of the file system does not end the job.
        """
        now = time.time()
        if self._path is None or (state == "running" and now < self._due):
            return
        self._due = now + self._interval
        content = {
            "time": now,
            "seconds": now - self._began,
            "state": state,
            "start": self.start,
            "processes": [process.status() for process in processes],
        }
        before, self._problem = self._problem, ""
        try:
            replace_file(self._path, json.dumps(content))
        except OSError as error:
            self._problem = str(error)
        if self._problem != before:
            problem = self._problem and f"not written: {self._problem}"
            _say(f"The status is {problem or 'written again'}.")


def run(parsed: argparse.Namespace) -> int:
    """Runs a job to its end. Returns 0, or the exit code of the process that failed.

    Raises:
      ValueError: If an option is wrong.
      TimeoutError: If too few hosts come.
    """
    options = _Options(parsed)
    restarts = options.restarts
    status = _Status(options.status, options.status_interval)
    with _stopped_by_signals():
        while True:
            status.start += 1
            job = _Job(options, status.start, restarts)
            try:
                job.run(status)
            except _JobError as failure:
                restarts = job.restarts - 1
                if restarts < 0:
                    _say(f"{failure}; all processes of this host were ended.")
                    status.write("failed", job.processes)
                    return failure.code
                _say(f"{failure}; the job starts again; {restarts} restarts are left.")
                status.write("restarting", job.processes)
            else:
                status.write("done", job.processes)
                return 0
            finally:
                for process in job.processes:
                    process.remove_status()


@contextlib.contextmanager
def _ended_together(processes: Sequence[_Process]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            if process.exit_code is None:
                process.signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and any(
            process.exit_code is None for process in processes
        ):
            time.sleep(_POLL_SECONDS)
        for process in processes:
            process.close()


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raises SystemExit at a signal, so that processes are ended."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _numbers(option: str, text: str, separator: str | None, least: int) -> list[int]:
    parts = text.split(separator) if separator else [text]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        several = f", or several as in {separator.join('23')}" if separator else ""
        raise ValueError(
            f"`{option}` takes a whole number of at least {least}{several}. Received: "
            f"{text!r}."
        )
    return [int(part) for part in parts]


def _seconds(
    option: str,
    value: float | None,
    default: float,
    needed: str,
    *,
    needed_is_given: bool,
) -> float:
    if value is None:
        return default
    if not needed_is_given:
        raise ValueError(f"`{option}` has no effect without `{needed}`. Leave it out.")
    return value


def _free_ports(counts: Mapping[str, int]) -> dict[str, list[int]]:
    """Finds ports that are free now, by kind of task."""
    with contextlib.ExitStack() as stack:
        return {
            kind: [
                stack.enter_context(socket.create_server(("", 0))).getsockname()[1]
                for _ in range(count)
            ]
            for kind, count in counts.items()
        }


def _end_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _ended(exit_code: int) -> str:
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def _shell_code(exit_code: int) -> int:
    """Returns the exit code that a shell gives a process."""
    return exit_code if exit_code > 0 else 128 - exit_code


def _say(text: str) -> None:
    print(f"[launch] {text}", file=sys.stderr, flush=True)
