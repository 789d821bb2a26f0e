"""Numbers for calls whose gradient is computed by another graph than their own."""

from __future__ import annotations

import tensorflow as tf

from tpu_embedding.engines.variables import create_counter, create_state
from tpu_embedding.keras import errors
from tpu_embedding.lookup.graph_checks import refuse

MEMORY = 1024  # Calls that may lie between a call and its gradient.


class Calls:
    """Tells the first gradient of a call from a second one, as a ticket does.

    A ticket cannot leave the graph of a function for that of its gradient; a number
    can. Each cell keeps the last number whose gradient was taken, of those that fall
    into it: they only grow.
    """

    def __init__(self) -> None:
        """Makes the state, one for all replicas."""
        self._count = create_counter("calls", "/device:CPU:0")
        with tf.device("/device:CPU:0"):
            self._taken = create_state("taken", tf.zeros([MEMORY], tf.int64))

    def number(self) -> tf.Tensor:
        """int64 scalar, of a new call."""
        return tf.identity(self._count.assign_add(1))  # Read now, not when used.

    def take(self, number: tf.Tensor) -> None:
        """Notes that the gradient of a call is taken now; for use in a tf.function.

        Raises:
          tf.errors.FailedPreconditionError: If it was taken before, or more than
            `MEMORY` calls came in between.
        """
        cell = number % MEMORY
        taken = tf.gather(self._taken, cell) >= number
        texts = ["", errors.second_gradient(MEMORY)]
        with tf.control_dependencies(refuse(tf.cast(taken, tf.int32), texts)):
            self._taken.scatter_nd_update([[cell]], [number])
