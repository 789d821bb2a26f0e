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
from tpu_embedding.engines import errors
from tpu_embedding.engines.base import Engine, EngineOptions, Lookup, Queue
from tpu_embedding.engines.full_table_view import (
    ShardedReader,
    logical_counter,
    logical_rows,
)
from tpu_embedding.engines.tickets import QueuedTickets
from tpu_embedding.engines.tpu_v2_v4.configuration import make_configuration
from tpu_embedding.engines.tpu_v2_v4.enqueueing import CoreQueues, core_batches
from tpu_embedding.engines.tpu_v2_v4.learning_rates import ProgramRates, counts_updates
from tpu_embedding.engines.tpu_v2_v4.tables import StandInTable
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.plan import UPDATES, Plan, TableSpec
from tpu_embedding.layout.table_arrays import (
    PARAMETERS,
    MutableRows,
    by_checkpoint_name,
)
from tpu_embedding.lookup.combine import StoredReader
from tpu_embedding.lookup.entries import Selection, select
from tpu_embedding.lookup.graph_checks import Check, require, text
from tpu_embedding.lookup.input_rows import FeatureInput, first
from tpu_embedding.tpu_generations import NAME_ATTRIBUTE

_AttrValue: Any = vars(attr_value_pb2)["AttrValue"]
_ENDED = (
    "The tables of this embedding are gone: the TPU was initialized again after the "
    "embedding was created. (Creating a SoftwareTPUStrategy does so, too.) Create the "
    "TPUEmbedding or the Keras layer again, and restore a checkpoint."
)


