"""Tables and slots as Keras sees them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tpu_embedding.engines.full_table_view import LogicalVariable


def as_weight(variable: Any, name: str) -> keras.Variable:
    """A table or slot, by its name in checkpoints, for `get_weights` and the like."""
    logical = isinstance(variable, LogicalVariable)
    return (_LogicalWeight if logical else _TableWeight)(variable, name)


def flat_name(name: str) -> str:
    """A name that Keras takes for a variable."""
    return name.replace("/", "_")


class _TableWeight(keras.Variable):
    """A table or slot as Keras sees it: the same memory, no copy."""

    def __init__(self, variable: tf.Variable, name: str) -> None:
        super().__init__(
            lambda shape, dtype: variable,
            shape=variable.shape,
            dtype=variable.dtype,
            trainable=False,
            autocast=False,
            name=flat_name(name),
        )

    def _initialize_with_initializer(self, initializer: Any) -> None:
        # At once, or later where Keras builds models without making variables.
        self._initialize(initializer(self.shape, dtype=self.dtype))


class _LogicalWeight(_TableWeight):
    """One that is no variable to TensorFlow; what stores it is exported instead."""

    @property
    def _should_act_as_resource_variable(self) -> bool:
        raise AttributeError  # TensorFlow asks whether there is such an attribute.

    def _initialize(self, value: Any) -> None:
        self._value = value

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {}

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        del restored_tensors  # There are none.

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> list[Any]:
        del args, kwargs
        return []
