"""An update that waits, from one call of the session to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_v1 = tf.compat.v1


class PendingUpdate:
    """Pipelining: each step's update is applied after the next step's lookups.

    Attributes:
      step: An op that applies the update of the step before, then keeps this one's.
      flush: An op that applies the update that is kept, if there is one.
    """

    def __init__(self, update: Callable[..., tf.Tensor], arguments: Any) -> None:
        """Adds the ops to the default graph.

        Args:
          update: Applies one update; called while a tf.function is traced.
          arguments: Its arguments for this step, nested; None stays None. They must
            depend on this step's lookups.
        """
        flat = tf.nest.flatten(arguments)
        tensors = [tensor for tensor in flat if tensor is not None]
        kept = _v1.FIFOQueue(
            1, [t.dtype for t in tensors], shared_name="tpu_embedding_pending_update"
        )

        def apply(*taken: Any) -> tf.Tensor:
            values = iter(taken)
            full = [None if tensor is None else next(values) for tensor in flat]
            for tensor, value in zip(tensors, taken, strict=True):
                value.set_shape(tensor.shape)
            return update(*tf.nest.pack_sequence_as(arguments, full))

        def apply_kept() -> tf.Tensor:
            return tf.function(apply, autograph=False)(*_listed(kept.dequeue()))

        def applied() -> tf.Tensor:
            return tf.cond(kept.size() > 0, apply_kept, lambda: tf.constant(True))

        with tf.control_dependencies(tensors):
            done = applied()
        with tf.control_dependencies([done]):
            self.step: tf.Operation = kept.enqueue(tensors)
        with tf.control_dependencies(None):
            self.flush: tf.Operation = applied().op


def _listed(dequeued: Any) -> list[Any]:
    return list(dequeued) if isinstance(dequeued, (list, tuple)) else [dequeued]
