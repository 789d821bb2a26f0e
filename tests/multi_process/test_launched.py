"""`python -m tpu_embedding launch` trains on after a kill, in another number."""

from __future__ import annotations

import json
import pathlib
import re

import documented_pages
import numpy as np
import pytest
import tensorflow as tf
from multi_process import launched_program
from new_process import printed_by

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "distributed.md"


def launch(*arguments: str) -> str:
    """Runs `python -m tpu_embedding launch`; what it printed."""
    nothing = {"GCE_METADATA_IP": "127.0.0.1:9"}  # Nothing answers there.
    command = ("-m", "tpu_embedding", "launch", *arguments)
    return printed_by(*command, env=nothing, timeout=200)


@pytest.mark.second_tier
def test_a_kill_and_another_number_keep_the_bits(tmp_path: pathlib.Path) -> None:
    restarts = ["--processes", "2,3", "--restarts", "1"]
    restarts += ["--status", str(tmp_path / "status.json")]
    printed = launch(*restarts, launched_program.__file__, str(tmp_path), "4:2")
    for begin in ("0 of 2", "3 of 3"):
        assert f"begins at {begin}" in printed
    status = json.loads((tmp_path / "status.json").read_text())
    for number, process in enumerate(status["processes"]):
        said = process["telemetry"]
        assert said["steps"] == launched_program.STEPS - 3
        assert said["steps_per_second"] > 0
        samples = said["samples_per_second"] / said["steps_per_second"]
        assert samples == pytest.approx(launched_program.SAMPLES / 3)
        assert said["bytes_per_step"] > 0
        assert [seconds > 0 for seconds in said["waited_seconds"]] == [
            other != number for other in range(3)
        ]
    expected = np.ones([50, 8], np.float32)
    for step in range(launched_program.STEPS):
        ids, factors = launched_program.batch(step)
        np.subtract.at(expected, ids, 0.25 * factors)
    path = str(tmp_path / "step_12")
    names = [name for name, _ in tf.train.list_variables(path)]
    (name,) = [name for name in names if re.search("films.*VARIABLE_VALUE", name)]
    np.testing.assert_array_equal(tf.train.load_variable(path, name), expected)


@pytest.mark.third_tier
def test_the_loop_instead_of_fit_trains_in_two_processes(
    tmp_path: pathlib.Path,
) -> None:
    """The page's program, whose data end in one process before the other."""
    program = tmp_path / "page.py"
    program.write_text(documented_pages.program(PAGE))
    printed = launch("--processes", "2", str(program))
    found = re.findall(r"\{'loss': \[.*\]\}", printed)
    assert len(found) == 2
    assert found[0] == found[1]