class TPUV2V4Engine(Engine, Queue):
    """The tables are in the TPU's memory; variables on the hosts stand in for them."""

    name = "tpu_v2_v4"
    takes_profiles = True
    needs_shapes = True
    unsupported: ClassVar[Mapping[str, str]] = {
        "TPUEmbeddingV2": str(errors.no_batches("TPUEmbeddingV2", name))
    }

    def __init__(self, options: EngineOptions) -> None:
        """Configures the TPU and loads it, or shares its engine; see `Engine`."""
        super().__init__(options)
        topology = options.topology
        assert topology.tpu is not None
        self._tpu: TPUSystem = topology.tpu
        if options.check_numerics and not self._tpu.simulated:
            raise NotImplementedError(
                "`check_numerics=True` is not possible under TPUStrategy: a program on "
                "a TPU cannot fail for a value. Leave it at False there."
            )
        if not options.initialize and counts_updates(self._plan):
            raise NotImplementedError(
                "`initialize_tpu_embedding=False` shares the tables of another "
                "TPUEmbedding, but not its count of updates: a learning rate that "
                "takes the step would begin anew. Pass a rate without arguments that "
                "reads a tf.Variable, which both may use."
            )
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
        self._still_there = self._tpu.watch(_ENDED)
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
            raise errors.in_control_flow()
        for path, value in zip(paths, values, strict=True):
            for part in topology.strategy.experimental_local_results(value):
                for tensor in tf.nest.flatten(part, expand_composites=True):
                    if not tf.is_tensor(tensor):
                        continue  # Refused later, by its kind.
                    if program is not None:
                        check_argument(path, tensor)
                    elif "TPU" in (tensor.device or ""):
                        raise ValueError(
                            f"Feature {path}: ids must be on the host, not on "
                            f"{tensor.device}. Distribute the data set with "
                            "tf.distribute.InputOptions(experimental_fetch_to_device=False)."
                        )

    def variables(self) -> list[dict[str, Any]]:
        """See `Engine.variables`; only while a model is saved."""
        if not save_context.in_save_context():
            raise RuntimeError(
                "The embedding tables are in the TPU's own memory: variables would be "
                "stale, and writing to them would change nothing. Save a checkpoint "
                "and restore it into an embedding made outside of the TPU strategy, or "
                "call tpu_embedding.checkpoint.save."
            )
        return [
            {name: array.shards[0] for name, array in table.arrays.items()}
            for table in self._tables
        ]

    def table_shards(self) -> list[list[tuple[str, tf.Tensor]]]:
        """See `Engine.table_shards`."""
        raise RuntimeError(
            "The embedding tables are in the TPU's own memory: variables would be "
            "stale, and writing to them would change nothing. Save a checkpoint and "
            "restore it into an embedding made outside of the TPU strategy, or call "
            "tpu_embedding.checkpoint.save."
        )

    def stacked_tables(self) -> dict[str, tuple[tf.Variable, ...]]:
        """See `Engine.stacked_tables`."""
        raise RuntimeError(
            "The embedding tables are in the TPU's own memory: variables would be "
            "stale, and writing to them would change nothing. Save a checkpoint and "
            "restore it into an embedding made outside of the TPU strategy, or call "
            "tpu_embedding.checkpoint.save."
        )

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
            raise NotImplementedError(
                f"Inside strategy.run a batch goes to one core, but {cores} cores work "
                "on each replica. Call enqueue outside of strategy.run, which deals "
                "the batch out to them; the Keras layer and calls of an embedding "
                "cannot, and need one core for each replica."
            )
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
        raise NotImplementedError(
            "A TPU of v2 to v4 cannot forget the batches that it has: TensorFlow has "
            "no op that empties its queues, only its initialization does, which ends "
            "all tables and variables on it. Save a checkpoint, call "
            "tf.tpu.experimental.initialize_tpu_system (for the software TPU, the "
            "strategy's method of that name), create the strategy's objects again and "
            "restore."
        )

    def _configure(self) -> None:
        """Configures the TPU's engine, or sees that another has done so."""
        with tf.device(self._tpu.system):
            initialized = tf.raw_ops.IsTPUEmbeddingInitialized()
            if self._options.initialize:
                if initialized:
                    raise RuntimeError(
                        "The TPU's embedding engine is configured already, by another "
                        "TPUEmbedding or Keras layer. A TPU system has one. Use that "
                        "object: a Keras layer takes other tables by `load_weights`. "
                        "Or initialize the TPU system anew and make a new strategy. "
                        "tpu_embedding.TPUEmbedding, which is no layer, can share the "
                        "engine by `initialize_tpu_embedding=False`."
                    )
                tf.raw_ops.ConfigureTPUEmbedding(config=self._config)
            elif not initialized:
                raise RuntimeError(
                    "`initialize_tpu_embedding=False` shares the engine that another "
                    "TPUEmbedding has configured, but there is none. Leave it at True."
                )

    def _output_shape(self, feature: int) -> tuple[int, ...]:
        """Of one replica."""
        shape = self._options.output_shapes.activation(feature)
        known = tuple(axis for axis in shape if axis is not None)
        if len(known) < len(shape):
            raise ValueError(
                f"Feature {self._plan.features[feature].path}: a TPU must know the "
                f"output shape before the first batch, but {shape} is not fully known. "
                "Call build(per_replica_input_shapes), set "
                "FeatureConfig(output_shape), or enqueue a batch of static shape "
                "first; the Keras layer takes `batch_size`."
            )
        if 0 in known:
            raise ValueError(
                f"Feature {self._plan.features[feature].path}: a TPU is configured for "
                f"one output shape, but there are no samples in {shape}. Skip empty "
                "batches."
            )
        return known

    def _core_shape(self, feature: int) -> tuple[int, ...]:
        first, *others = self._output_shapes[feature]
        cores = self._tpu.cores_per_replica
        if first % cores:
            path = self._plan.features[feature].path
            raise ValueError(
                f"Feature {path}: {cores} cores work on each replica, so the first "
                f"axis of its output shape must be divisible by {cores}. Received: "
                f"{self._output_shapes[feature]}."
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


def check_table(table: TableSpec) -> None:
    """Raises for what the hardware, or its proto, has no place for."""
    if table.optimizer is None:
        raise ValueError(
            f"Table {table.name} has no optimizer, and a TPU needs one even for "
            "evaluation. Pass `optimizer` to the constructor or to the TableConfig."
        )
    if table.optimizer.tpu is None:
        kind = type(table.optimizer).__name__
        raise NotImplementedError(
            f"Table {table.name}: TPU v2 to v4 have no `optimizer={kind!r}`. Give the "
            "table another optimizer."
        )
    for option, value in (
        ("slot_variable_creation_fn", table.optimizer.slot_variable_creation_fn),
        ("layout", table.config.layout),
    ):
        if value is not None:
            raise NotImplementedError(
                f"Table {table.name}: TPU v2 to v4 have no `{option}={value!r}`. Leave "
                "it at None."
            )


def symbolic(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Those that an op can wait for."""
    return [tensor for tensor in tensors if tf.is_symbolic_tensor(tensor)]


def check_argument(path: str, tensor: tf.Tensor) -> None:
    """Raises unless a tensor comes straight from the arguments of strategy.run."""
    if tf.is_symbolic_tensor(tensor):
        if tensor.op.type == "Placeholder":
            return
        with contextlib.suppress(ValueError):  # No such attribute.
            if tensor.op.get_attr("_tpu_input_identity"):
                return
    raise ValueError(
        f"Feature {path}: inside strategy.run enqueue takes only tensors that are "
        f"arguments of the function given to strategy.run. Received: {tensor}. Compute "
        "the features before strategy.run, or call enqueue outside of it. If the batch "
        "size is dynamic, pass "
        "tf.distribute.RunOptions(experimental_enable_dynamic_batch_size=False)."
    )


def check_finite(name: str, gradient: tf.Tensor) -> Check:
    """That the gradient of the feature `name`, float32 [..., dim], is finite."""
    values = tf.reshape(gradient, [-1])
    bad = ~tf.math.is_finite(values)
    dim = gradient.shape[-1]

    def not_finite() -> tf.Tensor:
        at = first(bad)
        return text(
            f"{name}: the gradient of sample ",
            at // dim,
            " is not finite (",
            values[at],
            ").",
        )

    return Check(~tf.reduce_any(bad), not_finite)
