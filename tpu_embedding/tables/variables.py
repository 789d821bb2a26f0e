"""Tables and slots as TensorFlow variables."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tpu_embedding.layout.plan import Plan, TableSpec
from tpu_embedding.ops import library
from tpu_embedding.tables.codes import joined_codes
from tpu_embedding.tables.initial import (
    FirstValues,
    initial_rows,
    slot_values,
    table_values,
)
from tpu_embedding.tables.rows import (
    PARAMETERS,
    SCALE_OFFSET,
    InitialValue,
    MutableTableRows,
    checkpoint_name,
)
from tpu_embedding.tables.waiting import catch_up, gather, scatter

# A variable made here must be *one* variable, whatever the strategy whose scope is
# open; the class behind tf.Variable is the one way past the scope's creators.
_ResourceVariable: Any = resource_variable_ops.ResourceVariable
_GIB = 2.0**30
_ROOT = pathlib.Path("/")
_CGROUPS = (  # The files of limit and usage, in version 2 and then version 1.
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


@dataclasses.dataclass(frozen=True)
class TableVariables:
    """The variables of one table.

    Attributes:
      parameters: The rows, [V, D] of the table's dtype, or the codes of an int8 table.
      slots: The slots by name, float32 [V, D] or [V, 1].
      scale_offset: Scales and offsets of an int8 table, bfloat16 [V, 2], else None.
    """

    parameters: tf.Variable
    slots: dict[str, tf.Variable]
    scale_offset: tf.Variable | None = None

    @property
    def stored(self) -> dict[str, tf.Variable]:
        """The arrays of the rows: "parameters", and for int8 also "scale_offset"."""
        found = {PARAMETERS: self.parameters, SCALE_OFFSET: self.scale_offset}
        return {name: array for name, array in found.items() if array is not None}

    @property
    def arrays(self) -> dict[str, tf.Variable]:
        """The arrays of `stored` and the slots, by name."""
        return {**self.stored, **self.slots}


class VariableRows(MutableTableRows):
    """A table or slot that is one variable, of which each replica may have a copy.

    Gathers and scatters touch only the rows. Reading the variable would copy all of it
    once a kernel has updated it in place.
    """

    def __init__(
        self,
        variable: Any,
        initial_value: InitialValue = None,
        *,
        reads_stored: bool = True,
    ) -> None:
        """Takes the variable.

        Args:
          variable: The variable, or that of a strategy.
          initial_value: See `MutableTableRows`.
          reads_stored: Whether `variable` may be read as it is stored. With False it is
            None, so that reads catch up the rows that wait.
        """
        super().__init__(variable.shape, np.dtype(variable.dtype.as_numpy_dtype))
        self._copies = getattr(variable, "values", (variable,))
        self.initial_value = initial_value
        self._reads_stored = reads_stored

    @property
    def variable(self) -> tf.Variable | None:
        is_matrix = self._reads_stored and len(self._copies) == 1
        return self._copies[0] if is_matrix else None

    def read(self, start: int, stop: int) -> np.ndarray:
        variable = self._copies[0]
        with tf.device(variable.device):  # It may be on a server.
            catch_up(variable)
            return gather(variable, tf.range(start, stop, dtype=tf.int64)).numpy()

    def write(self, start: int, values: np.ndarray) -> None:
        rows, columns = self.shape
        assert 0 <= start <= rows - len(values), (start, len(values), rows)
        assert values.shape[1:] == (columns,), (values.shape, columns)
        for variable in self._copies:
            with tf.device(variable.device):
                catch_up(variable)
                own = tf.range(start, start + len(values), dtype=tf.int64)
                scatter(variable, own, tf.constant(values, variable.dtype))

    def restore(self, values: tf.Tensor) -> None:
        for variable in self._copies:
            with tf.device(variable.device):
                variable.assign(values)


def variable_rows(
    spec: TableSpec, part: TableVariables
) -> Mapping[str, MutableTableRows]:
    """Returns the rows of a part of a table and of its slots, by name.

    A growing table has none here: its rows mean nothing without ids (`Vocabulary`).
    """
    if spec.config.vocabulary is not None:
        return {}
    slots = spec.optimizer.slots if spec.optimizer else ()
    starts = {slot.name: initial_rows(slot) for slot in slots}
    rows: dict[str, MutableTableRows] = {
        name: VariableRows(v, starts.get(name)) for name, v in part.arrays.items()
    }
    return joined_codes(rows)


# A part of a table: its device, and its rows or None for the whole table. A growing
# table has no rows yet, on any device.
Place = tuple[str, range | None]


def create_variables(
    plan: Plan, device: str, waiting_bytes: int = 0
) -> list[TableVariables]:
    """Makes each table and slot of a plan as one variable, if there is enough memory.

    Args:
      plan: The tables.
      device: The device of the variables.
      waiting_bytes: Bytes that the engine keeps for the steps that rows wait for.
    """
    if _is_here(device):
        sizes = dict(_all_bytes(plan))
        if waiting_bytes:
            sizes["steps that rows wait for"] = waiting_bytes
        require_memory(sizes)
    places = [[(device, None)]] * len(plan.tables)
    return [part for (part,) in create_parts(plan, places)]


def create_parts(
    plan: Plan, places: Sequence[Sequence[Place]]
) -> list[list[TableVariables]]:
    """Makes parts of the tables and slots of a plan.

    All tables are made before all slots: making the random numbers of a table takes
    its size once more, and the slots then fill that memory. All processes
    of a job call all initializers, so that random numbers are the same everywhere.

    Args:
      plan: The tables.
      places: The parts of each table to make. If `FirstValues.reader` must make a whole
        table, it does so on the device of the first part. A part without rows is a
        variable of one row, which no ID names.

    Returns:
      The parts of each table.
    """
    tables = [
        create_rows(spec, own) for spec, own in zip(plan.tables, places, strict=True)
    ]
    for spec, own, parts in zip(plan.tables, places, tables, strict=True):
        if spec.optimizer is None:
            continue
        if spec.optimizer.slot_variable_creation_fn is not None:
            for (device, _), part in zip(own, parts, strict=True):
                with tf.device(device):
                    part.slots.update(user_slots(spec, part.parameters))
            continue
        for slot in spec.optimizer.slots:
            made = _create(slot_values(spec, slot), own)
            for part, variable in zip(parts, made, strict=True):
                part.slots[slot.name] = variable
    return tables


def create_rows(
    spec: TableSpec, places: Sequence[Place] = (("", None),)
) -> list[TableVariables]:
    """Makes the parts of a table, without slots."""
    values = table_values(spec)
    if not spec.config.storage.is_coded:
        return [TableVariables(part, {}) for part in _create(values, places)]
    if values.grows:
        codes, grids = (
            _create(dataclasses.replace(values, name=n, shape=(0, w), dtype=d), places)
            for n, w, d in (
                (values.name, values.shape[1], tf.uint8),
                (checkpoint_name(values.name, SCALE_OFFSET), 2, tf.bfloat16),
            )
        )
        return [TableVariables(c, {}, g) for c, g in zip(codes, grids, strict=True)]
    read = values.reader(places[0][0])
    made = []
    for device, rows in places:
        with tf.device(device):
            own = range(values.shape[0]) if rows is None else rows
            made.append(_create_coded(spec, values, read, own))
    return made


def _create_coded(
    spec: TableSpec,
    values: FirstValues,
    read: Callable[[range], tf.Tensor],
    rows: range,
) -> TableVariables:
    """Makes rows of a table of int8 on the current device, a few MiB at a time."""
    height, dim = max(1, len(rows)), values.shape[1]
    name = variable_name(values.name)
    codes = create_state(name, tf.zeros([height, dim], tf.uint8))
    grids = tf.zeros([height, 2], tf.bfloat16)
    scale_offset = create_state(f"{name}/{SCALE_OFFSET}", grids)
    count = max(1, _BLOCK_BYTES // (dim * values.dtype.size * rows.step))
    for first in range(0, len(rows), count):
        block = rows[first : first + count]
        stored = library.load().tpu_embedding_encode_rows(
            values=read(block),
            rows=tf.range(block.start, block.stop, block.step, dtype=tf.int64),
            seed=tf.constant(spec.rounding_seed, tf.int64),
        )
        own = tf.range(first, first + len(block), dtype=tf.int64)
        scatter(codes, own, stored.codes)
        scatter(scale_offset, own, stored.grids)
    return TableVariables(codes, {}, scale_offset)


def _create(values: FirstValues, places: Sequence[Place]) -> list[tf.Variable]:
    """Makes the variable of each part of a table or slot."""
    first_device, rows = places[0]
    read = None if rows is None or values.grows else values.reader(first_device)
    made = []
    for device, rows in places:
        with tf.device(device):
            part = _create_part(values, read, rows, is_here=_is_here(device))
            made.append(part)
    return made


_BLOCK_BYTES = 4 << 20  # Rows are made from a block of a matrix of this size.


def _create_part(
    values: FirstValues,
    read: Callable[[range], tf.Tensor] | None,
    rows: range | None,
    *,
    is_here: bool,
) -> tf.Variable:
    """Makes the variable of some rows on the current device, a few MiB at a time."""
    name, dim = variable_name(values.name), values.shape[1]
    if read is None or rows is None:
        shape = None
        if values.grows:
            # A handle with a partial shape would make TensorFlow end a server.
            dims: Any = (None, dim) if is_here else None
            shape = tf.TensorShape(dims)
        return create_state(name, values.whole, shape, values.dtype)
    if not rows:
        return create_state(name, tf.zeros([1, dim], values.dtype))
    count = max(1, _BLOCK_BYTES // (dim * values.dtype.size * rows.step))
    if rows.step == 1 or len(rows) <= count:
        return create_state(name, read(rows))
    variable = create_state(name, tf.zeros([len(rows), dim], values.dtype))
    for first in range(0, len(rows), count):
        block = rows[first : first + count]
        own = tf.range(first, first + len(block), dtype=tf.int64)
        scatter(variable, own, read(block))
    return variable


def _all_bytes(plan: Plan) -> Iterator[tuple[str, int]]:
    """Yields the name and the first size of each table and slot."""
    for spec in plan.tables:
        has_rows = spec.config.vocabulary is None
        for array in spec.arrays():
            size = array.bytes if has_rows else 0
            yield checkpoint_name(spec.name, array.name), size


def _is_here(device: str) -> bool:
    """Returns whether variables on a device are in the memory of this machine."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.device_type in (None, "CPU") and spec.job in (None, "localhost")


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
        rows, dim = parameters.shape
        shape = (rows, 1 if slot.per_row else dim)
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
    """Creates a variable, without the creators of the strategy."""
    del next_creator
    return _ResourceVariable(**arguments)


