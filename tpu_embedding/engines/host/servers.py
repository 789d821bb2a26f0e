"""The engine of ParameterServerStrategy: the parts of the tables are on servers.

IDs travel to the servers, rows and activations back, and gradients to the servers. Only
the tables, their slots and counters, and the numbers of the pushes that were applied
are kept there: a batch exists within one function, so a lost worker leaves nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.config import DistributedOptions
from tpu_embedding.distribution import ServerTopology
from tpu_embedding.engines.base import (
    Engine,
    EngineOptions,
    Prepared,
    RowChanges,
    TableArrays,
)
from tpu_embedding.engines.cpu_base import arrays_of_variables
from tpu_embedding.engines.host.batches import plan_record
from tpu_embedding.engines.host.changes import Held, ReadTable, ServedChanges
from tpu_embedding.engines.host.engine import HostEngine, Routed
from tpu_embedding.engines.host.part import TablePart
from tpu_embedding.engines.host.queue import ServerQueue
from tpu_embedding.engines.host.transport import Servers
from tpu_embedding.engines.telemetry import Counts
from tpu_embedding.layout.csr import PreprocessedFeatures
from tpu_embedding.layout.partition import Partition
from tpu_embedding.layout.placement import (
    ALL_PROCESSES,
    Placement,
    part_of_plan,
    place_on_servers,
    rows_of_plan,
)
from tpu_embedding.layout.plan import UPDATES, TableSpec
from tpu_embedding.layout.stacking import Layout
from tpu_embedding.ops import library
from tpu_embedding.parameter_server import ClusterCoordinator
from tpu_embedding.tables.growing import Changed, GrowingState
from tpu_embedding.tables.initial import initial_rows
from tpu_embedding.tables.readers import PartsReader
from tpu_embedding.tables.rows import (
    PARAMETERS,
    MutableTableRows,
    checkpoint_name,
    interleaved,
)
from tpu_embedding.tables.trackable import LogicalVariable, copied_counter
from tpu_embedding.tables.variables import (
    Place,
    TableVariables,
    create_parts,
    variable_rows,
)
from tpu_embedding.vocabulary import VocabularyContents

# The attribute of a tensor that has what servers looked up, while the tensor exists.
_PARTS = "_tpu_embedding_parts"


class ParameterServerEngine(HostEngine):
    """Tables are looked up and updated on servers.

    Each is whole on one server, or its rows are divided over all of them. Workers
    prepare, check and divide batches, and combine what the servers send. A push that
    was numbered by a `ClusterCoordinator` is applied once on each server, however
    often the function runs.
    """

    name = "parameter_server"
    differentiates_weights = False
    for_custom = None

    def __init__(self, options: EngineOptions) -> None:
        """Makes the tables on the servers; see `Engine`.

        Raises:
          tf.errors.NotFoundError: If a server has not loaded the library.
        """
        assert isinstance(options.topology, ServerTopology)
        plan, servers = options.plan, options.topology.servers
        self._coordinator = ClusterCoordinator(options.topology.strategy)
        _require_library(servers)
        owners = place_on_servers(
            plan, len(servers), options.distributed.placement
        ).owners
        used = [k for k in range(len(servers)) if {k, ALL_PROCESSES} & {*owners}]
        owners = tuple(
            owner if owner == ALL_PROCESSES else used.index(owner) for owner in owners
        )
        devices = [servers[k] for k in used]
        places = [Placement(k, len(used), owners) for k in range(len(used))]
        # In plan order, as the numbers of random initializers depend on it.
        self._variables = create_parts(
            plan, [places_on_servers(spec, places[0], devices) for spec in plan.tables]
        )
        self._held = [
            self._hold(options, place, device)
            for place, device in zip(places, devices, strict=True)
        ]
        parts = [held.part for held in self._held]
        record = plan_record(options, places[0], served=True)
        super().__init__(options, parts, Servers(record, len(used)))
        self.queue = self._steps = ServerQueue(self)

    def _hold(self, options: EngineOptions, placement: Placement, device: str) -> Held:
        """The tables, and rows of tables, of one server."""
        own = placement.process
        tables = [
            t
            for t, owner in enumerate(placement.owners)
            if owner in (own, ALL_PROCESSES)
        ]
        held = dataclasses.replace(
            placement, owners=tuple(placement.owners[t] for t in tables)
        )
        plan, _ = part_of_plan(options.plan, tables)
        options = dataclasses.replace(
            options,
            plan=rows_of_plan(plan, held),
            topology=dataclasses.replace(options.topology, device=device),
            layout=None,
        )
        variables = [
            self._variables[t][own if placement.is_divided(t) else 0] for t in tables
        ]
        record = plan_record(options, held, served=True)
        return Held(TablePart(options, record, variables), held, tables)

    @classmethod
    def check(cls, options: EngineOptions) -> None:
        super().check(options)
        timeout = options.distributed.timeout_seconds
        if timeout != DistributedOptions().timeout_seconds:
            raise NotImplementedError(
                f"ParameterServerStrategy does not support `timeout_seconds={timeout}` "
                "of DistributedOptions: no process waits for another. Pass "
                "`task_timeout` to te.ClusterCoordinator."
            )

    @classmethod
    def lay_out(cls, options: EngineOptions) -> Layout:
        """See `Engine.lay_out`: tables on different servers cannot be one stack."""
        config = options.sparse_core
        config = dataclasses.replace(config, disable_table_stacking=True)
        return super().lay_out(dataclasses.replace(options, sparse_core=config))

    def _keep_rows(self, prepared: Prepared, looked_up: Routed) -> Prepared:
        prepared = self._with_tensors(prepared)
        for tensor in self._row_pointers(prepared.tensors):
            setattr(tensor, _PARTS, looked_up.parts)
        return prepared

    def _parts_kept(self, tensors: PreprocessedFeatures) -> Sequence[tf.Tensor]:
        if not self._grows:
            return ()
        known = [getattr(t, _PARTS, None) for t in self._row_pointers(tensors)]
        parts = next((each for each in known if each is not None), None)
        if parts is None:
            raise tf.errors.FailedPreconditionError(
                None,
                None,
                "apply_gradients: under ParameterServerStrategy the preserved outputs "
                "of growing tables are those of a lookup of the same function, loop "
                "and branch. Look up and apply the gradients in one tf.function.",
            )
        return parts

    def _row_pointers(self, tensors: PreprocessedFeatures | None) -> list[Any]:
        assert tensors is not None
        return [table.row_pointers for table in tensors.tables.values()]

    def tables(self) -> dict[str, TableArrays]:
        found = {}
        growing = {
            name: _ServedGrowing(state, self._coordinator)
            for part in self._parts
            for name, state in part.growing.items()
        }
        for spec, parts in zip(self._plan.tables, self._variables, strict=True):
            arrays = (
                _divided_arrays(spec, parts)
                if len(parts) > 1
                else arrays_of_variables(spec, parts[0], growing.get(spec.name))
            )
            rows = {
                name: _ServedRows(matrix, self._coordinator)
                for name, matrix in arrays.rows.items()
            }
            found[spec.name] = dataclasses.replace(arrays, rows=rows)
        return found

    def checkpoint_variables(self) -> dict[str, Any]:
        """See `TableStore.checkpoint_variables`: saving joins divided tables."""
        found: dict[str, Any] = {}
        tables = self.tables()
        for spec, parts in zip(self._plan.tables, self._variables, strict=True):
            state = tables[spec.name].growing
            if state is not None:
                found[spec.name] = state
            for array, rows in tables[spec.name].rows.items():
                name = checkpoint_name(spec.name, array)
                variables = [
                    part.parameters if array == PARAMETERS else part.slots[array]
                    for part in parts
                ]
                found[name] = (
                    _DividedVariable(name, rows, variables)
                    if len(parts) > 1
                    else variables[0]
                )
        updates = self._updates()
        return found if updates is None else {**found, UPDATES: updates}

    def _updates(self) -> Any:
        # Each server counts; all get what is assigned.
        counters = [part.rates.updates for part in self._parts]
        known = [counter for counter in counters if counter is not None]
        return copied_counter(known) if len(known) > 1 else next(iter(known), None)

    def changes(self, consumer: str) -> RowChanges:
        read = [ReadTable(a.reader, a.growing) for a in self.tables().values()]
        return ServedChanges(self._held, read, consumer, self._coordinator)

    def start_counting(self, every: int) -> Callable[[int], Counts]:
        return Engine.start_counting(self, every)

    def flush(self) -> None:
        """See `TableStore.flush`.

        Also applies an update whose worker was lost after its server had taken it.
        """
        if tf.executing_eagerly():
            self._coordinator.wait_for(self._apply_all)
        else:
            self._apply_all()

    def _apply_all(self) -> None:
        for part in self._parts:
            part.apply_all()

    def reset(self) -> None:
        self._steps.reset()
        super().reset()


class _ServedGrowing(GrowingState):
    """A growing table on a server: an error if it does not answer."""

    def __init__(self, state: GrowingState, coordinator: ClusterCoordinator) -> None:
        self._state, self._coordinator = state, coordinator
        self.parameters, self.parts = state.parameters, state.parts

    def contents(self) -> VocabularyContents:
        """See `GrowingState.contents`."""
        return self._coordinator.wait_for(self._state.contents)

    def evict(self) -> int:
        """See `GrowingState.evict`."""
        return self._coordinator.wait_for(self._state.evict)

    def take_changed(self, consumer: str) -> Changed:
        """See `GrowingState.take_changed`; `ServedChanges` waits."""
        return self._state.take_changed(consumer)

    def updates_begun(self) -> int:
        """See `GrowingState.updates_begun`."""
        return self._coordinator.wait_for(self._state.updates_begun)

    def read(self) -> dict[str, np.ndarray]:
        """See `GrowingState.read`."""
        return self._coordinator.wait_for(self._state.read)

    def fit(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `GrowingState.fit`."""
        return self._state.fit(state)

    def write(self, state: Mapping[str, np.ndarray]) -> None:
        """See `GrowingState.write`."""
        self._coordinator.wait_for(lambda: self._state.write(state))

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> None:
        # TensorFlow restores into several devices in a tf.function.
        def write(*values: tf.Tensor) -> None:
            read = [value.numpy() for value in values]
            self._state.write(dict(zip(restored_tensors, read, strict=True)))

        with tf.device(tf.config.list_logical_devices("CPU")[0].name):
            tf.py_function(write, list(restored_tensors.values()), [])


