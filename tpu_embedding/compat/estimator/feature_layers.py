"""DenseFeatures and SequenceFeatures of TensorFlow 1, without Keras.

Variables have the names that tf.compat.v1.keras.layers.DenseFeatures gives them, so
that checkpoints fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.compat.estimator import private_tensorflow

_v1 = tf.compat.v1


def dense_features(
    features: Mapping[str, Any],
    feature_columns: Sequence[Any],
    *,
    name: str = "dense_features",
    trainable: bool = True,
) -> tf.Tensor:
    """Makes one dense tensor of the features, for use in a model_fn.

    Args:
      features: The features that were passed to the model_fn.
      feature_columns: Dense columns of tf.feature_column and of
        tf.compat.v1.tpu.experimental.
      name: The variable scope.
      trainable: Whether the variables of columns are trainable.

    Returns:
      float32 [B, sum of widths], the columns side by side in the order of their names.

    Raises:
      ValueError: If a column is not dense.
    """
    columns = _sorted("dense_features", feature_columns, "get_dense_tensor")
    cache, manager = _state(features, columns, name, trainable)
    parts = []
    for column in columns:
        tensor = column.get_dense_tensor(cache, manager)
        parts.append(tf.reshape(tensor, [-1, math.prod(column.variable_shape)]))
    return tf.concat(parts, axis=1)


def sequence_features(
    features: Mapping[str, Any],
    feature_columns: Sequence[Any],
    *,
    name: str = "sequence_features",
    trainable: bool = True,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Makes one dense tensor of sequence columns, as `dense_features` does.

    Returns:
      (float32 [B, T, sum of widths], the number of positions in each sample [B]).
    """
    columns = _sorted("sequence_features", feature_columns, "get_sequence_dense_tensor")
    cache, manager = _state(features, columns, name, trainable)
    parts, lengths = [], []
    for column in columns:
        pair = column.get_sequence_dense_tensor(cache, manager)
        shape = tf.shape(pair.dense_tensor)
        width = math.prod(column.variable_shape)
        parts.append(tf.reshape(pair.dense_tensor, [shape[0], shape[1], width]))
        lengths.append(pair.sequence_length)
    for other in lengths[1:]:
        same = _v1.assert_equal(lengths[0], other)
        with tf.control_dependencies([same]):
            lengths[0] = tf.identity(lengths[0])
    return tf.concat(parts, axis=2), lengths[0]


def _sorted(function: str, columns: Sequence[Any], method: str) -> list[Any]:
    for column in columns:
        if not hasattr(column, method) or not hasattr(column, "variable_shape"):
            raise ValueError(
                f"{function} does not support this kind of column. Received: "
                f"{column!r} of type {errors.type_name(column)}. Wrap categorical "
                "columns in an embedding or indicator column."
            )
    return sorted(columns, key=lambda column: column.name)


def _state(
    features: Mapping[str, Any], columns: list[Any], name: str, trainable: bool
) -> tuple[Any, _Variables]:
    manager = _Variables(trainable)
    # Only the variables are made in this scope: shared ones have the scope in which
    # their activations are taken, as under Keras.
    with _v1.variable_scope(None, default_name=name):
        for column in columns:
            with _v1.variable_scope(column.name):
                column.create_state(manager)
    return private_tensorflow.feature_cache(features), manager


class _Variables(private_tensorflow.StateManager):
    """Keeps the variables and resources of columns."""

    def __init__(self, trainable: bool) -> None:
        self._trainable = trainable
        self._variables: dict[tuple[Any, str], tf.Variable] = {}
        self._resources: dict[tuple[Any, str], Any] = {}

    def create_variable(
        self,
        feature_column: Any,
        name: str,
        shape: Any,
        dtype: Any = None,
        trainable: bool = True,
        use_resource: bool = True,
        initializer: Any = None,
    ) -> tf.Variable:
        """Makes a variable in the current scope."""
        variable = _v1.get_variable(
            name,
            shape=shape,
            dtype=dtype or tf.float32,
            trainable=self._trainable and trainable,
            use_resource=use_resource,
            initializer=initializer,
        )
        self._variables[feature_column, name] = variable
        return variable

    def get_variable(self, feature_column: Any, name: str) -> tf.Variable:
        """Returns the variable that `create_variable` made."""
        return self._variables[feature_column, name]

    def add_resource(self, feature_column: Any, name: str, resource: Any) -> None:
        """Keeps a resource of a column, such as a lookup table."""
        self._resources[feature_column, name] = resource

    def has_resource(self, feature_column: Any, name: str) -> bool:
        """Returns whether a resource was kept."""
        return (feature_column, name) in self._resources

    def get_resource(self, feature_column: Any, name: str) -> Any:
        """Returns the resource that was kept."""
        return self._resources[feature_column, name]
