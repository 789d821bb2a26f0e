"""Checks inputs of which Keras knows the kinds and shapes, but no values yet."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tpu_embedding import errors
from tpu_embedding.config import TableConfig
from tpu_embedding.inputs import InputKind, kind_of
from tpu_embedding.layout.output_shapes import OutputShapes, Shape, from_input
from tpu_embedding.layout.plan import FeatureSpec, Plan

PLACEHOLDER = "virtual"  # The name of the placeholder variable in files.

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


@dataclasses.dataclass(frozen=True)
class Symbol:
    """What is known about ids or weights.

    Attributes:
      kind: Their kind, or None if they are not a tensor.
      shape: Their static shape; None for an unknown axis.
      dtype: The name of their dtype.
      value: The object, for error messages.
      may_differ: Whether the values may turn out to be of another kind.
    """

    kind: InputKind | None
    shape: tuple[int | None, ...]
    dtype: str
    value: Any = None
    may_differ: bool = False

    @property
    def may_be_ragged(self) -> bool:
        """Whether the rows may fill an output shape of several axes."""
        return self.kind is InputKind.RAGGED or (
            self.may_differ and len(self.shape) == 2
        )

    @property
    def dense_rank(self) -> int | None:
        """The rank of a dense input, else None."""
        dense = self.kind is InputKind.DENSE and not self.may_differ
        return len(self.shape) if dense else None

    @classmethod
    def of(cls, value: Any) -> Symbol:
        """Describes a tensor, or anything else."""
        kind = kind_of(value)
        if kind is None:
            return cls(None, (), "", value)
        return cls(kind, tuple(value.shape), value.dtype.name, value)


def output_shapes(
    plan: Plan, ids: Sequence[Symbol], weights: Sequence[Symbol | None]
) -> list[Shape]:
    """Checks inputs and returns the shape of the activations of each feature."""
    shapes = OutputShapes(plan.features)
    found = []
    for spec, symbol, weight in zip(plan.features, ids, weights, strict=True):
        _check_ids(spec, symbol)
        shape = symbol.shape
        shapes.check_input(spec.index, shape, ragged=symbol.may_be_ragged)
        if weight is not None:
            _check_weights(spec.path, weight, symbol)
        rows = spec.config.output_shape
        if rows is None:
            rows = from_input(spec.path, spec.config, shape)
            _tell_what_is_combined(spec, plan.tables[spec.table].config, symbol)
        found.append((*rows, plan.tables[spec.table].config.dim))
    return found


def as_samples(values: Sequence[Symbol | None], alone: Sequence[bool]) -> list[Any]:
    """Makes each of the ids or weights that stand alone a sample."""
    return [
        dataclasses.replace(value, shape=(None,)) if each and value else value
        for value, each in zip(values, alone, strict=True)
    ]


def from_shape(path: str, shape: Any) -> Symbol:
    """Describes the ids of a feature of which only the shape is known."""
    try:
        sizes = tuple(tf.TensorShape(shape).as_list())
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`input_shape` must hold the shape of feature {path}, a tuple "
            f"of int or None. Received: {shape!r}."
        ) from error
    # An input of rank 2 may be ragged, which can fill more output shapes.
    kind = InputKind.RAGGED if len(sizes) == 2 else InputKind.DENSE
    return Symbol(kind, sizes, "int64")


def _tell_what_is_combined(spec: FeatureSpec, table: TableConfig, ids: Symbol) -> None:
    """Warns once if ids are combined that keras.layers.Embedding would not combine."""
    combined = ids.dense_rank == 2 and ids.shape[1] != 1
    if combined and not spec.config.max_sequence_length:
        logging.log_first_n(
            logging.WARNING,
            f"Feature {spec.path} has an Input of shape {ids.shape}: the ids of its "
            f"last axis are combined ({table.combiner!r}), and the activations are "
            f"[batch, {table.dim}]. For one activation per position set "
            f"FeatureConfig(max_sequence_length={ids.shape[1] or 'the length'}).",
            1,
        )


def _check_ids(spec: FeatureSpec, ids: Symbol) -> None:
    path = spec.path
    if ids.kind is None:
        raise errors.feature_kind(path, ids.value)
    strings = ids.dtype == "string"
    if strings and not spec.string_ids:
        raise errors.string_ids(path)
    if not strings and ids.dtype not in ("int32", "int64"):
        raise TypeError(
            f"The ids of feature {path} must be int32 or int64. Received: a symbolic "
            f'tensor of {ids.dtype}. Use `keras.Input(shape, dtype="int64")`, also as '
            "the first layer of a Sequential model, which otherwise assumes float32. "
            "For a Keras preprocessing layer or a feature of keras.utils.FeatureSpace "
            'use `output_mode="int"`.'
        )
    smallest, largest, allowed = _RANKS[ids.kind]
    if not smallest <= len(ids.shape) <= largest:
        raise errors.input_rank(path, ids.kind.value, len(ids.shape), allowed)


def _check_weights(path: str, weights: Symbol, ids: Symbol) -> None:
    certain = not (weights.may_differ or ids.may_differ)
    if weights.kind is None or (certain and weights.kind is not ids.kind):
        assert ids.kind is not None
        raise errors.weights_kind(path, _NAMES[ids.kind], weights.value)
    if not tf.as_dtype(weights.dtype).is_floating:
        raise errors.weights_dtype(path, weights.dtype)
    if not tf.TensorShape(ids.shape).is_compatible_with(weights.shape):
        raise errors.weights_shape(path, ids.shape, weights.shape)
