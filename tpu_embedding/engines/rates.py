"""Learning rates, evaluated once per update, and the count of updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.engines import table_errors
from tpu_embedding.layout.tables import Plan
from tpu_embedding.optimizers import takes_step


class Rates:
    """The learning rates of a plan's tables.

    Attributes:
      updates: int64 scalar variable, the number of updates already applied, or
        None where neither a rate nor the rounding of a table asks for it.
    """

    def __init__(self, plan: Plan, create_counter: Callable[[], tf.Variable]) -> None:
        """Makes the counter, by the function given, where something asks for it."""
        self._rates = [
            spec.optimizer.learning_rate if spec.optimizer else 0.0
            for spec in plan.tables
        ]
        self.updates: tf.Variable | None = None
        self._rounds = any(spec.optimizer and spec.is_rounded for spec in plan.tables)
        if self._rounds or any(callable(r) and takes_step(r) for r in self._rates):
            self.updates = create_counter()

    def evaluate(self) -> tf.Tensor:
        """float32 [number of tables]; each distinct callable is called once."""
        values: dict[Any, Any] = {}
        for rate in self._rates:
            if callable(rate) and id(rate) not in values:
                arguments = [self.updates] if takes_step(rate) else []
                values[id(rate)] = _scalar(rate, rate(*arguments))
        rates = [values[id(r)] if callable(r) else float(r) for r in self._rates]
        return tf.stack(rates) if values else tf.constant(rates, tf.float32)

    def evaluate_if(self, condition: tf.Tensor) -> tf.Tensor:
        """As `evaluate` where `condition` holds, else zeros, and calls nothing."""
        return tf.cond(condition, self.evaluate, lambda: tf.zeros([len(self._rates)]))

    def step_of_update(self) -> tf.Tensor:
        """The number of the update that was counted last, from 0; int64 scalar.

        It is 0 for good where no table is rounded.
        """
        if not self._rounds:
            return tf.constant(0, tf.int64)
        assert self.updates is not None
        return self.updates - tf.constant(1, tf.int64)

    def count_update(self, completes: tf.Tensor, after: tf.Tensor) -> None:
        """Notes one more update where a step was completed.

        Args:
          completes: Whether it was.
          after: Of the op that took the gradients: if it fails, nothing is counted.
        """
        if self.updates is not None:
            with tf.control_dependencies([after]):
                self.updates.assign_add(tf.cast(completes, tf.int64))


def _scalar(rate: Any, value: Any) -> tf.Tensor:
    """What a rate returned, as float32."""
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise table_errors.rate_type(rate, value) from error
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        raise table_errors.rate_type(rate, value)
    if tensor.shape.rank != 0:
        raise errors.rate_shape(rate, tensor.shape)
    return tf.cast(tensor, tf.float32)
