"""Learning rates that a TPU program evaluates, once per update and replica."""

from __future__ import annotations

import tensorflow as tf

from tpu_embedding.distribution import outside_of_replicas
from tpu_embedding.engines.rates import evaluate_rate
from tpu_embedding.engines.tpu_v2_v4.configuration import dynamic_rates
from tpu_embedding.layout.plan import Plan
from tpu_embedding.optimizers.base import takes_step


class ProgramRates:
    """The callable learning rates, in the order of their tags.

    Attributes:
      updates: int64 scalar, the number of updates already applied, with a copy in each
        replica; None if no rate takes it.
    """

    def __init__(self, plan: Plan, strategy: tf.distribute.Strategy) -> None:
        """Creates the counter, if a rate takes it."""
        self._rates = dynamic_rates(plan)
        self.updates: tf.Variable | None = None
        if counts_updates(plan):
            self.updates = outside_of_replicas(lambda: _create_counter(strategy))

    def evaluate(self) -> list[tf.Tensor]:
        """Returns float32 scalars."""
        return [evaluate_rate(rate, self.updates) for rate in self._rates]

    def count_update(self) -> None:
        """Counts one update, in each replica."""
        if self.updates is not None:
            self.updates.assign_add(1)


def counts_updates(plan: Plan) -> bool:
    """Returns whether a learning rate takes the number of updates."""
    return any(takes_step(rate) for rate in dynamic_rates(plan))


def _create_counter(strategy: tf.distribute.Strategy) -> tf.Variable:
    with strategy.scope():
        return tf.Variable(
            tf.zeros([], tf.int64),
            trainable=False,
            name="updates",
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
