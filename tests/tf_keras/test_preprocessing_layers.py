"""Preprocessing layers of tf_keras before a lookup."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_layer.version import keras as tf_keras

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding

WORDS = [["b"], ["zz"], ["a"]]
EXPECTED = [[2.0], [0.0], [1.0]]  # With the vocabulary "a", "b"


@pytest.mark.parametrize("kind", ["scalar", "column", "ragged", "sparse"])
def test_strings_are_looked_up(kind: str, tmp_path: pathlib.Path):
    shape, options = {
        "scalar": ((), {}),
        "column": ((1,), {}),
        "ragged": ((None,), {"ragged": True}),
        "sparse": ((None,), {"sparse": True}),
    }[kind]
    words = tf_keras.Input(shape, dtype="string", name="word", **options)
    ids = tf_keras.layers.StringLookup(vocabulary=["a", "b"])(words)
    table = te.TableConfig(3, 1, te.RowIdInitializer(), name="t")
    layer = TPUEmbedding({"word": te.FeatureConfig(table)}, te.SGD(0.1))
    model = tf_keras.Model({"word": words}, layer({"word": ids})["word"])
    dense = tf.constant(WORDS)
    batch: Any = {
        "scalar": dense[:, 0],
        "column": dense,
        "ragged": tf.RaggedTensor.from_tensor(dense),
        "sparse": tf.sparse.from_dense(dense),
    }[kind]
    np.testing.assert_array_equal(model({"word": batch}), EXPECTED)
    model.save(tmp_path / "model.keras")
    loaded = tf_keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded({"word": batch}), EXPECTED)
