"""The stacks of SparseCores: their variables, initial values and checkpoints.

Each replica has a variable with the part of a stack that its device stores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.engines.calls import EngineOptions
from tpu_embedding.layout.partition import TableLayout
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.layout.stacking import Layout, Stack
from tpu_embedding.optimizers.base import Slot
from tpu_embedding.tables.initial import (
    FirstValues,
    ShardInfo,
    combiner_values,
    initial_rows,
    slot_values,
    table_values,
)
from tpu_embedding.tables.readers import PartsReader
from tpu_embedding.tables.rows import (
    PARAMETERS,
    InitialValue,
    MutableTableRows,
    RowsOfParts,
    checkpoint_name,
    joined,
    unstacked,
)
from tpu_embedding.tables.table import Identity, Table
from tpu_embedding.tables.variables import VariableRows, variable_name

# The options of the engines that `tracing_only` has seen, or None outside of it.
_tracing_only: list[EngineOptions] | None = None


@contextlib.contextmanager
def tracing_only() -> Iterator[list[EngineOptions]]:
    """Creates variables that have shapes but no memory, for programs to be compiled.

    It yields a list that receives the options of each engine created meanwhile.
    """
    global _tracing_only  # noqa: PLW0603 - engines are created in another thread.
    _tracing_only = []
    try:
        yield _tracing_only
    finally:
        _tracing_only = None


class _WithoutMemory(tf.Module):
    """Takes the place of the variables of all replicas, of which a program sees one."""

    def __init__(self, name: str, initial_value: Callable[[], tf.Tensor]) -> None:
        super().__init__()
        with tf.init_scope():
            traced = tf.function(initial_value, autograph=False)
            value: Any = traced.get_concrete_function().structured_outputs
            self.values = [
                resource_variable_ops.UninitializedVariable(
                    shape=value.shape,
                    dtype=value.dtype,
                    trainable=False,
                    name=variable_name(name),
                )
            ]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "values":
            raise AttributeError(name)
        return getattr(self.values[0], name)


@dataclasses.dataclass(frozen=True, eq=False)
class StackState:
    """The state of one stack.

    Attributes:
      stack: The tables of the stack.
      parameters: float32 [rows of a device, width] in each replica.
      slots: The slots by name, shaped as `parameters`.
      initial_values: The initial values of the slots by name.
      combiner_weights: float32 [num_weights] in each replica, if the table has a
        CustomCombiner with weights.
    """

    stack: Stack
    parameters: Any
    slots: dict[str, Any]
    initial_values: dict[str, InitialValue]
    combiner_weights: Any = None

    @property
    def arrays(self) -> dict[str, Any]:
        """The parameters, then the slots."""
        return {PARAMETERS: self.parameters, **self.slots}

    def read_combiner_weights(self) -> tf.Tensor:
        """Returns the CustomCombiner's weights in one replica; else an empty vector."""
        if self.combiner_weights is None:
            return tf.zeros([0])
        return self.combiner_weights.read_value()

    def rows(self, array: str) -> RowsOfParts:
        """Returns the whole stack, or one of its slots, from all devices."""
        start = self.initial_values.get(array)
        parts = [VariableRows(part, start) for part in self.arrays[array].values]
        return joined(parts, start)

    def tables(self, specs: Sequence[TableSpec]) -> Iterator[Table]:
        """Yields the tables of the stack without padding; `specs` are all tables."""
        for index, layout in zip(self.stack.tables, self.stack.layouts, strict=True):
            rows = self.rows_of_table(layout)
            row_of = functools.partial(
                layout.division.stacked, height=self.stack.rows_per_shard
            )
            yield Table(
                spec=specs[index],
                ids=Identity(specs[index].name, rows),
                stored=PartsReader(
                    self.parameters.values, row_of, layout.unsharded_shape[1]
                ),
                values=functools.partial(self._values, rows),
                shards=functools.partial(self._shards, layout),
                variables=lambda: self.parameters.values,
            )

    def rows_of_table(self, layout: TableLayout) -> dict[str, MutableTableRows]:
        """Returns the parameters and slots of one table without padding."""
        return {
            array: unstacked(rows, layout, rows.initial_value)
            for array, rows in ((array, self.rows(array)) for array in self.arrays)
        }

    def _values(self, rows: Mapping[str, MutableTableRows]) -> dict[str, tf.Tensor]:
        values = {array: tf.constant(own.numpy()) for array, own in rows.items()}
        if self.combiner_weights is not None:
            slot = CustomCombiner.CUSTOM_COMBINER_SLOT_NAME
            weights = self.combiner_weights.values[0]  # The same in all replicas.
            values[slot] = tf.identity(weights.read_value())
        return values

    def _shards(self, layout: TableLayout) -> list[tuple[str, tf.Tensor]]:
        vocabulary, dim = layout.unsharded_shape
        rows = layout.division.stacked(np.arange(vocabulary), self.stack.rows_per_shard)
        devices, local = np.divmod(rows, self.stack.rows_per_device)
        return [
            (
                part.device,
                tf.gather(part.read_value(), local[devices == device])[:, :dim],
            )
            for device, part in enumerate(self.parameters.values)
        ]


def create_state(options: EngineOptions, layout: Layout) -> list[StackState]:
    """Creates and fills all variables of stacks; with `to_restore` it fills no tables.

    Call it outside of replicas; see `outside_of_replicas`.
    """
    with options.topology.strategy.scope():
        states = [_create_stack(options, stack) for stack in layout.stacks]
    if _tracing_only is not None:
        _tracing_only.append(options)
        return states
    if not options.to_restore:
        fill_tables(options, states)
    for state in states:
        _fill_slots(options, state)
    return states


