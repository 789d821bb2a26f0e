"""Tables and slots as TensorFlow variables."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tpu_embedding.engines import memory
from tpu_embedding.engines.initial_values import (
    initial_rows,
    initial_value,
    initializer_of,
    slot_initializer,
)
from tpu_embedding.layout.plan import Plan, TableSpec
from tpu_embedding.layout.table_arrays import (
    PARAMETERS,
    CopiedRows,
    InitialValue,
    MutableRows,
    checkpoint_name,
)
from tpu_embedding.optimizers import Slot

# A variable made here must be *one* variable, whatever the strategy whose scope is
# open; the class behind tf.Variable is the one way past the scope's creators.
_ResourceVariable: Any = resource_variable_ops.ResourceVariable
Initializer = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class TableVariables:
    """The state of one table.

    Attributes:
      parameters: [V, D] of the table's dtype.
      slots: By name, float32 [V, D] or [V, 1].
    """

    parameters: tf.Variable
    slots: dict[str, tf.Variable]


class VariableRows(MutableRows):
    """A table or slot that is one variable.

    Gathers and scatters touch the rows alone; reading the variable would copy it
    whole once a kernel has updated it in place.
    """

    def __init__(self, variable: tf.Variable, initial_value: InitialValue) -> None:
        shape: Any = variable.shape
        super().__init__(shape, np.dtype(variable.dtype.as_numpy_dtype))
        self._variable, self.initial_value = variable, initial_value

    @property
    def variable(self) -> tf.Variable:
        return self._variable

    def read(self, start: int, stop: int) -> np.ndarray:
        with tf.device(self._variable.device):
            rows = tf.raw_ops.ResourceGather(
                resource=self._variable.handle,
                indices=tf.range(start, stop, dtype=tf.int64),
                dtype=self._variable.dtype,
            )
        return rows.numpy()

    def write(self, start: int, values: np.ndarray) -> None:
        rows, columns = self.shape
        assert 0 <= start <= rows - len(values), (start, len(values), rows)
        assert values.shape[1:] == (columns,), (values.shape, columns)
        with tf.device(self._variable.device):
            tf.raw_ops.ResourceScatterUpdate(
                resource=self._variable.handle,
                indices=tf.range(start, start + len(values), dtype=tf.int64),
                updates=tf.constant(values, self._variable.dtype),
            )


def variable_copies(variable: Any, initial_value: InitialValue = None) -> MutableRows:
    """A variable of which each replica may have a copy."""
    copies = getattr(variable, "values", [variable])
    return CopiedRows([VariableRows(v, initial_value) for v in copies], initial_value)


def variable_rows(spec: TableSpec, variables: TableVariables) -> dict[str, MutableRows]:
    """The table as "parameters", and its slots by name."""
    rows: dict[str, MutableRows] = {
        PARAMETERS: VariableRows(variables.parameters, None)
    }
    for slot in spec.optimizer.slots if spec.optimizer else ():
        variable = variables.slots[slot.name]
        rows[slot.name] = VariableRows(variable, initial_rows(slot))
    return rows


def create_variables(plan: Plan, device: str) -> list[TableVariables]:
    """Makes the tables and slots of a plan, each one variable on `device`.

    All tables come before all slots: the random numbers of a table take its size
    once more while they are made, and the slots then fill that memory.
    """
    if tf.DeviceSpec.from_string(device).device_type in (None, "CPU"):
        memory.require(_sizes(plan))
    with tf.device(device):
        tables = [_create_parameters(spec) for spec in plan.tables]
        return [
            TableVariables(parameters, _create_slots(spec, parameters))
            for spec, parameters in zip(plan.tables, tables, strict=True)
        ]


def _sizes(plan: Plan) -> dict[str, int]:
    """The bytes of each variable of a plan, by its name in checkpoints."""
    sizes = {}
    for spec in plan.tables:
        shape = (spec.config.vocabulary_size, spec.config.dim)
        sizes[spec.name] = math.prod(shape) * tf.as_dtype(spec.config.dtype).size
        for slot in spec.optimizer.slots if spec.optimizer else ():
            number = math.prod(_slot_shape(slot, shape))
            sizes[checkpoint_name(spec.name, slot.name)] = number * tf.float32.size
    return sizes


def named_variables(
    plan: Plan, variables: list[TableVariables]
) -> Iterator[tuple[str, tf.Variable]]:
    """Every variable with its name in checkpoints: `<table>`, `<table>/<slot>`."""
    for spec, table in zip(plan.tables, variables, strict=True):
        yield spec.name, table.parameters
        for name, slot in table.slots.items():
            yield checkpoint_name(spec.name, name), slot


def _create_parameters(spec: TableSpec) -> tf.Variable:
    config = spec.config
    shape = (config.vocabulary_size, config.dim)
    dtype = tf.as_dtype(config.dtype)
    return _create_variable(spec.name, shape, initializer_of(spec), dtype)


def _create_slots(spec: TableSpec, parameters: tf.Variable) -> dict[str, tf.Variable]:
    if spec.optimizer is None:
        return {}
    if spec.optimizer.slot_variable_creation_fn is not None:
        return user_slots(spec, parameters)
    return {
        slot.name: _create_variable(
            checkpoint_name(spec.name, slot.name),
            _slot_shape(slot, parameters.shape),
            slot_initializer(slot),
        )
        for slot in spec.optimizer.slots
    }


def user_slots(spec: TableSpec, parameters: tf.Variable) -> dict[str, tf.Variable]:
    """Returns the slots of `slot_variable_creation_fn`, checked and in rule order."""
    assert spec.optimizer is not None
    create = spec.optimizer.slot_variable_creation_fn
    assert create is not None
    wanted = spec.optimizer.slots
    names = [slot.name for slot in wanted]
    with tf.variable_creator_scope(_plain_variable):
        made = create(
            parameters,
            names,
            [tf.constant_initializer(slot.initial_value) for slot in wanted],
        )
    for slot in wanted:
        shape = _slot_shape(slot, parameters.shape)
        variable = made.get(slot.name)
        if (
            variable is None
            or variable.dtype != tf.float32
            or tuple(variable.shape) != shape
        ):
            raise ValueError(
                f"Table {spec.name}: `slot_variable_creation_fn` must return a dict "
                f"with a float32 variable of shape {shape} under {slot.name!r}. "
                f"Received: {variable!r}."
            )
    return {slot.name: made[slot.name] for slot in wanted}


def _plain_variable(next_creator: Any, **arguments: Any) -> tf.Variable:
    """A variable creator that leaves out the strategy's own."""
    del next_creator
    return _ResourceVariable(**arguments)


