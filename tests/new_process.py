"""Runs Python programs in processes that import everything anew; see also `forked`."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping


def run(
    *arguments: str | pathlib.Path,
    env: Mapping[str, str] | None = None,
    path: str | pathlib.Path | None = None,
    cwd: str | pathlib.Path | None = None,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Runs `python -P ARGUMENTS`, which finds the modules that this process finds.

    Those of the folder `path` come before them; `env` adds to the variables.
    """
    searched = [str(path or ""), *sys.path]
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, searched)),
            **(env or {}),
        },
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def printed_by(
    *arguments: str | pathlib.Path,
    env: Mapping[str, str] | None = None,
    cwd: str | pathlib.Path | None = None,
    timeout: float = 300.0,
) -> str:
    """Runs a program that must succeed; returns what it printed."""
    done = run(*arguments, env=env, cwd=cwd, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    return done.stdout
