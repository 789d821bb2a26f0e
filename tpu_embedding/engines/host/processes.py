"""The engine for several processes: each holds a part of the tables."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tpu_embedding.distribution import ProcessTopology
from tpu_embedding.engines import fingerprint
from tpu_embedding.engines.base import EngineOptions, RowChanges, TableArrays
from tpu_embedding.engines.cpu_base import arrays_of_variables
from tpu_embedding.engines.host.batches import plan_record
from tpu_embedding.engines.host.changes import Held, ReadTable, ShardedChanges
from tpu_embedding.engines.host.engine import HostEngine
from tpu_embedding.engines.host.growing import GrowingPart, changed
from tpu_embedding.engines.host.part import TablePart
from tpu_embedding.engines.host.transport import Processes
from tpu_embedding.engines.process_group import Channel, calling, connect
from tpu_embedding.engines.telemetry import Counts, TableCounts
from tpu_embedding.layout.partition import Run
from tpu_embedding.layout.placement import Placement, place_tables, rows_of_plan
from tpu_embedding.layout.plan import UPDATES, TableSpec
from tpu_embedding.tables.growing import Changed, GrowingState
from tpu_embedding.tables.initial import initial_rows
from tpu_embedding.tables.readers import StoredReader, VariableReader
from tpu_embedding.tables.rows import (
    PARAMETERS,
    InitialValue,
    MutableTableRows,
    ProcessGroup,
    checkpoint_name,
)
from tpu_embedding.tables.trackable import LogicalVariable
from tpu_embedding.tables.variables import (
    Place,
    TableVariables,
    create_parts,
    variable_rows,
)
from tpu_embedding.vocabulary import VocabularyContents


class ShardedEngine(HostEngine):
    """The host engine over the tables of all processes of a synchronous job.

    This process has one part of them. All processes make the same calls in the same
    order: those of the queue, `lookup`, `update`, `flush`, `reset`, and views of the
    tables.
    """

    name = "sharded"
    synchronizes = True
    differentiates_weights = False
    for_custom = None

    def __init__(self, options: EngineOptions) -> None:
        """Makes this process's part of the tables; see `Engine`."""
        self._placement = _placement(options)
        assert options.channel is not None
        self._channel = options.channel
        own = dataclasses.replace(
            options, plan=rows_of_plan(options.plan, self._placement)
        )
        record = plan_record(own, self._placement)
        variables = _create_parts(options, self._placement)
        self._part = TablePart(own, record, variables)
        self._channel.queues = [self._part.handle]
        # IDs and batches are those of whole tables.
        super().__init__(options, [self._part], Processes(record, self._channel))

    @classmethod
    def check(cls, options: EngineOptions) -> Channel:
        super().check(options)
        description = _description(options, _placement(options))
        timeout_seconds = options.distributed.timeout_seconds
        return connect(options.topology, description, timeout_seconds)

    @property
    def channel(self) -> Channel:
        """What the processes of this embedding exchange messages over."""
        return self._channel

    def flush(self) -> None:
        """See `TableStore.flush`; with pipelining a call of all processes."""
        if self.pipelined:
            with calling("flush"):  # Unless it is part of another call.
                self._channel.agree("update")
        super().flush()

    def reset(self) -> None:
        """See `Steps.reset`: a call of all processes."""
        self._channel.agree("update", "reset")
        super().reset()

    def _rates_to_send(self) -> tf.Tensor:
        with self._channel.refusing("update"), self._channel.after_exchange():
            return super()._rates_to_send()

    def changes(self, consumer: str) -> RowChanges:
        """See `TableStore.changes`: a call of all processes, also in the result."""
        tables = self._part.variables
        held = Held(self._part, self._placement, range(len(tables)))
        read = [
            ReadTable(VariableReader(table.parameters), arrays.growing)
            for table, arrays in zip(tables, self.tables().values(), strict=True)
        ]
        return ShardedChanges(held, read, consumer, self._channel)

    def start_counting(self, every: int) -> Callable[[int], Counts]:
        """See `TableStore.start_counting`: of the rows that this process has."""
        read = super().start_counting(every)

        def placed(num_hot_rows: int) -> Counts:
            counts, sent = read(num_hot_rows), self._channel.statistics()
            tables = {
                spec.name: self._placed(spec.index, counts.tables[spec.name])
                for spec in self._plan.tables
            }
            bytes_sent = {phase: number for phase, (_, number) in sent.items()}
            return dataclasses.replace(counts, tables=tables, bytes_sent=bytes_sent)

        return placed

    def _placed(self, table: int, counts: TableCounts) -> TableCounts:
        """Counts of the rows of this process, by their numbers in the whole table.

        The rows of a sample are in several processes, so no one counts samples.
        """
        counts = dataclasses.replace(
            counts, invalid_ids=None, samples=None, samples_without_ids=None
        )
        row = functools.partial(self._placement.rows_at, table)
        hot_rows, number = counts.hot_rows.T
        return dataclasses.replace(
            counts,
            hot_rows=np.stack([row(hot_rows), number], axis=1),
            rows=row(counts.rows.astype(np.int64)),
        )

    def tables(self) -> dict[str, TableArrays]:
        """See `TableStore.tables`; reading rows is a call of all processes."""
        return {
            spec.name: self._arrays(spec, table)
            for spec, table in zip(self._plan.tables, self._part.variables, strict=True)
        }

    def _arrays(self, spec: TableSpec, table: TableVariables) -> TableArrays:
        if spec.name in self._part.growing:
            return self._growing_arrays(spec, table)
        parts = variable_rows(spec, table.arrays)
        slots = {slot.name: slot for slot in (spec.optimizer or _NO_OPTIMIZER).slots}
        rows: dict[str, MutableTableRows] = {
            name: ShardedRows(
                checkpoint_name(spec.name, name),
                own,
                spec,
                self._placement,
                self._channel,
                initial_rows(slots[name]) if name in slots else None,
            )
            for name, own in parts.items()
        }

        def values() -> dict[str, Any]:
            return {name: tf.constant(array.numpy()) for name, array in rows.items()}

        parameters = table.parameters
        count = self._placement.count(spec.index, spec.config.vocabulary_size)
        return TableArrays(
            rows=rows,
            reader=_ShardedReader(),
            values=values,
            shards=lambda: [(parameters.device, parameters.read_value()[:count])],
            variables=_refuse_variables,
        )

    def _growing_arrays(self, spec: TableSpec, table: TableVariables) -> TableArrays:
        owner, own = self._placement.owners[spec.index], self._part.growing[spec.name]

        def values() -> dict[str, Any]:
            found = {name: array.numpy() for name, array in table.arrays.items()}
            call = f"the reading of the table {spec.name}"
            whole = _of_owner(self._channel, owner, found, call)
            return {name: tf.constant(value) for name, value in whole.items()}

        state = _GrowingInJob(spec.name, own, owner, self._channel)
        return dataclasses.replace(
            arrays_of_variables(spec, table, state),
            reader=_ShardedReader(),
            values=values,
            variables=_refuse_variables,
        )

    def checkpoint_variables(self) -> dict[str, Any]:
        """See `TableStore.checkpoint_variables`: whole tables, gathered when saved."""
        found: dict[str, Any] = {}
        for name, table in self.tables().items():
            if table.growing is not None:
                found[name] = table.growing
            for array, rows in table.rows.items():
                full = checkpoint_name(name, array)
                found[full] = LogicalVariable(
                    full, rows.shape, rows.dtype, rows.numpy, _writer(rows)
                )
        updates = self._updates()
        return found if updates is None else {**found, UPDATES: updates}


