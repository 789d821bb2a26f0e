"""The shapes that symbolic calls of the layer have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.inputs import InputKind, kind_of
from tpu_embedding.keras import errors as keras_errors
from tpu_embedding.keras.resolve import Resolved
from tpu_embedding.keras.running import is_tracing_shapes
from tpu_embedding.layout.output_shapes import OutputShapes, from_input
from tpu_embedding.layout.plan import FeatureSpec

# The ranks that each kind may have.
_RANKS: dict[InputKind, tuple[int, float, str]] = {
    InputKind.DENSE: (1, math.inf, ">= 1"),
    InputKind.SPARSE: (2, math.inf, ">= 2"),
    InputKind.RAGGED: (2, 2, "2"),
}
_WORDS = {
    InputKind.DENSE: "dense keras.Input",
    InputKind.SPARSE: "keras.Input with sparse=True",
    InputKind.RAGGED: "keras.Input with ragged=True",
}


def output_spec(resolved: Resolved, features: Any, weights: Any, dtype: str) -> Any:
    """The KerasTensors that a call with `features` and `weights` gives.

    Args:
      resolved: What is looked up.
      features: In its structure KerasTensors or tensors of ids.
      weights: None, or the same of weights, or None for features without.
      dtype: Of the activations.

    Raises:
      TypeError: If ids are not of integer dtype, weights not of a floating one, or a
        structure is of another type.
      ValueError: If an input is of a kind or shape that does not fit its feature, or
        weights are unlike their ids.
    """
    plan = resolved.plan
    shapes = OutputShapes(plan.features)
    values = resolved.structure.flatten("features", features)
    flat_weights = resolved.structure.flatten_weights(weights)
    outputs = []
    for spec, value, weight in zip(plan.features, values, flat_weights, strict=True):
        symbol = _Symbol.of(spec.path, value)
        shapes.check_input(
            spec.index, symbol.shape, ragged=symbol.kind is InputKind.RAGGED
        )
        if weight is not None:
            symbol.check_weights(spec.path, weight)
        if spec.config.output_shape is not None:
            rows = spec.config.output_shape
        else:
            rows = from_input(spec.path, spec.config, symbol.shape)
        dim = plan.tables[spec.table].config.dim
        outputs.append(keras.KerasTensor((*rows, dim), dtype=dtype))
    return resolved.structure.pack(outputs)


def output_shape(resolved: Resolved, shapes: Any) -> Any:
    """The shapes of activations for input shapes in the structure of the features.

    Raises:
      The errors of `output_spec` that concern structures and shapes.
    """
    leaves = resolved.structure.flatten("input_shape", shapes, container_leaves=True)
    inputs = [
        # A shape of rank 2 may be that of ragged input, which fills more outputs.
        keras.KerasTensor(shape, "int64", ragged=len(shape) == 2)
        for shape in map(_standardized, resolved.plan.features, leaves)
    ]
    outputs = output_spec(resolved, resolved.structure.pack(inputs), None, "float32")
    flat = resolved.structure.flatten("activations", outputs)
    return resolved.structure.pack([tuple(output.shape) for output in flat])


def _standardized(spec: FeatureSpec, shape: Any) -> tuple[int | None, ...]:
    try:
        return tuple(tf.TensorShape(shape).as_list())
    except (TypeError, ValueError) as error:
        raise keras_errors.input_shape(spec.path, shape) from error


@dataclasses.dataclass(frozen=True)
class _Symbol:
    """What is known of one feature before there are ids.

    Attributes:
      kind: How the ids will be laid out.
      shape: (rows, None) if ragged.
    """

    kind: InputKind
    shape: tuple[int | None, ...]

    @classmethod
    def of(cls, path: str, value: Any) -> _Symbol:
        """Reads the KerasTensor or tensor of a feature."""
        kind = _kind(value)
        if kind is None:
            raise errors.feature_kind(path, value)
        name = keras.backend.standardize_dtype(value.dtype)
        if name not in ("int32", "int64"):
            raise keras_errors.symbolic_dtype(path, name)
        smallest, largest, words = _RANKS[kind]
        if not smallest <= len(value.shape) <= largest:
            raise errors.input_rank(path, kind.value, len(value.shape), words)
        return cls(kind, tuple(value.shape))

    def check_weights(self, path: str, weights: Any) -> None:
        """Raises unless weights are laid out as the ids are."""
        if _kind(weights) is not self.kind:
            raise errors.weights_kind(path, _WORDS[self.kind], weights)
        name = keras.backend.standardize_dtype(weights.dtype)
        if not tf.as_dtype(name).is_floating:
            raise errors.weights_dtype(path, name)
        if not tf.TensorShape(self.shape).is_compatible_with(weights.shape):
            raise errors.weights_shape(path, self.shape, tuple(weights.shape))


def _kind(value: Any) -> InputKind | None:
    if not isinstance(value, keras.KerasTensor):
        return kind_of(value)
    if getattr(value, "ragged", False):
        return InputKind.RAGGED
    return InputKind.SPARSE if value.sparse else InputKind.DENSE


def with_integer_ids(values: Sequence[Any]) -> list[Any]:
    """The ids; as int64 where Keras traces shapes only, to build a model.

    With several replicas `fit` and `evaluate` build a model with the mean of their
    first batches, in which ids are no integers.
    """
    if not is_tracing_shapes():
        return list(values)
    return [
        tf.cast(value, tf.int64)
        if tf.is_tensor(value) and value.dtype.is_floating
        else value
        for value in values
    ]
