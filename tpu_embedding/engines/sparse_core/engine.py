"""SparseCoreEngine: stacked tables on TPUs v5p, v6e and 7x, real or in software."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.config import SparseCoreEmbeddingConfig
from tpu_embedding.distribution import Topology, TPUTopology, outside_of_replicas
from tpu_embedding.engines.base import Engine, TracedTicket
from tpu_embedding.engines.calls import Call, EngineOptions, Prepared
from tpu_embedding.engines.rates import Rates
from tpu_embedding.engines.sparse_core import host_to_device, ops
from tpu_embedding.engines.sparse_core.host_to_device import SparseCoreQueue
from tpu_embedding.engines.sparse_core.ops import CustomFunctions, functions_of
from tpu_embedding.engines.sparse_core.state import (
    StackState,
    create_counter,
    create_local,
    create_state,
    fill_tables,
)
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout import limits
from tpu_embedding.layout.csr import (
    BufferSizes,
    PartitionedStack,
    PreprocessedFeatures,
    check_optimizers,
    make_partitioning,
    stacking_options,
)
from tpu_embedding.layout.plan import UPDATES, FeatureSpec
from tpu_embedding.layout.stacking import Layout, StackingOptions, make_layout
from tpu_embedding.preprocessing import PartitionOptions, partition
from tpu_embedding.tables.rows import PARAMETERS, checkpoint_name
from tpu_embedding.tables.table import Table
from tpu_embedding.tables.trackable import ShardedArray

# The inputs of an update op, by stack name.
UpdateInputs = Mapping[str, Mapping[str, tf.Tensor]]


class SparseCoreEngine(Engine):
    """Preprocesses batches on the host; TensorFlow's XLA ops do the rest."""

    name = "sparse_core"
    stores_stacks = True
    needs_shapes = True

    def __init__(self, options: EngineOptions) -> None:
        """Creates and fills the stacks; see `Engine`."""
        super().__init__(options)
        topology, plan, layout = options.topology, options.plan, options.layout
        assert isinstance(topology, TPUTopology)
        assert layout is not None
        self._topology = topology
        self._partitioning = make_partitioning(
            dataclasses.replace(plan, features=_with_shape_sources(options)),
            layout,
            _stacking_options(topology, options.sparse_core),
            options.sparse_core,
        )
        if options.pipelined:  # `lay_out` has checked the other limits.
            limits.raise_first(
                limits.sparse_core_excesses(
                    plan,
                    layout,
                    self._partitioning,
                    topology.tpu.generation,
                    pipelined=True,
                )
            )
        self._samples = host_to_device.StackedSamples(
            plan, layout, self._partitioning.sparse_cores_per_device
        )
        # All replicas must cut their batches into minibatches at the same places.
        self._shares_cuts = (
            self._partitioning.minibatching and topology.num_replicas > 1
        )
        self._preprocessing = PartitionOptions(
            check_numerics=options.check_numerics, device=topology.device
        )
        self._created = outside_of_replicas(lambda: create_state(options, layout))
        # How many devices are still to be restored, by name of a stack without values.
        self._due = {
            state.stack.name: state.stack.num_devices
            for state in self._created
            if options.to_restore
        }
        self._filling = threading.Lock()
        self._functions = outside_of_replicas(
            lambda: [functions_of(plan, stack) for stack in layout.stacks]
        )
        self._rates = Rates(
            plan, lambda: outside_of_replicas(lambda: create_counter(options))
        )
        self._pending = self._create_pending() if options.pipelined else None
        specs = host_to_device.batch_specs(self._partitioning)
        self.queue = self._queue = SparseCoreQueue(self, topology, specs)
        self._flush = tf.function(self._apply_pending, autograph=False)
        self._reset = tf.function(self._discard_pending, autograph=False)

    @classmethod
    def check(cls, options: EngineOptions) -> None:
        plan, topology = options.plan, options.topology
        assert topology.tpu is not None
        if topology.tpu.cores_per_replica > 1:
            raise NotImplementedError(
                f"Each replica has {topology.tpu.cores_per_replica} TPU cores, but "
                "embeddings on SparseCores need exactly one. Use a DeviceAssignment "
                "with one core per replica."
            )
        check_optimizers(plan)
        ops.check_combiners(plan)

    @classmethod
    def lay_out(cls, options: EngineOptions) -> Layout:
        plan, topology, config = options.plan, options.topology, options.sparse_core
        stacking = _stacking_options(topology, config)
        assert topology.tpu is not None
        layout = make_layout(plan, options.output_shapes.full(), stacking)
        partitioning = make_partitioning(plan, layout, stacking, config)
        limits.raise_first(
            limits.sparse_core_excesses(
                plan, layout, partitioning, topology.tpu.generation
            )
        )
        return layout

    def checkpoint_variables(self) -> dict[str, Any]:
        """See `TableStore.checkpoint_variables`: names and values are TensorFlow's."""
        saved: dict[str, Any] = {}
        for stack in self._created:
            restored = functools.partial(self._restored, stack.stack.name)
            for array, variable in stack.arrays.items():
                name = checkpoint_name(stack.stack.name, array)
                hook = {"on_restore": restored} if array == PARAMETERS else {}
                saved[name] = ShardedArray(variable.values, **hook)
            if stack.combiner_weights is not None:
                slot = CustomCombiner.CUSTOM_COMBINER_SLOT_NAME
                saved[checkpoint_name(stack.stack.name, slot)] = stack.combiner_weights
        if self._rates.updates is not None:
            saved[UPDATES] = self._rates.updates
        return saved

    def _restored(self, name: str) -> None:
        """Notes that a checkpoint gave a stack its values on one device."""
        self._due[name] = self._due.get(name, 0) - 1

    def complete(self) -> None:
        with self._filling:
            due = {name for name, devices in self._due.items() if devices > 0}
            states = [own for own in self._created if own.stack.name in due]
            if states:
                outside_of_replicas(lambda: fill_tables(self._options, states))
            self._due = {}

    @property
    def _stacks(self) -> list[StackState]:
        """All stacks, after their first values were made."""
        if self._due:
            self.complete()
        return self._created

    def tables(self) -> dict[str, Table]:
        found = {
            table.spec.index: table
            for stack in self._stacks
            for table in stack.tables(self._plan.tables)
        }
        return {spec.name: found[spec.index] for spec in self._plan.tables}

    def prepare(
        self, batches: Sequence[Sequence[IdBatch]], call: Call
    ) -> list[Prepared]:
        """See `Steps.prepare`: the host of each replica prepares its batch."""
        if len(batches) > 1:
            return self._prepare_all(batches)
        (batch,), device, topology = batches, call.device, self._topology
        program = topology.program()
        if program is not None and program is not tf.compat.v1.get_default_graph():
            raise errors.in_control_flow()
        cuts = None
        if self._shares_cuts:
            if device is not None or topology.replica() is None:
                raise RuntimeError(
                    f"With minibatching, the batches of all {topology.num_replicas} "
                    "replicas must be cut at the same places, so one batch cannot be "
                    "preprocessed alone. Pass the raw features to embedding_lookup or "
                    "enqueue inside strategy.run, enqueue those of all replicas at "
                    "once, or raise the limits and set minibatching to False."
                )
            own = topology.on_host(self._cuts, batch)
            total = topology.sum_over_replicas(host_to_device.cuts_to_sum(own))
            cuts = topology.on_host(host_to_device.cuts_of_sum, total)
        if device is None:
            features = topology.on_host(self._preprocess, batch, cuts)
        else:
            with tf.device(self._host_of(device)):
                features = self._preprocess(batch)
        return [Prepared(tensors=features)]

    def _prepare_all(self, batches: Sequence[Sequence[IdBatch]]) -> list[Prepared]:
        devices = [cores[0] for cores in self._topology.tpu.devices]
        hosts = [self._host_of(device) for device in devices]
        cuts = None
        if self._shares_cuts:
            own = []
            for host, batch in zip(hosts, batches, strict=True):
                with tf.device(host):
                    own.append(self._cuts(batch))
            cuts = functools.reduce(tf.bitwise.bitwise_or, own)
        prepared = []
        for host, batch in zip(hosts, batches, strict=True):
            with tf.device(host):
                prepared.append(Prepared(tensors=self._preprocess(batch, cuts)))
        return prepared

    def lookup(
        self, prepared: Prepared, call: Call
    ) -> tuple[list[tf.Tensor], Prepared]:
        """See `Steps.lookup`; all shapes are declared."""
        del call  # Each replica is a program; nothing awaits an update.
        batch = prepared.tensors
        assert batch is not None
        for stack in self._stacks:
            if stack.stack.name not in batch.sizes:
                raise ValueError(
                    "The preprocessed batch has no sizes for stacked table "
                    f"{stack.stack.name}, so another engine created it. Preprocess it "
                    "with this embedding."
                )
        # The TPU sums shared cuts before this copy, which must then copy whole buffers.
        tables = self._topology.on_host(
            host_to_device.copy_to_device, batch, self._partitioning, self._shares_cuts
        )
        activations, tables = self._look_up(tables)
        return activations, Prepared(TracedTicket(None), batch._replace(tables=tables))

    def _look_up(
        self, batches: Mapping[str, Any]
    ) -> tuple[list[tf.Tensor], dict[str, Any]]:
        """Returns the activations, and the batches with what their updates need."""
        tables = dict(batches)
        activations = {}
        for partitioned, stack, functions in self._each_stack():
            name, parameters = partitioned.name, stack.parameters.read_value()
            spec = self._plan.tables[stack.stack.tables[0]]
            quantization = spec.config.quantization_config
            if functions.combiner is None:
                activations[name] = ops.look_up(
                    partitioned, tables[name], parameters, quantization
                )
            else:
                activations[name], tables[name] = ops.look_up_combined(
                    partitioned,
                    tables[name],
                    (parameters, stack.read_combiner_weights()),
                    quantization,
                    functions.combiner,
                )
            # Updates write in place what lookups read. Unless the inputs of an update
            # depend on the lookup, libtpu writes to a copy of the stack instead: 1.5
            # times its memory, and its time. Gradients need not depend on it.
            pointers = self._topology.tpu.after(
                tables[name].row_pointers, [activations[name]]
            )
            tables[name] = tables[name]._replace(row_pointers=pointers)
        return self._samples.split(activations), tables

    def flush_after_lookup(
        self, looked_up: Prepared, activations: list[tf.Tensor], training: tf.Tensor
    ) -> list[tf.Tensor]:
        """Applies the pending update; evaluation batches then get new activations."""
        if self._pending is None:
            return activations
        assert looked_up.tensors is not None
        self._apply_pending(after=looked_up.tensors.tables)
        # This looks up again, but nothing for a training batch: libtpu does not compile
        # a second update of a table in addition to that of the training step.
        empty = tf.cast(~training, tf.int32)
        tables = {
            name: batch._replace(row_pointers=batch.row_pointers * empty)
            for name, batch in looked_up.tensors.tables.items()
        }
        again, _ = self._look_up(tables)
        return [
            tf.where(training, before, after)
            for before, after in zip(activations, again, strict=True)
        ]

    def update(
        self, looked_up: Prepared, gradients: Sequence[tf.Tensor | None], call: Call
    ) -> None:
        del call
        self.apply(looked_up, gradients)

    def apply(
        self,
        looked_up: Prepared,
        gradients: Sequence[tf.Tensor | None],
        after: Sequence[tf.Tensor] = (),
        *,
        flushed: bool = False,
    ) -> list[Any]:
        """Updates like `Steps.update`, waiting for `after`; returns control inputs.

        `flushed` is True if it is known that no update is pending.
        """
        if looked_up.value is not None:
            looked_up.value.take()
        assert looked_up.tensors is not None
        tables = looked_up.tensors.tables
        host_to_device.check_sizes(tables, self._partitioning)
        rates = self._rates.evaluate()
        if self._options.check_numerics:
            gradients = self._topology.on_host(
                host_to_device.check_gradients, self._plan, gradients
            )
        by_stack = self._samples.join(gradients)
        inputs = {
            partitioned.name: ops.update_inputs(
                tables[partitioned.name],
                by_stack[partitioned.name],
                self._rates.of_table(rates, stack.stack.tables[0]),
                functions,
            )
            for partitioned, stack, functions in self._each_stack()
        }
        if self._pending is None:
            changes = self._updated(inputs, tf.constant(True))
        else:
            changes = self._pending.replacement(inputs)
            if not flushed:
                before = self._pending_after(tables)
                changes += self._updated(before, self._pending.is_there())
        if self._rates.updates is not None:
            updates = self._rates.updates
            changes.append((updates, updates.read_value() + 1))
        # The new inputs must be valid, too, although the pending update is applied.
        return self._assign_together(changes, [*tf.nest.flatten(inputs), *after])

    def flush(self) -> None:
        if self._pending is not None:
            self._in_replicas(self._flush)

    def reset(self) -> None:
        self._queue.reset()
        if self._pending is not None:
            self._in_replicas(self._reset)

    def _cuts(self, batch: Sequence[IdBatch]) -> tf.Tensor:
        result = partition(batch, self._partitioning, options=self._preprocessing)
        return tf.stack([result.splits[t.name] for t in self._partitioning.stacks])

    def _host_of(self, device: str | tf.Tensor) -> str:
        """Returns the host of a device, which may be a number if there is one host."""
        tpu = self._topology.tpu
        return tpu.host_of(device) if isinstance(device, str) else tpu.hosts[0]

    def _preprocess(
        self, batch: Sequence[IdBatch], cuts: tf.Tensor | None = None
    ) -> PreprocessedFeatures:
        splits = None if cuts is None else tf.unstack(cuts)
        result = partition(batch, self._partitioning, splits, self._preprocessing)
        return PreprocessedFeatures(
            tables={
                partitioned.name: result.tables[partitioned.name]._replace(
                    sample_count=tf.constant(partitioned.samples, tf.int32)
                )
                for partitioned in self._partitioning.stacks
            },
            output_shapes=tuple(
                tf.constant(feature.output_shape, tf.int64)
                for feature in self._partitioning.features
            ),
            dropped_ids=result.dropped_ids,
            sizes={
                name: BufferSizes(size, result.ids_sizes[name])
                for name, size in result.row_pointers_sizes.items()
            },
            sorted_pos_ids=result.sorted_pos_ids,
            marks=tf.constant(self._partitioning.fingerprint, tf.int64),
        )

    def _each_stack(
        self,
    ) -> Iterator[tuple[PartitionedStack, StackState, CustomFunctions]]:
        return zip(
            self._partitioning.stacks, self._stacks, self._functions, strict=True
        )

    def _updated(
        self, inputs: UpdateInputs, is_there: tf.Tensor
    ) -> list[tuple[Any, tf.Tensor]]:
        """Returns each variable of the stacks with its value after an update.

        `is_there` is False if `inputs` hold no update; then no value changes.
        """
        changes = []
        for partitioned, stack, functions in self._each_stack():
            optimizer = self._plan.tables[stack.stack.tables[0]].optimizer
            assert optimizer is not None
            variables = list(stack.arrays.values())
            values = [variable.read_value() for variable in variables]
            if functions.combiner is not None:
                values.append(stack.read_combiner_weights())
            updated = ops.update(
                partitioned, optimizer, functions, inputs[partitioned.name], values
            )
            if stack.combiner_weights is not None:
                # An update without entries is NaN if the user's function returns NaN.
                updated[-1] = tf.where(is_there, updated[-1], values[-1])
                variables.append(stack.combiner_weights)
            changes += zip(variables, updated, strict=False)
        return changes

    def _assign_together(
        self, changes: Sequence[tuple[Any, tf.Tensor]], after: Sequence[tf.Tensor] = ()
    ) -> list[Any]:
        """Assigns all values in all replicas, or none if a replica fails before.

        It also waits for the tensors `after`, and returns control inputs for ops that
        must come later.
        """
        topology = self._topology
        values = [value for _, value in changes]
        # TensorFlow keeps the order of stateful ops: the user's assertions before this
        # call come before the first barrier, and those after it after the second.
        with tf.control_dependencies(topology.barrier([*values, *after])):
            assigned = [
                variable.assign(tf.ensure_shape(value, variable.shape))
                for variable, value in changes
            ]
        return topology.barrier(assigned)

    def _create_pending(self) -> PendingUpdate:
        specs = {
            partitioned.name: ops.update_input_specs(
                self._partitioning, partitioned, stack.stack.width, functions
            )
            for partitioned, stack, functions in self._each_stack()
        }

        def create() -> PendingUpdate:
            with self._topology.strategy.scope():
                return PendingUpdate(specs)

        return outside_of_replicas(create)

    def _pending_after(self, tables: Mapping[str, Any]) -> UpdateInputs:
        """Returns the pending inputs, which depend on the lookup of `tables`."""
        assert self._pending is not None
        inputs = self._pending.read()
        for name, own in inputs.items():
            own["row_pointers"] = self._topology.tpu.after(
                own["row_pointers"], [tables[name].row_pointers]
            )
        return inputs

    def _apply_pending(self, after: Mapping[str, Any] | None = None) -> None:
        """Applies the pending update, after the lookup of batches if they are given."""
        assert self._pending is not None
        inputs = self._pending.read() if after is None else self._pending_after(after)
        updated = self._updated(inputs, self._pending.is_there())
        self._assign_together([*updated, *self._pending.clearing()])

    def _discard_pending(self) -> None:
        assert self._pending is not None
        changes = self._pending.clearing()
        if self._rates.updates is not None:
            # The discarded update was counted when it became pending.
            discarded = tf.cast(self._pending.is_there(), tf.int64)
            updates = self._rates.updates
            changes.append((updates, updates.read_value() - discarded))
        self._assign_together(changes)

    def _in_replicas(self, function: Any) -> None:
        """Calls `function` in this replica; outside of replicas, in each of them."""
        topology = self._topology
        if topology.replica() is None:
            topology.strategy.run(function)
        else:
            function()


