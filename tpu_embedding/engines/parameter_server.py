"""The engine of ParameterServerStrategy: a host engine on each parameter server.

Ids travel to the servers, activations back, and gradients to the servers. Only the
tables, their slots and counters, and the numbers of the pushes that were applied
are kept there: a batch exists within one function, so a lost worker leaves nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.config import (
    DTYPES,
    DistributedOptions,
    SparseCoreEmbeddingConfig,
)
from tpu_embedding.distribution import Topology
from tpu_embedding.engines.base import (
    QUEUE_CAPACITY,
    Engine,
    EngineOptions,
    Prepared,
    StepQueue,
    TableArrays,
)
from tpu_embedding.engines.cpu_base import lay_out_whole, refuse_tpu_options
from tpu_embedding.engines.divided_tables import DividedTables
from tpu_embedding.engines.host import HostBatches, HostEngine
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.csr import PreprocessedFeatures
from tpu_embedding.layout.output_shapes import OutputShapes, Shape, ShapesOfPart
from tpu_embedding.layout.partition import Partition
from tpu_embedding.layout.placement import Placement, part_of_plan, place_on_servers
from tpu_embedding.layout.plan import UPDATES, Plan, TableSpec
from tpu_embedding.layout.stacking import Layout
from tpu_embedding.ops import library
from tpu_embedding.parameter_server import ClusterCoordinator
from tpu_embedding.tables.rows import MutableTableRows
from tpu_embedding.tables.trackable import copied_counter
from tpu_embedding.tables.variables import Place, create_parts


@dataclasses.dataclass(frozen=True)
class _Server:
    """One parameter server and the whole tables that it holds.

    Attributes:
      engine: The engine of its tables; its features are numbered by their position
        in `features`.
      tables: Names of its tables, in plan order.
      features: Indices of its features in the whole plan.
    """

    engine: HostEngine
    tables: tuple[str, ...]
    features: tuple[int, ...]


class ParameterServerEngine(Engine):
    """Tables are looked up and updated on servers.

    Each is whole on one server, or its rows are divided over all of them.

    Attributes:
      pipelined: Whether an update stays pending until the lookups of the next step.
    """

    name = "parameter_server"
    table_dtypes = DTYPES

    def __init__(self, options: EngineOptions) -> None:
        """Makes the tables on the servers; see `Engine`.

        Raises:
          tf.errors.NotFoundError: If a server has not loaded the library.
        """
        super().__init__(options)
        topology = options.topology
        self._coordinator = ClusterCoordinator(topology.strategy)
        _require_library(topology.servers)
        self._ops = library.load()
        self._batches = HostBatches(options, None)
        placement = place_on_servers(
            self._plan, len(topology.servers), options.distributed.placement
        )
        # In plan order, as the numbers of random initializers depend on it.
        variables = create_parts(
            self._plan,
            [
                places_on_servers(spec, placement, topology.servers)
                for spec in self._plan.tables
            ],
        )
        self._servers: list[_Server] = []
        for place, device in enumerate(topology.servers):
            tables = [t for t, at in enumerate(placement.owners) if at == place]
            if not tables:
                continue
            plan, features = part_of_plan(self._plan, tables)
            own = dataclasses.replace(
                options,
                plan=plan,
                topology=dataclasses.replace(topology, device=device),
                output_shapes=ShapesOfPart(options.output_shapes, features),
                layout=options.layout
                and lay_out_whole(
                    plan, SparseCoreEmbeddingConfig(disable_table_stacking=True)
                ),
            )
            self._servers.append(
                _Server(
                    HostEngine(own, [variables[table][0] for table in tables]),
                    tuple(spec.name for spec in plan.tables),
                    features,
                )
            )
        divided = [t for t in range(len(variables)) if placement.is_divided(t)]
        self._divided = (
            DividedTables(options, divided, [variables[t] for t in divided])
            if divided
            else None
        )
        self.pipelined = options.pipelined
        self._queue = ParameterServerQueue(self)

    @classmethod
    def join(cls, options: EngineOptions) -> None:
        """See `Engine.join`: refuses options that servers do not carry.

        Raises:
          NotImplementedError: If rows are to travel as bfloat16, or calls to wait for
            another time.
        """
        timeout = options.distributed.timeout_seconds
        if timeout != DistributedOptions().timeout_seconds:
            raise NotImplementedError(
                f"ParameterServerStrategy does not support `timeout_seconds={timeout}` "
                "of DistributedOptions: no process waits for another. Pass "
                "`task_timeout` to te.ClusterCoordinator."
            )
        if options.distributed.wire_dtype != "float32":
            raise NotImplementedError(
                "ParameterServerStrategy does not support "
                f"`wire_dtype={options.distributed.wire_dtype!r}` of "
                "DistributedOptions: rows, activations and gradients travel as they "
                'are. Leave it at "float32", or use tables of bfloat16.'
            )

    @classmethod
    def check_plan(cls, plan: Plan, topology: Topology) -> None:
        """See `Engine.check_plan`."""
        del topology
        refuse_tpu_options("parameter server", plan)
        for table in plan.tables:
            functions = {
                "CustomOptimizer": table.optimizer is not None
                and table.optimizer.is_custom,
                "CustomCombiner": table.config.custom_combiner is not None,
            }
            for kind, is_given in functions.items():
                if is_given:
                    raise NotImplementedError(
                        f"Table {table.name!r}: ParameterServerStrategy does not "
                        f"support a {kind}, as its Python function cannot run on the "
                        "servers. Use one of the named ones, or another strategy."
                    )
            if (
                table.optimizer is not None
                and table.optimizer.slot_variable_creation_fn is not None
            ):
                raise NotImplementedError(
                    f"Table {table.name!r}: ParameterServerStrategy does not support "
                    "`slot_variable_creation_fn`, as slots are made beside their "
                    "table, on its server. Leave it at None."
                )

    @classmethod
    def lay_out(
        cls,
        plan: Plan,
        topology: Topology,
        config: SparseCoreEmbeddingConfig,
        output_shapes: OutputShapes,
    ) -> Layout:
        """See `Engine.lay_out`: tables on different servers cannot be one stack."""
        del topology, output_shapes
        return lay_out_whole(
            plan, dataclasses.replace(config, disable_table_stacking=True)
        )

    def prepare(
        self, batch: Sequence[IdBatch], *, training: bool, device: str | None = None
    ) -> Prepared:
        """See `Engine.prepare`: errors in values are raised by what takes it."""
        if device is not None:
            raise errors.enqueue_device(device)
        return Prepared((tuple(batch), training))

    def check(self, prepared: Prepared) -> list[Any]:
        """Raises the errors of a batch that `prepare` returned.

        Returns:
          Control inputs for ops that must not run if it is refused.

        Raises:
          tf.errors.InvalidArgumentError: If ids, weights or splits are not valid.
        """
        batch, training = prepared.value
        checked = []
        for server in self._servers:
            own = [batch[f] for f in server.features]
            refused = server.engine.batches.prepare(own, training=training)
            with tf.device(server.engine.device):
                checked.append(self._ops.tpu_embedding_check_batch(batch=refused))
        if self._divided:
            checked.append(self._divided.check(batch))
        return checked

    def lookup(
        self,
        prepared: Prepared,
        replica: int,
        *,
        training: bool,
        shapes: Sequence[Shape] | None = None,
    ) -> tuple[list[tf.Tensor], Prepared]:
        """See `Engine.lookup`."""
        activations: dict[int, tf.Tensor] = {}
        looked_up = []
        for server in self._servers:
            own = self._on_server(server, prepared)
            found, own = server.engine.lookup(
                own,
                replica,
                training=training,
                shapes=shapes and [shapes[f] for f in server.features],
            )
            looked_up.append(own)
            activations.update(zip(server.features, found, strict=True))
        divided = None
        if self._divided:
            found, divided = self._divided.look_up(
                prepared, training=training, shapes=shapes
            )
            activations.update(zip(self._divided.features, found, strict=True))
        ordered = [activations[f] for f in range(len(self._plan.features))]
        return ordered, prepared._replace(value=(looked_up, divided, ordered))

    def update(
        self,
        looked_up: Prepared,
        gradients: Sequence[tf.Tensor | None],
        replica: int,
    ) -> None:
        """See `Engine.update`.

        A push that was numbered by a `ClusterCoordinator` is applied once on each
        server, however often the function runs.
        """
        divided = None
        if looked_up.value is None:
            parts = [self._on_server(server, looked_up) for server in self._servers]
            activations: Sequence[tf.Tensor] = ()
        else:
            parts, divided, activations = looked_up.value
        push = self._current_push()
        # No server changes before all of them have accepted batch and gradients.
        ready: list[Any] = list(activations)
        pushes = []
        if self._divided:
            engines = self._divided.engines
            if looked_up.tensors is not None:
                gradients = self._divided.flat_gradients(gradients)
            if divided is None:
                assert looked_up.tensors is not None
                divided = self._divided.from_tensors(looked_up.tensors)
            accepted, own = self._divided.gradients_of_servers(divided, gradients)
            ready += accepted
            batches = map(Prepared, divided.parts)
            pushes += list(zip(engines, batches, own, strict=True))
        whole = [
            (server.engine, part, [gradients[f] for f in server.features])
            for server, part in zip(self._servers, parts, strict=True)
        ]
        pushes += whole
        if len(pushes) > 1 and self._may_refuse(activations, gradients):
            ready += [
                engine.hand_in(part, own, replica, check_only=True)
                for engine, part, own in whole
            ]
        with tf.control_dependencies(ready):
            for engine, part, own in pushes:
                engine.apply_due(engine.hand_in(part, own, replica, push=push))

    def to_tensors(self, prepared: Prepared) -> PreprocessedFeatures:
        """See `Engine.to_tensors`: where the call is, so it may run in tf.data."""
        if prepared.tensors is not None:
            return prepared.tensors
        batch, training = prepared.value
        return self._batches.to_tensors(self._batches.prepare(batch, training=training))

    def queue(self) -> StepQueue:
        """See `Engine.queue`."""
        return self._queue

    def tables(self) -> dict[str, TableArrays]:
        """See `Engine.tables`."""
        found = self._divided.tables() if self._divided else {}
        for server in self._servers:
            found |= server.engine.tables()
        return {
            spec.name: dataclasses.replace(
                found[spec.name],
                rows={
                    name: _ServedRows(rows, self._coordinator)
                    for name, rows in found[spec.name].rows.items()
                },
            )
            for spec in self._plan.tables
        }

    def stacked_tables(self) -> dict[str, tuple[tf.Variable, ...]]:
        """See `Engine.stacked_tables`: the tables themselves."""
        found = self._divided.stacked_tables() if self._divided else {}
        for server in self._servers:
            found |= server.engine.stacked_tables()
        return {spec.name: found[spec.name] for spec in self._plan.tables}

    def checkpoint_variables(self) -> dict[str, Any]:
        """See `Engine.checkpoint_variables`."""
        found = self._divided.checkpoint_variables() if self._divided else {}
        for server in self._servers:
            found |= server.engine.checkpoint_variables()
        updates = self.updates()
        if updates is not None:
            found[UPDATES] = updates
        return found

    def updates(self) -> Any:
        """See `Engine.updates`: each server counts; all get what is assigned."""
        counters = [engine.updates() for engine in self._engines()]
        known = [counter for counter in counters if counter is not None]
        return copied_counter(known) if len(known) > 1 else next(iter(known), None)

    def flush(self) -> None:
        """See `Engine.flush`.

        Also applies an update whose worker was lost after its server had taken it.
        """
        if tf.executing_eagerly():
            self._coordinator.wait_for(self._apply_all)
        else:
            self._apply_all()

    def _apply_all(self) -> None:
        for engine in self._engines():
            engine.apply_all()

    def reset(self) -> None:
        """See `Engine.reset`."""
        self._queue.reset()
        for engine in self._engines():
            engine.reset()

    def _engines(self) -> list[HostEngine]:
        divided = self._divided.engines if self._divided else []
        return [*(server.engine for server in self._servers), *divided]

    def _on_server(self, server: _Server, prepared: Prepared) -> Prepared:
        """The part of a batch that belongs to the tables of one server."""
        if prepared.tensors is None:
            batch, training = prepared.value
            own = [batch[f] for f in server.features]
            return server.engine.prepare(own, training=training)
        tensors = prepared.tensors
        shapes = tensors.output_shapes
        return server.engine.from_tensors(
            tensors._replace(
                tables={name: tensors.tables[name] for name in server.tables},
                output_shapes=shapes and tuple(shapes[f] for f in server.features),
            )
        )

    def _current_push(self) -> tf.Tensor | None:
        """The number of this push, read where the function runs: on the worker."""
        if tf.executing_eagerly():
            return None
        return self._ops.tpu_embedding_current_push().push

    def _may_refuse(
        self,
        activations: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor | None],
    ) -> bool:
        """Whether a server may refuse what the shapes known here let pass."""
        if self._options.check_numerics or not activations:
            return True
        return any(
            gradient is not None
            and not (
                gradient.shape.is_fully_defined() and gradient.shape == activation.shape
            )
            for activation, gradient in zip(activations, gradients, strict=True)
        )


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


class ParameterServerQueue(StepQueue):
    """The batches of one function, or of eager calls, in order.

    Each tf.function has steps of its own, also each of its loops and branches: any
    number of workers may run it at a time. A wrong order of calls is an error when
    the function is traced.
    """

    def __init__(self, engine: ParameterServerEngine) -> None:
        self._engine = engine
        self._eager = _Steps()
        self._of_graphs: weakref.WeakKeyDictionary[Any, _Steps]
        self._of_graphs = weakref.WeakKeyDictionary()

    def enqueue(
        self,
        batches: Sequence[Prepared],
        replica: int | None,
        *,
        training: bool,
        name: str | None = None,
    ) -> None:
        """See `StepQueue.enqueue`."""
        del replica, name
        queued = self._steps().queued
        if len(queued) >= QUEUE_CAPACITY:
            raise _wrong_order(
                f"enqueue: the queue is full ({QUEUE_CAPACITY} batches). Call dequeue "
                "once for each enqueue."
            )
        (batch,) = batches
        # In a function a batch is checked when it is looked up. It is checked here if
        # its refusal is to leave the pending update as it is.
        checked: list[Any] = []
        if tf.executing_eagerly() or (self._engine.pipelined and not training):
            checked = self._engine.check(batch)
        queued.append((batch, training))
        if not training:
            with tf.control_dependencies(checked):
                self._engine.flush()

    def dequeue(
        self,
        replica: int,
        *,
        shapes: Sequence[Shape] | None = None,
        name: str | None = None,
    ) -> list[tf.Tensor]:
        """See `StepQueue.dequeue`."""
        del name
        steps = self._steps()
        if not steps.queued:
            raise _wrong_order(
                "dequeue: no batch is enqueued. Call enqueue before dequeue, once for "
                "each dequeue; under ParameterServerStrategy in the same function, "
                "loop and branch."
            )
        batch, training = steps.queued[0]
        if training and steps.owed is not None:
            raise _wrong_order(
                "dequeue: the training batch dequeued before still owes its "
                "gradients. Call apply_gradients first, or enqueue with "
                "training=False; after a step that failed call flush and reset."
            )
        activations, looked_up = self._engine.lookup(
            batch, replica, training=training, shapes=shapes
        )
        steps.queued.popleft()
        steps.was_training = training
        if training:
            steps.owed = looked_up
        return activations

    def apply_gradients(
        self,
        gradients: Sequence[tf.Tensor | None],
        replica: int,
        *,
        name: str | None = None,
    ) -> None:
        """See `StepQueue.apply_gradients`."""
        del name
        steps = self._steps()
        if steps.owed is None or not steps.was_training:
            if not steps.was_training:
                problem = (
                    "the batch was enqueued with training=False. Enqueue with "
                    "training=True to train on it."
                )
            elif steps.queued:
                problem = "the enqueued batch was not dequeued. Call dequeue first."
            else:
                problem = (
                    "no dequeued batch owes gradients; they can be applied once per "
                    "dequeue, under ParameterServerStrategy in the same function, loop "
                    "and branch."
                )
            raise _wrong_order(f"apply_gradients: {problem}")
        self._engine.update(steps.owed, gradients, replica)
        steps.owed = None

    def reset(self) -> None:
        """Forgets the steps of eager calls; those of functions end with them."""
        self._eager = _Steps()

    def _steps(self) -> _Steps:
        if tf.executing_eagerly():
            return self._eager
        graph = tf.compat.v1.get_default_graph()
        return self._of_graphs.setdefault(graph, _Steps())


class _Steps:
    """The steps of one function.

    Attributes:
      queued: Batches with `training`, the oldest first.
      owed: The lookup whose gradients are awaited, or None.
      was_training: Whether the last batch that was dequeued is for training.
    """

    def __init__(self) -> None:
        self.queued: collections.deque[tuple[Prepared, bool]] = collections.deque()
        self.owed: Prepared | None = None
        self.was_training = True


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


def _wrong_order(text: str) -> tf.errors.FailedPreconditionError:
    return tf.errors.FailedPreconditionError(None, None, text)
