"""Small embeddings that the tests of checkpoints save and restore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from steps import train_on

import tpu_embedding as te

Values = dict[str, dict[str, np.ndarray]]  # By table "parameters" and slots.
SIZES = {"films": (11, 3), "users": (6, 2)}  # Each: vocabulary, dim.


def make(
    optimizer: Any, sizes: Mapping[str, tuple[int, int]] = SIZES, **options: Any
) -> te.TPUEmbedding:
    features = {
        name: te.FeatureConfig(te.TableConfig(*size, name=name))
        for name, size in sizes.items()
    }
    return te.TPUEmbedding(features, optimizer, **options)


def train(embedding: te.TPUEmbedding, steps: int = 1) -> None:
    for _ in range(steps):
        train_on(embedding, {name: tf.constant([1, 2]) for name in SIZES})


def values(embedding: Any) -> Values:
    """What an embedding of ours or of TensorFlow's holds."""
    if isinstance(embedding, te.TPUEmbedding):
        variables = embedding.variables.items()
    else:
        embedding.build()
        variables = [
            (t, embedding._variables[t.name]) for t in embedding.embedding_tables
        ]
    return {
        config.name: {name: variable.numpy() for name, variable in arrays.items()}
        for config, arrays in variables
    }


def scramble(embedding: Any, rng: np.random.Generator) -> None:
    """Gives every row of every table and slot a value of its own."""
    embedding.build()
    of_class = isinstance(embedding, te.TPUEmbedding)
    all_arrays = embedding.variables if of_class else embedding._variables
    for arrays in all_arrays.values():
        for variable in arrays.values():
            variable.assign(rng.uniform(0.1, 1.0, variable.numpy().shape))


def assert_same(actual: Values, expected: Values) -> None:
    """Tables, slots and all bits are the same."""
    assert actual.keys() == expected.keys()
    for table, arrays in expected.items():
        assert actual[table].keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(actual[table][name], array)
