"""Tables and slots as TensorFlow variables."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.trackable import base

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.initializers import default_initializer
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
    """Makes the tables and slots of a plan, each one variable.

    Args:
      plan: The tables.
      device: Where they are to be.
    """
    if _is_here(device):
        require_memory(_sizes(plan))
    return [part for (part,) in create_divided(plan, [[device]] * len(plan.tables))]


def create_divided(
    plan: Plan, devices: Sequence[Sequence[str]]
) -> list[list[TableVariables]]:
    """Makes the tables and slots of a plan, each in one or more parts.

    All tables come before all slots: the random numbers of a table take its size
    once more while they are made, and the slots then fill that memory.

    Args:
      plan: The tables.
      devices: For each table the devices of its n parts; part r % n holds row r. A
        table of several parts that `_rows_reader` must make whole is made on the
        first of its devices.

    Returns:
      For each table its parts.
    """

    def divide(matrix: _Matrix, places: Sequence[str]) -> list[tf.Variable]:
        parts = []
        for k, device in enumerate(places):
            with tf.device(device):
                rows = range(k, matrix.shape[0], len(places))
                parts.append(_create_part(matrix, rows))
        return parts

    tables = []
    for spec, places in zip(plan.tables, devices, strict=True):
        if len(places) == 1:
            with tf.device(places[0]):
                tables.append([_create_parameters(spec)])
            continue
        matrix = _table_matrix(spec, places[0])
        tables.append(divide(matrix, places))
        del matrix  # Frees it before the next one is made.
    found = []
    for spec, places, parts in zip(plan.tables, devices, tables, strict=True):
        if len(places) == 1:
            with tf.device(places[0]):
                found.append([TableVariables(parts[0], _create_slots(spec, parts[0]))])
            continue
        found.append([TableVariables(part, {}) for part in parts])
        for slot in spec.optimizer.slots if spec.optimizer else ():
            matrix = _slot_matrix(spec, slot, places[0])
            for part, variable in zip(found[-1], divide(matrix, places), strict=True):
                part.slots[slot.name] = variable
            del matrix
    return found


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """The initial values of a table or slot of which rows are to be read.

    Attributes:
      name: Its name in checkpoints.
      shape: [V, D].
      dtype: Its dtype.
      read: Returns some rows, [len(rows), D].
    """

    name: str
    shape: tuple[int, int]
    dtype: tf.DType
    read: Callable[[range], tf.Tensor]


_BLOCK_BYTES = 4 << 20  # Of a matrix, for the rows of a part that are made at a time.


def _table_matrix(spec: TableSpec, device: str) -> _Matrix:
    dtype = tf.as_dtype(spec.config.dtype)
    return _matrix(spec.name, _table_shape(spec), initializer_of(spec), device, dtype)


def _slot_matrix(spec: TableSpec, slot: Slot, device: str) -> _Matrix:
    name = checkpoint_name(spec.name, slot.name)
    shape = _slot_shape(slot, _table_shape(spec))
    make = slot_initializer(slot)
    if callable(slot.initial_value):
        return _matrix(name, shape, make, device)
    return _Matrix(name, shape, tf.float32, lambda rows: make((len(rows), shape[1])))


def _matrix(
    name: str,
    shape: tuple[int, int],
    initializer: Initializer,
    device: str,
    dtype: tf.DType = tf.float32,
) -> _Matrix:
    """What an initializer fills: with `by_rows` each row where it is read.

    Any other initializer makes the whole matrix now, on `device`.
    """
    by_rows = getattr(initializer, "by_rows", None)
    if by_rows is not None:
        make = by_rows(shape, dtype=dtype)

        def read_made(rows: range) -> tf.Tensor:
            start, stop = rows.start, rows[-1] + 1
            block = (stop - start, shape[1])
            made = initial_value(name, block, lambda: make(start, stop), dtype)
            return made[:: rows.step]

        return _Matrix(name, shape, dtype, read_made)
    with tf.device(device):
        whole = initial_value(
            name, shape, lambda: initializer(shape, dtype=dtype), dtype
        )

    def read_whole(rows: range) -> tf.Tensor:
        with tf.device(device):
            return whole[rows.start : rows[-1] + 1 : rows.step]

    return _Matrix(name, shape, dtype, read_whole)


def _create_part(matrix: _Matrix, rows: range) -> tf.Variable:
    """Makes the variable of some rows on the current device, a few MiB at a time."""
    name, dim = variable_name(matrix.name), matrix.shape[1]
    count = max(1, _BLOCK_BYTES // (dim * matrix.dtype.size * rows.step))
    if rows.step == 1 or len(rows) <= count:
        return create_state(name, matrix.read(rows))
    variable = create_state(name, tf.zeros([len(rows), dim], matrix.dtype))
    for first in range(0, len(rows), count):
        block = rows[first : first + count]
        tf.raw_ops.ResourceScatterUpdate(
            resource=variable.handle,
            indices=tf.range(first, first + len(block), dtype=tf.int64),
            updates=matrix.read(block),
        )
    return variable


def _is_here(device: str) -> bool:
    """Whether a device is in the memory of this machine."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.device_type in (None, "CPU") and spec.job in (None, "localhost")


