"""Values that differ among the replicas of a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def of_replicas(strategy: tf.distribute.Strategy, values: Sequence[Any]) -> Any:
    """The value of each replica, as strategy.run takes it."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )
