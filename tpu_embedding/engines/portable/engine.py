"""The engine for any device: it runs one replica with TensorFlow's ops."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.engines.base import Engine, TracedTicket
from tpu_embedding.engines.batch_ring import BatchRing, pack, unpack
from tpu_embedding.engines.calls import Call, EngineOptions, Prepared, StepQueue
from tpu_embedding.engines.cpu_base import StackedBatches, refuse_tpu_options
from tpu_embedding.engines.portable.combiners import (
    CombinerInputs,
    Combiners,
    check_functions,
)
from tpu_embedding.engines.rates import Rates, UpdateScalars
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.csr import PartitionedCsrFormatTensor
from tpu_embedding.layout.output_shapes import Shape
from tpu_embedding.layout.plan import UPDATES, Plan, TableSpec
from tpu_embedding.layout.stacking import Layout, Stack
from tpu_embedding.lookup.entries import Entries, select
from tpu_embedding.lookup.features import look_up, reader_of, sum_segments
from tpu_embedding.lookup.graph_checks import Check, refuse, require, text
from tpu_embedding.lookup.input_rows import FeatureInput, finite_gradient
from tpu_embedding.optimizers.base import ArrayOps, apply_rule
from tpu_embedding.tables.codes import random_bits
from tpu_embedding.tables.readers import VariableReader
from tpu_embedding.tables.table import Table, stored_table
from tpu_embedding.tables.trackable import RowsVariable
from tpu_embedding.tables.variables import (
    TableVariables,
    create_counter,
    create_state,
    create_variables,
)

_DISCARDED = (
    "The gradients belong to a step that was discarded: it failed in some replica, or "
    "reset was called after its lookup. Run the step again."
)
# Bit patterns of a float32.
_INFINITY = 0x7F800000
_LARGEST = 0x7F7FFFFF
_QUIET = 0x00400000


class PortableEngine(Engine, StepQueue):
    """Looks up and updates entries (row, sample, gain), and is its own queue."""

    name = "portable"
    table_dtypes = ("float32", "bfloat16")
    differentiates_weights = True

    def __init__(self, options: EngineOptions) -> None:
        """Makes the tables and the queue; see `Engine`."""
        check_functions(options.plan)
        super().__init__(options)
        self.queue = self
        self._variables = create_variables(options.plan, self._device)
        self._rates = Rates(
            options.plan, lambda: create_counter("updates", self._device)
        )
        self._stacks = StackedBatches(options.plan, options.layout)
        self._lock = threading.Lock()
        self._host = _host_of(self._device)
        with tf.device(self._device):
            self._combiners = Combiners(self._plan, options.layout)
        with tf.device(self._host):
            self._ring = BatchRing(in_order=True)
            # The number of calls of `reset`, to recognize gradients of older lookups.
            self._resets = create_state("resets", tf.zeros([], tf.int64))

    @classmethod
    def check(cls, options: EngineOptions) -> None:
        refuse_tpu_options(cls.name, options.plan)
        number = options.topology.num_replicas
        lacking = [f"{number} replicas"] if number > 1 else []
        if options.pipelined:
            lacking.append("`pipeline_execution_with_tensor_core=True`")
        if lacking:
            raise NotImplementedError(
                f"The portable engine does not support {' or '.join(lacking)}. The "
                "host engine supports this, but needs the compiled library, tables on "
                "a CPU, and no CustomOptimizer or CustomCombiner."
            )

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Runs one eager call at a time, on the CPU; graphs may run at any time."""
        with self._lock, tf.device(self._host):
            yield

    def tables(self) -> dict[str, Table]:
        tables = {}
        for spec, variables in zip(self._plan.tables, self._variables, strict=True):
            table = stored_table(spec, [variables])
            weights = self._combiners.variables(spec.index)
            values = functools.partial(dict, {**variables.arrays, **weights})
            tables[spec.name] = dataclasses.replace(table, values=values)
        return tables

    def checkpoint_variables(self) -> dict[str, Any]:
        variables: dict[str, Any] = {}
        for stored in self.tables().values():
            variables |= stored.ids.objects(RowsVariable)
        for table in self._plan.tables:
            for name, variable in self._combiners.variables(table.index).items():
                variables[f"{table.name}/{name}"] = variable
        updates = self._rates.updates
        return variables if updates is None else {**variables, UPDATES: updates}

    def prepare(
        self, batches: Sequence[Sequence[IdBatch]], call: Call
    ) -> list[Prepared]:
        """See `Steps.prepare`; a batch is a list of Entries."""
        (batch,) = batches
        with tf.device(self._host):
            inputs = [
                FeatureInput(
                    spec=spec,
                    table=self._plan.tables[spec.table],
                    batch=feature,
                    declared=self._options.output_shapes.declared(spec.index),
                    check_numerics=self._options.check_numerics,
                )
                for spec, feature in zip(self._plan.features, batch, strict=True)
            ]
            entries = self._combiners.checked([s.entries() for s in select(inputs)])
            if not call.tensors:
                return [Prepared(entries)]
            layout = self._stacks.layout
            stacks = [_write_stack(layout, stack, entries) for stack in layout.stacks]
            shapes = [entry.shape for entry in entries]
            return [Prepared(entries, self._stacks.pack(stacks, shapes))]

    def lookup(
        self, prepared: Prepared, call: Call
    ) -> tuple[list[tf.Tensor], Prepared]:
        batch = prepared.tensors
        with self._turn():
            if batch is None:
                activations, _ = self._look_up(prepared.value, call)
                ticket = TracedTicket((prepared.value, self._resets.read_value()))
                return activations, Prepared(ticket)
            given = [tf.cast(shape, tf.int64) for shape in batch.output_shapes]
            entries = self._read_stacks(batch.tables, given)
            activations, found = self._look_up(entries, call)
            tables = self._combiners.pack(batch.tables, found)
            return activations, Prepared(None, batch._replace(tables=tables))

    def update(
        self, looked_up: Prepared, gradients: Sequence[tf.Tensor | None], call: Call
    ) -> None:
        del call
        with self._turn():
            if looked_up.tensors is not None:
                tables = looked_up.tensors.tables
                counts = self._stacks.samples(tables)
                entries = self._read_stacks(tables, [n[tf.newaxis] for n in counts])
                found = self._combiners.unpack(tables, counts)
                self._update(entries, self._stacks.by_sample(gradients), found)
                return
            ticket = looked_up.value
            entries, resets = ticket.content
            is_late = self._resets.read_value() > resets
            code = tf.cast(is_late & (not ticket.taken), tf.int32)
            with tf.control_dependencies(refuse(code, ["", _DISCARDED])):
                self._update(entries, gradients, {}, ticket)

    def enqueue(self, batches: Sequence[Prepared], call: Call) -> None:
        (batch,) = batches
        with self._turn():
            self._ring.put(pack(tf.nest.flatten(batch.value)), training=call.training)

    def dequeue(self, call: Call) -> list[tf.Tensor]:

        def check(batch: tf.Tensor) -> list[Any]:
            shapes = call.shapes or ()
            entries = self._unpack(batch)[: len(shapes)]
            known = zip(self._plan.paths, entries, shapes, strict=False)
            return require([_static_check(p, e.shape, shape) for p, e, shape in known])

        with self._turn():
            _, batch = self._ring.take(check)
            return self._look_up(self._unpack(batch), call)[0]

    def apply_gradients(
        self, gradients: Sequence[tf.Tensor | None], call: Call
    ) -> None:
        del call
        with self._turn():
            entries = self._unpack(self._ring.owed())
            with tf.control_dependencies(self._update(entries, gradients, {})):
                self._ring.settle()

    def flush(self) -> None:
        """See `TableStore.flush`: nothing is pending."""

    def reset(self) -> None:
        with self._turn():
            self._ring.reset()
            self._resets.assign_add(1)

    def _look_up(
        self, entries: Sequence[Entries], call: Call
    ) -> tuple[list[tf.Tensor], dict[int, CombinerInputs]]:
        """Returns the activations, and what the update of custom combiners needs."""
        activations = []
        with tf.device(self._device):
            positions = self._combiners.positions(entries)
            for feature, entry in zip(self._plan.features, positions, strict=True):
                config = self._plan.tables[feature.table].config
                table = VariableReader(self._variables[feature.table].parameters)
                reader = reader_of(table, config.quantization_config)
                activations.append(look_up(reader, entry, sum_segments))
            activations, found = self._combiners.combine(entries, activations)
        known = self._options.output_shapes.activations(call.shapes)
        outputs = zip(activations, known, self._plan.dims, strict=True)
        return [tf.ensure_shape(a, (*axes, dim)) for a, axes, dim in outputs], found

    def _update(
        self,
        entries: Sequence[Entries],
        gradients: Sequence[tf.Tensor | None],
        found: Mapping[int, CombinerInputs],
        ticket: TracedTicket | None = None,
    ) -> list[Any]:
        """Updates all tables once nothing can fail; returns what it waited for."""
        rates = self._rates.evaluate()
        checks = []
        batch = zip(self._plan.features, entries, gradients, strict=True)
        for spec, own, gradient in batch:
            if gradient is not None:
                shape = tf.concat([own.shape, [self._plan.dims[spec.index]]], 0)
                checks.append(_shape_check(spec.path, gradient, shape))
                if self._options.check_numerics:
                    checks.append(finite_gradient(spec.path, gradient))
        with tf.control_dependencies(require(checks)), tf.device(self._device):
            of_lookups, of_weights = self._combiners.backward(found, gradients)
            positions = self._combiners.positions(entries)
            sums = [_row_sums(t, positions, of_lookups) for t in self._plan.tables]
        if ticket is not None:
            ticket.take()
        updates = self._rates.updates
        number = tf.zeros([], tf.int64) if updates is None else tf.identity(updates)
        accepted = [rates, number, *tf.nest.flatten([of_weights, sums])]
        with tf.control_dependencies(accepted), tf.device(self._device):
            for spec, own in zip(self._plan.tables, sums, strict=True):
                numbers = self._rates.of_table(rates, spec.index)
                self._combiners.update(spec.index, of_weights, numbers.combiner_rate)
                variables = self._variables[spec.index]
                _update_table(spec, variables, numbers, number, *own)
            if updates is not None:
                updates.assign_add(1)
        return accepted

    def _read_stacks(self, tables: Any, shapes: Sequence[tf.Tensor]) -> list[Entries]:
        found: dict[int, Entries] = {}
        layout = self._stacks.layout
        for stack in layout.stacks:
            own = [shapes[f] for f in stack.features]
            entries = _read_stack(self._plan, layout, stack, tables[stack.name], own)
            found.update(zip(stack.features, entries, strict=True))
        return self._combiners.checked([found[f] for f in range(len(shapes))])

    def _unpack(self, batch: tf.Tensor) -> list[Entries]:
        """Returns the entries of a batch from the queue."""
        vector, known = tf.TensorSpec([None], tf.int64), self._options.output_shapes
        ranks = [len(known.activation(f.index)) for f in self._plan.features]
        shapes = [tf.TensorSpec([rank], tf.int64) for rank in ranks]
        specs = [Entries(vector, vector, tf.TensorSpec([None]), s) for s in shapes]
        # A tape outside of the function cannot make zeros for the variant.
        tensors = map(tf.stop_gradient, unpack(batch, tf.nest.flatten(specs)))
        return tf.nest.pack_sequence_as(specs, list(tensors))


def _static_check(path: str, shape: tf.Tensor, static: Shape) -> Check:
    """Makes the check that an output has the shape for which a function was traced."""
    expected = [-1 if axis is None else axis for axis in static]
    return Check(
        tf.equal(shape, expected) | tf.equal(expected, -1),
        lambda: text(
            f"Feature {path}: the activations have shape [",
            _axes(shape),
            f", D], but the function was traced for {[*static, 'D']}. Pass "
            "`batch_size` where the size of batches is fixed, or trace a function for "
            "each size.",
        ),
    )


def _shape_check(path: str, gradient: tf.Tensor, expected: tf.Tensor) -> Check:
    shape = tf.shape(gradient, out_type=tf.int64)
    what = f"Feature {path}: the gradient has shape ["
    return Check(
        tf.equal(shape, expected),
        lambda: text(
            *(what, _axes(shape), "], but the activation had [", _axes(expected), "].")
        ),
    )


def _axes(shape: tf.Tensor) -> tf.Tensor:
    return tf.strings.reduce_join(tf.strings.as_string(shape), separator=",")


def _host_of(device: str) -> str:
    """Returns the CPU beside a device, on which checks and queues are placed."""
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type != "CPU":
        spec = spec.replace(device_type="CPU", device_index=0)
    return spec.to_string()


