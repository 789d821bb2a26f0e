"""Runs tests in a process in which tf.keras is tf_keras."""

from __future__ import annotations

import importlib.util
import pathlib

import new_process
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = "tests/tf_keras"
LEGACY = {"TF_USE_LEGACY_KERAS": "1"}
FIRST_TIER = [f"{FOLDER}/test_models.py"]
# Those of tf_keras alone, and those that each Keras runs.
SECOND_TIER = [
    *(FOLDER, f"--ignore={FIRST_TIER[0]}"),
    *(
        f"tests/keras_layer/test_checkpoints.py::test_{name}"
        for name in (
            "names_in_checkpoints",
            "a_checkpoint_restored_before_the_layer_is_built",
            "checkpoints_of_the_layer_and_of_tpu_embedding_fit",
            "clones_are_new_models_of_the_same_kind",
        )
    ),
]
THIRD_TIER = [
    "tests/keras_layer/test_catch_up.py",
    "tests/keras_layer/test_fused_rows.py",
    "tests/keras_layer/test_growing.py",
    "tests/keras_layer/test_preprocessing_layers.py",
    "tests/keras_layer/test_row_embedding.py",
    "tests/keras_layer/test_row_sparse.py",
    "tests/keras_layer/test_row_tables.py",
]


@pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed"
)
@pytest.mark.parametrize(
    "files",
    [
        FIRST_TIER,
        pytest.param(SECOND_TIER, marks=pytest.mark.second_tier),
        pytest.param(THIRD_TIER, marks=pytest.mark.third_tier),
    ],
    ids=["first tier", "second tier", "third tier"],
)
def test_the_layer_of_tf_keras(files: list[str]):
    command = ("-m", "pytest", "-q", *files)
    run = new_process.run(*command, env=LEGACY, cwd=ROOT, timeout=900)
    print(run.stdout[-20000:])
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


@pytest.mark.second_tier
def test_without_tf_keras_the_import_says_what_to_install(tmp_path: pathlib.Path):
    (tmp_path / "tf_keras.py").write_text("raise ImportError('hidden')")
    command = ("-c", "import tpu_embedding.keras")
    run = new_process.run(*command, env=LEGACY, path=tmp_path)
    assert run.returncode == 1
    assert "TF_USE_LEGACY_KERAS is set, but tf_keras cannot be imported" in run.stderr