class PendingUpdate:
    """The inputs of one update of all stacks, in variables of each replica.

    If nothing is pending, `row_pointers` is 0: no partition has an entry, and the
    update touches no row.
    """

    def __init__(self, specs: Mapping[str, Mapping[str, tf.TensorSpec]]) -> None:
        """Creates the variables, in the strategy's scope, for inputs of full shapes."""
        self._variables: dict[str, dict[str, Any]] = {
            stack: {
                name: create_local(
                    f"pending/{stack}/{name}",
                    lambda spec=spec: tf.zeros(spec.shape, spec.dtype),
                )
                for name, spec in own.items()
            }
            for stack, own in specs.items()
        }
        self._is_there = create_local("pending/is_there", lambda: tf.constant(False))
        for own in self._variables.values():
            if ops.MINIBATCHES in own:  # The op checks it, even if nothing is pending.
                for part in own[ops.MINIBATCHES].values:
                    part.assign(1)

    def read(self) -> dict[str, dict[str, tf.Tensor]]:
        """Returns the pending inputs of one replica."""
        return {
            stack: {name: variable.read_value() for name, variable in own.items()}
            for stack, own in self._variables.items()
        }

    def is_there(self) -> tf.Tensor:
        """Returns whether an update is pending in one replica, a bool scalar."""
        return self._is_there.read_value()

    def replacement(self, inputs: UpdateInputs) -> list[tuple[Any, tf.Tensor]]:
        """Returns the variables of one replica and their values for a new update."""
        return [
            (self._is_there, tf.constant(True)),
            *(
                (variable, inputs[stack][name])
                for stack, own in self._variables.items()
                for name, variable in own.items()
            ),
        ]

    def clearing(self) -> list[tuple[Any, tf.Tensor]]:
        """Returns variables of one replica and the values that discard the update."""
        pointers = [own["row_pointers"] for own in self._variables.values()]
        return [
            (self._is_there, tf.constant(False)),
            *((variable, tf.zeros(variable.shape, tf.int32)) for variable in pointers),
        ]


def _with_shape_sources(options: EngineOptions) -> tuple[FeatureSpec, ...]:
    """Returns the plan's features; each says where its output shape comes from."""
    pairs = zip(
        options.plan.features, options.output_shapes.all_declared(), strict=True
    )
    return tuple(
        dataclasses.replace(spec, shape_source=declared.source) if declared else spec
        for spec, declared in pairs
    )


def _stacking_options(
    topology: Topology, config: SparseCoreEmbeddingConfig
) -> StackingOptions:
    assert topology.tpu is not None
    generation = topology.tpu.generation
    return stacking_options(
        topology.num_replicas,
        generation.sparse_cores_per_device,
        config,
        width_multiple=generation.lane_width,
        row_multiple=generation.row_multiple,
    )