def create_counter(options: EngineOptions) -> tf.Variable:
    """Creates a counter that starts at 0, an int64 scalar in each replica."""
    with options.topology.strategy.scope():
        return create_local(
            "updates",
            lambda: tf.zeros([], tf.int64),
            tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )


def create_local(
    name: str,
    initial_value: Callable[[], tf.Tensor],
    aggregation: tf.VariableAggregation = tf.VariableAggregation.NONE,
) -> Any:
    """Creates a variable with one value in each replica, in the strategy's scope."""
    if _tracing_only is not None:
        return _WithoutMemory(name, initial_value)
    return tf.Variable(
        initial_value,
        trainable=False,
        name=variable_name(name),
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=aggregation,
    )


def _create_stack(options: EngineOptions, stack: Stack) -> StackState:
    optimizer = options.plan.tables[stack.tables[0]].optimizer
    assert optimizer is not None
    combiner = options.plan.tables[stack.tables[0]].config.custom_combiner
    shape = (stack.rows_per_device, stack.width)
    return StackState(
        stack=stack,
        parameters=create_local(stack.name, lambda: tf.zeros(shape)),
        slots={
            slot.name: create_local(
                checkpoint_name(stack.name, slot.name),
                functools.partial(_start, slot, shape),
            )
            for slot in optimizer.slots
        },
        initial_values={slot.name: initial_rows(slot) for slot in optimizer.slots},
        combiner_weights=_create_combiner_weights(stack.name, combiner),
    )


def _create_combiner_weights(name: str, combiner: CustomCombiner | None) -> Any:
    """Creates the weights of a CustomCombiner, if there are any."""
    if combiner is None or combiner.num_weights == 0:
        return None
    full_name = f"{name}/{combiner.CUSTOM_COMBINER_SLOT_NAME}"
    start = combiner_values(full_name, combiner).whole()
    return create_local(
        full_name, lambda: start, tf.VariableAggregation.ONLY_FIRST_REPLICA
    )


def _start(slot: Slot, shape: tuple[int, int]) -> tf.Tensor:
    """Returns the first value of a part; `_fill_slots` calls callable initializers."""
    start = 0.0 if callable(slot.initial_value) else slot.initial_value
    return tf.fill(shape, start)


def _fill_slots(options: EngineOptions, state: StackState) -> None:
    """Fills the slots with callable initializers, table by table."""
    stack = state.stack
    for index, layout in zip(stack.tables, stack.layouts, strict=True):
        arrays = state.rows_of_table(layout)
        spec = options.plan.tables[index]
        assert spec.optimizer is not None
        for slot in spec.optimizer.slots:
            if callable(slot.initial_value):
                arrays[slot.name].assign(slot_values(spec, slot).whole())


def fill_tables(options: EngineOptions, states: Sequence[StackState]) -> None:
    """Fills the parameters of some stacks, as `SparseCoreEmbeddingConfig` says."""
    topology = options.topology
    assert topology.tpu is not None
    on_host = options.sparse_core.initialize_tables_on_host
    device = topology.device if on_host else topology.tpu.devices[0][0]
    fill = (
        _fill_at_once
        if options.sparse_core.enable_fast_table_initialization
        else _fill_one_by_one
    )
    with tf.device(device):
        fill(options, states)


def _fill_one_by_one(options: EngineOptions, states: Sequence[StackState]) -> None:
    """Fills tables in plan order, with the same random numbers as the host engine."""
    places = {
        index: (state.stack, layout, state.rows(PARAMETERS))
        for state in states
        for index, layout in zip(state.stack.tables, state.stack.layouts, strict=True)
    }
    for index in sorted(places):
        (stack, layout, rows), spec = places[index], options.plan.tables[index]
        values = table_values(spec)
        if values.takes_shard_info:
            _fill_by_device(values, stack, layout, rows)
        else:
            unstacked(rows, layout).assign(values.whole())


def _fill_by_device(
    values: FirstValues, stack: Stack, layout: TableLayout, rows: MutableTableRows
) -> None:
    """Calls the initializer for the part of each device, as TensorFlow's class does.

    The offset of a part is its first row in a table of concatenated shards.
    """
    total, width = layout.unsharded_padded_shape
    cores = layout.num_sparse_cores // layout.num_partitions
    height = total // layout.num_sparse_cores
    for device in range(layout.num_partitions):
        offset = (device * cores - layout.sparse_core_shard_rotation) * height % total
        shape = (cores * height, width)
        info = ShardInfo(shape, (offset, 0))
        part = values.part(shape, (total, width), shard_info=info)
        for core in range(cores):
            shard = (device * cores + core) * stack.rows_per_shard
            begin = shard + layout.sparse_core_shard_row_offset
            rows.write(begin, part[core * height : (core + 1) * height].numpy())


def _fill_at_once(options: EngineOptions, states: Sequence[StackState]) -> None:
    """Fills whole parts with the initializer of the first table of each stack."""
    for state in states:
        stack, rows = state.stack, state.rows(PARAMETERS)
        values = table_values(options.plan.tables[stack.tables[0]])
        shape = (stack.rows_per_device, stack.width)
        for device in range(stack.num_devices):
            rows.write(device * shape[0], values.part(shape).numpy())
