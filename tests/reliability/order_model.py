"""The order of calls of docs/semantics.md, one replica, in plain Python."""

from __future__ import annotations

import dataclasses

CAPACITY = 64
FULL = "enqueue: the queue is full (64 batches). Call dequeue once for each enqueue."
EMPTY = (
    "dequeue: no batch is enqueued. Call enqueue before dequeue, once for each dequeue."
)
OWING = (
    "dequeue: the training batch dequeued before still owes its gradients. Call "
    "apply_gradients first, or enqueue with training=False; after a step that failed "
    "call flush and reset."
)
EVALUATION = (
    "apply_gradients: the batch was enqueued with training=False. Enqueue with "
    "training=True to train on it."
)
NOT_DEQUEUED = (
    "apply_gradients: the enqueued batch was not dequeued. Call dequeue first."
)
NOTHING_OWED = (
    "apply_gradients: no dequeued batch owes gradients; they can be applied once per "
    "dequeue."
)


@dataclasses.dataclass
class Model:
    """What a TPUEmbedding of one replica may be asked for next.

    Attributes:
      queue: Whether each waiting batch is for training, oldest first.
      owed: Whether a dequeued batch owes its gradients.
      last: Whether the batch dequeued last was for training; None: there was none.
    """

    queue: list[bool] = dataclasses.field(default_factory=list)
    owed: bool = False
    last: bool | None = None

    def call(self, name: str) -> str:
        """Makes a call; returns the text of its refusal, or nothing."""
        return getattr(self, name)()

    def train(self) -> str:
        return self._enqueue(training=True)

    def evaluate(self) -> str:
        return self._enqueue(training=False)

    def _enqueue(self, *, training: bool) -> str:
        if len(self.queue) == CAPACITY:
            return FULL
        self.queue.append(training)
        return ""

    def dequeue(self) -> str:
        if not self.queue:
            return EMPTY
        if self.queue[0] and self.owed:
            return OWING
        self.last = self.queue.pop(0)
        self.owed = self.owed or self.last
        return ""

    def apply_gradients(self) -> str:
        if not self.owed:
            if self.last is False:
                return EVALUATION
            return NOT_DEQUEUED if self.queue and self.queue[0] else NOTHING_OWED
        self.owed = False
        return ""

    def flush(self) -> str:
        return ""

    def reset(self) -> str:
        self.queue, self.owed, self.last = [], False, None
        return ""
