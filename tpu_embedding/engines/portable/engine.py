"""The engine for any device: the same numbers and errors from TensorFlow's ops."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.engines.base import (
    QUEUE_CAPACITY,
    EngineOptions,
    Prepared,
    StepQueue,
    TableArrays,
)
from tpu_embedding.engines.batch_queue import BatchQueue, CallsOfRun, pack, unpack
from tpu_embedding.engines.cpu_base import WholeTablesEngine
from tpu_embedding.engines.portable.combiners import (
    Combiners,
    Found,
    check_functions,
)
from tpu_embedding.engines.portable.stacks import read_stacks, write_stack
from tpu_embedding.engines.portable.sums import NestQueue, Sums, Update
from tpu_embedding.engines.portable.tables import CountedUpdate, update_table
from tpu_embedding.engines.telemetry import Counts, Recorder
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.csr import PreprocessedFeatures
from tpu_embedding.layout.output_shapes import Shape
from tpu_embedding.lookup.combine import look_up, reader_of, sum_segments
from tpu_embedding.lookup.entries import Entries, build_entries
from tpu_embedding.lookup.graph_checks import Check, refuse, require, text
from tpu_embedding.lookup.input_rows import FeatureInput, first
from tpu_embedding.tables.readers import VariableReader
from tpu_embedding.tables.variables import create_state

_MAX_UPDATES = 1024  # Gradients of one replica that may wait for other replicas.
_PARTIAL = (
    "Another replica has not applied its gradients of the step before. Put the loop "
    "over steps outside of strategy.run, and in each step look up all batches before "
    "gradients are applied."
)
_NO_TURN = (
    "The gradients of this replica came before those of the replica before it. Apply "
    "as many gradients in every replica, and put the loop over steps outside of "
    "strategy.run."
)
_TOO_MANY = (
    f"The gradients of {_MAX_UPDATES} lookups of this replica wait for those of the "
    "others. Make the same lookups in every replica."
)
_USED = (
    "The gradients of this lookup were applied already; each lookup takes them once. "
    "Call the layer again, or take all gradients with one tape.gradient call."
)
_GIVEN_UP = (
    "The gradients belong to a step that was given up: it failed in some replica, or "
    "reset was called after its lookup. Run the step again."
)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Owner = TypeVar("_Owner", bound=Any)


def _in_turn(
    method: Callable[Concatenate[_Owner, _Arguments], _Result],
) -> Callable[Concatenate[_Owner, _Arguments], _Result]:
    """Runs a method on the engine's host, one eager call of all threads at a time.

    A tf.function that runs later is beyond the reach of a lock in Python.
    """

    @functools.wraps(method)
    def call(
        self: _Owner, *arguments: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Result:
        with self.turn, tf.device(self.host):
            return method(self, *arguments, **named)

    return call


class PortableEngine(WholeTablesEngine):
    """Batches travel as entries, gradients as their sums by row.

    With several replicas, the gradients of a replica wait until the last replica hands
    in its own. MirroredStrategy runs the replicas in their order, eagerly and in
    graphs, so that the last replica is always the one that completes an update.

    Attributes:
      host: The CPU of the tables' device, which checks and queues.
      turn: Held during eager calls.
      calls: What each replica has called in its strategy.run.
    """

    name = "portable"

    def __init__(self, options: EngineOptions) -> None:
        """Makes the tables and the queues; see `Engine`."""
        check_functions(options.plan)
        super().__init__(options)
        self.turn = threading.RLock()
        self.host = _host_of(self._device)
        self.calls = CallsOfRun(options.topology)
        self._is_trained = all(table.optimizer for table in self._plan.tables)
        with tf.device(self._device):
            self._combiners = Combiners(self._plan, options.layout)
        self._recorder = Recorder(self._plan)
        self._traced_uncounted = False  # Whether a function trains without counts.
        sums = Sums.specs(self._plan, self._combiners.num_weights)
        rates = tf.TensorSpec([self._rates.size])
        pending = Update(tf.TensorSpec([], tf.int64), rates, sums)
        with tf.device(self.host):
            self._waiting = [
                NestQueue(_MAX_UPDATES, sums) for _ in range(self._num_replicas - 1)
            ]
            self._pending = NestQueue(1, pending) if self._pipelined else None
            self._batches = BatchQueue(self._num_replicas, QUEUE_CAPACITY)
            # The number of steps given up, by which late gradients are told. Written by
            # each use of a lookup, too, so that graphs make the uses in order.
            self._epoch = create_state("epoch", tf.zeros([], tf.int64))

    def tables(self) -> dict[str, TableArrays]:
        """See `Engine.tables`."""
        tables = super().tables()
        for spec in self._plan.tables:
            weights = self._combiners.variables(spec.index)
            if weights:
                table = tables[spec.name]
                values = {**table.values(), **weights}
                get_values = functools.partial(dict, values)
                tables[spec.name] = dataclasses.replace(table, values=get_values)
        return tables

    def checkpoint_variables(self) -> dict[str, Any]:
        """See `Engine.checkpoint_variables`."""
        weights = {
            f"{table.name}/{name}": variable
            for table in self._plan.tables
            for name, variable in self._combiners.variables(table.index).items()
        }
        return {**super().checkpoint_variables(), **weights}

    def prepare(
        self,
        batch: Sequence[IdBatch],
        *,
        training: bool,
        device: str | tf.Tensor | None = None,
    ) -> Prepared:
        """See `Engine.prepare`."""
        del training
        if device is not None:
            raise errors.enqueue_device(device)
        shapes = self._options.output_shapes
        with tf.device(self.host):
            inputs = [
                FeatureInput(
                    spec=spec,
                    table=self._plan.tables[spec.table],
                    batch=feature,
                    declared=shapes.declared(spec.index),
                    check_numerics=self._options.check_numerics,
                )
                for spec, feature in zip(self._plan.features, batch, strict=True)
            ]
            entries = self._combiners.checked(build_entries(inputs))
            return Prepared(_pack_entries(entries))

    def to_tensors(self, prepared: Prepared) -> PreprocessedFeatures:
        """See `Engine.to_tensors`."""
        if prepared.tensors is not None:
            return prepared.tensors
        layout = self._stacks.layout
        with tf.device(self.host):
            entries = self.unpack_entries(prepared.value)
            stacks = [write_stack(layout, stack, entries) for stack in layout.stacks]
            return self._stacks.pack(stacks, [entry.shape for entry in entries])

    @_in_turn
    def lookup(
        self,
        prepared: Prepared,
        replica: int,
        *,
        training: bool,
        shapes: Sequence[Shape] | None = None,
    ) -> tuple[list[tf.Tensor], Prepared]:
        """See `Engine.lookup`."""
        batch = prepared.tensors
        if batch is None:
            entries = self.unpack_entries(prepared.value)
        else:
            given = [tf.cast(shape, tf.int64) for shape in batch.output_shapes]
            entries = self._read_stacks(batch.tables, given)
        if training:
            with tf.control_dependencies([entries[-1].rows]):
                begun = self._begin_lookup(replica)
            with tf.control_dependencies(begun):
                entries = [e._replace(rows=tf.identity(e.rows)) for e in entries]
        activations, found = self.look_up(entries, shapes)
        if batch is not None:
            tables = self._combiners.pack(batch.tables, found)
            return activations, Prepared(None, batch._replace(tables=tables))
        # Gets an entry when the lookup is used, and is freed together with the lookup.
        used = tf.raw_ops.AnonymousMutableHashTable(
            key_dtype=tf.int64, value_dtype=tf.int64
        )
        epoch = self._epoch.read_value()
        return activations, Prepared(pack([prepared.value, used, epoch]))

    @_in_turn
    def update(
        self,
        looked_up: Prepared,
        gradients: Sequence[tf.Tensor | None],
        replica: int,
    ) -> None:
        """See `Engine.update`."""
        if looked_up.tensors is not None:
            tables = looked_up.tensors.tables
            counts = self._stacks.samples(tables)
            entries = self._read_stacks(tables, [n[tf.newaxis] for n in counts])
            found = self._combiners.unpack(tables, counts)
            self.hand_in(entries, self._by_sample(gradients), replica, found)
            return
        batch, *ticket = unpack(
            looked_up.value,
            [tf.TensorSpec([], t) for t in (tf.variant, tf.resource, tf.int64)],
        )
        self.hand_in(self.unpack_entries(batch), gradients, replica, {}, ticket)

    def queue(self) -> StepQueue:
        """See `Engine.queue`."""
        return _Queue(self, self._batches)

    @_in_turn
    def flush(self) -> None:
        """See `Engine.flush`."""
        self.flush_if(tf.constant(True))

    @_in_turn
    def reset(self) -> None:
        """See `Engine.reset`."""
        self._batches.reset()
        self.discard_waiting(tf.constant(True))
        if self._pending is not None:
            size = self._pending.size()
            if self._rates.updates is not None:
                self._rates.updates.assign_sub(tf.cast(size, tf.int64))
            self._pending.discard(size)

    @_in_turn
    def start_counting(self, every: int) -> None:
        """See `Engine.start_counting`."""
        if every and self._traced_uncounted:
            raise RuntimeError(
                "A tf.function that trains was traced while nothing was counted, and "
                "the portable engine counts only what functions were traced to count. "
                "Create a Telemetry before the first training step."
            )
        self._recorder.start(every)

    def counts(self, num_hot_rows: int) -> Counts:
        """See `Engine.counts`."""
        steps, counted_steps, tables = self._recorder.read(num_hot_rows)
        pending = 0 if self._pending is None else int(self._pending.size())
        depth = self._batches.depth()
        return Counts(steps, counted_steps, depth, pending, tables)

    def _note_trace(self) -> bool:
        """Whether an update counts; notes if a function is traced that does not."""
        counted = self._recorder.is_on
        self._traced_uncounted |= not counted and not tf.executing_eagerly()
        return counted

    def is_outside(self) -> bool:
        """Whether the caller is outside of strategy.run, among several replicas."""
        topology = self._options.topology
        return self._num_replicas > 1 and topology.run_context() is None

    def is_last(self, replica: int) -> bool:
        """Whether all other replicas come before `replica`."""
        return replica == self._num_replicas - 1

    def is_partial(self, replica: int) -> tf.Tensor:
        """Whether gradients of `replica` wait for those of other replicas."""
        if self.is_last(replica):
            return tf.constant(False)
        return self._waiting[replica].size() > 0

    def discard_waiting(self, condition: tf.Tensor, replica: int = 0) -> None:
        """Gives a refused step up: discards gradients of it that wait.

        Those that are still to come are refused. Replicas act in ascending order, so
        that gradients of those before `replica` are of the step that has begun.
        """
        self._epoch.assign_add(tf.cast(condition, tf.int64), read_value=False)
        for queue in self._waiting[replica:]:
            queue.discard(tf.where(condition, queue.size(), 0))

    def flush_if(self, condition: tf.Tensor) -> tf.Tensor:
        """Applies the pending update if there is one and `condition` holds."""
        queue = self._pending
        if queue is None or not self._is_trained:
            return tf.constant(False)

        def apply() -> tf.Tensor:
            self._apply(queue.dequeue())
            return tf.constant(True)

        return tf.cond(condition & (queue.size() > 0), apply, lambda: False)

    def hand_in(
        self,
        entries: Sequence[Entries],
        gradients: Sequence[tf.Tensor | None],
        replica: int,
        found: Mapping[int, Found],
        ticket: Sequence[tf.Tensor] = (),
    ) -> list[Any]:
        """Takes the gradients of one lookup; those of the last replica update.

        Args:
          entries: The batch, one for each feature.
          gradients: For each feature float32 of its activation's shape, or None.
          replica: Index of the calling replica.
          found: What the lookup found for features with a custom combiner.
          ticket: If the lookup can be used once only, what marks it as used, and when
            it was made.

        Returns:
          Control inputs for ops that must not run if the call is refused.
        """
        self.calls.note("update")
        counted = self._note_trace()
        # Before anything changes: a learning rate that fails changes nothing.
        rates = self._rates.evaluate() if self.is_last(replica) else tf.zeros([0])
        with tf.control_dependencies(self._check_gradients(entries, gradients)):
            sums = self._row_sums(entries, gradients, found, counted=counted)
        accepted = [rates, *tf.nest.flatten(sums)]
        with tf.control_dependencies(accepted):
            accepted += self._check_turn(replica)
        with tf.control_dependencies(accepted):
            accepted += self._use(*ticket) if ticket else []
        with tf.control_dependencies(accepted):
            if self.is_last(replica):
                others = [queue.dequeue() for queue in self._waiting]
                merged = Sums.merged([*others, sums], counted=counted)
                self._complete(rates, merged)
            else:
                self._waiting[replica].enqueue(sums)
        return accepted

    def _begin_lookup(self, replica: int) -> list[Any]:
        """Gives up the step before this one if it was refused.

        Returns:
          Control inputs for ops that must not run if this lookup is refused.
        """
        if self.is_last(replica):
            return []
        partial = self.is_partial(replica)
        if self.calls.made("update"):
            return refuse(tf.cast(partial, tf.int32), ["", _PARTIAL])
        self.discard_waiting(partial, replica)
        return []

    def _check_turn(self, replica: int) -> list[Any]:
        """Checks that replicas come in their order; returns control inputs."""
        if self._num_replicas == 1:
            return []
        waiting = [queue.size() for queue in self._waiting] + [tf.constant(0)]
        code = tf.where(waiting[replica] >= _MAX_UPDATES, 2, 0)
        if replica > 0:
            code = tf.where(waiting[replica - 1] <= waiting[replica], 1, code)
        return refuse(tf.cast(code, tf.int32), ["", _NO_TURN, _TOO_MANY])

    def _use(self, used: tf.Tensor, made: tf.Tensor) -> list[Any]:
        """Marks a lookup as used; returns control inputs."""
        epoch = self._epoch.read_value()
        with tf.control_dependencies([epoch]):
            size = tf.raw_ops.LookupTableSizeV2(table_handle=used)
        code = tf.where(size > 0, 1, tf.where(tf.equal(epoch, made), 0, 2))
        zero = tf.zeros([1], tf.int64)
        with tf.control_dependencies(refuse(code, ["", _USED, _GIVEN_UP])):
            done = tf.raw_ops.LookupTableInsertV2(
                table_handle=used, keys=zero, values=zero
            )
        with tf.control_dependencies([done]):
            return [self._epoch.assign_add(0, read_value=False)]

    def _complete(self, rates: tf.Tensor, sums: Sums) -> None:
        """Applies an update, or leaves it pending and applies the one before it."""
        updates = self._rates.updates
        number = tf.zeros([], tf.int64) if updates is None else updates.read_value()
        number = tf.identity(number)
        update = Update(number, rates, sums)
        if self._pending is None:
            self._apply(update)
        else:
            with tf.control_dependencies([self.flush_if(tf.constant(True))]):
                self._pending.enqueue(update)
        if updates is not None:
            with tf.control_dependencies([number]):
                updates.assign_add(1)

    def _apply(self, update: Update) -> None:
        """Applies one update."""
        number, rates, sums = update
        numbers = [self._rates.of_table(rates, t.index) for t in self._plan.tables]
        with tf.device(self._device):
            self._combiners.update(
                sums.of_weights, lambda table: numbers[table].combiner_rate
            )
            counting = None
            if self._note_trace():
                counting = CountedUpdate(
                    self._recorder, self._plan, self._variables, sums
                )
            for spec, table in zip(self._plan.tables, sums.tables, strict=True):
                variables = self._variables[spec.index]
                update_table(spec, variables, numbers[spec.index], number, table)
            if counting is not None:
                counting.finish()

    def _read_stacks(self, tables: Any, shapes: Sequence[tf.Tensor]) -> list[Entries]:
        entries = read_stacks(self._plan, self._stacks.layout, tables, shapes)
        return self._combiners.checked(entries)

    def unpack_entries(self, batch: tf.Tensor) -> list[Entries]:
        """Undoes `_pack_entries`."""
        shapes = self._options.output_shapes
        vector = tf.TensorSpec([None], tf.int64)
        specs = [
            Entries(
                rows=vector,
                samples=vector,
                gains=tf.TensorSpec([None]),
                shape=tf.TensorSpec([len(shapes.activation(f.index))], tf.int64),
                num_invalid=tf.TensorSpec([], tf.int64),
            )
            for f in self._plan.features
        ]
        tensors = unpack(batch, tf.nest.flatten(specs))
        return tf.nest.pack_sequence_as(specs, tensors)

    def check_shapes(self, batch: tf.Tensor, shapes: Sequence[Shape]) -> list[Any]:
        """Checks that a graph may look a batch up; returns control inputs."""
        entries = self.unpack_entries(batch)
        return require(
            [
                _static_check(feature.path, entry.shape, shape)
                for feature, entry, shape in zip(
                    self._plan.features, entries, shapes, strict=True
                )
            ]
        )

    def look_up(
        self, entries: Sequence[Entries], shapes: Sequence[Shape] | None = None
    ) -> tuple[list[tf.Tensor], dict[int, Found]]:
        """The activations, and what the update of custom combiners is to know."""
        activations = []
        with tf.device(self._device):
            positions = self._combiners.positions(entries)
            for feature, entry in zip(self._plan.features, positions, strict=True):
                config = self._plan.tables[feature.table].config
                table = VariableReader(self._variables[feature.table].parameters)
                reader = reader_of(table, config.quantization_config)
                activations.append(look_up(reader, entry, sum_segments))
            activations, found = self._combiners.combine(entries, activations)
        known = self._options.output_shapes.activations(shapes)
        activations = [
            tf.ensure_shape(activation, (*shape, dim))
            for activation, shape, dim in zip(
                activations, known, self._plan.dims, strict=True
            )
        ]
        return activations, found

    def _check_gradients(
        self, entries: Sequence[Entries], gradients: Sequence[tf.Tensor | None]
    ) -> list[Any]:
        checks = []
        for at, gradient in enumerate(gradients):
            if gradient is not None:
                shape = tf.concat([entries[at].shape, [self._plan.dims[at]]], 0)
                name = f"Feature {self._plan.features[at].path}"
                checks.append(_shape_check(name, gradient, shape))
                if self._options.check_numerics:
                    checks.append(_finite_check(name, gradient))
        return require(checks)

    def _row_sums(
        self,
        entries: Sequence[Entries],
        gradients: Sequence[tf.Tensor | None],
        found: Mapping[int, Found],
        *,
        counted: bool,
    ) -> Sums:
        """The sums of one replica's gradients."""
        with tf.device(self._device):
            gradients, of_weights = self._combiners.backward(found, gradients)
            return Sums.of_replica(
                self._plan,
                entries,
                gradients,
                of_weights=of_weights,
                positions=self._combiners.positions(entries),
                counted=counted,
            )