class _ServedRows(MutableTableRows):
    """A matrix on servers: an error, not a wait without end, if one does not answer."""

    def __init__(self, rows: MutableTableRows, coordinator: ClusterCoordinator) -> None:
        super().__init__(rows.shape, rows.dtype)
        self._rows, self._coordinator = rows, coordinator
        self.initial_value = rows.initial_value

    @property
    def variable(self) -> Any:
        return self._rows.variable

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._coordinator.wait_for(lambda: self._rows.read(start, stop))

    def write(self, start: int, values: np.ndarray) -> None:
        self._coordinator.wait_for(lambda: self._rows.write(start, values))


def _divided_arrays(spec: TableSpec, parts: Sequence[TableVariables]) -> TableArrays:
    """A table whose rows are divided over servers."""
    slots = {s.name: s for s in spec.optimizer.slots} if spec.optimizer else {}
    by_server = [variable_rows(spec, part.arrays) for part in parts]
    rows: dict[str, MutableTableRows] = {
        name: interleaved(
            [part[name] for part in by_server],
            initial_rows(slots[name]) if name in slots else None,
        )
        for name in (PARAMETERS, *slots)
    }
    parameters = [part.parameters for part in parts]
    heights = [part[PARAMETERS].shape[0] for part in by_server]
    starts = [sum(heights[:k]) for k in range(len(heights))]
    partition = Partition(len(parts))

    def row_of(ids: tf.Tensor) -> tf.Tensor:
        first = tf.gather(tf.constant(starts, tf.int64), partition.owner(ids))
        return first + partition.local(ids)

    return TableArrays(
        rows=rows,
        reader=PartsReader(parameters, row_of, spec.config.dim),
        values=lambda: {n: tf.constant(r.numpy()) for n, r in rows.items()},
        shards=lambda: [(p.device, p.read_value()) for p in parameters],
        variables=lambda: parameters,
    )


