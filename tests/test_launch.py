"""`python -m tpu_embedding launch`, with programs that read TF_CONFIG and no more.

tests/multi_process/test_launched.py trains.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tpu_embedding as te

PACKAGE = pathlib.Path(te.__file__).parents[1]
PROGRAM = """
import json, os, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
index, cluster = config["task"]["index"], config["cluster"]
print("size", sum(map(len, cluster.values())), "pid", os.getpid(), flush=True)
first = not os.path.exists("began")
"""
WAIT = "time.sleep(60)\n"

Launch = Callable[..., subprocess.Popen[str]]
pytestmark = pytest.mark.second_tier


@pytest.fixture
def launch(tmp_path: pathlib.Path) -> Iterator[Launch]:
    """Starts a launcher in a folder: the rest of the program, then options."""
    with contextlib.ExitStack() as stack:

        def start(rest: str, *options: str) -> subprocess.Popen[str]:
            program = tmp_path / f"program{len(list(tmp_path.iterdir()))}.py"
            program.write_text(PROGRAM + rest)
            command = [sys.executable, "-P", "-m", "tpu_embedding", "launch"]
            process = subprocess.Popen(
                [*command, *options, str(program)],
                env={**os.environ, "PYTHONPATH": str(PACKAGE)},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield start


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code and the outputs; no process that was started is left."""
    out, error = process.communicate(timeout=60)
    for pid in re.findall(r"pid (\d+)", out):
        assert not pathlib.Path("/proc", pid).exists()
    return process.returncode, out, error


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def address(free_port: int) -> tuple[str, ...]:
    return "--address", f"127.0.0.1:{free_port}"


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_lines_have_the_name_of_their_process(launch: Launch) -> None:
    code, out, error = ended(
        launch("print('last', end=''); sys.stderr.write('to stderr\\n')",
               "--processes", "2")
    )  # fmt: skip
    assert code == 0
    for index in range(2):
        assert f"[worker {index}] size 2" in out
        assert f"[worker {index}] last\n" in out
        assert f"[worker {index}] to stderr\n" in error


def test_a_failure_ends_all_and_is_the_exit_code(launch: Launch) -> None:
    rest = "if index == 1: sys.exit(7)\n" + WAIT
    code, _, error = ended(launch(rest, "--processes", "3"))
    assert code == 7
    assert "worker 1 ended with exit code 7; all processes" in error


def test_restarts_use_the_next_numbers_of_processes(
    launch: Launch, tmp_path: pathlib.Path
) -> None:
    rest = (
        "size = len(cluster['worker'])\n"
        "if size == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "open(f'size{size}_{index}', 'w')\n"
        "begun = lambda: all(os.path.exists(f'size3_{i}') for i in range(3))\n"
        "while size == 3 and not (index == 2 and begun()): time.sleep(0.01)\n"
        "if size == 3: sys.exit(1)\n"
    )
    status = tmp_path / "status.json"
    options = ("--processes", "2,3,1", "--restarts", "2", "--status", str(status))
    code, out, error = ended(launch(rest, *options))
    assert code == 0
    assert [out.count(f"size {size}") for size in (2, 3, 1)][1:] == [3, 1]
    assert "was ended by SIGKILL; the job starts again; 1 restarts are left" in error
    written = json.loads(status.read_text())
    assert (written["state"], written["start"]) == ("done", 3)
    assert [process["exit_code"] for process in written["processes"]] == [0]


def test_a_process_that_is_done_early_does_not_hang_the_job(launch: Launch) -> None:
    rest = "if index == 0: sys.exit(0)\n" + WAIT
    code, _, error = ended(launch(rest, "--processes", "2", "--exit-timeout", "0.3"))
    assert code == 1
    assert "worker 1 still ran 0.3 s after worker 0 ended" in error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_launcher(
    launch: Launch, number: signal.Signals, tmp_path: pathlib.Path
) -> None:
    rest = "open(f'began{index}', 'w')\n" + WAIT
    process = launch(rest, "--processes", "2")
    wait_for(lambda: (tmp_path / "began0").exists() and (tmp_path / "began1").exists())
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    for pid in re.findall(r"pid (\d+)", out):
        wait_for(lambda pid=pid: not pathlib.Path("/proc", pid).exists())


def test_a_status_has_what_telemetry_said_last(
    launch: Launch, tmp_path: pathlib.Path
) -> None:
    said = "open(os.environ['TPU_EMBEDDING_STATUS'], 'w').write('[%d]' % index)\n"
    process = launch(said, "--processes", "2", "--status", "status.json")
    assert ended(process)[0] == 0
    written = json.loads((tmp_path / "status.json").read_text())
    assert written["state"] == "done"
    assert [one["telemetry"] for one in written["processes"]] == [[0], [1]]
    assert not [*tmp_path.glob("status.json.*")]