class _Queue(StepQueue):
    """Puts batches of entries into a `BatchQueue` and takes them through the engine."""

    def __init__(self, engine: PortableEngine, batches: BatchQueue) -> None:
        self._engine, self._batches = engine, batches

    def enqueue(
        self,
        batches: Sequence[Prepared],
        replica: int | None,
        *,
        training: bool,
        name: str | None = None,
    ) -> None:
        """See `StepQueue.enqueue`."""
        del name
        engine = self._engine
        with engine.turn, tf.device(engine.host):
            packed = [batch.value for batch in batches]
            begins = replica is None or not engine.calls.made("enqueue")
            with tf.control_dependencies(packed):
                gave_up = self._batches.enqueue(
                    packed,
                    replica,
                    training=training,
                    begins=begins,
                    outside=replica is not None and engine.is_outside(),
                )
            engine.calls.note("enqueue")
            with tf.control_dependencies([gave_up]):
                engine.discard_waiting(gave_up)
                if not training:
                    engine.flush()

    def dequeue(
        self,
        replica: int,
        *,
        shapes: Sequence[Shape] | None = None,
        name: str | None = None,
    ) -> list[tf.Tensor]:
        """See `StepQueue.dequeue`."""
        del name
        engine = self._engine

        def check(batch: tf.Tensor) -> list[Any]:
            return [] if shapes is None else engine.check_shapes(batch, shapes)

        with engine.turn, tf.device(engine.host):
            batch, training, gave_up = self._batches.dequeue(
                replica,
                partial=engine.is_partial(replica),
                begins=engine._num_replicas > 1
                and not engine.calls.made("dequeue", "update"),
                check=check,
            )
            engine.calls.note("dequeue")
            with tf.control_dependencies([gave_up]):
                engine.discard_waiting(gave_up, replica)
                flushed = engine.flush_if(~training)
            with tf.control_dependencies([flushed]):
                entries = engine.unpack_entries(batch)
                activations, _ = engine.look_up(entries, shapes)
            if not engine.is_last(replica):
                return activations
            # All replicas have looked up. What uses the activations runs after the
            # update, so that it cannot interrupt it when it fails.
            with tf.control_dependencies(activations):
                flushed = engine.flush_if(training)
            with tf.control_dependencies([flushed]):
                return [tf.identity(activation) for activation in activations]

    def apply_gradients(
        self,
        gradients: Sequence[tf.Tensor | None],
        replica: int,
        *,
        name: str | None = None,
    ) -> None:
        """See `StepQueue.apply_gradients`."""
        del name
        engine = self._engine
        with engine.turn, tf.device(engine.host):
            entries = engine.unpack_entries(self._batches.owed(replica))
            with tf.control_dependencies(
                engine.hand_in(entries, gradients, replica, {})
            ):
                self._batches.settle(replica)


