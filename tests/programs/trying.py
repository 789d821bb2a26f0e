"""Runs a program of this folder as it is and by rows."""

from __future__ import annotations

import pathlib
import re

from new_process import printed_by

FOLDER = pathlib.Path(__file__).parent
STEPS = 40


def tried(name: str, optimizer: str, **environment: str) -> str:
    """What `python -m tpu_embedding try` prints of a program."""
    script = str(FOLDER / f"{name}.py")
    command = ["-m", "tpu_embedding", "try", "--steps", str(STEPS), script, optimizer]
    printed = printed_by(*command, env=environment, timeout=600)
    print(printed)  # Of a test that fails.
    return printed


def assert_same_losses(printed: str) -> None:
    """That all steps ran, and their losses are those of Keras."""
    found = re.search(r"largest difference of losses in (\d+) steps: (\S+)", printed)
    assert found, printed
    assert int(found[1]) == STEPS
    assert float(found[2]) < 2e-6
