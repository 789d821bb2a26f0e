"""A ranking model like DLRM: its embedding tables, and its dense model in Keras.

Naumov et al. (2019), Deep Learning Recommendation Model for Personalization and
Recommendation Systems, https://arxiv.org/abs/1906.00091. This model adds a bias for
each user and each film, as tables of dim 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tpu_embedding as te

DIM = 64  # Wide enough that int8 rows, with four bytes more, take about a quarter.
NUM_DENSE = 3
DROPOUT = 0.2

Symbolic = Any  # A Keras tensor that has no value yet.

FeatureConfigs = dict[str, te.FeatureConfig]


def make_feature_config(
    vocabulary_sizes: Mapping[str, int], batch_size: int | None = None
) -> FeatureConfigs:
    """Makes features by name, each with its own table.

    Args:
      vocabulary_sizes: Number of ids of each feature, by name.
      batch_size: Batch size of a replica, which TPUs need to know in advance.
    """
    shape = None if batch_size is None else [batch_size]
    return {
        name: te.FeatureConfig(_make_table(name, size), output_shape=shape, name=name)
        for name, size in vocabulary_sizes.items()
    }


def _make_table(name: str, size: int) -> te.TableConfig:
    if name.endswith("_bias"):
        slow = te.Adagrad(0.02)
        return te.TableConfig(size, 1, tf.zeros_initializer(), slow, name=name)
    small = tf.random_normal_initializer(stddev=0.05)
    return te.TableConfig(size, DIM, small, combiner="mean", name=name)


def make_dense_part(features: FeatureConfigs, mean_rating: float) -> keras.Model:
    """Makes the dense model.

    rating = user bias + item bias + top([vectors, dots of all pairs of vectors]),
    where the vectors are the activations of all other features and bottom(dense).

    Args:
      features: The names of the activations and their dims.
      mean_rating: The initial value of the top part's own bias.

    Returns:
      A model of one dict of inputs, float32: the activations [B, dim] by name, and
      "numbers" [B, 3]. Its output has the shape [B].
    """
    inputs = {
        name: keras.Input([config.table.dim], name=name)
        for name, config in features.items()
    }
    dense = keras.Input([NUM_DENSE], name="numbers")
    biases = [x for name, x in inputs.items() if name.endswith("_bias")]
    vectors = [x for name, x in inputs.items() if not name.endswith("_bias")]
    vectors.append(_dense_layers(dense, [32, DIM]))
    top = keras.layers.Concatenate()([*vectors, _dots_of_pairs(vectors)])
    top = keras.layers.Dropout(DROPOUT)(top)
    top = _dense_layers(top, [64, 32])
    start = keras.initializers.Constant(mean_rating)
    top = keras.layers.Dense(1, bias_initializer=start)(top)
    rating = keras.ops.squeeze(sum(biases, start=top), axis=1)
    return keras.Model({**inputs, "numbers": dense}, rating)


def _dense_layers(x: Symbolic, sizes: Sequence[int]) -> Symbolic:
    for size in sizes:
        x = keras.layers.Dense(size, "relu")(x)
    return x


def _dots_of_pairs(vectors: Sequence[Symbolic]) -> Symbolic:
    """Computes the dot products of all pairs: [B, dim] each -> [B, pairs]."""
    count = len(vectors)
    stacked = keras.ops.stack(vectors, axis=1)
    dots = keras.ops.matmul(stacked, keras.ops.transpose(stacked, [0, 2, 1]))
    rows, columns = np.tril_indices(count, -1)
    flat = keras.ops.reshape(dots, [-1, count * count])
    return keras.ops.take(flat, rows * count + columns, axis=1)