def _pack_entries(entries: Sequence[Entries]) -> tf.Tensor:
    """The entries of all features as one scalar variant."""
    return pack(tf.nest.flatten(list(entries)))


def _static_check(path: str, shape: tf.Tensor, static: Shape) -> Check:
    """That an output has the shape for which a function was traced."""
    expected = [-1 if axis is None else axis for axis in static]
    fits = tf.equal(shape, expected) | tf.equal(expected, -1)

    def message() -> tf.Tensor:
        axes = tf.strings.reduce_join(tf.strings.as_string(shape), separator=",")
        return text(
            f"Feature {path}: the activations have shape [",
            axes,
            f", D], but the function was traced for {[*static, 'D']}. Pass "
            "`batch_size` where the size of batches is fixed, or trace a function for "
            "each size.",
        )

    return Check(fits, message)


def _shape_check(name: str, gradient: tf.Tensor, expected: tf.Tensor) -> Check:
    shape = tf.shape(gradient, out_type=tf.int64)
    size = tf.minimum(tf.size(shape), tf.size(expected))
    is_same = tf.reduce_all(tf.equal(shape[:size], expected[:size]))

    def message() -> tf.Tensor:
        shapes = [
            tf.strings.reduce_join(tf.strings.as_string(axes), separator=",")
            for axes in (shape, expected)
        ]
        return text(
            f"{name}: the gradient has shape [",
            shapes[0],
            "], but the activation had [",
            shapes[1],
            "].",
        )

    return Check(is_same & tf.equal(tf.size(shape), tf.size(expected)), message)


def _finite_check(name: str, gradient: tf.Tensor) -> Check:
    values = tf.reshape(gradient, [-1])
    is_finite = tf.math.is_finite(values)

    def message() -> tf.Tensor:
        at = first(~is_finite)
        sample = at // tf.shape(gradient, tf.int64)[-1]
        return text(
            f"{name}: the gradient of sample ",
            sample,
            " is not finite (",
            values[at],
            ").",
        )

    return Check(is_finite, message)


def _host_of(device: str) -> str:
    """The CPU that serves a device: checks and queues are for CPUs."""
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type == "CPU":
        return device
    return spec.replace(device_type="CPU", device_index=0).to_string()
