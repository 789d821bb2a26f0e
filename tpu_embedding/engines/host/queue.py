"""Queues of batches on top of the engine, which check the order of calls."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tpu_embedding.engines.calls import QUEUE_CAPACITY, Call, Prepared, StepQueue
from tpu_embedding.engines.host.transport import CollectiveCall

if TYPE_CHECKING:
    from tpu_embedding.engines.host.engine import HostEngine, Routed
    from tpu_embedding.engines.host.servers import ParameterServerEngine


DEQUEUE = CollectiveCall("lookup", "dequeue", "continues")


class HostEngineQueue(StepQueue):
    """The queue in the resource of the engine's part of the tables.

    In a job of several processes it holds routed batches.
    """

    def __init__(self, engine: HostEngine) -> None:
        self._engine = engine

    def enqueue(self, batches: Sequence[Prepared], call: Call) -> None:
        """See `StepQueue.enqueue`; a batch refused in one process is so in all."""
        engine, (part,) = self._engine, self._engine._parts
        values = [batch.value for batch in batches]
        if engine._transport is not None:
            collective, training = _enqueue(call), call.training
            routed = [engine.route(v, collective, training=training) for v in values]
            values = [own for each in routed for own in each.parts]
        apply_now = part.enqueue(values, call)
        if engine.pipelined and not call.training:
            part.apply(apply_now)

    def dequeue(self, call: Call) -> list[tf.Tensor]:
        engine, (part,) = self._engine, self._engine._parts
        found = engine.look_up_queued(call)
        if engine.pipelined:
            part.apply(found.apply_now)
        return found.activations

    def apply_gradients(
        self, gradients: Sequence[tf.Tensor | None], call: Call
    ) -> None:
        engine, (part,) = self._engine, self._engine._parts
        if engine._transport is not None:
            engine.send_gradients(None, gradients, call)
        else:
            part.apply(part.submit([], gradients, call))


class ServerQueue(StepQueue):
    """Queues the batches of each function, and of eager calls.

    Each tf.function has steps of its own, and so has each of its loops and branches:
    any number of workers may run it at a time. A wrong order of calls raises an error
    when the function is traced.
    """

    def __init__(self, engine: ParameterServerEngine) -> None:
        self._engine = engine
        self._eager = _Steps()
        self._of_graphs: weakref.WeakKeyDictionary[Any, _Steps]
        self._of_graphs = weakref.WeakKeyDictionary()

    def enqueue(self, batches: Sequence[Prepared], call: Call) -> None:
        queued, training = self._steps().queued, call.training
        if len(queued) >= QUEUE_CAPACITY:
            raise _wrong_order(
                f"enqueue: the queue is full ({QUEUE_CAPACITY} batches). Call dequeue "
                "once for each enqueue."
            )
        (batch,) = batches
        routed = self._engine.route(batch.value, _enqueue(call), training=training)
        queued.append((routed, training))
        if not training:
            # A refused batch leaves what is pending.
            with tf.control_dependencies([routed.own]):
                self._engine.apply_all()

    def dequeue(self, call: Call) -> list[tf.Tensor]:
        steps = self._steps()
        if not steps.queued:
            raise _wrong_order(
                "dequeue: no batch is enqueued. Call enqueue before dequeue, once for "
                "each dequeue; under ParameterServerStrategy in the same function, "
                "loop and branch."
            )
        batch, training = steps.queued[0]
        if training and steps.owed is not None:
            raise _wrong_order(
                "dequeue: the training batch dequeued before still owes its "
                "gradients. Call apply_gradients first, or enqueue with "
                "training=False; after a step that failed call flush and reset."
            )
        activations, looked_up = self._engine.look_up_routed(batch, DEQUEUE, call)
        steps.queued.popleft()
        steps.was_training = training
        if training:
            steps.owed = looked_up
        return activations

    def apply_gradients(
        self, gradients: Sequence[tf.Tensor | None], call: Call
    ) -> None:
        steps = self._steps()
        if steps.owed is None or not steps.was_training:
            if not steps.was_training:
                problem = (
                    "the batch was enqueued with training=False. Enqueue with "
                    "training=True to train on it."
                )
            elif steps.queued:
                problem = "the enqueued batch was not dequeued. Call dequeue first."
            else:
                problem = (
                    "no dequeued batch owes gradients; they can be applied once per "
                    "dequeue, under ParameterServerStrategy in the same function, loop "
                    "and branch."
                )
            raise _wrong_order(f"apply_gradients: {problem}")
        self._engine.send_gradients(steps.owed, gradients, call)
        steps.owed = None

    def reset(self) -> None:
        """Forgets the steps of eager calls; those of functions end with them."""
        self._eager = _Steps()

    def _steps(self) -> _Steps:
        if tf.executing_eagerly():
            return self._eager
        graph = tf.compat.v1.get_default_graph()
        return self._of_graphs.setdefault(graph, _Steps())


class _Steps:
    """The steps of one function.

    Attributes:
      queued: Routed batches, each with its `training`, the oldest first.
      owed: The lookup whose gradients are awaited, or None.
      was_training: Whether the last batch that was dequeued is for training.
    """

    def __init__(self) -> None:
        self.queued: collections.deque[tuple[Routed, bool]] = collections.deque()
        self.owed: Routed | None = None
        self.was_training = True


def _enqueue(call: Call) -> CollectiveCall:
    return CollectiveCall("enqueue", f"enqueue(training={call.training})", "begins")


def _wrong_order(text: str) -> tf.errors.FailedPreconditionError:
    return tf.errors.FailedPreconditionError(None, None, text)