def _write_stack(
    layout: Layout, stack: Stack, entries: Sequence[Entries]
) -> list[tf.Tensor]:
    """Returns the row_pointers, sample ids, token ids and gains of one stack."""
    samples, tokens = [], []
    first_sample = tf.zeros([], tf.int64)
    for feature in stack.features:
        samples.append(entries[feature].samples + first_sample)
        tokens.append(entries[feature].rows + layout.row_offsets[feature])
        first_sample += entries[feature].num_samples
    all_samples = tf.concat(samples, 0)
    pointers = tf.searchsorted(all_samples, tf.range(first_sample + 1))
    return [
        tf.cast(pointers, tf.int32),
        tf.cast(all_samples, tf.int32),
        tf.cast(tf.concat(tokens, 0), tf.int32),
        tf.concat([entries[feature].gains for feature in stack.features], 0),
    ]


def _read_stack(
    plan: Plan,
    layout: Layout,
    stack: Stack,
    table: PartitionedCsrFormatTensor,
    shapes: Sequence[tf.Tensor],
) -> list[Entries]:
    """Undoes `_write_stack`, for each feature and its output shape, int64 [k].

    The tensors of the stack come from the user and may hold anything. It refuses those
    that `_write_stack` cannot have made.
    """
    specs = [plan.features[f] for f in stack.features]
    # The product of large axes overflows an integer, but not a float64.
    sizes = tf.stack([tf.reduce_prod(tf.cast(s, tf.float64)) for s in shapes])
    counts = tf.stack([tf.reduce_prod(shape) for shape in shapes])
    pointers = tf.cast(tf.reshape(table.row_pointers, [-1]), tf.int64)
    tokens = tf.cast(table.sorted_token_ids, tf.int64)
    gains = tf.cast(table.sorted_gains, tf.float32)
    steps = tf.concat([pointers, [tf.size(tokens, tf.int64)]], 0)
    steps -= tf.concat([[0], pointers], 0)
    are_whole = tf.stack([steps[0], steps[-1], tf.size(gains, tf.int64)])
    checks = {
        "a feature has a negative or too large number of samples": (
            tf.reduce_all(tf.concat(shapes, 0) >= 0)
            & tf.reduce_all(sizes <= tf.int32.max)
        ),
        "the number of row_pointers must be 1 plus the number of samples": tf.equal(
            tf.size(pointers, tf.int64), tf.reduce_sum(counts) + 1
        ),
        "row_pointers must rise from 0 to the number of sorted_token_ids, which is "
        "that of sorted_gains": (
            tf.reduce_all(steps >= 0)
            & tf.reduce_all(tf.equal(are_whole, [0, 0, tf.size(tokens, tf.int64)]))
        ),
    }
    with tf.control_dependencies(_require_stack(stack, checks)):
        ends = tf.gather(pointers, tf.cumsum(counts))
        numbers = tf.concat([tf.range(count) for count in tf.unstack(counts)], 0)
    lengths = ends - tf.concat([[0], ends[:-1]], 0)
    owners = tf.repeat(tf.range(len(specs)), lengths)
    begins = [layout.row_offsets[f] for f in stack.features]
    num_rows = [plan.tables[spec.table].config.vocabulary_size for spec in specs]
    rows = tokens - tf.gather(tf.constant(begins, tf.int64), owners)
    known = (rows >= 0) & (rows < tf.gather(tf.constant(num_rows, tf.int64), owners))
    paths = ", ".join(spec.path for spec in specs)
    what = f"a token id is not a row of the table of its feature ({paths})"
    with tf.control_dependencies(_require_stack(stack, {what: tf.reduce_all(known)})):
        samples = tf.repeat(numbers, steps[1:-1])
        values = (rows, samples, gains)
        parts = [tf.split(own, lengths, num=len(specs)) for own in values]
    return [Entries(*own) for own in zip(*parts, shapes, strict=True)]


