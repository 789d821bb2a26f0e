"""The shapes that symbolic calls of the layer have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from tpu_embedding import errors
from tpu_embedding.keras import errors as keras_errors
from tpu_embedding.keras.configs import Resolved
from tpu_embedding.layout.output_shapes import OutputShapes, from_input


def output_spec(resolved: Resolved, features: Any, dtype: str) -> Any:
    """The KerasTensors that a call with `features` gives.

    Args:
      resolved: What is looked up.
      features: In its structure KerasTensors or tensors of ids.
      dtype: Of the activations.

    Raises:
      TypeError: If ids are not of integer dtype.
      ValueError: If the shape of an input does not fit its feature.
    """
    plan = resolved.plan
    shapes = OutputShapes(plan.features)
    inputs = resolved.structure.flatten("features", features)
    outputs = []
    for spec, value in zip(plan.features, inputs, strict=True):
        name = keras.backend.standardize_dtype(value.dtype)
        if name not in ("int32", "int64"):
            raise keras_errors.symbolic_dtype(spec.path, name)
        shape = tuple(value.shape)
        if not shape:
            raise errors.input_rank(spec.path, "symbolic", 0, ">= 1")
        ragged = bool(getattr(value, "ragged", False))
        shapes.check_input(spec.index, shape, ragged=ragged)
        if spec.config.output_shape is not None:
            rows = spec.config.output_shape
        else:
            rows = from_input(spec.path, spec.config, shape)
        dim = plan.tables[spec.table].config.dim
        outputs.append(keras.KerasTensor((*rows, dim), dtype=dtype))
    return resolved.structure.pack(outputs)


def with_integer_ids(values: Sequence[Any]) -> list[Any]:
    """The ids; as int64 where Keras traces shapes only, to build a model.

    With several replicas `fit` and `evaluate` build a model with the mean of their
    first batches, in which ids are no integers. There is no public function that
    tells of this.
    """
    if not in_symbolic_scope():
        return list(values)
    return [
        tf.cast(value, tf.int64)
        if tf.is_tensor(value) and value.dtype.is_floating
        else value
        for value in values
    ]
