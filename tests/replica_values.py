"""Replicas of one process, their numbers, and values that differ among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def mirrored(replicas: int) -> tf.distribute.Strategy:
    """Makes a strategy of so many logical CPUs."""
    return tf.distribute.MirroredStrategy([f"CPU:{r}" for r in range(replicas)])


def replicated(replicas: int) -> tf.distribute.Strategy:
    """Makes a strategy of several CPUs; for one it is the default strategy."""
    return mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()


def this_replica() -> int:
    """Returns the number of the replica that calls, inside of strategy.run."""
    context: Any = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def of_replicas(strategy: tf.distribute.Strategy, values: Sequence[Any]) -> Any:
    """The value of each replica, as strategy.run takes it."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )
