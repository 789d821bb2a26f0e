"""The parts of Keras 3 that the layer uses, apart from `keras.layers.Layer`.

No other module below `layer.py` and `symbolic.py` imports Keras.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from tpu_embedding.engines.full_table_view import LogicalVariable

Model = keras.Model
Variable = keras.Variable
Optimizer = keras.optimizers.Optimizer
LossScaleOptimizer = keras.optimizers.LossScaleOptimizer

register = keras.saving.register_keras_serializable("tpu_embedding")
serialize = keras.saving.serialize_keras_object
deserialize = keras.saving.deserialize_keras_object
serialize_optimizer = keras.optimizers.serialize
deserialize_optimizer = keras.optimizers.deserialize


def is_tracing_shapes() -> bool:
    """Whether Keras traces the call for shapes only, to build a model.

    Keras has no public function for this, nor for `is_stateless`.
    """
    return in_symbolic_scope()


def is_stateless() -> bool:
    """Whether the caller passes the weights, as in `stateless_call`."""
    return in_stateless_scope() and not in_symbolic_scope()


def as_weight(variable: Any, name: str) -> keras.Variable:
    """Wraps a table or slot for `get_weights` and everything built on it.

    Args:
      variable: A tf.Variable or a LogicalVariable.
      name: The name in checkpoints.
    """
    logical = isinstance(variable, LogicalVariable)
    return (_LogicalWeight if logical else _TableWeight)(variable, name)


def weight_name(name: str) -> str:
    """Returns a name that Keras accepts for a variable."""
    return name.replace("/", "_")


class _TableWeight(keras.Variable):
    """A view of a table or slot in the same memory."""

    def __init__(self, variable: tf.Variable, name: str) -> None:
        super().__init__(
            lambda shape, dtype: variable,
            shape=variable.shape,
            dtype=variable.dtype,
            trainable=False,
            autocast=False,
            name=weight_name(name),
        )

    def _initialize_with_initializer(self, initializer: Any) -> None:
        # Keras calls this later if it builds a model without making variables.
        self._initialize(initializer(self.shape, dtype=self.dtype))


class _LogicalWeight(_TableWeight):
    """A view of a table that TensorFlow does not store as one variable.

    Exported models refer to the variables that store the table instead.
    """

    @property
    def _should_act_as_resource_variable(self) -> bool:
        raise AttributeError  # TensorFlow checks whether the attribute exists.

    def _initialize(self, value: Any) -> None:
        self._value = value

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {}

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        del restored_tensors  # Always empty.

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> list[Any]:
        del args, kwargs
        return []
