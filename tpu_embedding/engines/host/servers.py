"""The engine of ParameterServerStrategy: the parts of the tables are on servers.

IDs travel to the servers, rows and activations back, and gradients to the servers.
Servers keep only the tables, their slots and counters, and the numbers of applied
pushes: a batch exists within one function, so a lost worker leaves nothing behind.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.config import DistributedOptions
from tpu_embedding.distribution import ServerTopology
from tpu_embedding.engines import batch_ring
from tpu_embedding.engines.calls import (
    QUEUE_CAPACITY,
    Call,
    Counts,
    EngineOptions,
    Prepared,
)
from tpu_embedding.engines.host.batches import plan_record
from tpu_embedding.engines.host.engine import (
    DEQUEUE,
    CollectiveCall,
    HostEngine,
    Messages,
    Routed,
)
from tpu_embedding.engines.host.part import TablePart
from tpu_embedding.layout.balancing import part_of_plan, place_on_servers, rows_of_plan
from tpu_embedding.layout.csr import PreprocessedFeatures
from tpu_embedding.layout.partition import Division
from tpu_embedding.layout.placement import Placement
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.layout.stacking import Layout
from tpu_embedding.ops import library
from tpu_embedding.parameter_server import ClusterCoordinator
from tpu_embedding.tables.reach import OnServers
from tpu_embedding.tables.trackable import CopiedCounter
from tpu_embedding.tables.variables import Place, TableVariables, create_parts

# The attribute by which a tensor keeps what servers looked up, while it exists. A field
# of the engine would keep alive the graphs of functions, to which the parts belong.
_PARTS = "_tpu_embedding_parts"
_WITHIN = "under ParameterServerStrategy in the same function, loop and branch."


class Servers:
    """Parameter servers; TensorFlow itself carries the inputs of their ops to them."""

    def __init__(self, record: bytes, size: int) -> None:
        self.record, self.is_owner = record, False
        self.size, self.num_senders = size, 1

    def to_owners(
        self, collective: CollectiveCall, messages: Messages, refusal: tf.Tensor
    ) -> list[Messages]:
        """See `Transport.to_owners`: a refused step has raised its error already."""
        del collective, refusal
        return [[message] for message in messages]

    def to_senders(
        self, collective: CollectiveCall, messages: Messages, refusal: tf.Tensor
    ) -> Messages:
        """See `Transport.to_senders`."""
        del collective, refusal
        return messages

    def push(self) -> Any:
        """See `Transport.push`: the worker that runs the function reads it."""
        if tf.executing_eagerly():
            return library.NO_NUMBER
        return library.load().tpu_embedding_current_push().push


class ParameterServerEngine(HostEngine):
    """Looks up and updates tables on servers.

    Each table is whole on one server, or its rows are divided over all of them. Workers
    prepare, check and divide batches, and combine what the servers send. If a
    `ClusterCoordinator` has numbered a push, each server applies it only once, however
    often the function runs.

    Each tf.function has steps of its own, and so has each of its loops and branches:
    any number of workers may run it at a time. A wrong order of calls raises an error
    when the function is traced.
    """

    name = "parameter_server"
    differentiates_weights = False
    stand_in = None

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
        divides = min(owners) < 0
        used = [k for k in range(len(servers)) if divides or k in owners]
        owners = tuple(o if o < 0 else used.index(o) for o in owners)
        devices = [servers[k] for k in used]
        places = [Placement(k, len(used), owners) for k in range(len(used))]
        # Parts are made in plan order, on which random initial values depend.
        variables = create_parts(
            plan, [places_on_servers(spec, places[0], devices) for spec in plan.tables]
        )
        parts = [
            _part_on(device, options, place, variables)
            for place, device in zip(places, devices, strict=True)
        ]
        record = plan_record(options, places[0], served=True)
        reach = OnServers(self._coordinator)
        super().__init__(options, parts, Servers(record, len(used)), reach)
        self._eager = _Steps()
        self._of_graphs: weakref.WeakKeyDictionary[Any, _Steps]
        self._of_graphs = weakref.WeakKeyDictionary()

    @classmethod
    def check(cls, options: EngineOptions) -> None:
        super().check(options)
        timeout = options.distributed.timeout_seconds
        if timeout != DistributedOptions().timeout_seconds:
            raise NotImplementedError(
                f"ParameterServerStrategy does not support `timeout_seconds={timeout}` "
                "of DistributedOptions, because no process waits for another. Pass "
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
                "of growing tables must come from a lookup in the same function, loop "
                "and branch. Look up and apply the gradients in one tf.function.",
            )
        return parts

    def _row_pointers(self, tensors: PreprocessedFeatures | None) -> list[Any]:
        assert tensors is not None
        return [table.row_pointers for table in tensors.tables.values()]

    def _updates(self) -> Any:
        # Each server has a counter; an assignment goes to all of them.
        counters = [part.rates.updates for part in self._parts]
        known = [counter for counter in counters if counter is not None]
        return CopiedCounter(known) if len(known) > 1 else next(iter(known), None)

    def flush(self) -> None:
        """See `TableStore.flush`.

        It also applies an update whose worker was lost after the server had taken it.
        """
        self._run(self._flush_parts)

    def start_counting(self, every: int) -> Callable[[int | None], Counts]:
        """See `TableStore.start_counting`; servers see rows, and no samples."""
        read = super().start_counting(every)
        return lambda hot_rows: dataclasses.replace(read(hot_rows), samples=None)

    def enqueue(self, batches: Sequence[Prepared], call: Call) -> None:
        queued, training = self._steps().queued, call.training
        if len(queued) >= QUEUE_CAPACITY:
            raise _wrong_order(batch_ring.FULL)
        (batch,) = batches
        routed = self.route_enqueued(batch.value, call)
        queued.append((routed, training))
        if not training:
            # A refused batch leaves updates pending.
            with tf.control_dependencies([routed.own]):
                self._run(self._apply_parts)

    def dequeue(self, call: Call) -> list[tf.Tensor]:
        steps = self._steps()
        if not steps.queued:
            raise _wrong_order(f"{batch_ring.EMPTY[:-1]}; {_WITHIN}")
        batch, training = steps.queued[0]
        if training and steps.owed is not None:
            raise _wrong_order(batch_ring.OWES)
        activations, looked_up = self.look_up_routed(batch, DEQUEUE, call)
        steps.queued.popleft()
        steps.was_training = training
        if training:
            steps.owed = looked_up
        return activations

    def apply_gradients(
        self, gradients: Sequence[tf.Tensor | None], call: Call
    ) -> None:
        steps = self._steps()
        if not steps.was_training:
            raise _wrong_order(batch_ring.NO_TRAINING)
        if steps.owed is None and steps.queued:
            raise _wrong_order(batch_ring.NOT_DEQUEUED)
        if steps.owed is None:
            raise _wrong_order(f"{batch_ring.NOTHING_OWED[:-1]}, {_WITHIN}")
        self.send_gradients(steps.owed, gradients, call)
        steps.owed = None

    def _steps(self) -> _Steps:
        if tf.executing_eagerly():
            return self._eager
        graph = tf.compat.v1.get_default_graph()
        return self._of_graphs.setdefault(graph, _Steps())

    def _run(self, call: Callable[[], None]) -> None:
        if tf.executing_eagerly():
            self._coordinator.wait_for(call)
        else:
            call()

    def _apply_parts(self) -> None:
        for part in self._parts:
            part.apply_all()  # Waiting rows need not catch up.

    def _flush_parts(self) -> None:
        for part in self._parts:
            part.apply_all()
            part.catch_up()

    def reset(self) -> None:
        self._eager = _Steps()  # The steps of a function end with it.
        super().reset()


def _part_on(
    server: str,
    options: EngineOptions,
    placement: Placement,
    variables: Sequence[Sequence[TableVariables]],
) -> TablePart:
    """Makes the part for the tables, and rows of tables, of one server."""
    process = placement.process
    tables = [
        t for t, owner in enumerate(placement.owners) if owner < 0 or owner == process
    ]
    local = dataclasses.replace(
        placement, owners=tuple(placement.owners[t] for t in tables)
    )
    plan = part_of_plan(options.plan, tables)
    options = dataclasses.replace(
        options,
        plan=rows_of_plan(plan, local),
        topology=dataclasses.replace(options.topology, device=server),
        layout=None,
    )
    stored = [variables[t][process if placement.is_divided(t) else 0] for t in tables]
    record = plan_record(options, local, served=True)
    return TablePart(options, record, stored, local, tables, routed=True)


def places_on_servers(
    spec: TableSpec, placement: Placement, servers: Sequence[str]
) -> list[Place]:
    """Returns the server of each part of a table, and the part's rows."""
    if not placement.is_divided(spec.index):
        return [(servers[placement.owners[spec.index]], None)]
    division = Division(len(servers))
    return [
        (server, division.rows(k, spec.config.max_rows))
        for k, server in enumerate(servers)
    ]


def _require_library(servers: Sequence[str]) -> None:
    """Refuses servers that do not have the ops of the library.

    Raises:
      tf.errors.NotFoundError: If a server lacks them; the text names it and a fix.
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


class _Steps:
    """The steps of one function, or of eager calls.

    Attributes:
      queued: Routed batches, each with its `training`, the oldest first.
      owed: The lookup whose gradients are awaited, or None.
      was_training: Whether the last batch that was dequeued is for training.
    """

    def __init__(self) -> None:
        self.queued: collections.deque[tuple[Routed, bool]] = collections.deque()
        self.owed: Routed | None = None
        self.was_training = True


def _wrong_order(text: str) -> tf.errors.FailedPreconditionError:
    return tf.errors.FailedPreconditionError(None, None, text)
