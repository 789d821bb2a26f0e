"""Lookups in stock TensorFlow ops: for export, serving and trainable tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.layout.tables import Plan
from tpu_embedding.lookup.combine import VariableReader
from tpu_embedding.serving.lookup import FeatureLookup


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
    readers = {table.index: VariableReader(tables[table.name]) for table in plan.tables}
    lookup = FeatureLookup(
        plan,
        readers,
        check_numerics=checks.check_numerics,
        batch_size=checks.batch_size,
    )
    return lookup(plan.features, values, weights)
