"""Tables and slots of SparseCores: stacks in parts, one part for each device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.engines.base import EngineOptions
from tpu_embedding.engines.full_table_view import ShardedReader
from tpu_embedding.engines.initial_values import (
    combiner_weights,
    initial_rows,
    initial_value,
    slot_initializer,
)
from tpu_embedding.engines.sparse_core.initial_values import fill_tables
from tpu_embedding.engines.variables import VariableRows, variable_name
from tpu_embedding.layout.stacked_rows import JoinedRows, MutableUnstackedRows
from tpu_embedding.layout.stacking import Stack
from tpu_embedding.layout.table_arrays import (
    PARAMETERS,
    InitialValue,
    MutableRows,
    checkpoint_name,
)
from tpu_embedding.optimizers import Slot


@dataclasses.dataclass(frozen=True, eq=False)
class StackState:
    """The state of one stack.

    Attributes:
      stack: What it holds.
      parameters: float32 [rows of a device, width] in each replica.
      slots: By name, likewise.
      initial_values: By name of a slot what its rows start as.
      combiner_weights: float32 [num_weights] in each replica, where its one table has
        a CustomCombiner with weights.
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
        """The weights of the CustomCombiner, in one replica; [0] without any."""
        if self.combiner_weights is None:
            return tf.zeros([0])
        return self.combiner_weights.read_value()

    def combiner_values(self) -> dict[str, tf.Tensor]:
        """The same by their name, as they are now; nothing without any."""
        if self.combiner_weights is None:
            return {}
        first = self.combiner_weights.values[0]  # All replicas have the same.
        return {CustomCombiner.NAME: tf.identity(first.read_value())}

    def rows(self, array: str) -> JoinedRows:
        """The whole stack, or one slot of it, out of the parts of all devices."""
        start = self.initial_values.get(array)
        parts = [VariableRows(part, start) for part in self.arrays[array].values]
        return JoinedRows(parts, start)

    def tables(self) -> Iterator[tuple[int, dict[str, MutableRows]]]:
        """Each table of the plan, by index, with its slots in logical form."""
        joined = {array: self.rows(array) for array in self.arrays}
        for index, layout in zip(self.stack.tables, self.stack.layouts, strict=True):
            yield (
                index,
                {
                    array: MutableUnstackedRows(rows, layout, rows.initial_value)
                    for array, rows in joined.items()
                },
            )

    def reader(self, index: int) -> ShardedReader:
        """Reads one table of the plan out of the parts of all devices."""
        layout = self.stack.layouts[self.stack.tables.index(index)]
        sharding, height = layout.sharding, self.stack.rows_per_shard
        return ShardedReader(
            self.parameters.values,
            lambda ids: sharding.stack_row(ids, height),
            layout.unsharded_shape[1],
        )

    def shards(self, index: int) -> list[tuple[str, tf.Tensor]]:
        """For one table of the plan (device, rows there) of each part."""
        layout = self.stack.layouts[self.stack.tables.index(index)]
        vocabulary, dim = layout.unsharded_shape
        rows = layout.sharding.stack_row(
            np.arange(vocabulary), self.stack.rows_per_shard
        )
        devices, local = np.divmod(rows, self.stack.rows_per_device)
        return [
            (
                part.device,
                tf.gather(part.read_value(), local[devices == device])[:, :dim],
            )
            for device, part in enumerate(self.parameters.values)
        ]


def create_state(options: EngineOptions) -> list[StackState]:
    """Makes the variables of all stacks and fills them.

    To be called outside of replicas; see `outside_of_replicas`.
    """
    with options.topology.strategy.scope():
        states = [_create_stack(options, stack) for stack in options.layout.stacks]
    fill_tables(options, [state.rows(PARAMETERS) for state in states])
    for state in states:
        _fill_slots(options, state)
    return states


def create_counter(options: EngineOptions, name: str) -> tf.Variable:
    """An int64 scalar at 0 that each replica counts for itself."""
    with options.topology.strategy.scope():
        return create_local(
            name,
            lambda: tf.zeros([], tf.int64),
            tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )


def create_local(
    name: str,
    initial_value: Callable[[], tf.Tensor],
    aggregation: tf.VariableAggregation = tf.VariableAggregation.NONE,
) -> Any:
    """A variable of which each replica has its own; in the strategy's scope."""
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
    """A variable that each replica has for itself, or None; in the strategy's scope."""
    if combiner is None or combiner.num_weights == 0:
        return None
    full_name = f"{name}/{combiner.NAME}"
    start = combiner_weights(full_name, combiner)
    return create_local(
        full_name, lambda: start, tf.VariableAggregation.ONLY_FIRST_REPLICA
    )


def _start(slot: Slot, shape: tuple[int, int]) -> tf.Tensor:
    """What a part of a slot is made with; initializers fill it later, by table."""
    start = 0.0 if callable(slot.initial_value) else slot.initial_value
    return tf.fill((shape[0], 1) if slot.per_row else shape, start)


def _fill_slots(options: EngineOptions, state: StackState) -> None:
    """Slots whose initializers are functions, table by table as tables are."""
    for index, arrays in state.tables():
        spec = options.plan.tables[index]
        assert spec.optimizer is not None
        for slot in spec.optimizer.slots:
            if callable(slot.initial_value):
                rows = arrays[slot.name]
                name = checkpoint_name(spec.name, slot.name)
                value = initial_value(
                    name,
                    rows.shape,
                    functools.partial(slot_initializer(slot), rows.shape),
                ).numpy()
                for start, stop in rows.slices():
                    rows.write(start, value[start:stop])
