"""The layer of TFRS and those of this package, for tf_keras and for Keras 3, agree.

On a CPU the TFRS layer hands its tables to the optimizer of the model.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
import subprocess
from typing import Any

import new_process
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs  # pyright: ignore[reportMissingImports]
import tf_keras  # pyright: ignore[reportMissingImports]
from peers import losses
from tensorflow_recommenders.layers.embedding import (  # pyright: ignore[reportMissingImports]
    tpu_embedding_layer,
)

from tpu_embedding import checkpoint
from tpu_embedding.keras import TPUEmbedding

SEED = 7
TESTS = pathlib.Path(__file__).parents[1]
legacy = tf_keras.optimizers.legacy


def run_python(*arguments: str, legacy: str) -> subprocess.CompletedProcess[str]:
    variables = {"TF_USE_LEGACY_KERAS": legacy}
    return new_process.run(*arguments, env=variables, path=TESTS, timeout=900)


@functools.cache
def of_keras3() -> dict[str, list[float]]:
    run = run_python("-m", "peers.losses", str(SEED), legacy="0")
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", losses.OPTIMIZERS)
def test_the_losses_of_three_layers_agree(name: str):
    optimizer = getattr(legacy, name)(losses.RATE)
    layer = tpu_embedding_layer.TPUEmbedding(losses.make_feature_config(), optimizer)
    of_tfrs = losses.losses(layer, optimizer, losses.batches(SEED))
    assert abs(of_tfrs[-1] - of_tfrs[0]) > 1e-2  # It does learn something.
    of_legacy = losses.of_this_package(legacy, name, SEED)
    of_new = losses.of_this_package(tf_keras.optimizers, name, SEED)
    for ours in (of_legacy, of_new, of_keras3()[name]):
        difference = np.abs(np.subtract(ours, of_tfrs)).max()
        print(f"{name}: largest difference over {len(ours)} steps: {difference:.2g}")
        np.testing.assert_allclose(ours, of_tfrs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("file", "cases"),
    [
        ("layers/embedding/tpu_embedding_layer_test.py", 12),
        ("experimental/layers/embedding/partial_tpu_embedding_test.py", 4),
        ("layers/feature_multiplexing/unified_embedding_test.py", 6),
    ],
)
def test_the_tests_of_layers_of_tfrs_pass(file: str, cases: int):
    """Those in its wheel, unchanged; `test_session` is skipped."""
    source = pathlib.Path(tfrs.__file__).parent / file
    run = run_python("-m", "tpu_embedding", "run", str(source), legacy="1")
    assert run.returncode == 0, run.stderr[-2000:]
    passed = re.findall(r"\[       OK \] (\w+\.test_(?!session)\w+)", run.stderr)
    assert len({*passed}) == cases
    assert "FAILED" not in run.stderr


UNIFIED = """
import tpu_embedding as te
te.install()
import numpy as np
import tensorflow as tf
from tensorflow_recommenders.layers.feature_multiplexing import unified_embedding
config = unified_embedding.UnifiedEmbeddingConfig(10, 8, 3, "films")
config.add_feature("liked", 2)
layer = unified_embedding.UnifiedEmbedding(config, te.SGD())
ids = {"liked": tf.constant([["a", "b"], ["c", "a"]])}
(expected,) = layer(ids)
assert expected.shape == [2, 2, 16]
copy = unified_embedding.UnifiedEmbedding.from_config(layer.get_config())
copy(ids)
copy.set_weights(layer.get_weights())
np.testing.assert_array_equal(copy(ids)[0], expected)
"""


def test_unified_embedding_is_made_of_its_configuration():
    """Its own `from_config` asks for a key that its `get_config` does not give."""
    run = run_python("-c", UNIFIED, legacy="1")
    assert run.returncode == 0, run.stderr[-2000:]


class Ranking(tfrs.Model):
    """A model as the tutorials of TFRS write it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.embedding = layer
        ones = tf_keras.initializers.Constant(0.5)
        self.score = tf_keras.layers.Dense(1, kernel_initializer=ones)
        self.task = tfrs.tasks.Ranking(loss=tf_keras.losses.MeanSquaredError())

    def call(self, features: Any) -> Any:
        activations = self.embedding(features)
        return self.score(tf.concat([activations["seen"], activations["user"]], -1))

    def compute_loss(self, inputs: Any, training: bool = False) -> Any:
        features, labels = inputs
        return self.task(labels=labels, predictions=self(features))


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Ftrl"])
def test_a_model_of_tfrs_is_fitted(name: str):
    steps = losses.batches(SEED)[:10]
    history = []
    for cls in (tpu_embedding_layer.TPUEmbedding, TPUEmbedding):
        optimizer = getattr(legacy, name)(losses.RATE)
        model = Ranking(cls(losses.make_feature_config(), optimizer))
        model.compile(optimizer)
        found = [model.train_on_batch(*step) for step in steps]
        history.append(found)
    np.testing.assert_allclose(history[1], history[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["Adagrad", "Adam", "Ftrl"])
def test_checkpoints_of_tfrs_are_read(name: str, tmp_path: pathlib.Path):
    optimizer = getattr(legacy, name)(losses.RATE)
    layer = tpu_embedding_layer.TPUEmbedding(losses.make_feature_config(), optimizer)
    losses.losses(layer, optimizer, losses.batches(SEED)[:3])
    path = tf.train.Checkpoint(model=layer, optimizer=optimizer).write(
        str(tmp_path / "tfrs")
    )
    expected = {t.name: v.numpy() for t, v in layer.embedding_tables.items()}
    tables = checkpoint.read(path)
    ours = TPUEmbedding(losses.make_feature_config(), optimizer)
    for table, variable in ours.embedding_tables.items():
        variable.assign(tables[table.name].parameters.numpy())
        np.testing.assert_array_equal(variable.numpy(), expected[table.name])
        assert set(tables[table.name].slots)
