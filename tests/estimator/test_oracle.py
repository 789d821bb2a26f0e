"""The trainer against the reference runs, with use_tpu=False and use_tpu=True."""

from __future__ import annotations

import itertools
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest
from estimator import oracle
from estimator.estimator_models import reference_estimator, reference_inputs, variables

RUNS = pytest.mark.parametrize("folder", oracle.RUNS, ids=oracle.RUN_IDS)
USE_TPU = pytest.mark.parametrize("use_tpu", [False, True], ids=["cpu", "tpu"])


def predictions(trained: Any, run: oracle.Run) -> np.ndarray:
    count = len(run.arrays["predictions"])
    found = itertools.islice(trained.predict(reference_inputs(run)), count)
    return np.array([sample["out"] for sample in found])


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=0, atol=oracle.TOLERANCE, err_msg=name
        )


def test_there_are_runs():
    assert oracle.RUNS


@USE_TPU
@RUNS
def test_reference_run(folder: pathlib.Path, use_tpu: bool, tmp_path: pathlib.Path):
    run = oracle.load(folder)
    trained = reference_estimator(run, tmp_path, use_tpu=use_tpu)
    trained.train(reference_inputs(run), steps=run.meta["steps"])
    assert_same(variables(trained), run.variables)
    metrics = trained.evaluate(reference_inputs(run), steps=1)
    assert_same(metrics, run.meta["eval"])
    np.testing.assert_allclose(
        predictions(trained, run),
        run.arrays["predictions"],
        rtol=0,
        atol=oracle.TOLERANCE,
    )


@RUNS
def test_reference_checkpoint(folder: pathlib.Path, tmp_path: pathlib.Path):
    """It predicts the same, and two more steps are the same on both paths."""
    run = oracle.load(folder)
    found = {}
    for use_tpu in (False, True):
        copy = tmp_path / str(use_tpu)
        shutil.copytree(run.checkpoint, copy)
        trained = reference_estimator(run, copy, use_tpu=use_tpu, cross_shard=True)
        if use_tpu:  # Of the other path the next steps show what it has read.
            np.testing.assert_allclose(
                predictions(trained, run),
                run.arrays["predictions"],
                rtol=0,
                atol=oracle.TOLERANCE,
            )
        trained.train(reference_inputs(run), steps=2)
        found[use_tpu] = variables(trained)
        assert found[use_tpu]["global_step"] == run.meta["steps"] + 2
        # By how much is the rate's affair, and other runs may have a small one.
        assert (found[use_tpu]["head"] != run.variables["head"]).any()
    assert_same(found[True], found[False])
