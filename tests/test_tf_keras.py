"""Runs tests in a process in which tf.keras is tf_keras."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent
# Those of tf_keras alone, and those that each Keras runs.
FILES = [
    "tests/tf_keras",
    "tests/keras_layer/test_preprocessing_layers.py",
    "tests/keras_layer/test_row_embedding.py",
    "tests/keras_layer/test_row_sparse.py",
]


@pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed"
)
def test_the_layer_of_tf_keras():
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", *FILES],
        cwd=TESTS.parent,
        env={**os.environ, "TF_USE_LEGACY_KERAS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    print(run.stdout[-20000:])
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


def test_without_tf_keras_the_import_says_what_to_install(tmp_path: pathlib.Path):
    (tmp_path / "tf_keras.py").write_text("raise ImportError('hidden')")
    run = subprocess.run(
        [sys.executable, "-c", "import tpu_embedding.keras"],
        env={
            **os.environ,
            "TF_USE_LEGACY_KERAS": "1",
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 1
    assert "TF_USE_LEGACY_KERAS is set, and tf_keras cannot be imported" in run.stderr
