"""Symbolic calls of the layer: checks of Keras inputs, and the shapes of outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.inputs import InputKind, kind_of
from tpu_embedding.keras.conversion import Features
from tpu_embedding.layout.output_shapes import OutputShapes, from_input

# The smallest and largest rank of each kind of input.
_RANKS: dict[InputKind, tuple[int, float, str]] = {
    InputKind.DENSE: (1, math.inf, ">= 1"),
    InputKind.SPARSE: (2, math.inf, ">= 2"),
    InputKind.RAGGED: (2, 2, "2"),
}
_NAMES = {
    InputKind.DENSE: "dense keras.Input",
    InputKind.SPARSE: "keras.Input with sparse=True",
    InputKind.RAGGED: "keras.Input with ragged=True",
}


def output_spec(features: Features, ids: Any, weights: Any, dtype: str) -> Any:
    """Checks a symbolic call and returns the KerasTensors of its activations.

    Args:
      features: The features to look up.
      ids: In the structure of the features KerasTensors or tensors.
      weights: None, or the same structure; None for features without weights.
      dtype: Of the activations.

    Raises:
      TypeError: If a structure is of the wrong type, ids are not integers, or weights
        are not floating point.
      ValueError: If an input's kind or shape does not fit its feature, or weights
        differ in layout from their ids.
    """
    plan, structure = features.plan, features.structure
    shapes = OutputShapes(plan.features)
    values = structure.flatten("features", ids)
    flat_weights = structure.flatten_weights(weights)
    outputs = []
    for spec, value, weight in zip(plan.features, values, flat_weights, strict=True):
        kind = _check_ids(spec.path, value)
        shape = tuple(value.shape)
        shapes.check_input(spec.index, shape, ragged=kind is InputKind.RAGGED)
        if weight is not None:
            _check_weights(spec.path, weight, kind, shape)
        rows = spec.config.output_shape
        if rows is None:
            rows = from_input(spec.path, spec.config, shape)
        dim = plan.tables[spec.table].config.dim
        outputs.append(keras.KerasTensor((*rows, dim), dtype=dtype))
    return structure.pack(outputs)


def output_shape(features: Features, shapes: Any) -> Any:
    """Returns the shapes of activations for shapes of inputs, in the same structure.

    Raises:
      TypeError, ValueError: As `output_spec`, for structures and shapes.
    """
    structure = features.structure
    leaves = structure.flatten("input_shape", shapes, container_leaves=True)
    inputs = []
    for spec, leaf in zip(features.plan.features, leaves, strict=True):
        try:
            shape = tuple(tf.TensorShape(leaf).as_list())
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`input_shape` must hold the shape of feature {spec.path}, a tuple "
                f"of int or None. Received: {leaf!r}."
            ) from error
        # An input of rank 2 may be ragged, which can fill more output shapes.
        inputs.append(keras.KerasTensor(shape, "int64", ragged=len(shape) == 2))
    outputs = output_spec(features, structure.pack(inputs), None, "float32")
    flat = structure.flatten("activations", outputs)
    return structure.pack([tuple(output.shape) for output in flat])


def with_integer_ids(values: Sequence[Any]) -> list[Any]:
    """Casts the ids of a call that Keras traces for shapes only.

    With several replicas, `fit` and `evaluate` build a model with the mean of the
    replicas' first batches, in which ids are floating point.
    """
    return [
        tf.cast(value, tf.int64)
        if tf.is_tensor(value) and value.dtype.is_floating
        else value
        for value in values
    ]


def _check_ids(path: str, value: Any) -> InputKind:
    kind = _kind(value)
    if kind is None:
        raise errors.feature_kind(path, value)
    name = keras.backend.standardize_dtype(value.dtype)
    if name not in ("int32", "int64"):
        raise TypeError(
            f"The ids of feature {path} must be int32 or int64. Received: a symbolic "
            f'tensor of {name}. Use `keras.Input(shape, dtype="int64")`, also as the '
            "first layer of a Sequential, which otherwise assumes float32."
        )
    smallest, largest, allowed = _RANKS[kind]
    if not smallest <= len(value.shape) <= largest:
        raise errors.input_rank(path, kind.value, len(value.shape), allowed)
    return kind


def _check_weights(path: str, weights: Any, kind: InputKind, shape: Any) -> None:
    if _kind(weights) is not kind:
        raise errors.weights_kind(path, _NAMES[kind], weights)
    name = keras.backend.standardize_dtype(weights.dtype)
    if not tf.as_dtype(name).is_floating:
        raise errors.weights_dtype(path, name)
    if not tf.TensorShape(shape).is_compatible_with(weights.shape):
        raise errors.weights_shape(path, shape, tuple(weights.shape))


def _kind(value: Any) -> InputKind | None:
    if not isinstance(value, keras.KerasTensor):
        return kind_of(value)
    if getattr(value, "ragged", False):
        return InputKind.RAGGED
    return InputKind.SPARSE if value.sparse else InputKind.DENSE
