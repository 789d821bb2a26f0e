"""`python -m tpu_embedding launch` trains on after a kill, in another number."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from multi_process import launched_program

import tpu_embedding as te

PACKAGE = pathlib.Path(te.__file__).parents[1]


@pytest.mark.second_tier
def test_a_kill_and_another_number_keep_the_bits(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-P", "-m", "tpu_embedding", "launch"]
    command += ["--processes", "2,3", "--restarts", "1"]
    done = subprocess.run(
        [*command, launched_program.__file__, str(tmp_path), "4:2"],
        env={
            **os.environ,
            "PYTHONPATH": str(PACKAGE),
            "GCE_METADATA_IP": "127.0.0.1:9",  # Nothing answers there.
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for begin in ("0 of 2", "3 of 3"):
        assert f"begins at {begin}" in done.stdout
    expected = np.ones([50, 8], np.float32)
    for step in range(launched_program.STEPS):
        ids, factors = launched_program.batch(step)
        np.subtract.at(expected, ids, 0.25 * factors)
    path = str(tmp_path / "step_12")
    names = [name for name, _ in tf.train.list_variables(path)]
    (name,) = [name for name in names if re.search("films.*VARIABLE_VALUE", name)]
    np.testing.assert_array_equal(tf.train.load_variable(path, name), expected)
