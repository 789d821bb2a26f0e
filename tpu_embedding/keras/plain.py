"""Lookups in stock TensorFlow ops: for export, serving and trainable tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.engines.portable_entries import build_entries
from tpu_embedding.engines.portable_rows import FeatureInput
from tpu_embedding.engines.portable_tables import look_up as look_up_entries
from tpu_embedding.inputs import IdBatch, InputKind, to_id_batch
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.tables import Plan


@dataclasses.dataclass(frozen=True)
class Checks:
    """What a batch must be.

    Attributes:
      check_numerics: Whether weights must be finite.
      batch_size: The size of each replica's batch, where it is known before the graph
        runs; an exported graph takes any. None: any.
    """

    check_numerics: bool
    batch_size: int | None = None


def look_up(
    plan: Plan,
    tables: Mapping[str, tf.Variable],
    values: Sequence[Any],
    weights: Sequence[Any],
    checks: Checks,
) -> list[tf.Tensor]:
    """The activations of one batch, differentiable with respect to the tables.

    Args:
      plan: The features to look up.
      tables: By name, float32 [V, D].
      values: For each feature its ids.
      weights: For each feature its weights or None.
      checks: What a batch must be.

    Returns:
      For each feature float32 [output shape..., D].

    Raises:
      The errors of TPUEmbedding.enqueue that concern features and weights.
    """
    batches = _read(plan, values, weights)
    shapes = _check_shapes(plan, batches, checks.batch_size)
    inputs = [
        FeatureInput(
            spec=spec,
            table=plan.tables[spec.table],
            batch=batch,
            declared=shapes.declared(spec.index),
            check_numerics=checks.check_numerics,
        )
        for spec, batch in zip(plan.features, batches, strict=True)
    ]
    activations = []
    for feature, entries in zip(inputs, build_entries(inputs), strict=True):
        config = feature.table.config
        table = tables[feature.table.name]
        activation = look_up_entries(table, None, entries)
        if config.quantization_config is not None:
            quantized = look_up_entries(table, config.quantization_config, entries)
            # The quantized value, with the gradient of the value itself.
            activation += tf.stop_gradient(quantized - activation)
        shape = (*shapes.activation(feature.spec.index), config.dim)
        activations.append(tf.ensure_shape(activation, shape))
    return activations


def _read(plan: Plan, values: Sequence[Any], weights: Sequence[Any]) -> list[IdBatch]:
    return [
        to_id_batch(spec.path, value, weight)
        for spec, value, weight in zip(plan.features, values, weights, strict=True)
    ]


def _check_shapes(
    plan: Plan, batches: Sequence[IdBatch], batch_size: int | None
) -> OutputShapes:
    static = [tuple(batch.static_shape.as_list()) for batch in batches]
    expected, shapes = OutputShapes(plan.features), OutputShapes(plan.features)
    if batch_size is not None:
        expected.set_batch_size(batch_size)
    for spec, batch, shape in zip(plan.features, batches, static, strict=True):
        ragged = batch.kind is InputKind.RAGGED
        expected.check_input(spec.index, shape, ragged=ragged)
    shapes.remember_ranks(static)
    return shapes
