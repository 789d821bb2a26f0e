"""Servers in processes of their own, and their faults; see also parameter_servers."""

from __future__ import annotations

import json
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any

import new_process
import pytest

import tpu_embedding as te
from tpu_embedding.__main__ import main

STORAGE = pathlib.Path(__file__).with_name("parameter_server_storage.py")
FAULTS = pathlib.Path(__file__).with_name("parameter_server_faults.py")


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("file", "fault"),
    [
        (FAULTS, "repeated"),
        pytest.param(FAULTS, "two_clusters", marks=pytest.mark.third_tier),
        (STORAGE, "storage"),
        pytest.param(STORAGE, "stop_server", marks=pytest.mark.third_tier),
    ],
    ids=["repeated", "two_clusters", "storage", "stop_server"],
)
def test_fault(file: pathlib.Path, fault: str) -> None:
    """Of several processes; `make test-servers` runs the others."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    done = new_process.run(file, fault, env=quiet, timeout=240)
    # TensorFlow may write much more after the traceback.
    _, _, traceback = done.stderr.rpartition("Traceback")
    assert f"{fault}: passed" in done.stdout, traceback[:8000]


def test_logs_of_local_servers_are_kept_after_an_error_only() -> None:
    printing = {"ps": [sys.executable, "-c", "print('started')"]}
    with te.testing.LocalServers(1, 0, printing) as job:
        job.processes["ps", 0].wait()
        log = job.log("ps", 0)
        assert log.read_text() == "started\n"
    assert not log.parent.exists()

    def fail() -> None:
        with te.testing.LocalServers(1, 0, printing) as job:
            raise ValueError(job.log("ps", 0))

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        fail()
    (log,) = caught.value.args
    assert log.exists()
    shutil.rmtree(log.parent)


def test_local_servers_that_cannot_be_started_leave_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started, popen = [], subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(FileNotFoundError, match="no_such_command"):
        te.testing.LocalServers(1, 1, {"ps": sleeping, "worker": ["no_such_command"]})
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("cluster", "task", "text"),
    [
        ({"worker": ["localhost:1"]}, None, "Received: type None"),
        ({"worker": ["localhost:1"]}, ["worker", 1], "No task with index 1 in job"),
        ({"worker": ["localhost:1"]}, ["ps", 0], "No such job in cluster: 'ps'"),
        ({"worker": ["localhost:1"]}, ["worker", "x"], "invalid literal for int"),
        (3, ["worker", 0], "`cluster` must be a dictionary"),
        ({"ps": ["localhost:x"]}, ["ps", 0], "gives ps 0 the address 'localhost:x'"),
        ({"ps": ["localhost"]}, ["ps", 0], "gives ps 0 the address 'localhost'"),
        (
            {"ps": ["localhost:1"], "worker": ["localhost:2", "localhost:65536"]},
            ["ps", 0],
            "gives worker 1 the address 'localhost:65536', but an address must end",
        ),
        ({"ps": ["localhost:0"]}, ["ps", 0], "with a port from 1 to 65535, as in"),
        (
            {"ps": ["localhost:1"], "worker": ["localhost:1"]},
            ["ps", 0],
            "gives ps 0 and worker 0 the same address, 'localhost:1'",
        ),
        (
            {"ps": ["localhost:{taken}"]},
            ["ps", 0],
            "cannot listen at localhost:{taken}",
        ),
    ],
    ids=range(11),
)
def test_the_server_command_names_what_is_wrong(
    cluster: Any,
    task: Any,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = {"cluster": cluster}
    if task:
        config["task"] = dict(zip(("type", "index"), task, strict=True))
    with socket.create_server(("localhost", 0)) as taken:
        port = str(taken.getsockname()[1])
        value = json.dumps(config).replace("{taken}", port)
        monkeypatch.setenv("TF_CONFIG", value)
        assert main(["server"]) == 2
    said = capsys.readouterr().err
    assert text.replace("{taken}", port) in said
    assert "TF_CONFIG" in said
