"""Updates the rows of all tables of a step by one op of the library.

It is the op of the host engine, applied to the variables of Keras: each gradient plays
the part of a feature of an embedding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tpu_embedding import distribution
from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.engines.calls import EngineOptions
from tpu_embedding.engines.host.batches import HostBatches, plan_record
from tpu_embedding.engines.rates import evaluate_rate
from tpu_embedding.inputs import IdBatch, InputKind
from tpu_embedding.keras.rows.waiting import Waiting, kernels_for, serialized
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.plan import make_plan
from tpu_embedding.ops import library
from tpu_embedding.optimizers import Optimizer


class Rows(NamedTuple):
    """A table, and the gradient of some of its rows.

    Attributes:
      gradient: float32 values [n, D] of the rows `indices` [n], which may repeat.
      variable: The table, float32 [V, D].
      slots: Variables of the same shape, in the order of the rule.
      waiting: The steps that rows wait for, or None if they do not wait.
    """

    gradient: tf.IndexedSlices
    variable: Any
    slots: Sequence[Any]
    waiting: Waiting | None

    def fits(self, rule: Optimizer) -> bool:
        """Returns whether the op can update the rows by a rule."""
        variables, shape = [self.variable, *self.slots], self.variable.shape
        return (
            len(self.slots) == len(rule.slots)
            and shape.rank == 2
            and all(shape)  # Rows and columns are known, and not 0.
            and self.gradient.indices.shape.rank == 1
            and self.gradient.indices.dtype in (tf.int32, tf.int64)
            and kernels_for(variables) is not None
            and self.gradient.dtype == tf.float32
        )


def update(
    rule: Optimizer, tables: Sequence[Rows], updates: Any, steps: Sequence[tf.Tensor]
) -> None:
    """Sums the gradients of equal rows, and applies a rule to each row once.

    Args:
      rule: A rule whose learning rate is a callable.
      tables: The tables, which fit the rule; the rows of all or of none of them wait.
      updates: The number of updates before, which the rate may take.
      steps: The `step` of `Waiting.advance` for each table whose rows wait.
    """
    plan = _updates(
        dataclasses.replace(rule, learning_rate=0.0),
        tuple((rows.variable.name, *rows.variable.shape) for rows in tables),
    )
    assert callable(rule.learning_rate)
    rate = evaluate_rate(rule.learning_rate, updates)
    plan.update(tables, tf.fill([len(tables)], rate), steps)


class _Updates:
    """Updates tables of given names and sizes by one rule, through a plan of them."""

    def __init__(self, rule: Optimizer, tables: Sequence[tuple[str, int, int]]) -> None:
        configs = [TableConfig(rows, dim, combiner="sum") for _, rows, dim in tables]
        features = [FeatureConfig(config) for config in configs]
        paths = [name for name, *_ in tables]
        plan = make_plan(paths, features, {c: c for c in configs}, rule)
        options = EngineOptions(
            plan=plan,
            topology=distribution.current(),
            output_shapes=OutputShapes(plan.features),
            pipelined=False,
            check_numerics=False,
        )
        self._device, self._record = options.topology.device, plan_record(options)
        self._batches = HostBatches(options, self._device, self._record, groups=True)

    def update(
        self, tables: Sequence[Rows], rates: tf.Tensor, steps: Sequence[tf.Tensor]
    ) -> None:
        waiting = [rows.waiting for rows in tables if rows.waiting is not None]
        variables = [rows.variable for rows in tables]
        slots = [slot for rows in tables for slot in rows.slots]
        ids = [rows.gradient.indices for rows in tables]
        batch = self._batches.prepare(
            [IdBatch(InputKind.DENSE, i, None, i.shape) for i in ids], training=True
        )
        with tf.device(self._device):
            library.load().tpu_embedding_update_rows(
                batch=batch,
                gradients=[rows.gradient.values for rows in tables],
                rates=rates,
                arrays=[variable.handle for variable in (*variables, *slots)],
                clocks=[each.clock.handle for each in waiting],
                sinces=[each.since.handle for each in waiting],
                histories=[each.history.handle for each in waiting],
                idle=serialized(waiting),
                steps=tf.stack(steps) if steps else tf.zeros([0, 3], tf.float64),
                plan=self._record,
            )


_updates = functools.lru_cache(maxsize=64)(_Updates)
