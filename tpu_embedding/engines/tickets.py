"""Tickets of lookups in TPU programs, where a wrong order shows while tracing."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from tpu_embedding.engines import errors


class TracedTicket:
    """Of one lookup in a program; it is taken once.

    Attributes:
      content: What the engine needs for the update.
      taken: Whether it was taken.
    """

    def __init__(self, content: Any) -> None:
        self.content = content
        self.taken = False

    def take(self) -> Any:
        """The content.

        Raises:
          tf.errors.FailedPreconditionError: If it was taken before.
        """
        if self.taken:
            raise errors.second_submit()
        self.taken = True
        return self.content


class QueuedTickets:
    """For an engine with one queue: in a program one lookup at a time owes gradients.

    The content of a ticket is a name that tells the ops of one lookup from others.
    """

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[Any, TracedTicket] = (
            weakref.WeakKeyDictionary()
        )
        self._numbers = itertools.count(1)

    def begin(self, program: Any, *, training: bool) -> TracedTicket:
        """A ticket for a new lookup.

        Args:
          program: The graph that it is traced in.
          training: Whether its gradients may come.

        Raises:
          NotImplementedError: If those of the lookup before may still come.
        """
        before = self._last.get(program)
        if before is not None and not before.taken:
            raise errors.second_lookup()
        ticket = TracedTicket(f"lookup_{next(self._numbers)}")
        if training:
            self._last[program] = ticket
        return ticket
