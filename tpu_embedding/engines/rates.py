"""Learning rates, evaluated once per update."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tpu_embedding.engines.variables import create_counter
from tpu_embedding.layout.tables import Plan
from tpu_embedding.optimizers import takes_step


class Rates:
    """The learning rates of a plan's tables.

    Attributes:
      updates: int64 scalar variable, the number of updates already applied, or
        None where no rate asks for it.
    """

    def __init__(self, plan: Plan, device: str) -> None:
        self._rates = [
            spec.optimizer.learning_rate if spec.optimizer else 0.0
            for spec in plan.tables
        ]
        self.updates: tf.Variable | None = None
        if any(callable(rate) and takes_step(rate) for rate in self._rates):
            self.updates = create_counter("updates", device)

    def evaluate(self) -> tf.Tensor:
        """float32 [number of tables]; each distinct callable is called once."""
        values: dict[Any, Any] = {}
        for rate in self._rates:
            if callable(rate) and id(rate) not in values:
                arguments = [self.updates] if takes_step(rate) else []
                values[id(rate)] = tf.cast(rate(*arguments), tf.float32)
        rates = [values[id(r)] if callable(r) else float(r) for r in self._rates]
        return tf.stack(rates) if values else tf.constant(rates, tf.float32)

    def count_update(self) -> None:
        """Notes that one more update was applied."""
        if self.updates is not None:
            self.updates.assign_add(1)
