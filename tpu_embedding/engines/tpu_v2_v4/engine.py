"""TPU v2 to v4: TensorFlow's own ops for the embedding engine in the hardware."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.saved_model import save_context

from tpu_embedding.distribution import Topology, TPUSystem
from tpu_embedding.engines import errors as engine_errors
from tpu_embedding.engines.base import Engine, EngineOptions, Lookup, Queue
from tpu_embedding.engines.full_table_view import (
    ShardedReader,
    logical_counter,
    logical_rows,
)
from tpu_embedding.engines.tickets import QueuedTickets
from tpu_embedding.engines.tpu_v2_v4 import errors
from tpu_embedding.engines.tpu_v2_v4.batches import core_batches
from tpu_embedding.engines.tpu_v2_v4.checks import (
    check_argument,
    check_finite,
    check_table,
    symbolic,
)
from tpu_embedding.engines.tpu_v2_v4.configuration import make_configuration
from tpu_embedding.engines.tpu_v2_v4.enqueueing import CoreQueues
from tpu_embedding.engines.tpu_v2_v4.rates import ProgramRates, counts_updates
from tpu_embedding.engines.tpu_v2_v4.tables import StandInTable
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.plan import UPDATES, Plan
from tpu_embedding.layout.table_arrays import (
    PARAMETERS,
    MutableRows,
    by_checkpoint_name,
)
from tpu_embedding.lookup.combine import StoredReader
from tpu_embedding.lookup.entries import Selection, select
from tpu_embedding.lookup.graph_checks import require
from tpu_embedding.lookup.input_rows import FeatureInput
from tpu_embedding.tpu_generations import NAME_ATTRIBUTE

_AttrValue: Any = vars(attr_value_pb2)["AttrValue"]


class TPUV2V4Engine(Engine, Queue):
    """The tables are in the TPU's memory; variables on the hosts stand in for them."""

    name = "tpu_v2_v4"
    takes_profiles = True
    needs_shapes = True
    unsupported: ClassVar[Mapping[str, str]] = {
        "TPUEmbeddingV2": str(engine_errors.no_batches("TPUEmbeddingV2", name))
    }

    def __init__(self, options: EngineOptions) -> None:
        """Configures the TPU and loads it, or shares its engine; see `Engine`."""
        super().__init__(options)
        topology = options.topology
        assert topology.tpu is not None
        self._tpu: TPUSystem = topology.tpu
        if options.check_numerics and not self._tpu.simulated:
            raise errors.no_numeric_checks()
        if not options.initialize and counts_updates(self._plan):
            raise errors.shared_count()
        self._output_shapes = [self._output_shape(f.index) for f in self._plan.features]
        self._config: bytes = make_configuration(
            self._plan,
            self._tpu,
            [self._core_shape(f.index) for f in self._plan.features],
            pipelined=options.pipelined,
            profile_data_directory=options.profile_data_directory,
        ).SerializeToString()
        self._tag: str | None = None
        combiners = [table.config.combiner for table in self._plan.tables]
        self._queues = CoreQueues(topology, combiners)
        self._tickets = QueuedTickets()
        self._still_there = self._tpu.watch(errors.ended())
        self._configure()
        self._rates = ProgramRates(self._plan, topology.strategy)
        self._tables = [
            StandInTable(spec, self._tpu, self.load) for spec in self._plan.tables
        ]
        if options.initialize:
            self.load()
        else:
            self.retrieve()

    @classmethod
    def check_plan(cls, plan: Plan, topology: Topology) -> None:
        """See `Engine.check_plan`."""
        del topology
        for table in plan.tables:
            check_table(table)

    @classmethod
    def check_inputs(
        cls, topology: Topology, paths: Sequence[str], values: Sequence[Any]
    ) -> None:
        """See `Engine.check_inputs`."""
        program = topology.program()
        if program is not None and program is not tf.compat.v1.get_default_graph():
            raise engine_errors.in_control_flow()
        for path, value in zip(paths, values, strict=True):
            for part in topology.strategy.experimental_local_results(value):
                for tensor in tf.nest.flatten(part, expand_composites=True):
                    if not tf.is_tensor(tensor):
                        continue  # Refused later, by its kind.
                    if program is not None:
                        check_argument(path, tensor)
                    elif "TPU" in (tensor.device or ""):
                        raise errors.input_on_tpu(path, tensor.device)

    def variables(self) -> list[dict[str, Any]]:
        """See `Engine.variables`; only while a model is saved."""
        if not save_context.in_save_context():
            raise errors.tables_on_tpu()
        return [
            {name: array.shards[0] for name, array in table.arrays.items()}
            for table in self._tables
        ]

    def table_shards(self) -> list[list[tuple[str, tf.Tensor]]]:
        """See `Engine.table_shards`."""
        raise errors.tables_on_tpu()

    def stacked_tables(self) -> dict[str, tuple[tf.Variable, ...]]:
        """See `Engine.stacked_tables`."""
        raise errors.tables_on_tpu()

    def checkpoint_variables(self) -> dict[str, Any]:
        """See `Engine.checkpoint_variables`."""
        arrays = {
            spec.name: table.arrays
            for spec, table in zip(self._plan.tables, self._tables, strict=True)
        }
        objects: dict[str, Any] = {**by_checkpoint_name(arrays)}
        if self._rates.updates is not None:
            objects[UPDATES] = self._rates.updates
        return objects

    def logical_variables(self) -> dict[str, Any]:
        """See `Engine.logical_variables`."""
        rows = logical_rows(self.rows(), self.retrieve, self.load)
        found: dict[str, Any] = {**rows}
        if self._rates.updates is not None:
            found[UPDATES] = logical_counter(self._rates.updates)
        return found

    def readers(self) -> list[StoredReader]:
        """See `Engine.readers`: as old as the last `retrieve`."""
        return [
            ShardedReader(
                table.arrays[PARAMETERS].shards, lambda ids: ids, spec.config.dim
            )
            for spec, table in zip(self._plan.tables, self._tables, strict=True)
        ]

    def updates(self) -> tf.Variable | None:
        """See `Engine.updates`."""
        return self._rates.updates

    def rows(self) -> dict[str, dict[str, MutableRows]]:
        """See `Engine.rows`."""
        return {
            spec.name: {name: array.rows() for name, array in table.arrays.items()}
            for spec, table in zip(self._plan.tables, self._tables, strict=True)
        }

    def load(self) -> None:
        """See `Engine.load`."""
        self._still_there()
        config = self._config
        for table in self._tables:
            table.load(config)
            config = b""

    def retrieve(self) -> None:
        """See `Engine.retrieve`."""
        self._still_there()
        config = self._config
        for table in self._tables:
            table.retrieve(config)
            config = b""

    @contextlib.contextmanager
    def tagged(self, name: str | None) -> Iterator[None]:
        """See `Queue.tagged`."""
        before, self._tag = self._tag, name
        try:
            yield
        finally:
            self._tag = before

    def enqueue(
        self,
        batches: Sequence[Sequence[IdBatch]],
        replica: int | None,
        *,
        training: bool,
    ) -> None:
        """See `Queue.enqueue`."""
        cores = self._tpu.cores_per_replica
        if cores > 1 and self._options.topology.program() is not None:
            raise errors.several_cores_inside(cores)
        parts = [core_batches(self._select(batch), cores) for batch in batches]
        checked = [ids for part in parts for core in part for ids in core.ids]
        replicas = range(len(batches)) if replica is None else (replica,)
        # Not before all are checked.
        with tf.control_dependencies([*symbolic(checked), *self._still_there()]):
            mode = self._mode(training)
            for number, part in zip(replicas, parts, strict=True):
                for core, batch in enumerate(part):
                    device = self._tpu.devices[number][core]
                    self._tag_op(self._queues.put(batch, device, mode))

    def enqueue_on(
        self, device: str | tf.Tensor, batch: Sequence[IdBatch], *, training: bool
    ) -> None:
        """See `Queue.enqueue_on`."""
        checked = self._queues.check(device)
        (part,) = core_batches(self._select(batch, of_core=True), 1)
        with tf.control_dependencies([*checked, *self._still_there()]):
            self._tag_op(self._queues.put(part, device, self._mode(training)))

    def dequeue(self, replica: int) -> list[tf.Tensor]:
        """See `Queue.dequeue`."""
        del replica  # The program knows its own.
        with tf.control_dependencies(self._still_there()):
            activations = tf.raw_ops.RecvTPUEmbeddingActivations(
                num_outputs=len(self._plan.features), config=self._config
            )
        self._tag_op(activations[0])
        return [
            tf.ensure_shape(activation, (*shape, dim))
            for activation, shape, dim in zip(
                activations, self._output_shapes, self._plan.dims, strict=True
            )
        ]

    def apply_gradients(
        self, gradients: Sequence[tf.Tensor | None], replica: int
    ) -> None:
        """See `Queue.apply_gradients`."""
        del replica
        whole = [
            tf.zeros((*shape, dim)) if gradient is None else gradient
            for gradient, shape, dim in zip(
                gradients, self._output_shapes, self._plan.dims, strict=True
            )
        ]
        checks = []
        if self._options.check_numerics:
            for spec, gradient in zip(self._plan.features, gradients, strict=True):
                if gradient is not None:
                    checks.append(check_finite(f"Feature {spec.path}", gradient))
        rates = self._rates.evaluate()
        there = self._still_there()
        with tf.control_dependencies([*require(checks), *rates, *there]):
            sent = tf.raw_ops.SendTPUEmbeddingGradients(
                inputs=whole, learning_rates=rates, config=self._config
            )
        self._tag_op(sent)
        with tf.control_dependencies([] if sent is None else [sent]):
            self._rates.count_update()

    def lookup_call(
        self, batch: Sequence[IdBatch], replica: int, *, training: bool = True
    ) -> Lookup:
        """See `Engine.lookup_call`: what is queued leaves the queue at once."""
        topology = self._options.topology
        ticket = self._tickets.begin(topology.program(), training=training)

        def enqueue() -> None:
            self.enqueue([batch], replica, training=training)

        # The name makes it an evaluation if no gradients follow.
        with self.tagged(ticket.content if training else None):
            topology.on_host(enqueue)
            return Lookup(self.dequeue(replica), ticket)

    def submit(
        self, ticket: Any, gradients: Sequence[tf.Tensor | None], replica: int
    ) -> None:
        """See `Engine.submit`."""
        with self.tagged(ticket.take()):
            self.apply_gradients(gradients, replica)

    def flush(self) -> None:
        """See `Engine.flush`: the TPU itself puts a pending update first."""

    def reset(self) -> None:
        """See `Engine.reset`."""
        raise errors.reset()

    def _configure(self) -> None:
        """Configures the TPU's engine, or sees that another has done so."""
        with tf.device(self._tpu.system):
            initialized = tf.raw_ops.IsTPUEmbeddingInitialized()
            if self._options.initialize:
                if initialized:
                    raise errors.already_configured()
                tf.raw_ops.ConfigureTPUEmbedding(config=self._config)
            elif not initialized:
                raise errors.not_configured()

    def _output_shape(self, feature: int) -> tuple[int, ...]:
        """Of one replica."""
        shape = self._options.output_shapes.activation(feature)
        known = tuple(axis for axis in shape if axis is not None)
        if len(known) < len(shape):
            raise errors.shape_not_known(self._plan.features[feature].path, shape)
        if 0 in known:
            raise errors.no_samples(self._plan.features[feature].path, shape)
        return known

    def _core_shape(self, feature: int) -> tuple[int, ...]:
        first, *others = self._output_shapes[feature]
        cores = self._tpu.cores_per_replica
        if first % cores:
            path = self._plan.features[feature].path
            raise errors.not_divisible_by_cores(
                path, self._output_shapes[feature], cores
            )
        return (first // cores, *others)

    def _select(
        self, batch: Sequence[IdBatch], *, of_core: bool = False
    ) -> list[Selection]:
        """Checks the features of a replica, or of one core."""
        inputs = []
        for spec, feature in zip(self._plan.features, batch, strict=True):
            declared = self._options.output_shapes.declared(spec.index)
            if declared is not None and of_core:
                declared = dataclasses.replace(
                    declared, shape=self._core_shape(spec.index)
                )
            inputs.append(
                FeatureInput(
                    spec=spec,
                    table=self._plan.tables[spec.table],
                    batch=feature,
                    declared=declared,
                    check_numerics=self._options.check_numerics,
                )
            )
        return select(inputs)

    def _mode(self, training: bool) -> tf.Tensor:
        if self._options.topology.program() is None:
            return tf.constant("train" if training else "inference")
        # An op of its own: the compiler of the program looks whether there are
        # gradients of the same name, and sets the mode accordingly.
        return tf.where(training, tf.constant("train"), tf.constant("inference"))

    def _tag_op(self, made: Any) -> None:
        """Marks an op with the user's name for it; eagerly there is no op."""
        if self._tag is None or tf.executing_eagerly():
            return
        op = made.op if isinstance(made, tf.Tensor) else made
        op._set_attr(NAME_ATTRIBUTE, _AttrValue(s=tf.compat.as_bytes(self._tag)))
