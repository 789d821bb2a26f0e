"""The options of engines, the arguments of each call, and the queue of steps."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tpu_embedding.config import DistributedOptions, SparseCoreEmbeddingConfig
from tpu_embedding.distribution import Topology
from tpu_embedding.engines.process_group import Channel
from tpu_embedding.layout.csr import PreprocessedFeatures
from tpu_embedding.layout.output_shapes import OutputShapes, Shape
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Layout
from tpu_embedding.ops import library

QUEUE_CAPACITY = 64  # batches of one replica that may wait


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingOptions:
    """The options of a constructor that an engine needs.

    Attributes:
      pipelined: Leave each update pending until the lookups of the next step.
      check_numerics: Reject weights and gradients that are not finite.
      sparse_core: Limits of SparseCores, and how they stack and fill the tables.
      initialize: On TPU v2 to v4, configure the TPU's engine; False shares the one that
        is configured already.
      profile_data_directory: The folder where TPU v2 to v4 write what they learn about
        the ids, or None.
      distributed: How several processes share the tables.
      batch_size: The global size of every batch, or None for any.
    """

    pipelined: bool
    check_numerics: bool
    sparse_core: SparseCoreEmbeddingConfig = SparseCoreEmbeddingConfig()  # noqa: RUF009 - frozen
    initialize: bool = True
    profile_data_directory: str | None = None
    distributed: DistributedOptions = DistributedOptions()  # noqa: RUF009 - frozen
    batch_size: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions(EmbeddingOptions):
    """The arguments of an engine's constructor.

    Attributes:
      plan: The tables and features.
      topology: Replicas and devices.
      output_shapes: The declared shape of each feature's output.
      layout: The stacks that `Engine.lay_out` returned, or None without stacks.
      channel: What `Engine.check` returned.
      made_by: The name of the public class for which the engine is made.
      to_restore: Whether a restore may follow at once; SparseCores then make the first
        values of tables only when they are needed.
    """

    plan: Plan
    topology: Topology
    output_shapes: OutputShapes
    layout: Layout | None = None
    channel: Channel | None = None
    made_by: str = ""
    to_restore: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The facts about one call of the user that an engine needs.

    Attributes:
      replica: Index of the calling replica. None outside of a replica, or for a batch
        of all replicas.
      training: Whether gradients may be applied later.
      name: A tag for the ops of TPU v2 to v4, by which the compiler pairs them.
      shapes: The static shape of each feature's output in the graph that is being
        traced; None means the shapes known for all batches.
      device: The TPU core that the batch is for, if the caller named one: its name or
        its ordinal on the only host.
      tensors: Whether to make plain tensors of the batch, too. TPUEmbeddingV2 hands
        them to the user, and the update takes them back.
      clock: The clock of an update, an int64 scalar, by which rows of growing tables
        age.
    """

    replica: int | None
    training: bool = True
    name: str | None = None
    shapes: Sequence[Shape] | None = None
    device: str | tf.Tensor | None = None
    tensors: bool = False
    clock: tf.Tensor | None = None

    @property
    def clock_or_none(self) -> Any:
        """The clock in the form that ops take, an empty tensor if there is none."""
        return library.NO_NUMBER if self.clock is None else self.clock


class Prepared(NamedTuple):
    """One replica's batch on its way through an engine.

    The public classes pass it on, also through tf.function; only engines read `value`.

    Attributes:
      value: The engine's own form of the batch; None if only `tensors` is set.
      tensors: The batch as plain tensors, if the call asked for them or the user
        passed them. After a lookup its `tables` include what the update of a
        CustomCombiner needs.
    """

    value: Any = None
    tensors: PreprocessedFeatures | None = None


class StepQueue(abc.ABC):
    """A queue of batches on top of an engine, which TPUEmbedding uses.

    A step holds one batch of each replica. It is refused as a whole: if an input, a
    gradient or anything else fails in one replica, the step is discarded in every
    replica, at the latest when a replica begins another one. Nothing of a discarded
    step is applied, and the pending update stays pending.
    """

    @abc.abstractmethod
    def enqueue(self, batches: Sequence[Prepared], call: Call) -> None:
        """Queues a batch for every replica (all of them or none), or for one.

        An accepted evaluation batch (`call.training` is False) first applies the
        pending update; a refused one leaves it pending.

        Args:
          batches: What `Steps.prepare` returned for this call.
          call: The call; the batches are for its `device` or `replica`, else for all.

        Raises:
          ValueError: If the TPU has no such device.
          tf.errors.InvalidArgumentError: If `Steps.prepare` refused a batch.
          tf.errors.FailedPreconditionError: If the queue is full.
        """

    @abc.abstractmethod
    def dequeue(self, call: Call) -> list[tf.Tensor]:
        """Takes the oldest batch of the calling replica and looks it up.

        Returns:
          The activations, one for each feature in plan order.

        Raises:
          tf.errors.FailedPreconditionError: If no batch is queued, or the previous
            training batch still owes its gradients.
          tf.errors.InvalidArgumentError: If the shapes of the batch are not those of
            the call. The batch stays in the queue.
        """

    @abc.abstractmethod
    def apply_gradients(
        self, gradients: Sequence[tf.Tensor | None], call: Call
    ) -> None:
        """Updates with the gradients that the replica owes; see `Steps.update`.

        Raises:
          tf.errors.FailedPreconditionError: If no dequeued batch owes gradients.
        """