def test_a_status_shows_what_runs(launch: Launch, tmp_path: pathlib.Path) -> None:
    status = tmp_path / "status.json"
    options = ("--status", str(status), "--status-interval", "0.1")
    process = launch(WAIT, "--processes", "2", *options)
    wait_for(status.exists)
    written = json.loads(status.read_text())
    assert written["state"] == "running"
    assert [one["name"] for one in written["processes"]] == ["worker 0", "worker 1"]
    assert all(one["resident_bytes"] > 0 for one in written["processes"])
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143


def test_a_status_that_cannot_be_written_ends_no_process(
    launch: Launch, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "status"
    folder.mkdir()
    status = folder / "line.json"
    rest = (
        "while not os.path.exists('end'):\n"
        "    time.sleep(0.05)\n"
    )  # fmt: skip
    options = ("--status", str(status), "--status-interval", "0.1")
    process = launch(rest, *options)
    wait_for(status.exists)
    folder.rename(tmp_path / "gone")
    assert process.stderr is not None
    assert "[launch] The status is not written: " in process.stderr.readline()
    folder.mkdir()
    wait_for(status.exists)
    (tmp_path / "end").touch()
    code, _, error = ended(process)
    assert code == 0
    assert error == "[launch] The status is written again.\n"


def test_hosts_meet_fail_and_start_again_together(
    launch: Launch, free_port: int, tmp_path: pathlib.Path
) -> None:
    rest = (
        "if index == 2 and not os.path.exists('began'):\n"
        "    open('began', 'w'); sys.exit(5)\n"
        "time.sleep(60 if first else 0)\n"
    )
    common = ("--hosts", "2", *address(free_port), "--restarts", "1")
    hosts = [launch(rest, *common, "--processes", n) for n in ("1", "2")]
    done = [ended(host) for host in hosts]
    assert [code for code, *_ in done] == [0, 0]
    printed = "".join(out for _, out, _ in done)
    # All 3 print it in the second start, and worker 2 in the first; the others may be
    # ended before they do.
    assert printed.count("size 3") >= 4
    errors = "".join(error for *_, error in done)
    assert "ended with exit code 5; the job starts again" in errors
    assert "the processes of another host failed; the job starts again" in errors


def test_a_host_waits_until_the_others_are_done(launch: Launch, free_port: int) -> None:
    common = ("--hosts", "2", *address(free_port))
    hosts = [launch("time.sleep(index)", *common) for _ in range(2)]
    assert [ended(host)[0] for host in hosts] == [0, 0]


def test_a_worker_of_servers_starts_again_alone(
    launch: Launch, tmp_path: pathlib.Path
) -> None:
    rest = (
        "import pathlib\n"
        "def worker():\n"
        "    path = pathlib.Path('status.json')\n"
        "    if not path.exists(): return []\n"
        "    running = json.loads(path.read_text())['processes']\n"
        "    return [one['pid'] for one in running if one['name'] == 'worker 0']\n"
        "while not (first := worker()): time.sleep(0.1)\n"
        "os.kill(first[0], signal.SIGKILL)\n"
        "while worker() == first: time.sleep(0.1)\n"
    )
    options = ("--servers", "1", "--restarts", "1", "--status-interval", "0.1")
    process = launch(rest, *options, "--status", str(tmp_path / "status.json"))
    code, out, error = ended(process)
    assert code == 0
    assert out.count("size 3") == 1  # The chief was not started again.
    assert "worker 0 was ended by SIGKILL and starts again; 0 restarts" in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--hosts", "2"), "needs `--address HOST:PORT`"),
        (("--hosts", "3:2"), "the smallest and largest"),
        (("--processes", "0"), "a whole number of at least 1"),
        (("--restarts", "-1"), "a whole number of at least 0"),
        (("--address", "here:1"), "needs `--hosts` with more than one host"),
        (("--hosts", "2", "--address", "nowhere"), "Received: 'nowhere'"),
        (("--hosts", "2", "--address", "127.0.0.1:PORT", "--timeout", "0.2"),
         "1 of at least 2 hosts connected"),
        (("--timeout", "5"), "`--timeout` has no effect without `--hosts`"),
        (("--status-interval", "5"), "has no effect without `--status`"),
        (("--status", "none/line"), "in an existing folder. Received: 'none/line'"),
        (("--status", "."), "must be a file in an existing folder. Received: '.'"),
        (("-m",), "No module named"),
    ],
)  # fmt: skip
def test_wrong_options(
    launch: Launch, options: tuple[str, ...], words: str, free_port: int
) -> None:
    options = tuple(option.replace("PORT", str(free_port), 1) for option in options)
    code, _, error = ended(launch("", *options))
    assert code != 0
    assert words.replace("PORT", str(free_port)) in error or words in error


def test_an_address_in_use_is_not_ours(launch: Launch, free_port: int) -> None:
    import socket

    with socket.create_server(("127.0.0.1", free_port)):
        options = ("--hosts", "2", *address(free_port), "--timeout", "0.5")
        code, _, error = ended(launch("", *options))
    assert code == 2
    assert "No cluster was formed at" in error
