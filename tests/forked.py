"""Runs Python programs in forks of one process that has imported TensorFlow.

An import takes seconds of CPU, a fork milliseconds. `run` is for programs of which
nothing depends on the import itself; those that do are processes of `subprocess`.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import tpu_embedding

_PACKAGES = str(pathlib.Path(tpu_embedding.__file__).resolve().parents[1])


def run(
    arguments: Sequence[str | pathlib.Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | pathlib.Path | None = None,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Runs `python -P ARGUMENTS` to its end, or kills it and its children in time.

    `env` adds to the variables of this process; by default PYTHONPATH leads to the
    package that is under test.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, error = (pathlib.Path(folder, name) for name in ("out", "error"))
        request = {
            "arguments": [str(argument) for argument in arguments],
            "env": {**os.environ, "PYTHONPATH": _PACKAGES, **(env or {})},
            "path": sys.path,
            "cwd": str(cwd or pathlib.Path.cwd()),
            "timeout": timeout,
            "files": [str(out), str(error)],
        }
        parent = _parent()
        parent.stdin.write(json.dumps(request) + "\n")
        parent.stdin.flush()
        code = int(parent.stdout.readline())
        return subprocess.CompletedProcess(
            request["arguments"], code, out.read_text(), error.read_text()
        )


@functools.cache
def _parent() -> Any:
    parent = subprocess.Popen(
        [sys.executable, "-P", __file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, parent)
    return parent


def _end(parent: subprocess.Popen[str]) -> None:
    with parent:  # Waits for it, and closes its pipes.
        parent.kill()


def _execute(arguments: list[str]) -> None:
    """As Python's command line does."""
    if arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # pyright: ignore[reportArgumentType]
        arguments = arguments[2:]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(pathlib.Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _child(request: dict[str, Any]) -> None:
    """Ends this process with the exit code of the program."""
    os.setsid()
    for number, name in enumerate(request["files"], start=1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[:] = request["path"]
    code: Any = 0
    try:
        _execute(request["arguments"])
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _wait(child: int, timeout: float) -> int:
    signal.alarm(int(timeout))
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except TimeoutError:
        os.killpg(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        signal.alarm(0)


def main() -> None:
    import keras  # noqa: F401 - for all programs at once.
    import tensorflow  # noqa: F401

    def expired(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, expired)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            _child(request)
        print(_wait(child, request["timeout"]), flush=True)


if __name__ == "__main__":
    main()