def create_parts(
    plan: Plan, device: str, rows_of: Callable[[int], slice]
) -> list[TableVariables]:
    """Makes the part of each table and slot that one process has.

    All processes call all initializers, so that random numbers are the same everywhere.

    Args:
      plan: The tables.
      device: Where the variables are to be.
      rows_of: For the index of a table the rows of this process. A part without rows
        is a variable of one row, which no ID names.
    """

    def part(table: int, matrix: _Matrix) -> tf.Variable:
        rows = range(*rows_of(table).indices(matrix.shape[0]))
        if not rows:
            zeros = tf.zeros([1, matrix.shape[1]], matrix.dtype)
            return create_state(variable_name(matrix.name), zeros)
        return _create_part(matrix, rows)

    with tf.device(device):
        found = [
            TableVariables(part(spec.index, _table_matrix(spec, device)), {})
            for spec in plan.tables
        ]
        for spec, table in zip(plan.tables, found, strict=True):
            for slot in spec.optimizer.slots if spec.optimizer else ():
                matrix = _slot_matrix(spec, slot, device)
                table.slots[slot.name] = part(spec.index, matrix)
    return found


def _sizes(plan: Plan) -> dict[str, int]:
    """The bytes of each variable of a plan, by its name in checkpoints."""
    sizes = {}
    for spec in plan.tables:
        shape = _table_shape(spec)
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
    dtype = tf.as_dtype(spec.config.dtype)
    return _create_variable(spec.name, _table_shape(spec), initializer_of(spec), dtype)


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
        variable = made.get(slot.name) if isinstance(made, Mapping) else None
        if (
            not isinstance(variable, tf.Variable)
            or variable.dtype != tf.float32
            or tuple(variable.shape) != shape
        ):
            raise ValueError(
                f"Table {spec.name}: `slot_variable_creation_fn` must return a dict "
                f"with a float32 variable of shape {shape} under {slot.name!r}. "
                f"Received: {made!r}."
            )
    return {slot.name: made[slot.name] for slot in wanted}


def _plain_variable(next_creator: Any, **arguments: Any) -> tf.Variable:
    """A variable creator that leaves out the strategy's own."""
    del next_creator
    return _ResourceVariable(**arguments)


