"""The engine for any device: the same numbers and errors from stock TensorFlow ops."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.engines.base import QUEUE_CAPACITY, EngineOptions, Lookup
from tpu_embedding.engines.cpu_base import WholeTablesEngine
from tpu_embedding.engines.portable.cells import pack, unpack
from tpu_embedding.engines.portable.combiners import Combiners, Found
from tpu_embedding.engines.portable.functions import check_functions
from tpu_embedding.engines.portable.gradients import gradient_checks
from tpu_embedding.engines.portable.packing import (
    pack_entries,
    unpack_entries,
    unpack_row_sums,
)
from tpu_embedding.engines.portable.rounding import Rounding
from tpu_embedding.engines.portable.stacks import read_stacks, write_stack
from tpu_embedding.engines.portable.steps import StepQueue
from tpu_embedding.engines.portable.tables import (
    TableStep,
    entry_gradients,
    merge,
    sum_by_row,
    update,
)
from tpu_embedding.engines.portable.turns import in_turn
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.csr import (
    PartitionedCsrFormatTensor,
    PreprocessedFeatures,
)
from tpu_embedding.lookup.combine import VariableReader, look_up, reader_of
from tpu_embedding.lookup.entries import Entries, build_entries
from tpu_embedding.lookup.graph_checks import Change, no_change, require
from tpu_embedding.lookup.input_rows import FeatureInput


class PortableEngine(WholeTablesEngine):
    """Batches travel as variants of entries, gradients as variants of row sums."""

    name = "portable"

    def __init__(self, options: EngineOptions) -> None:
        """Makes the tables and the step queue; see `Engine`."""
        check_functions(options.plan)
        super().__init__(options)
        self._turn = threading.RLock()
        self._host = _host_of(self._device)
        with tf.device(self._device):
            self._combiners = Combiners(self._plan, options.layout)
        with tf.device(self._host):
            self._steps = StepQueue(
                self._num_replicas, QUEUE_CAPACITY, pipelined=self._pipelined
            )

    def variables(self) -> list[dict[str, Any]]:
        """See `Engine.variables`."""
        return [
            {**arrays, **self._combiners.variables(table)}
            for table, arrays in enumerate(super().variables())
        ]

    def checkpoint_variables(self) -> dict[str, Any]:
        """See `Engine.checkpoint_variables`."""
        weights = {
            f"{table.name}/{name}": variable
            for table in self._plan.tables
            for name, variable in self._combiners.variables(table.index).items()
        }
        return {**super().checkpoint_variables(), **weights}

    @in_turn
    def enqueue(
        self,
        batches: Sequence[Sequence[IdBatch]],
        replica: int | None,
        *,
        training: bool,
    ) -> None:
        """See `Queue.enqueue`."""
        on_failure = no_change
        if replica is not None and self._num_replicas > 1:
            # A failure in one replica among several must be known to the others.
            on_failure = functools.partial(self._steps.fail_enqueue, replica)
        all_replicas = tuple(range(self._num_replicas))
        replicas = all_replicas if replica is None else (replica,)
        with tf.device(self._host):
            packed = [self._prepare(batch, on_failure) for batch in batches]
            with tf.control_dependencies(packed):
                if self._pipelined and not training:
                    self.flush()
                self._steps.enqueue(packed, replicas, training=training)

    @in_turn
    def dequeue(self, replica: int) -> list[tf.Tensor]:
        """See `Queue.dequeue`."""
        with tf.device(self._host):
            if self._pipelined:
                self._apply_if(self._steps.is_ready_before_evaluation(replica))
            batch = self._steps.dequeue(replica)
            activations = self._look_up(self._unpack_entries(batch))
            if self._pipelined:
                self._apply_if(self._steps.lookups_are_done())
        return activations

    @in_turn
    def apply_gradients(
        self, gradients: Sequence[tf.Tensor | None], replica: int
    ) -> None:
        """See `Queue.apply_gradients`."""
        on_failure = no_change
        if self._num_replicas > 1:
            on_failure = functools.partial(self._steps.fail_deposit, replica)
        with tf.device(self._host):
            rates, completes = self._evaluate_rates(replica, submitting=False)
            with tf.control_dependencies([rates]):
                batch = self._steps.owed(replica)
            entries = self._unpack_entries(batch)
            sums, of_weights = self._row_sums(entries, gradients, on_failure, {})
            parts = pack([sums, rates, of_weights])
            apply_now = self._steps.deposit(replica, parts)
            self._rates.count_update(completes, after=apply_now)
            if not self._pipelined:
                self._apply_if(apply_now)

    @in_turn
    def lookup_call(
        self, batch: Sequence[IdBatch], replica: int, *, training: bool = True
    ) -> Lookup:
        """See `Engine.lookup_call`."""
        del training  # Tickets are forgotten by themselves.
        with tf.device(self._host):
            packed = self._prepare(batch, no_change)
            with tf.control_dependencies([packed]):
                ticket = self._steps.begin_lookup(replica, packed)
            entries = self._unpack_entries(self._steps.ticket_batch(ticket))
            activations = self._look_up(entries)
        return Lookup(activations, ticket)

    @in_turn
    def submit(
        self, ticket: Any, gradients: Sequence[tf.Tensor | None], replica: int
    ) -> None:
        """See `Engine.submit`."""
        with tf.device(self._host):
            rates, completes = self._evaluate_rates(replica, submitting=True)
            with tf.control_dependencies([rates]):
                batch = self._steps.ticket_batch(ticket)
            entries = self._unpack_entries(batch)
            sums, of_weights = self._row_sums(entries, gradients, no_change, {})
            parts = pack([sums, rates, of_weights])
            apply_now = self._steps.submit(replica, ticket, parts)
            self._rates.count_update(completes, after=apply_now)
            self._apply_if(apply_now)

    def preprocess(self, batch: Sequence[IdBatch]) -> PreprocessedFeatures:
        """See `Stacks.preprocess`."""
        layout = self._stacks.layout
        with tf.device(self._host):
            entries = self._combiners.checked(build_entries(self._inputs(batch)))
            stacks = [write_stack(layout, stack, entries) for stack in layout.stacks]
            return self._stacks.pack(stacks, [entry.shape for entry in entries])

    @in_turn
    def lookup_stacked(self, batch: PreprocessedFeatures, replica: int) -> Lookup:
        """See `Stacks.lookup_stacked`."""
        shapes = [tf.cast(shape, tf.int64) for shape in batch.output_shapes]
        with tf.device(self._host):
            entries = self._read_stacks(batch.tables, shapes)
            nothing = pack([])
            with tf.control_dependencies([entries[-1].rows]):
                ticket = self._steps.begin_lookup(replica, nothing)
            with tf.control_dependencies([ticket]):
                activations, found = self._look_up_combined(entries)
                return Lookup(activations, self._combiners.pack(batch.tables, found))

    @in_turn
    def update_stacked(
        self,
        tables: Mapping[str, PartitionedCsrFormatTensor],
        gradients: Sequence[tf.Tensor | None],
        replica: int,
    ) -> None:
        """See `Stacks.update_stacked`."""
        with tf.device(self._host):
            flat = self._by_sample(gradients)
            rates, completes = self._evaluate_rates(replica, submitting=True)
            with tf.control_dependencies([rates]):
                counts = self._stacks.samples(tables)
                entries = self._read_stacks(tables, [n[tf.newaxis] for n in counts])
            found = self._combiners.unpack(tables, counts)
            sums, of_weights = self._row_sums(entries, flat, no_change, found)
            ticket = self._steps.new_ticket(pack([]))
            parts = pack([sums, rates, of_weights])
            apply_now = self._steps.submit(replica, ticket, parts)
            self._rates.count_update(completes, after=apply_now)
            self._apply_if(apply_now)

    @in_turn
    def reset(self) -> None:
        """See `Engine.reset`."""
        with tf.device(self._host):
            self._steps.reset()

    def _completes(self, replica: int, *, submitting: bool) -> tf.Tensor:
        return self._steps.completes(replica, submitting=submitting)

    @in_turn
    def flush(self) -> None:
        """See `Engine.flush`."""
        if self._pipelined:
            with tf.device(self._host):
                self._apply_if(self._steps.is_ready())

    def _apply_update(self) -> None:
        spec = [
            tf.TensorSpec([], tf.variant),
            tf.TensorSpec([self._rates.size]),
            tf.TensorSpec([self._combiners.num_weights]),
        ]
        parts = [unpack(part, spec) for part in self._steps.take_ready()]
        replicas = [unpack_row_sums(sums, self._plan) for sums, *_ in parts]
        rates = tf.add_n([rates for _, rates, _ in parts])  # zeros from all but one
        step = self._rates.step_of_update()
        with tf.device(self._device):
            self._combiners.update(
                tf.add_n([weights for *_, weights in parts]),
                lambda table: self._rates.of_table(rates, table).combiner_rate,
            )
        for table, variables in zip(self._plan.tables, self._variables, strict=True):
            assert table.optimizer is not None
            with tf.device(self._device):
                rows, sums = merge([sums[table.index] for sums in replicas])
                rounding = Rounding(table.rounding_seed, step)
                numbers = self._rates.of_table(rates, table.index)
                how = TableStep(table.optimizer, numbers, rounding)
                update(variables, how, rows, sums)

    def _prepare(self, batch: Sequence[IdBatch], on_failure: Change) -> tf.Tensor:
        """Checks one replica's batch; a variant that the queue takes."""
        entries = build_entries(self._inputs(batch), on_failure)
        return pack_entries(entries)

    def _inputs(self, batch: Sequence[IdBatch]) -> list[FeatureInput]:
        shapes = self._options.output_shapes
        return [
            FeatureInput(
                spec=spec,
                table=self._plan.tables[spec.table],
                batch=feature,
                declared=shapes.declared(spec.index),
                check_numerics=self._options.check_numerics,
            )
            for spec, feature in zip(self._plan.features, batch, strict=True)
        ]

    def _read_stacks(
        self,
        tables: Mapping[str, PartitionedCsrFormatTensor],
        shapes: Sequence[tf.Tensor],
    ) -> list[Entries]:
        entries = read_stacks(self._plan, self._stacks.layout, tables, shapes)
        return self._combiners.checked(entries)

    def _unpack_entries(self, batch: tf.Tensor) -> list[Entries]:
        return unpack_entries(batch, self._plan, self._options.output_shapes)

    def _look_up(self, entries: Sequence[Entries]) -> list[tf.Tensor]:
        activations = []
        with tf.device(self._device):
            for feature, entry, dim in zip(
                self._plan.features, entries, self._plan.dims, strict=True
            ):
                config = self._plan.tables[feature.table].config
                table = VariableReader(self._variables[feature.table].parameters)
                reader = reader_of(table, config.quantization_config)
                activation = look_up(reader, entry)
                if feature.index not in self._combiners.of_features:
                    shape = self._options.output_shapes.activation(feature.index)
                    activation = tf.ensure_shape(activation, (*shape, dim))
                activations.append(activation)
        return activations

    def _look_up_combined(
        self, entries: Sequence[Entries]
    ) -> tuple[list[tf.Tensor], dict[int, Found]]:
        """As `_look_up`, with custom combiners and what they are to know later."""
        activations = self._look_up(self._combiners.all_places(entries))
        with tf.device(self._device):
            return self._combiners.combine_all(entries, activations)

    def _row_sums(
        self,
        entries: Sequence[Entries],
        gradients: Sequence[tf.Tensor | None],
        on_failure: Change,
        found: Mapping[int, Found],
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Checks one replica's gradients.

        Returns:
          (A variant of rows and sums by table, the gradients of all weights of custom
          combiners one after another).
        """
        checks = [
            check
            for feature, gradient in enumerate(gradients)
            if gradient is not None
            for check in gradient_checks(
                self._plan.features[feature].path,
                gradient,
                tf.concat([entries[feature].shape, [self._plan.dims[feature]]], 0),
                check_numerics=self._options.check_numerics,
            )
        ]
        tensors = []
        with (
            tf.control_dependencies(require(checks, on_failure)),
            tf.device(self._device),
        ):
            of_vectors, of_weights = self._combiners.backward(found, gradients)
            for table in self._plan.tables:
                rows = [entries[f].rows for f in table.features]
                values = [
                    self._entry_gradients(
                        f, of_vectors.get(f, gradients[f]), entries[f]
                    )
                    for f in table.features
                ]
                tensors += sum_by_row(tf.concat(rows, 0), tf.concat(values, 0))
        return pack(tensors), of_weights

    def _entry_gradients(
        self, feature: int, gradient: tf.Tensor | None, entries: Entries
    ) -> tf.Tensor:
        dim = self._plan.dims[feature]
        if gradient is None:
            return tf.zeros([tf.size(entries.rows), dim])
        if feature in self._combiners.of_features:
            entries = self._combiners.places(feature, entries)
        return entry_gradients(gradient, entries, dim)


def _host_of(device: str) -> str:
    """The CPU that serves a device: checks and queues are for CPUs."""
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type == "CPU":
        return device
    return spec.replace(device_type="CPU", device_index=0).to_string()