def _require_stack(stack: Stack, checks: dict[str, tf.Tensor]) -> list[Any]:
    """Refuses a stack with the first text whose condition is false."""
    end = ". Pass the second output of embedding_lookup unchanged."
    return require(
        [
            Check(
                ok, lambda what=what: text(f"Stacked table {stack.name}: {what}{end}")
            )
            for what, ok in checks.items()
        ]
    )


def _row_sums(
    spec: TableSpec, entries: Sequence[Entries], gradients: Sequence[tf.Tensor | None]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the rows that a batch touches, each once, and their summed gradients."""
    parts = []
    for feature in spec.features:
        own, gradient = entries[feature], gradients[feature]
        if gradient is None:
            parts.append(tf.zeros([tf.size(own.rows), spec.config.dim]))
        else:
            of_samples = tf.reshape(gradient, [-1, spec.config.dim])
            gains = own.gains[:, tf.newaxis]
            parts.append(tf.gather(of_samples, own.samples) * gains)
    rows = tf.concat([entries[f].rows for f in spec.features], 0)
    unique = tf.unique(rows, out_idx=tf.int64)
    size = tf.size(unique.y)
    sums = sum_segments(tf.concat(parts, 0), unique.idx, size)
    return unique.y, sums


def _update_table(
    spec: TableSpec,
    variables: TableVariables,
    numbers: UpdateScalars,
    number: tf.Tensor,
    rows: tf.Tensor,
    gradient: tf.Tensor,
) -> None:
    """Applies an update to a table and its slots, after `number` earlier updates."""
    assert spec.optimizer is not None
    optimizer = spec.optimizer.with_hyperparameters(numbers.hyperparameters)
    state = [variables.parameters, *variables.slots.values()]
    if optimizer.touches_all_rows:
        gradient = tf.math.unsorted_segment_sum(
            gradient, rows, variables.parameters.shape[0]
        )
        rows = tf.range(tf.shape(gradient, tf.int64)[0])
        stored, *slots = [tf.convert_to_tensor(variable) for variable in state]
    else:
        stored, *slots = [tf.gather(variable, rows) for variable in state]
    row = tf.cast(stored, tf.float32)
    row, *slots = apply_rule(
        optimizer, TENSORFLOW_OPS, gradient, row, slots, numbers.rate
    )
    if stored.dtype != tf.float32:
        row = round_rows(row, rows, spec.rounding_seed, number)
    for variable, value in zip(state, (row, *slots), strict=True):
        if optimizer.touches_all_rows:
            variable.assign(value)
        else:
            variable.scatter_update(tf.IndexedSlices(value, rows))


class _TensorFlowOps:
    """The `ArrayOps` of TensorFlow."""

    sqrt = staticmethod(tf.sqrt)
    pow = staticmethod(tf.pow)
    abs = staticmethod(tf.abs)
    sign = staticmethod(tf.sign)
    where = staticmethod(tf.where)
    maximum = staticmethod(tf.maximum)
    minimum = staticmethod(tf.minimum)

    mean_last = staticmethod(functools.partial(tf.reduce_mean, axis=-1, keepdims=True))

    @staticmethod
    def map_rows(function: Callable[..., Any], arrays: Sequence[Any]) -> Sequence[Any]:
        """Applies `function` to the first, second, ... row of all arrays."""
        return tf.vectorized_map(lambda rows: function(*rows), tuple(arrays))


TENSORFLOW_OPS: ArrayOps = _TensorFlowOps()


def round_rows(
    values: tf.Tensor, rows: tf.Tensor, seed: int, number: tf.Tensor
) -> tf.Tensor:
    """Rounds each value to one of the two nearest bfloat16 (docs/semantics.md).

    The bits equal those of ops/cc/core/bfloat16.h. Values are float32 [n, D], and rows
    of the table int64 [n]. `number` is the number of updates before this one.
    """
    bits = tf.cast(tf.bitcast(values, tf.uint32), tf.int64)
    size = bits & 0x7FFFFFFF
    dim = values.shape[-1]
    assert dim is not None  # A table has a known dim.
    random = random_bits(rows, dim, seed, number)
    finite = tf.minimum(size + random, _LARGEST)
    other = tf.where(size == _INFINITY, size, size | _QUIET)
    rounded = tf.where(size < _INFINITY, finite, other) | (bits & 0x80000000)
    halves = tf.cast(tf.bitwise.right_shift(rounded, 16), tf.uint16)
    return tf.bitcast(halves, tf.bfloat16)