def _table_shape(spec: TableSpec) -> tuple[int, int]:
    return spec.config.vocabulary_size, spec.config.dim


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
      value: The initial value.
      shape: Of the values to come, where that is more than the shape of `value`.
    """
    return _ResourceVariable(
        initial_value=value, name=name, trainable=False, shape=shape
    )


# What an initializer that takes `shard_info` is told of its part of a table.
ShardInfo: Any = vars(base)["ShardInfo"]  # pyright does not see exported names.


def initial_value(
    name: str,
    shape: tuple[int, ...],
    initialize: Callable[[], Any],
    dtype: tf.DType = tf.float32,
) -> tf.Tensor:
    """What a table or slot starts as.

    Args:
      name: For messages.
      shape: What the value must have.
      initialize: The user's initializer, with its arguments.
      dtype: Of the value. For bfloat16 an initializer may give float32 all the same,
        which is rounded to the nearest.

    Raises:
      ValueError: If the value has another shape.
    """
    value = initialize()
    if dtype != tf.float32:
        value = tf.cast(value, dtype)
    value = tf.convert_to_tensor(value, dtype)
    if tuple(value.shape) != shape:
        raise ValueError(
            f"The initializer of {name} must return the shape that it is given, "
            f"{shape}. Received: {tuple(value.shape)}."
        )
    return value


def initializer_of(spec: TableSpec) -> Callable[..., Any]:
    """The initializer of a table, or the default one.

    Raises:
      TypeError: If it cannot be called as initializers are.
    """
    initializer = spec.config.initializer or default_initializer(spec.config.dim)
    try:
        signature = inspect.signature(initializer)
    except ValueError:
        return initializer  # Some built-ins have no signature.
    part = {"shard_info": None} if "shard_info" in signature.parameters else {}
    try:
        signature.bind((1, 1), dtype=tf.as_dtype(spec.config.dtype), **part)
    except TypeError as error:
        raise TypeError(
            f"The initializer of {spec.name} is called as initializer(shape, "
            f"dtype=tf.float32), which {initializer!r} does not accept: {error}. Write "
            "it as `def initializer(shape, dtype)`."
        ) from error
    return initializer


def slot_initializer(slot: Slot) -> Callable[..., tf.Tensor]:
    """The initializer of a slot, a callable of ([V, D] or [V, 1], dtype)."""

    def initialize(shape: tuple[int, int], dtype: tf.DType = tf.float32) -> tf.Tensor:
        start = slot.initial_value
        if not callable(start):
            return tf.fill(shape, tf.cast(start, dtype))
        # To the user a slot with one number for each row is a vector.
        value: Any = start(shape[:1] if slot.per_row else shape, dtype=dtype)
        return tf.reshape(value, shape)

    return initialize


def initial_rows(slot: Slot) -> InitialValue:
    """What rows of a slot start as, as `MutableRows` has it."""
    if not callable(slot.initial_value):
        return slot.initial_value
    return lambda shape: slot_initializer(slot)(shape).numpy()


def combiner_weights(name: str, combiner: CustomCombiner) -> tf.Tensor:
    """What the weights of a custom combiner start as, float32 [num_weights]."""
    shape = (combiner.num_weights,)
    if combiner.initializer is None:
        return tf.zeros(shape)
    initialize = combiner.initializer
    return initial_value(name, shape, lambda: initialize(shape, dtype=tf.float32))


def takes_shard_info(initializer: Callable[..., Any]) -> bool:
    """Whether it is called for each part of a table, as TensorFlow's classes do."""
    try:
        return "shard_info" in inspect.signature(initializer).parameters
    except ValueError:  # Some built-ins have no signature.
        return False


_GIB = 2.0**30
_ROOT = pathlib.Path("/")
_CGROUPS = (  # the limit, what is used of it: version 2, then 1
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def require_memory(sizes: Mapping[str, int], root: pathlib.Path = _ROOT) -> None:
    """Fails where variables of these sizes would not fit.

    Args:
      sizes: Bytes of each variable, by name.
      root: Where the files of the system are.

    Raises:
      tf.errors.ResourceExhaustedError: If they take more than what is free.
    """
    available = available_bytes(root)
    if available is not None and sum(sizes.values()) > available:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:4]
        parts = ", ".join(f"{name} {sizes[name] / _GIB:.1f} GiB" for name in largest)
        more = f" and {len(sizes) - 4} more" if len(sizes) > 4 else ""
        raise tf.errors.ResourceExhaustedError(
            None,
            None,
            f"The tables and slots take {sum(sizes.values()) / _GIB:.1f} GiB ({parts}"
            f"{more}), but {available / _GIB:.1f} GiB of memory are free. Nothing was "
            "made. Use a smaller `vocabulary_size` or `dim`, an optimizer with fewer "
            "or smaller slots (SGD, RowwiseAdagrad), or a machine with more memory.",
        )


def available_bytes(root: pathlib.Path = _ROOT) -> int | None:
    """Memory and swap that is free, in bytes; None where the system does not say."""
    limits = [
        limit - used
        for limit, used in ((_number(root / p) for p in pair) for pair in _CGROUPS)
        if limit is not None and used is not None
    ]
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        lines = (line.split() for line in meminfo.read_text().splitlines())
        sizes = {words[0]: int(words[1]) for words in lines if len(words) > 1}
        if "MemAvailable:" in sizes:
            kib = sizes["MemAvailable:"] + sizes.get("SwapFree:", 0)
            limits.append(kib * 1024)
    return max(min(limits), 0) if limits else None


def _number(file: pathlib.Path) -> int | None:
    """What a file holds if it is a number; "max" stands for no limit."""
    if not file.is_file():
        return None
    text = file.read_text().strip()
    return int(text) if text.isdigit() else None