def variable_name(name: str) -> str:
    """Returns a table's or slot's name with "_" for what graphs do not allow in names.

    >>> variable_name("films/velocities"), variable_name("größe")
    ('films/velocities', 'gr__e')
    """
    allowed = re.sub(r"[^\w./>-]", "_", name, flags=re.ASCII)
    return re.sub(r"^[^A-Za-z0-9.]", "table_", allowed)


def create_counter(name: str, device: str) -> tf.Variable:
    """Creates an int64 scalar at 0, one variable whatever the strategy's scope."""
    with tf.device(device):
        return create_state(name, tf.zeros([], tf.int64))


def create_state(
    name: str, value: Any, shape: Any = None, dtype: tf.DType | None = None
) -> tf.Variable:
    """Creates one variable that is not a Keras weight, whatever the strategy's scope.

    `value` may be a function that returns the value, of `dtype`. Pass `shape` to allow
    later values of other shapes than that of `value`.
    """
    return _ResourceVariable(
        initial_value=value, name=name, trainable=False, shape=shape, dtype=dtype
    )


def require_memory(sizes: Mapping[str, int], root: pathlib.Path = _ROOT) -> None:
    """Fails if variables of so many bytes do not fit; `root` has /proc and /sys."""
    available = available_bytes(root)
    if available is not None and sum(sizes.values()) > available:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:4]
        parts = ", ".join(f"{name} {sizes[name] / _GIB:.1f} GiB" for name in largest)
        more = f" and {len(sizes) - 4} more" if len(sizes) > 4 else ""
        raise tf.errors.ResourceExhaustedError(
            None,
            None,
            f"The tables and slots take {sum(sizes.values()) / _GIB:.1f} GiB "
            f"({parts}{more}), but {available / _GIB:.1f} GiB of memory are free. "
            "Nothing was created. Use a smaller `vocabulary_size` or `dim`, an "
            "optimizer with fewer or smaller slots (SGD, RowwiseAdagrad), or a machine "
            "with more memory.",
        )


def available_bytes(root: pathlib.Path = _ROOT) -> int | None:
    """Returns the bytes of free memory and swap; None where the system does not say."""
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
    """Returns the number in a file; None if it has none: "max" stands for no limit."""
    if not file.is_file():
        return None
    text = file.read_text().strip()
    return int(text) if text.isdigit() else None
