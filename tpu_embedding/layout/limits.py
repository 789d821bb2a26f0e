"""Finds what does not fit on the devices of a TPU, before anything is created."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tpu_embedding.layout.csr import Partitioning, custom_limit
from tpu_embedding.layout.plan import Plan, TableSpec
from tpu_embedding.layout.stacking import Layout, Stack
from tpu_embedding.tpu_generations import (
    COMBINER_MULTIPLE,
    GIB,
    PROGRAM_BYTES_PER_STACK,
    SPARSE_CORE_TENSOR_BYTES,
    TENSOR_CORE_LANES,
    VALENCY_MULTIPLE,
    Generation,
)

_BYTES = 4  # A TPU's tables and batches hold only float32 and int32.
_LARGEST_SHOWN = 3
# The most copies of a CustomCombiner's inputs that its program holds at a time.
_COMBINER_ARRAYS = 4
_COMPILED = (
    "a TPU compiles its CustomOptimizer or CustomCombiner with a limit of {} distinct "
    "ids, which follows from the number of samples"
)


@dataclasses.dataclass(frozen=True)
class Excess:
    """One limit that a configuration exceeds.

    Attributes:
      kind: "tensor bytes", "width", "unique ids", "ids", "valency", "samples" or
        "device bytes".
      tables: Names of the tables.
      stack: Name of their stack, or None for a limit of a whole device.
      number: The number that the configuration needs or asks for.
      limit: The largest number that is possible.
      message: A sentence with all of these and the way out.
    """

    kind: str
    tables: tuple[str, ...]
    stack: str | None
    number: int
    limit: int
    message: str


def array_bytes(stack: Stack) -> int:
    """Returns the bytes of one array of a stack, table or slot, on one device."""
    return stack.rows_per_device * stack.width * _BYTES


def num_arrays(spec: TableSpec) -> int:
    """Returns the number of arrays of a table: itself and its slots."""
    return 1 + (0 if spec.optimizer is None else len(spec.optimizer.slots))


def buffer_bytes(
    partitioning: Partitioning, stack: Stack, *, pipelined: bool = False
) -> int:
    """Returns the bytes of a stack's batch on one device.

    With `pipelined` a pending update adds its batch and its activations.
    """
    batch = _batch_bytes(partitioning, stack)
    return batch + (batch + _activation_bytes(stack) if pipelined else 0)


def program_bytes(
    partitioning: Partitioning,
    stack: Stack,
    *,
    pipelined: bool = False,
    padded: bool = False,
) -> int:
    """Returns the bytes that a step's program needs on a device besides its arguments.

    Programs of libtpu 0.0.30 (docs/libtpu_limits.md) need them for code, activations,
    and, if an update is pending, the batch once more. In some programs ops outside of
    SparseCores store activations `padded`, and a CustomCombiner's inputs too.
    """
    activations = _activation_bytes(stack)
    pending = _batch_bytes(partitioning, stack) + activations
    if padded:
        stored = stack.samples * stored_row_bytes(stack.width)
        dims = {place.unsharded_shape[1] for place in stack.layouts}
        if dims == {stack.width} == {8}:  # No columns are cut off or added.
            activations = stored + 2 * activations
        elif stack.width > TENSOR_CORE_LANES and activations == stored:
            activations = 2 * stored
        else:
            activations += 2 * stored
        rows = -(-_max_valency(partitioning, stack) // VALENCY_MULTIPLE)
        rows *= VALENCY_MULTIPLE * _COMBINER_ARRAYS
        activations += rows * _activation_bytes(stack)
    return PROGRAM_BYTES_PER_STACK + activations + (pending if pipelined else 0)


def _batch_bytes(partitioning: Partitioning, stack: Stack) -> int:
    ids = stack.samples * partitioning.max_ids_per_chip_per_sample
    positions = any(t.positions for t in partitioning.stacks if t.name == stack.name)
    return _BYTES * (ids * (4 if positions else 3) + partitioning.num_row_pointers)


def _max_valency(partitioning: Partitioning, stack: Stack) -> int:
    """Returns the largest valency of a CustomCombiner; 0 for other combiners."""
    return max(
        (partitioning.features[f].max_valency for f in stack.features), default=0
    )


def _activation_bytes(stack: Stack) -> int:
    return _BYTES * stack.samples * stack.width


def sparse_core_excesses(
    plan: Plan,
    layout: Layout,
    partitioning: Partitioning,
    generation: Generation,
    *,
    pipelined: bool = False,
    padded: bool = False,
) -> list[Excess]:
    """Returns the limits of SparseCores that a plan exceeds."""
    found: list[Excess] = []
    for stack, partitioned in zip(layout.stacks, partitioning.stacks, strict=True):
        where = _StackOf(plan, stack)
        found += _tensor_excess(where)
        found += _width_excess(where, generation)
        found += _valency_excess(where, _max_valency(partitioning, stack), generation)
        compiled = custom_limit(plan, stack, partitioning.sparse_cores_per_device)
        asked = (
            partitioned.max_ids_per_partition,
            partitioned.max_unique_ids_per_partition,
        )
        place = (generation, partitioning.num_shards)
        found += _partition_excess(where, asked, compiled, place)
    used = []
    for stack in layout.stacks:
        name = ", ".join(plan.tables[index].name for index in stack.tables)
        arrays = num_arrays(plan.tables[stack.tables[0]])
        step = buffer_bytes(partitioning, stack, pipelined=pipelined)
        step += program_bytes(partitioning, stack, pipelined=pipelined, padded=padded)
        used += [(name, array_bytes(stack) * arrays), (f"a step of {name}", step)]
    names = tuple(spec.name for spec in plan.tables)
    return [
        *found,
        *device_excess(
            names,
            used,
            partitioning.num_replicas,
            (generation.name, generation.hbm_bytes),
        ),
    ]


def stored_row_bytes(columns: int) -> int:
    """Returns the bytes of a row of float32 outside of SparseCores, with its padding.

    >>> stored_row_bytes(8), stored_row_bytes(128), stored_row_bytes(129)
    (512, 512, 1024)
    """
    return -(-columns // TENSOR_CORE_LANES) * TENSOR_CORE_LANES * _BYTES


def whole_table_excesses(
    plan: Plan, generation: Generation, num_devices: int, *, step_bytes: int = 0
) -> list[Excess]:
    """Returns the limits exceeded by tables whose rows are divided without stacks.

    How TPU v2 to v4 pad their tables is not known, so a plan that exceeds none may
    still not fit. A single device holds all rows; a step needs `step_bytes` more.
    """
    used = [
        (
            spec.name,
            spec.config.max_rows
            * spec.config.dim
            * _BYTES
            * num_arrays(spec)
            // num_devices,
        )
        for spec in plan.tables
    ]
    if step_bytes:
        used.append(("a step", step_bytes))
    names = tuple(spec.name for spec in plan.tables)
    return device_excess(
        names, used, num_devices, (generation.name, generation.hbm_bytes)
    )


def device_excess(
    names: tuple[str, ...],
    used: Sequence[tuple[str, int]],
    num_devices: int,
    device: tuple[str, int],
) -> list[Excess]:
    """Returns the excess of a device over its memory, if there is one.

    `used` has (name, bytes) of each array there. `device` is the name of a place and
    its bytes, 0 if they are not known.
    """
    total, (place, limit) = sum(size for _, size in used), device
    if not limit or total <= limit:
        return []
    largest = sorted(used, key=lambda item: -item[1])[:_LARGEST_SHOWN]
    shown = "; ".join(f"{name}: {_gib(size)}" for name, size in largest)
    each = "a device" if num_devices == 1 else f"each of {num_devices} devices"
    return [
        Excess(
            "device bytes",
            names,
            None,
            total,
            limit,
            f"The tables, their slots and a step need {total} bytes ({_gib(total)}) on "
            f"{each}, but programs on {place} can use {limit} bytes ({_gib(limit)}): "
            f"{_gib(total - limit)} too much. The largest are {shown}. Use more "
            "devices, a smaller vocabulary_size, dim or batch, or an optimizer with "
            "fewer slots.",
        )
    ]


def raise_first(excesses: Sequence[Excess]) -> None:
    """Raises ValueError for the first of some excesses; it names the others."""
    if excesses:
        first, *rest = excesses
        others = dict.fromkeys(f"{e.kind} of {_named(e.tables)}" for e in rest)
        more = f" Also exceeded: {_some(list(others))}." if rest else ""
        raise ValueError(first.message + more)


@dataclasses.dataclass(frozen=True)
class _StackOf:
    """A stack of a plan, which may exceed a limit."""

    plan: Plan
    stack: Stack

    def excess(self, kind: str, number: int, limit: int, text: str) -> Excess:
        """Makes the excess of the stack; its message begins with the tables."""
        names = tuple(self.plan.tables[index].name for index in self.stack.tables)
        named, stack = _named(names), self.stack.name
        message = f"{named[0].upper()}{named[1:]} in stack {stack!r}: {text}"
        return Excess(kind, names, stack, number, limit, message)


def _tensor_excess(where: _StackOf) -> Iterable[Excess]:
    stack, limit = where.stack, SPARSE_CORE_TENSOR_BYTES
    size, devices = array_bytes(stack), stack.num_devices
    text = (
        f"{stack.rows_per_device} rows of {stack.width} float32 numbers on each of "
        f"{devices} devices are {size} bytes ({_gib(size)}), but SparseCores support "
        f"at most {limit} bytes ({_gib(limit)}) for a table or slot on a device. Use "
        f"at least {-(-devices * size // limit)} devices, or a smaller vocabulary_size "
        "or dim."
    )
    if size > limit:
        yield where.excess("tensor bytes", size, limit, text)


def _width_excess(where: _StackOf, generation: Generation) -> Iterable[Excess]:
    width, most = where.stack.width, generation.max_width
    text = (
        f"its rows have {width} columns, but libtpu 0.0.30 compiles updates of at most "
        f"{most} columns for {generation.name}. Use a smaller dim."
    )
    if most and width > most:
        yield where.excess("width", width, most, text)


def _valency_excess(
    where: _StackOf, valency: int, generation: Generation
) -> Iterable[Excess]:
    width, most = where.stack.width, generation.max_valency(where.stack.width)
    fewer = f"Use a max_valency of at most {most}, or a smaller dim"
    way_out = fewer if most else "Use a smaller dim"
    text = (
        f"its CustomCombiner gets up to {valency} rows of {width} columns for a "
        f"sample, but libtpu 0.0.30 compiles at most {most} such rows for "
        f"{generation.name}. {way_out}."
    )
    if generation.combiner_values and valency > most:
        yield where.excess("valency", valency, most, text)


def combiner_excesses(
    plan: Plan, layout: Layout, partitioning: Partitioning, generation: Generation
) -> list[Excess]:
    """Returns batches of CustomCombiners with which libtpu 0.0.30 ends its process.

    The software TPU accepts any; `te.plan` reports these before there is a TPU.
    """
    found = []
    cores = partitioning.sparse_cores_per_device
    for stack in layout.stacks:
        samples = stack.samples // cores
        if not _max_valency(partitioning, stack) or not samples % COMBINER_MULTIPLE:
            continue
        text = (
            f"its CustomCombiner has {samples} samples on each SparseCore, but libtpu "
            f"0.0.30 compiles only multiples of {COMBINER_MULTIPLE} for "
            f"{generation.name}. Use batches that give the stack a multiple of "
            f"{COMBINER_MULTIPLE * cores} samples on each device."
        )
        limit = samples // COMBINER_MULTIPLE * COMBINER_MULTIPLE
        found.append(_StackOf(plan, stack).excess("samples", samples, limit, text))
    return found


def _partition_excess(
    where: _StackOf,
    asked: tuple[int, int],
    compiled: int | None,
    place: tuple[Generation, int],
) -> Iterable[Excess]:
    """Yields the excess of a partition over the memory of a SparseCore.

    `asked` has the limits of ids and of distinct ids that the preprocessor enforces.
    `compiled` is the limit of both that libtpu compiles for a CustomOptimizer or
    CustomCombiner, or None.
    """
    (generation, cores), stack = place, where.stack
    ids, unique = (max(number, compiled or 0) for number in asked)
    size, spmem = generation.partition_bytes(ids, unique, cores), generation.spmem_bytes
    if not spmem:
        return
    if size <= spmem:
        yield from _multiple_excess(where, unique, compiled, generation)
        return
    most = generation.max_unique_ids(cores)
    kind, number, limit = (
        "unique ids",
        unique,
        generation.max_unique_ids(cores, ids) or most,
    )
    if compiled is not None:
        limit = most  # `compiled` is at least what the user asks for.
        what = _COMPILED.format(unique)
        way_out = "Use a smaller batch"
    else:
        what = (
            f"max_unique_ids_per_table[{stack.name!r}] is {unique} and "
            f"max_ids_per_table[{stack.name!r}] is {ids}"
        )
        choices = [f"max_unique_ids_per_table to at most {limit}"]
        if unique <= most:
            kind, number, limit = "ids", ids, generation.max_ids(cores, unique)
            fewer = f"max_ids_per_table to at most {limit}"
            # So many ids may leave no memory for distinct ones.
            choices = (
                [*choices, fewer] if generation.max_unique_ids(cores, ids) else [fewer]
            )
        elif generation.partition_bytes(ids, limit, cores) > spmem:
            choices[0] += (
                f", and max_ids_per_table to {generation.max_ids(cores, limit)}"
            )
        way_out = (
            f"Set {' or '.join(choices)} in SparseCoreEmbeddingConfig, with "
            "minibatching=True if batches have more"
        )
    text = (
        f"{what}. With these limits and {cores} SparseCores a partition needs {size} "
        f"bytes of the memory of a SparseCore, which has {spmem} bytes (SPMEM) on "
        f"{generation.name}. {way_out}."
    )
    yield where.excess(kind, number, limit, text)


def _multiple_excess(
    where: _StackOf, unique: int, compiled: int | None, generation: Generation
) -> Iterable[Excess]:
    """Yields an excess if libtpu does not compile the limit of distinct ids."""
    if generation.compiles_multiple(unique):
        return
    multiple = generation.id_multiple
    limit = unique // multiple * multiple
    if compiled is None:
        what = f"max_unique_ids_per_table[{where.stack.name!r}] is {unique}"
        larger = -(-unique // multiple) * multiple
        way_out = f"Set it to {larger}" + (f" or {limit}" if limit else "")
    else:
        what = _COMPILED.format(unique)
        way_out = f"Use a batch that gives a multiple of {multiple}"
    text = (
        f"{what}, but libtpu 0.0.30 compiles only multiples of {multiple} for "
        f"{generation.name}. {way_out}."
    )
    yield where.excess("unique ids", unique, limit, text)


def _named(names: Sequence[str]) -> str:
    plural = "s" if len(names) > 1 else ""
    return f"table{plural} {_some([repr(name) for name in names])}"


def _some(items: Sequence[str]) -> str:
    rest = len(items) - _LARGEST_SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return ", ".join(items[:_LARGEST_SHOWN]) + more


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
