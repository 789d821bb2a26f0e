"""Carries ids, rows and gradients between processes that ask and the owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tpu_embedding.engines.process_group import Channel
from tpu_embedding.ops import library

Messages = Sequence[tf.Tensor]


class CollectiveCall(NamedTuple):
    """A call in which all processes take part, in the form that they compare.

    Attributes:
      phase: One of `PHASES` of process_group.py.
      name: The call, with the arguments that must be alike everywhere.
      role: Its role in a step, one of `ROLES`.
    """

    phase: str
    name: str
    role: str


class Transport(Protocol):
    """The way between this process and the owners of tables.

    Attributes:
      record: The plan by which a batch is divided over the owners.
      size: Number of owners.
      num_senders: Number of processes that send to an owner in one step.
      is_owner: Whether this process is an owner itself.
    """

    record: bytes
    size: int
    num_senders: int
    is_owner: bool

    def to_owners(
        self, collective: CollectiveCall, messages: Messages, refusal: tf.Tensor
    ) -> list[Messages]:
        """Sends one message to each owner.

        Args:
          collective: The call that the messages belong to.
          messages: The message to each owner.
          refusal: Why this process refuses the step, or "".

        Returns:
          For each part of the tables that ops of this process work on, the messages
          that have arrived, by sender.
        """
        ...

    def to_senders(
        self, collective: CollectiveCall, messages: Messages, refusal: tf.Tensor
    ) -> Messages:
        """Sends the answer of one of those parts; what has arrived here from it."""
        ...

    def push(self) -> Any:
        """Returns the number of this push, or none where a push cannot come twice."""
        ...


class Processes:
    """The processes of a synchronous job, each with a part of the tables."""

    def __init__(self, record: bytes, channel: Channel) -> None:
        self.record, self.is_owner = record, True
        self.size = self.num_senders = channel.size
        self._channel = channel

    def to_owners(
        self, collective: CollectiveCall, messages: Messages, refusal: tf.Tensor
    ) -> list[Messages]:
        """See `Transport.to_owners`: this process has one part."""
        return [self.to_senders(collective, messages, refusal)]

    def to_senders(
        self, collective: CollectiveCall, messages: Messages, refusal: tf.Tensor
    ) -> Messages:
        """See `Transport.to_senders`."""
        return self._channel.exchange(
            collective.phase, messages, refusal, collective.name, collective.role
        )

    def push(self) -> Any:
        """See `Transport.push`: a step of a job is made once."""
        return library.NO_NUMBER


class Servers:
    """Parameter servers, to whose ops TensorFlow carries inputs from other devices."""

    def __init__(self, record: bytes, size: int) -> None:
        self.record, self.is_owner = record, False
        self.size, self.num_senders = size, 1

    def to_owners(
        self, collective: CollectiveCall, messages: Messages, refusal: tf.Tensor
    ) -> list[Messages]:
        """See `Transport.to_owners`: a refused step has raised its error already."""
        del collective, refusal
        return [[message] for message in messages]

    def to_senders(
        self, collective: CollectiveCall, messages: Messages, refusal: tf.Tensor
    ) -> Messages:
        """See `Transport.to_senders`."""
        del collective, refusal
        return messages

    def push(self) -> Any:
        """See `Transport.push`: read where the function runs, on the worker."""
        if tf.executing_eagerly():
            return library.NO_NUMBER
        return library.load().tpu_embedding_current_push().push
