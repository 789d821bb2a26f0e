"""The benchmark runs, on a scenario that is too small to say anything."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import tpu_embedding

CHECKOUT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def root(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder on the path with `benchmarks`, but not the checkout's package."""
    (tmp_path / "benchmarks").symlink_to(CHECKOUT / "benchmarks")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_scenarios() -> None:
    scenarios = importlib.import_module("benchmarks.scenarios").SCENARIOS
    assert scenarios["dlrm"].ids_per_step == 438_272
    for batch in scenarios["tiny"].batches(2):
        for ids, rows in zip(batch, scenarios["tiny"].rows, strict=True):
            assert ids.dtype == np.int32
            assert 0 <= ids.min() <= ids.max() < rows


def test_run_writes_its_three_files(root: pathlib.Path) -> None:
    out = root / "out"
    command = [sys.executable, "-m", "benchmarks.run", "--scenario", "tiny"]
    options = ["--rounds", "2", "--out", str(out), "--peers", "tensorflow_nn", "no"]
    package = pathlib.Path(tpu_embedding.__file__).parents[1]
    path = os.pathsep.join([str(root), str(package)])
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    subprocess.run([*command, *options], env=environment, check=True)
    results = json.loads((out / "tiny-adagrad.json").read_text())
    assert set(results["tpu_embedding"]["milliseconds"]) == {"lookup", "step"}
    assert results["tensorflow_nn"]["missing"] is None
    assert "No module named" in results["no"]["missing"]
    table = (out / "tiny-adagrad.md").read_text()
    report = importlib.import_module("benchmarks.report")
    assert table == report.markdown("tiny-adagrad", "tpu_embedding", results)
    assert "| no | not measured: No module named" in table
    assert (out / "tiny-adagrad.png").stat().st_size > 0