class _DividedVariable(LogicalVariable):
    """A table or slot in checkpoints of TensorFlow, which hold it whole."""

    def __init__(
        self, name: str, rows: MutableTableRows, parts: Sequence[tf.Variable]
    ) -> None:
        super().__init__(
            name, rows.shape, rows.dtype, rows.numpy, lambda value: rows.write(0, value)
        )
        self._parts = parts

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> None:
        # TensorFlow restores into several devices in a tf.function.
        (value,) = restored_tensors.values()
        whole = tf.ensure_shape(value, self.shape)
        rows: Any = self.shape[0]
        for run in Partition(len(self._parts)).runs(0, rows):
            part = self._parts[run.part]
            with tf.device(part.device):
                part.assign(whole[run.within])


def places_on_servers(
    spec: TableSpec, placement: Placement, servers: Sequence[str]
) -> list[Place]:
    """Where the parts of a table are."""
    if not placement.is_divided(spec.index):
        return [(servers[placement.owners[spec.index]], None)]
    partition = Partition(len(servers))
    return [
        (server, partition.rows(k, spec.config.vocabulary_size))
        for k, server in enumerate(servers)
    ]


def _require_library(servers: Sequence[str]) -> None:
    """Refuses servers that do not know our ops.

    Raises:
      tf.errors.NotFoundError: It names the server and the way out.
    """
    ops: Mapping[str, Any] = vars(library.load())
    for server in servers:
        try:
            with tf.device(server):
                ops["tpu_embedding_current_push"]()
        except tf.errors.NotFoundError as error:
            raise tf.errors.NotFoundError(
                None,
                None,
                f"The parameter server {server} has not loaded the library of "
                "tpu_embedding, so it cannot hold tables. Start every server and "
                "worker by `python -m tpu_embedding server`.",
            ) from error