class _GrowingInJob(GrowingState):
    """A growing table, which one process has."""

    def __init__(
        self, name: str, own: GrowingPart, owner: int, channel: Channel
    ) -> None:
        """Takes the state of this process, which is empty in all but the owner."""
        self._name, self._own, self._owner, self._channel = name, own, owner, channel
        self.parts, self.group = own.parts, channel

    @property
    def parameters(self) -> Any:
        """The rows, in all processes, which read them together."""
        own = {PARAMETERS: self._own.parameters.numpy()}
        return tf.constant(self._gather(own, "rows of")[PARAMETERS])

    def contents(self) -> VocabularyContents:
        """See `GrowingState.contents`."""
        found = self._own.contents()._asdict()
        arrays = {name: np.asarray(value) for name, value in found.items()}
        own = self._gather(arrays, "vocabulary of")
        values: Any = {n: v if v.shape else int(v) for n, v in own.items()}
        return VocabularyContents(**values)

    def evict(self) -> int:
        """See `GrowingState.evict`: a call of all processes."""
        self._agree("evict")
        count = np.asarray(self._own.evict())
        return int(self._gather({"evicted": count}, "evictions of")["evicted"])

    def updates_begun(self) -> int:
        """See `GrowingState.updates_begun`."""
        begun = np.asarray(self._own.updates_begun())
        return int(self._gather({"begun": begun}, "updates of")["begun"])

    def take_changed(self, consumer: str) -> Changed:
        """See `GrowingState.take_changed`: a call of all processes."""
        return changed(self._gather(self._own.take_arrays(consumer), "changes of"))

    def read(self) -> dict[str, np.ndarray]:
        """See `GrowingState.read`."""
        return self._gather(self._own.read(), "growing")

    def _agree(self, call: str) -> None:
        """Before what changes this process: a call that differs changes nothing."""
        self._channel.agree("checkpoint", f"{call} of table {self._name}")

    def _gather(self, own: dict[str, np.ndarray], what: str) -> dict[str, np.ndarray]:
        call = f"the reading of the {what} table {self._name}"
        return _of_owner(self._channel, self._owner, own, call)

    def write(self, state: Mapping[str, np.ndarray]) -> None:
        """See `GrowingState.write`; each process checks what it has read."""
        if self._channel.rank == self._owner:
            self._own.write(state)
        else:
            self.fit(state)

    def fit(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `GrowingState.fit`."""
        return self._own.fit(state)


def _of_owner(
    channel: Channel, owner: int, own: Mapping[str, np.ndarray], call: str
) -> dict[str, np.ndarray]:
    """The arrays that the owner passes, in all processes."""
    head = [(name, v.dtype.name, v.shape) for name, v in own.items()]
    content = b"".join(v.tobytes() for v in own.values())
    is_owner = channel.rank == owner
    sent = json.dumps(head).encode() + b"\n" + content if is_owner else b""
    received = channel.all_gather("checkpoint", sent, call)[owner]
    line, _, content = received.partition(b"\n")
    found, start = {}, 0
    for name, dtype, shape in json.loads(line):
        count = math.prod(shape)
        kind = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
        flat = np.frombuffer(content, kind, count, start)
        found[name] = flat.reshape(shape)
        start += flat.nbytes
    return found


class ShardedRows(MutableTableRows):
    """A table or slot whose rows are in several processes.

    `read` is a call of all processes with the same range; each gets all its rows.
    `write` keeps the rows of this process and drops the others.
    """

    def __init__(
        self,
        name: str,
        own: MutableTableRows,
        spec: TableSpec,
        placement: Placement,
        channel: Channel,
        initial_value: InitialValue,
    ) -> None:
        super().__init__((spec.config.vocabulary_size, own.shape[1]), own.dtype)
        self._own, self._table, self._name = own, spec.index, name
        self._placement, self._channel = placement, channel
        self.initial_value = initial_value

    def read(self, start: int, stop: int) -> np.ndarray:
        values = np.empty((stop - start, self.shape[1]), self.dtype)
        own = self._read_own(start, stop)
        call = self._describe(start, stop)
        parts = self._channel.all_gather("checkpoint", own.tobytes(), call)
        self._join(parts, start, stop, values)
        return values

    @property
    def group(self) -> ProcessGroup:
        return self._channel

    def read_in(self, process: int, start: int, stop: int) -> np.ndarray:
        values = np.empty((stop - start, self.shape[1]), self.dtype)
        own = self._read_own(start, stop).tobytes()
        sent = [own if p == process else b"" for p in range(self._channel.size)]
        call = self._describe(start, stop)
        parts = self._channel.all_to_all("checkpoint", sent, call)
        if process == self._channel.rank:
            self._join(parts, start, stop, values)
        return values

    def _describe(self, start: int, stop: int) -> str:
        return f"the reading of rows {start} to {stop} of {self._name}"

    def _join(
        self, parts: Sequence[bytes], start: int, stop: int, values: np.ndarray
    ) -> None:
        for process, part in enumerate(parts):
            rows = np.frombuffer(part, self.dtype).reshape(-1, self.shape[1])
            values[self._run(process, start, stop).within] = rows

    def write(self, start: int, values: np.ndarray) -> None:
        run = self._run(self._placement.process, start, start + len(values))
        if run.count:
            self._own.write(run.first, values[run.within])

    def _read_own(self, start: int, stop: int) -> np.ndarray:
        run = self._run(self._placement.process, start, stop)
        return self._own.read(run.first, run.first + run.count)

    def _run(self, process: int, start: int, stop: int) -> Run:
        return self._placement.within(self._table, process, start, stop)


class _ShardedReader(StoredReader):
    """Reads no rows in a graph: each process has only a part of them."""

    @property
    def variables(self) -> Sequence[Any]:
        raise _not_whole()

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        raise _not_whole()


def _refuse_variables() -> Any:
    raise NotImplementedError(
        "Under MultiWorkerMirroredStrategy no process has a whole stacked table. "
        "Use `embedding_tables`, which gathers them, or a checkpoint."
    )


def _not_whole() -> NotImplementedError:
    return NotImplementedError(
        "Under MultiWorkerMirroredStrategy no process has a whole table to look up in. "
        "In a tf.function without a tf.GradientTape, call the layer in `strategy.run`. "
        "To export or serve a model with a layer, restore a checkpoint of it in one "
        "process; te.serving.export takes a TPUEmbedding of a job."
    )


class _NoOptimizer(NamedTuple):
    slots: tuple[()] = ()


_NO_OPTIMIZER = _NoOptimizer()


def _create_parts(options: EngineOptions, placement: Placement) -> list[TableVariables]:
    device = options.topology.device
    places: list[list[Place]] = [
        [(device, None)]
        if spec.config.vocabulary is not None
        else [(device, placement.rows_of(spec.index, spec.config.vocabulary_size))]
        for spec in options.plan.tables
    ]
    return [part for (part,) in create_parts(options.plan, places)]


def _placement(options: EngineOptions) -> Placement:
    topology = options.topology
    assert isinstance(topology, ProcessTopology)
    return place_tables(
        options.plan,
        topology.rank,
        len(topology.processes),
        options.distributed.placement,
    )


def _writer(rows: MutableTableRows) -> Any:
    return lambda value: rows.write(0, value)


def _description(options: EngineOptions, placement: Placement) -> dict[str, Any]:
    """What must be alike in all processes."""
    plan = options.plan
    found: dict[str, Any] = {
        "the TensorFlow version": tf.__version__,
        "the class": options.made_by,
        "`pipeline_execution_with_tensor_core`": options.pipelined,
        "`check_numerics`": options.check_numerics,
        "`batch_size`": options.batch_size,
        "`wire_dtype` of DistributedOptions": options.distributed.wire_dtype,
        "`timeout_seconds` of DistributedOptions": options.distributed.timeout_seconds,
        "the names of the tables": [spec.name for spec in plan.tables],
        "the paths of the features": list(plan.paths),
    }
    for spec, owner in zip(plan.tables, placement.owners, strict=True):
        config, optimizer = spec.config, spec.optimizer
        fields = {
            "vocabulary_size": config.vocabulary_size,
            "dim": config.dim,
            "hashing": str(spec.hashing),
            "combiner": str(config.combiner),
            "dtype": config.dtype,
            "invalid_ids": config.invalid_ids,
            "quantization_config": str(config.quantization_config),
            "rounding_seed": spec.rounding_seed,
            "owner": owner,
            "initializer": fingerprint.of_initializer(config.initializer),
            "optimizer": type(optimizer).__name__,
        }
        if optimizer is not None:
            options_of: Any = optimizer
            fields |= {
                f"the optimizer's {field.name}": str(getattr(optimizer, field.name))
                for field in dataclasses.fields(options_of)
                if not callable(getattr(optimizer, field.name))
            }
        for name, value in fields.items():
            found[f"{name} of table {spec.name!r}"] = value
    for feature in plan.features:
        length, shape = feature.config.max_sequence_length, feature.config.output_shape
        found[f"max_sequence_length of feature {feature.path!r}"] = length
        found[f"output_shape of feature {feature.path!r}"] = str(shape)
        found[f"the table of feature {feature.path!r}"] = plan.tables[
            feature.table
        ].name
    return found
