"""Model.fit of tf_keras under ParameterServerStrategy."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import tpu_embedding as te

SCRIPT = pathlib.Path(__file__).with_name("parameter_server_fit.py")


def test_fit_has_the_bits_of_one_process() -> None:
    """In a process of its own: a cluster belongs to an eager context."""
    paths = [pathlib.Path(te.__file__).parents[1], SCRIPT.parents[1], *sys.path]
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["passed"], done.stderr[-4000:]
