"""What engines take and return: options, calls, batches and counts; their queue."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
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
      check_numerics: Refuse weights and gradients that are not finite.
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


@dataclasses.dataclass(frozen=True)
class TableCounts:
    """Sums over the counted updates of one table, and the last of them.

    Attributes:
      ids: Ids that were looked up. If gradients do not name the rows of a batch, it is
        None, and so are distinct_ids, rows_touched and hot_rows.
      invalid_ids: Ids that were dropped or taken modulo V; None if not known.
      samples: Samples of all features; None if not known.
      samples_without_ids: Samples that no id is looked up for; None if not known.
      distinct_ids: Rows that an update touched, summed over updates.
      rows_touched: Rows that any counted update touched.
      hot_rows: int64 [n, 2], the rows with the most ids, and how many ids each had.
      rows: int [k], the rows of the last counted update, each once.
      row_ids: int [k], the number of ids of each of these rows.
      gradient_norms: float32 [k], norms of the summed gradients, before clipping.
      update_norms: float32 [k], norms of the changes of the rows; [V] if the optimizer
        updates all rows.
      vocabulary: Counts over all updates of a growing table, also those before
        telemetry: ids without a row, how many of these were admitted and refused, and
        rows that were evicted. Empty for other tables.
      counted_steps: The table's counted updates; if None, see `Counts.counted_steps`.
    """

    ids: int | None = 0
    invalid_ids: int | None = 0
    samples: int | None = 0
    samples_without_ids: int | None = 0
    distinct_ids: int | None = 0
    rows_touched: int | None = 0
    hot_rows: np.ndarray | None = dataclasses.field(
        default_factory=lambda: _empty([0, 2])
    )
    rows: np.ndarray = dataclasses.field(default_factory=lambda: _empty([0]))
    row_ids: np.ndarray = dataclasses.field(default_factory=lambda: _empty([0]))
    gradient_norms: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros([0], np.float32)
    )
    update_norms: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros([0], np.float32)
    )
    vocabulary: tuple[int, ...] = ()
    counted_steps: int | None = None


@dataclasses.dataclass(frozen=True)
class Counts:
    """The counts of an engine since counting began.

    Attributes:
      steps: Updates that were applied.
      counted_steps: Updates that were counted.
      queue_depth: Batches of a replica that wait in the queue now.
      pending_updates: Complete updates that are not applied yet.
      tables: The counts of each table by name.
      samples: Samples of the updates that were applied; None on servers.
      bytes_sent: Bytes that this process has sent by phase of a step, or None.
      waited_seconds: How long this process waited for each process, or None.
    """

    steps: int
    counted_steps: int
    queue_depth: int
    pending_updates: int
    tables: Mapping[str, TableCounts]
    samples: int | None = None
    bytes_sent: Mapping[str, int] | None = None
    waited_seconds: Sequence[float] | None = None


def joined(parts: Sequence[Counts], num_hot_rows: int | None) -> Counts:
    """Joins the counts of the parts of the tables."""
    if len(parts) == 1:
        return parts[0]
    tables: dict[str, list[TableCounts]] = {}
    for part in parts:
        for name, counts in part.tables.items():
            tables.setdefault(name, []).append(counts)
    return Counts(
        # A push under way has reached only some of the servers.
        max(part.steps for part in parts),
        max(part.counted_steps for part in parts),
        max(part.queue_depth for part in parts),
        max(part.pending_updates for part in parts),
        {name: _joined_table(own, num_hot_rows) for name, own in tables.items()},
    )


def _joined_table(
    parts: Sequence[TableCounts], num_hot_rows: int | None
) -> TableCounts:
    if len(parts) == 1:
        return parts[0]

    def every(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    hot_rows, order = every("hot_rows"), np.argsort(every("rows"))
    hottest = np.lexsort((hot_rows[:, 0], -hot_rows[:, 1]))[:num_hot_rows]
    return dataclasses.replace(
        parts[0],
        **{
            name: sum(getattr(part, name) for part in parts)
            for name in ("ids", "distinct_ids", "rows_touched")
        },
        hot_rows=hot_rows[hottest],
        **{n: every(n)[order] for n in ("rows", "row_ids", "gradient_norms")},
        update_norms=every("update_norms"),
        vocabulary=tuple(np.sum([part.vocabulary for part in parts], 0).tolist()),
    )


def _empty(shape: list[int]) -> np.ndarray:
    return np.zeros(shape, np.int64)