def _slot_shape(slot: Slot, table_shape: Any) -> tuple[int, int]:
    rows, dim = table_shape
    return (rows, 1) if slot.per_row else (rows, dim)


def _create_variable(
    name: str,
    shape: tuple[int, int],
    initializer: Initializer,
    dtype: tf.DType = tf.float32,
) -> tf.Variable:
    return _ResourceVariable(
        initial_value=lambda: initial_value(
            name, shape, lambda: initializer(shape, dtype=dtype), dtype
        ),
        name=variable_name(name),
        trainable=False,
        dtype=dtype,
    )


def variable_name(name: str) -> str:
    """The name of a table or slot with "_" for what graphs do not allow in names.

    >>> variable_name("films/velocities"), variable_name("größe")
    ('films/velocities', 'gr__e')
    """
    allowed = re.sub(r"[^\w./>-]", "_", name, flags=re.ASCII)
    return re.sub(r"^[^A-Za-z0-9.]", "table_", allowed)


def create_counter(name: str, device: str) -> tf.Variable:
    """An int64 scalar at 0, one variable whatever the strategy's scope."""
    with tf.device(device):
        return create_state(name, tf.zeros([], tf.int64))


def create_state(name: str, value: tf.Tensor, shape: Any = None) -> tf.Variable:
    """One variable whatever the strategy's scope, which is no weight.

    Args:
      name: Its name.
      value: What it starts as.
      shape: Of the values to come, where that is more than the shape of `value`.
    """
    return _ResourceVariable(
        initial_value=value, name=name, trainable=False, shape=shape
    )
