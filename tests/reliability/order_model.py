"""The order of calls of docs/semantics.md, one replica, in plain Python."""

from __future__ import annotations

import dataclasses

CAPACITY = 64


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

    def call(self, name: str) -> str | None:
        """Makes a call; the words of its refusal, or None."""
        return getattr(self, name)()

    def train(self) -> str | None:
        return self._enqueue(training=True)

    def evaluate(self) -> str | None:
        return self._enqueue(training=False)

    def _enqueue(self, *, training: bool) -> str | None:
        if len(self.queue) == CAPACITY:
            return "the queue is full"
        self.queue.append(training)
        return None

    def dequeue(self) -> str | None:
        if not self.queue:
            return "no batch is enqueued"
        if self.queue[0] and self.owed:
            return "still owes its gradients"
        self.last = self.queue.pop(0)
        self.owed = self.owed or self.last
        return None

    def apply_gradients(self) -> str | None:
        if not self.owed:
            return "apply_gradients: "
        self.owed = False
        return None

    def flush(self) -> str | None:
        return None

    def reset(self) -> str | None:
        self.queue, self.owed, self.last = [], False, None
        return None
