"""Runs a program of this folder as it is and by rows."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

FOLDER = pathlib.Path(__file__).parent
STEPS = 40


def tried(name: str, optimizer: str, **environment: str) -> str:
    """What `python -m tpu_embedding try` prints of a program."""
    script = str(FOLDER / f"{name}.py")
    command = [sys.executable, "-P", "-m", "tpu_embedding", "try"]
    done = subprocess.run(
        [*command, "--steps", str(STEPS), script, optimizer],
        env={
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)  # Of a test that fails.
    return done.stdout


def assert_same_losses(printed: str) -> None:
    """That all steps ran, and their losses are those of Keras."""
    found = re.search(r"largest difference of losses in (\d+) steps: (\S+)", printed)
    assert found, printed
    assert int(found[1]) == STEPS
    assert float(found[2]) < 2e-6
