"""The part of the tables, or of their rows, that one device owns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.engines.calls import Call, Counts, EngineOptions, TableCounts
from tpu_embedding.engines.host.waiting import PartWaits, idle_of
from tpu_embedding.engines.rates import Rates
from tpu_embedding.layout.placement import Placement
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.ops import library
from tpu_embedding.tables.variables import TableVariables, create_counter
from tpu_embedding.tables.vocabularies import QueueVocabulary

# The columns of `totals`, in the order of kernels/telemetry.cc.
_TOTALS = (
    *("ids", "invalid_ids", "samples", "samples_without_ids"),
    *("distinct_ids", "rows_touched"),
)


class TablePart:
    """The tables and slots that one device owns, their updates, and the ops on them.

    Lists of messages are in order of senders. A list `batches` has one batch, which
    bypasses the queue, or none, which means the queue's next batch.

    Attributes:
      device: The device.
      record: The plan of the part, for ops.
      rates: The learning rates, and the count of updates.
      variables: The variables of each table.
      vocabularies: The vocabularies of growing tables by name.
      handle: The step queue, which also notes changed rows.
      placement: The rows of the tables that are here.
      tables: The indices of the tables in the plan of all tables.
    """

    def __init__(
        self,
        options: EngineOptions,
        record: bytes,
        variables: Sequence[TableVariables],
        placement: Placement,
        tables: Sequence[int],
        *,
        routed: bool = False,
    ) -> None:
        """Makes the step queue.

        Args:
          options: The options of an engine for these tables on their device.
          record: The plan of the tables, from `plan_record`.
          variables: The variables of each table.
          placement: The rows of the tables that are here.
          tables: The indices of the tables in the plan of all tables.
          routed: Whether the ids of a sample go to several parts.
        """
        self.device = options.topology.device
        self.record, self.variables = record, variables
        self.placement, self.tables = placement, tables
        self.rates = Rates(options.plan, lambda: create_counter("updates", self.device))
        self._ops = library.load()
        self._plan, self._topology = options.plan, options.topology
        stored = [table.parameters for table in variables]
        stored += [t.scale_offset for t in variables if t.scale_offset is not None]
        slots = [slot for table in variables for slot in table.slots.values()]
        self._arrays = [variable.handle for variable in (*stored, *slots)]
        self._is_trained = all(table.optimizer for table in options.plan.tables)
        self._waits = [
            spec.index
            for spec in options.plan.tables
            if self._is_trained and idle_of(spec) is not None
        ]
        # Lookups read slots only where rows wait.
        self._read_arrays = self._arrays if self._waits else self._arrays[: len(stored)]
        updates = self.rates.updates
        self._counters = [] if updates is None else [updates.handle]
        with tf.device(self.device):
            self.handle = self._ops.tpu_embedding_step_queue(plan=record)
        self._counts_samples = not routed
        self.vocabularies = {
            spec.name: QueueVocabulary(
                spec,
                self.handle,
                variables[spec.index].arrays,
                self.device,
                placement.part(spec.index),
                find=self.read_ids,
            )
            for spec in options.plan.growing
        }
        for table in self._waits:
            PartWaits(self, table)

    def enqueue(self, batches: Sequence[tf.Tensor], call: Call) -> tf.Tensor:
        """Queues a batch for all replicas or one; returns whether updates are due."""
        with tf.device(self.device):
            return self._ops.tpu_embedding_enqueue(
                queue=self.handle,
                batches=batches,
                runs=self._topology.runs(),
                replica=call.replica or 0,
                training=call.training,
            )

    def look_up(
        self, batches: Sequence[tf.Tensor], call: Call, shapes: Sequence[tf.TensorShape]
    ) -> Any:
        """Looks up a batch in tables that are whole on this device."""
        with tf.device(self.device):
            return self._ops.tpu_embedding_lookup(
                queue=self.handle,
                batches=batches,
                arrays=self._read_arrays,
                runs=self._topology.runs(),
                num_features=len(shapes),
                output_shapes=shapes,
                replica=call.replica,
            )

    def submit(
        self,
        batches: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor | None],
        call: Call,
    ) -> tf.Tensor:
        """Submits the gradients of a batch that `look_up` took.

        It evaluates the rates first: if one fails, nothing has changed.

        Returns:
          Whether updates are due, a bool scalar.
        """
        # Replicas act in ascending order: the last one completes the update.
        is_last = call.replica == self._topology.num_replicas - 1
        with tf.device(self.device):
            return self._ops.tpu_embedding_update(
                queue=self.handle,
                batches=batches,
                gradients=[g for g in gradients if g is not None],
                rates=self.rates.evaluate() if is_last else tf.zeros([self.rates.size]),
                counters=self._counters,
                clock=call.clock_or_none if is_last else library.NO_NUMBER,
                has_gradient=[g is not None for g in gradients],
                replica=call.replica,
            )

    def receive_batch(
        self,
        routed: Sequence[tf.Tensor],
        received: Sequence[tf.Tensor],
        looked_up: Sequence[tf.Tensor],
        *,
        training: bool,
    ) -> tf.Tensor:
        """Receives what the senders ask of this part.

        Args:
          routed: The batch of this process itself, if it has one.
          received: The message of each sender.
          looked_up: At most one element; see `HostEngine.route`.
          training: Whether an update may follow.
        """
        with tf.device(self.device):
            return self._ops.tpu_embedding_receive_batch(
                routed=routed,
                received=received,
                looked_up=looked_up,
                plan=self.record,
                training=training,
            )

    def serve(
        self,
        batches: Sequence[tf.Tensor],
        shapes: Sequence[tf.TensorShape],
        num_senders: int,
    ) -> Any:
        """Looks up what `receive_batch` read; `shapes` are those of its own batch."""
        with tf.device(self.device):
            return self._ops.tpu_embedding_serve(
                queue=self.handle,
                batches=batches,
                arrays=self._read_arrays,
                runs=self._topology.runs(),
                num_messages=num_senders,
                output_shapes=shapes,
            )

    def receive_gradients(
        self,
        batches: Sequence[tf.Tensor],
        received: Sequence[tf.Tensor],
        rates: tf.Tensor,
        push: Any,
    ) -> tf.Tensor:
        """Submits the gradients of all senders; returns whether updates are due."""
        with tf.device(self.device):
            return self._ops.tpu_embedding_receive_gradients(
                queue=self.handle,
                batches=batches,
                received=received,
                rates=rates,
                counters=self._counters,
                push=push,
            )

    def apply(self, apply_now: tf.Tensor) -> None:
        """Applies the updates that are due, if `apply_now` is true."""
        if not self._is_trained:
            return  # Lookup only: no update can be pending.
        with tf.device(self.device):
            self._ops.tpu_embedding_apply_update(
                queue=self.handle, apply_now=apply_now, arrays=self._arrays
            )

    def catch_up(self) -> None:
        """Catches up all rows that wait for their gradients."""
        if not self._waits:
            return
        with tf.device(self.device):
            self._ops.tpu_embedding_catch_up_tables(
                queue=self.handle, arrays=self._arrays
            )

    def read_rows(self, table: int, rows: tf.Tensor) -> tf.Tensor:
        """Reads rows of a table, caught up, as float32 [*rows.shape, D]."""
        with tf.device(self.device):
            found = self._ops.tpu_embedding_read_rows(
                queue=self.handle,
                arrays=self._arrays,
                rows=tf.cast(tf.reshape(rows, [-1]), tf.int64),
                table=table,
            )
        dim = self._plan.tables[table].config.dim
        return tf.reshape(found, tf.concat([tf.shape(rows), [dim]], 0))

    def read_ids(self, table: int, ids: tf.Tensor) -> tf.Tensor:
        """See `StoredVocabulary.find`."""
        with tf.device(self.device):
            found = self._ops.tpu_embedding_read_ids(
                queue=self.handle, arrays=self._read_arrays, ids=ids, table=table
            )
        return tf.ensure_shape(found, [None, self._plan.tables[table].config.dim])

    def apply_all(self) -> None:
        """Applies every complete update, pending or due."""
        with tf.device(self.device):
            self.apply(self._ops.tpu_embedding_flush(queue=self.handle))

    def reset(self) -> None:
        """Discards batches, owed gradients and the pending update."""
        with tf.device(self.device):
            self._ops.tpu_embedding_reset(queue=self.handle, counters=self._counters)

    def start_counting(self, every: int) -> Callable[[int | None], Counts]:
        """See `TableStore.start_counting`."""
        with tf.device(self.device):
            self._ops.tpu_embedding_start_telemetry(queue=self.handle, every=every)
        return self._counts

    def _counts(self, num_hot_rows: int | None) -> Counts:
        tables = () if num_hot_rows is None else self._plan.tables
        with tf.device(self.device):
            found = self._ops.tpu_embedding_read_telemetry(
                queue=self.handle,
                num_tables=len(tables),
                num_hot_rows=num_hot_rows or 0,
            )
        steps, counted_steps, depth, pending, samples = found.steps.numpy().tolist()
        return Counts(
            steps=steps,
            counted_steps=counted_steps,
            queue_depth=depth,
            pending_updates=pending,
            tables={
                spec.name: self._placed(spec.index, self._counts_of(spec, found))
                for spec in tables
            },
            samples=samples,
        )

    def _counts_of(self, spec: TableSpec, found: Any) -> TableCounts:
        """Returns the counts of a table among the outputs of the op."""
        table, vocabulary = spec.index, ()
        if spec.name in self.vocabularies:
            vocabulary = tuple(found.vocabularies[table].numpy().tolist())
        totals = found.totals[table].numpy().tolist()
        return TableCounts(
            **dict(zip(_TOTALS, totals, strict=True)),
            hot_rows=found.hot_rows[table].numpy(),
            rows=found.rows[table].numpy(),
            row_ids=found.ids[table].numpy(),
            gradient_norms=found.gradient_norms[table].numpy(),
            update_norms=found.update_norms[table].numpy(),
            vocabulary=vocabulary,
        )

    def _placed(self, table: int, counts: TableCounts) -> TableCounts:
        """Returns the counts of a table with the row numbers of the whole table.

        If the rows of a sample are in several parts, no part counts samples.
        """
        if self._counts_samples:
            return counts
        assert counts.hot_rows is not None
        (hot_rows, number), placement = counts.hot_rows.T, self.placement
        return dataclasses.replace(
            counts,
            invalid_ids=None,
            samples=None,
            samples_without_ids=None,
            hot_rows=np.stack([placement.rows_at(table, hot_rows), number], axis=1),
            rows=placement.rows_at(table, counts.rows.astype(np.int64)),
        )
