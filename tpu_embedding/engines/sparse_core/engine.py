"""SparseCoreEngine: stacked tables on TPUs v5p, v6e and 7x, real or in software."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.config import SparseCoreEmbeddingConfig
from tpu_embedding.distribution import Topology
from tpu_embedding.engines import errors
from tpu_embedding.engines.base import Engine, EngineOptions, Lookup, Stacks
from tpu_embedding.engines.full_table_view import logical_counter, logical_rows
from tpu_embedding.engines.outside import outside_of_replicas
from tpu_embedding.engines.rates import Rates
from tpu_embedding.engines.sparse_core import minibatches, ops
from tpu_embedding.engines.sparse_core.checks import check_gradients
from tpu_embedding.engines.sparse_core.custom import CustomFunctions, functions_of
from tpu_embedding.engines.sparse_core.pending import PendingUpdate
from tpu_embedding.engines.sparse_core.saving import SavedStack
from tpu_embedding.engines.sparse_core.stacked_samples import StackedSamples
from tpu_embedding.engines.sparse_core.state import (
    StackState,
    create_counter,
    create_state,
)
from tpu_embedding.engines.sparse_core.transfer import check_shapes, copy_to_device
from tpu_embedding.engines.tickets import TracedTicket
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout import errors as layout_errors
from tpu_embedding.layout.csr import (
    BufferSizes,
    PartitionedCsrFormatTensor,
    PreprocessedFeatures,
)
from tpu_embedding.layout.partitioning import (
    full_output_shapes,
    make_partitioning,
    refuse_for_sparse_cores,
    require_names_and_optimizers,
    stacking_options,
)
from tpu_embedding.layout.partitions import PartitionedTable
from tpu_embedding.layout.plan import UPDATES, Plan
from tpu_embedding.layout.stacking import (
    Layout,
    StackingOptions,
    make_layout,
)
from tpu_embedding.layout.table_arrays import MutableRows, checkpoint_name
from tpu_embedding.lookup.combine import StoredReader
from tpu_embedding.preprocessing import PartitionOptions, partition


class SparseCoreEngine(Engine, Stacks):
    """Batches are preprocessed on the host; TensorFlow's XLA ops do the rest.

    There is no queue: a lookup hands its batch out, an update takes it back.
    """

    name = "sparse_core"
    stores_stacks = True
    unsupported: ClassVar[Mapping[str, str]] = {
        "TPUEmbedding": str(errors.no_queue("TPUEmbedding", name))
    }

    def __init__(self, options: EngineOptions) -> None:
        """Makes and fills the stacks; see `Engine`."""
        super().__init__(options)
        topology, plan, layout = options.topology, options.plan, options.layout
        self._partitioning = make_partitioning(
            plan,
            layout,
            _stacking_options(topology, options.sparse_core),
            options.sparse_core,
        )
        self._samples = StackedSamples(
            plan, layout, self._partitioning.num_sparse_cores
        )
        # All replicas must be cut alike.
        self._must_agree = self._partitioning.minibatching and topology.num_replicas > 1
        self._preprocessing = PartitionOptions(
            check_numerics=options.check_numerics, device=topology.device
        )
        self._stacks = outside_of_replicas(lambda: create_state(options))
        self._functions = outside_of_replicas(
            lambda: [functions_of(plan, stack) for stack in layout.stacks]
        )
        self._rates = Rates(
            plan,
            lambda: outside_of_replicas(lambda: create_counter(options, "updates")),
        )
        self._pending = self._create_pending() if options.pipelined else None
        self._flush = tf.function(self._apply_pending, autograph=False)
        self._reset = tf.function(self._clear_pending, autograph=False)

    @classmethod
    def lay_out(
        cls, plan: Plan, topology: Topology, config: SparseCoreEmbeddingConfig
    ) -> Layout:
        """See `Engine.lay_out`."""
        assert topology.tpu is not None
        if topology.tpu.cores_per_replica > 1:
            raise layout_errors.cores_per_replica(topology.tpu.cores_per_replica)
        require_names_and_optimizers(plan)
        refuse_for_sparse_cores(plan)
        options = _stacking_options(topology, config)
        layout = make_layout(plan, full_output_shapes(plan), options)
        make_partitioning(plan, layout, options, config)  # For its errors.
        return layout

    def variables(self) -> list[dict[str, Any]]:
        """See `Engine.variables`."""
        found = {
            index: {
                **{array: tf.constant(rows.numpy()) for array, rows in arrays.items()},
                **stack.combiner_values(),
            }
            for stack in self._stacks
            for index, arrays in stack.tables()
        }
        return [found[index] for index in range(len(self._plan.tables))]

    def table_shards(self) -> list[list[tuple[str, tf.Tensor]]]:
        """See `Engine.table_shards`."""
        found = {
            index: stack.shards(index)
            for stack in self._stacks
            for index in stack.stack.tables
        }
        return [found[index] for index in range(len(self._plan.tables))]

    def stacked_tables(self) -> dict[str, tuple[tf.Variable, ...]]:
        """See `Engine.stacked_tables`: the part of each device."""
        return {
            stack.stack.name: tuple(stack.parameters.values) for stack in self._stacks
        }

    def checkpoint_variables(self) -> dict[str, Any]:
        """See `Engine.checkpoint_variables`: those of TensorFlow's own class."""
        saved: dict[str, Any] = {}
        for stack in self._stacks:
            for array, variable in stack.arrays.items():
                name = checkpoint_name(stack.stack.name, array)
                saved[name] = SavedStack(variable.values)
            if stack.combiner_weights is not None:
                saved[f"{stack.stack.name}/{CustomCombiner.NAME}"] = (
                    stack.combiner_weights
                )
        if self._rates.updates is not None:
            saved[UPDATES] = self._rates.updates
        return saved

    def logical_variables(self) -> dict[str, Any]:
        """See `Engine.logical_variables`."""
        found: dict[str, Any] = {**logical_rows(self.rows(), self.flush, self.load)}
        if self._rates.updates is not None:
            found[UPDATES] = logical_counter(self._rates.updates)
        return found

    def readers(self) -> list[StoredReader]:
        """See `Engine.readers`."""
        found = {
            index: s.reader(index) for s in self._stacks for index in s.stack.tables
        }
        return [found[index] for index in range(len(self._plan.tables))]

    def updates(self) -> tf.Variable | None:
        """See `Engine.updates`."""
        return self._rates.updates

    def rows(self) -> dict[str, dict[str, MutableRows]]:
        """See `Engine.rows`."""
        names = [spec.name for spec in self._plan.tables]
        found = {
            names[index]: arrays
            for stack in self._stacks
            for index, arrays in stack.tables()
        }
        return {name: found[name] for name in names}

    def lookup_call(
        self, batch: Sequence[IdBatch], replica: int, *, training: bool = True
    ) -> Lookup:
        """See `Engine.lookup_call`."""
        del training  # Nothing is owed.
        found = self.lookup_stacked(self.preprocess(batch), replica)
        return Lookup(found.activations, TracedTicket(found.ticket))

    def submit(
        self, ticket: Any, gradients: Sequence[tf.Tensor | None], replica: int
    ) -> None:
        """See `Engine.submit`."""
        self.update_stacked(ticket.take(), gradients, replica)

    def preprocess(self, batch: Sequence[IdBatch]) -> PreprocessedFeatures:
        """See `Stacks.preprocess`."""
        topology = self._options.topology
        program = topology.program()
        if program is not None and program is not tf.compat.v1.get_default_graph():
            raise errors.in_control_flow()
        if not self._must_agree:
            return topology.on_host(self._preprocess, batch)
        if topology.replica() is None:
            raise layout_errors.minibatches_outside_of_replicas(topology.num_replicas)
        needed = minibatches.union(topology.on_host(self._needed_cuts, batch))
        return topology.on_host(self._preprocess, batch, needed)

    def preprocess_on(
        self, device: str, batch: Sequence[IdBatch]
    ) -> PreprocessedFeatures:
        """See `Stacks.preprocess_on`."""
        topology = self._options.topology
        assert topology.tpu is not None
        if self._must_agree:
            raise layout_errors.minibatches_outside_of_replicas(topology.num_replicas)
        with tf.device(topology.tpu.host_of(device)):
            return self._preprocess(batch)

    def lookup_stacked(self, batch: PreprocessedFeatures, replica: int) -> Lookup:
        """See `Stacks.lookup_stacked`."""
        del replica  # Each is a program of its own.
        for stack in self._stacks:
            if stack.stack.name not in batch.sizes:
                raise layout_errors.unpartitioned(stack.stack.name)
        tables = self._options.topology.on_host(
            copy_to_device, batch, self._partitioning
        )
        activations = {}
        for table, stack, functions in self._each_stack():
            name, parameters = table.name, stack.parameters.read_value()
            first = self._plan.tables[stack.stack.tables[0]]
            quantization = first.config.quantization_config
            if functions.combiner is None:
                activations[name] = ops.look_up(
                    table, tables[name], parameters, quantization
                )
            else:
                activations[name], tables[name] = ops.look_up_combined(
                    table,
                    tables[name],
                    (parameters, stack.read_combiner_weights()),
                    quantization,
                    functions.combiner,
                )
        return Lookup(self._samples.split(activations), tables)

    def update_stacked(
        self,
        tables: Mapping[str, PartitionedCsrFormatTensor],
        gradients: Sequence[tf.Tensor | None],
        replica: int,
    ) -> None:
        """See `Stacks.update_stacked`."""
        del replica
        check_shapes(tables, self._partitioning)
        rates = self._rates.evaluate()
        if self._options.check_numerics:
            gradients = self._options.topology.on_host(
                check_gradients, self._plan, gradients
            )
        # No replica begins to update before it has its rates and sound gradients, and
        # none can update without the others: what fails has changed nothing.
        with tf.control_dependencies([rates, *(g for g in gradients if g is not None)]):
            by_stack = self._samples.join(gradients)
            inputs = {
                table.name: ops.update_inputs(
                    tables[table.name],
                    by_stack[table.name],
                    self._rates.of_table(rates, stack.stack.tables[0]),
                    functions,
                )
                for table, stack, functions in self._each_stack()
            }
            due, is_there = inputs, tf.constant(True)
            if self._pending is not None:
                due, is_there = self._pending.read(), self._pending.is_there()
                self._pending.write(inputs)
            updated = self._apply(due, is_there)
        self._rates.count_update(tf.constant(True), after=updated)

    def flush(self) -> None:
        """See `Engine.flush`."""
        if self._pending is not None:
            self._in_replicas(self._flush)

    def reset(self) -> None:
        """See `Engine.reset`: nothing is queued or owed here."""
        if self._pending is not None:
            self._in_replicas(self._reset)

    def _needed_cuts(self, batch: Sequence[IdBatch]) -> tf.Tensor:
        result = partition(batch, self._partitioning, options=self._preprocessing)
        names = [table.name for table in self._partitioning.tables]
        return minibatches.to_flags(tf.stack([result.splits[n] for n in names]))

    def _preprocess(
        self, batch: Sequence[IdBatch], cuts: tf.Tensor | None = None
    ) -> PreprocessedFeatures:
        result = partition(
            batch,
            self._partitioning,
            None if cuts is None else tf.unstack(minibatches.from_flags(cuts)),
            self._preprocessing,
        )
        return PreprocessedFeatures(
            tables={
                table.name: result.tables[table.name]._replace(
                    sample_count=tf.constant(table.samples, tf.int32)
                )
                for table in self._partitioning.tables
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
            marks=tf.constant(self._partitioning.marks, tf.int64),
        )

    def _each_stack(
        self,
    ) -> Iterator[tuple[PartitionedTable, StackState, CustomFunctions]]:
        return zip(
            self._partitioning.tables, self._stacks, self._functions, strict=True
        )

    def _apply(
        self, due: Mapping[str, Mapping[str, tf.Tensor]], is_there: tf.Tensor
    ) -> tf.Tensor:
        """Updates all stacks, unless nothing is due; a tensor that is there after."""
        results = []
        for table, stack, functions in self._each_stack():
            optimizer = self._plan.tables[stack.stack.tables[0]].optimizer
            assert optimizer is not None
            variables = list(stack.arrays.values())
            values = [variable.read_value() for variable in variables]
            if functions.combiner is not None:
                values.append(stack.read_combiner_weights())
            if stack.combiner_weights is not None:
                variables.append(stack.combiner_weights)
            updated = ops.update(table, optimizer, functions, due[table.name], values)
            if stack.combiner_weights is not None:
                at = len(stack.arrays)
                updated[at] = tf.where(is_there, updated[at], values[at])
            results.append((variables, updated[: len(variables)]))
        for variables, updated in results:
            for variable, value in zip(variables, updated, strict=True):
                variable.assign(value)
        return results[-1][1][0]

    def _create_pending(self) -> PendingUpdate:
        specs = {}
        shards = self._partitioning
        for table, stack, functions in self._each_stack():
            specs[table.name] = ops.update_input_specs(
                shards, table, stack.stack.width, functions
            )

        def create() -> PendingUpdate:
            with self._options.topology.strategy.scope():
                return PendingUpdate(specs)

        return outside_of_replicas(create)

    def _apply_pending(self) -> None:
        assert self._pending is not None
        self._apply(self._pending.read(), self._pending.is_there())
        self._pending.clear()

    def _clear_pending(self) -> None:
        assert self._pending is not None
        self._pending.clear()

    def _in_replicas(self, function: Any) -> None:
        """Calls `function` in this replica, or in each from outside."""
        topology = self._options.topology
        if topology.replica() is None:
            topology.strategy.run(function)
        else:
            function()


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
