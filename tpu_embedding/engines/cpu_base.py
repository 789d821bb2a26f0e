"""What the engines share that keep each table as one variable."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.config import DTYPES, SparseCoreEmbeddingConfig
from tpu_embedding.distribution import Topology
from tpu_embedding.engines.base import (
    EmbeddingOptions,
    Engine,
    EngineOptions,
    TableArrays,
)
from tpu_embedding.engines.rates import Rates
from tpu_embedding.layout.csr import (
    PartitionedCsrFormatTensor,
    PreprocessedFeatures,
)
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.plan import UPDATES, Plan, TableSpec
from tpu_embedding.layout.stacking import Layout, StackingOptions, make_layout
from tpu_embedding.optimizers import Optimizer
from tpu_embedding.tables.readers import VariableReader
from tpu_embedding.tables.variables import (
    TableVariables,
    create_counter,
    create_variables,
    named_variables,
    variable_rows,
)


class WholeTablesEngine(Engine):
    """Each table and slot is one variable on one device; abstract."""

    table_dtypes = DTYPES
    differentiates_weights = True

    def __init__(
        self,
        options: EngineOptions,
        variables: Sequence[TableVariables] | None = None,
    ) -> None:
        """Makes the variables, unless they are given; see `Engine`."""
        super().__init__(options)
        self._pipelined = options.pipelined
        self._num_replicas = options.topology.num_replicas
        self._stacks = StackedBatches(options.plan, options.layout)
        self._variables = (
            create_variables(options.plan, self._device)
            if variables is None
            else list(variables)
        )
        self._rates = Rates(
            options.plan, lambda: create_counter("updates", self._device)
        )

    @classmethod
    def check_plan(
        cls, plan: Plan, topology: Topology, options: EmbeddingOptions
    ) -> None:
        """See `Engine.check_plan`."""
        del topology, options
        refuse_tpu_options(cls.name, plan)

    @classmethod
    def lay_out(
        cls,
        plan: Plan,
        topology: Topology,
        config: SparseCoreEmbeddingConfig,
        output_shapes: OutputShapes,
    ) -> Layout:
        """See `Engine.lay_out`."""
        del topology, output_shapes  # What no FeatureConfig says may change.
        return lay_out_whole(plan, config)

    def _by_sample(
        self, gradients: Sequence[tf.Tensor | None]
    ) -> list[tf.Tensor | None]:
        """Gradients of activations as [samples, D]."""
        return [
            None if gradient is None else tf.reshape(gradient, [-1, dim])
            for gradient, dim in zip(gradients, self._plan.dims, strict=True)
        ]

    def tables(self) -> dict[str, TableArrays]:
        """See `Engine.tables`; each array is one variable, the table one part."""
        return {
            spec.name: arrays_of_variables(spec, table)
            for spec, table in zip(self._plan.tables, self._variables, strict=True)
        }

    def stacked_tables(self) -> dict[str, tuple[tf.Variable, ...]]:
        """See `Engine.stacked_tables`: the tables themselves."""
        return {
            stack.name: tuple(
                self._variables[index].parameters for index in stack.tables
            )
            for stack in self._stacks.layout.stacks
        }

    def checkpoint_variables(self) -> dict[str, Any]:
        """See `Engine.checkpoint_variables`."""
        variables = dict(named_variables(self._plan, self._variables))
        if self._rates.updates is not None:
            variables[UPDATES] = self._rates.updates
        return variables

    def updates(self) -> tf.Variable | None:
        """See `Engine.updates`."""
        return self._rates.updates


def arrays_of_variables(spec: TableSpec, table: TableVariables) -> TableArrays:
    """A table of which each array is one variable, and the table one part."""
    parameters = table.parameters
    return TableArrays(
        rows=variable_rows(spec, table.arrays),
        reader=VariableReader(parameters),
        values=lambda: table.arrays,
        shards=lambda: [(parameters.device, parameters.read_value())],
    )


def refuse_tpu_options(engine: str, plan: Plan) -> None:
    """Refuses what only a TPU can do with a table.

    Raises:
      NotImplementedError: If a table has an option that describes how a TPU stores it,
        or an option of its optimizer is known to TPUs only.
    """
    refuse_layouts(engine, plan)
    for table in plan.tables:
        if table.optimizer:
            _refuse_optimizer(engine, f"table {table.name}", table.optimizer)


def refuse_layouts(engine: str, plan: Plan) -> None:
    """Refuses tables with a layout.

    Raises:
      NotImplementedError: If a table has one.
    """
    for table in plan.tables:
        layout = table.config.layout
        if layout is not None:
            raise _tpu_only(engine, f"table {table.name}", "layout", layout)


def _refuse_optimizer(engine: str, where: str, optimizer: Optimizer) -> None:
    for option, carried in optimizer.host_values.items():
        value = getattr(optimizer, option)
        if value != carried:
            raise _tpu_only(engine, where, option, value)


def _tpu_only(
    engine: str, where: str, option: str, value: object
) -> NotImplementedError:
    return NotImplementedError(
        f"The {engine} engine does not support `{option}={value!r}` of {where}: only "
        "TPUs do. Leave it at its default."
    )


def lay_out_whole(plan: Plan, config: SparseCoreEmbeddingConfig) -> Layout:
    """The stacks of tables that are not cut: one shard, no padding."""
    shapes = [_full_shape(spec.config.output_shape) for spec in plan.features]
    return make_layout(
        plan,
        shapes,
        StackingOptions(
            num_devices=1,
            sparse_cores_per_device=1,
            width_multiple=1,
            row_multiple=1,
            disable_table_stacking=config.disable_table_stacking,
            stock_feature_counts=config.stock_feature_counts,
        ),
    )


class StackedBatches:
    """Turns what an engine computes into the records of `layout.csr`, and back."""

    def __init__(self, plan: Plan, layout: Layout | None) -> None:
        """Remembers how many samples each feature is declared to have."""
        self._layout = layout
        self._declared: list[int | None] = []
        for spec in plan.features:
            shape = _full_shape(spec.config.output_shape)
            self._declared.append(None if shape is None else math.prod(shape))

    @property
    def layout(self) -> Layout:
        """The stacks, where the class hands them out."""
        assert self._layout is not None
        return self._layout

    def pack(
        self, stacks: Sequence[Sequence[tf.Tensor]], shapes: Sequence[tf.Tensor]
    ) -> PreprocessedFeatures:
        """The record of one batch.

        Args:
          stacks: For each stack row_pointers, sample ids, token ids, gains.
          shapes: For each feature its output shape, int64 [k].
        """
        samples = [tf.cast(tf.reduce_prod(shape), tf.int32) for shape in shapes]
        return PreprocessedFeatures(
            tables={
                stack.name: PartitionedCsrFormatTensor(
                    *tensors,
                    sample_count=self._count([samples[f] for f in stack.features], k),
                    num_minibatches_per_physical_sparse_core=tf.constant(1, tf.int32),
                )
                for k, (stack, tensors) in enumerate(
                    zip(self.layout.stacks, stacks, strict=True)
                )
            },
            output_shapes=tuple(shapes),
            dropped_ids={
                table.table_name: tf.constant(0, tf.int64)
                for table in self.layout.tables
            },
            sizes={},
        )

    def samples(
        self, tables: Mapping[str, PartitionedCsrFormatTensor]
    ) -> list[tf.Tensor]:
        """For each feature the number of its samples, an int64 scalar."""
        counts: dict[int, tf.Tensor] = {}
        for k, stack in enumerate(self.layout.stacks):
            count = tf.cast(tables[stack.name].sample_count, tf.int64)
            if len(self._undeclared(k)) > 1:
                # As many as there are features, else the op would not run at all.
                count = tf.ensure_shape(count, [len(stack.features)])
                counts.update(zip(stack.features, tf.unstack(count), strict=True))
                continue
            known = {f: self._declared[f] for f in stack.features}
            total = sum(n for n in known.values() if n is not None)
            for feature, n in known.items():
                rest = count - total
                counts[feature] = rest if n is None else tf.constant(n, tf.int64)
        return [counts[f] for f in range(len(self._declared))]

    def _undeclared(self, stack: int) -> list[int]:
        features = self.layout.stacks[stack].features
        return [f for f in features if self._declared[f] is None]

    def _count(self, samples: Sequence[tf.Tensor], stack: int) -> tf.Tensor:
        if len(self._undeclared(stack)) > 1:
            return tf.stack(samples)
        return tf.add_n(samples)


def _full_shape(shape: tuple[int | None, ...] | None) -> tuple[int, ...] | None:
    if shape is None:
        return None
    known = tuple(axis for axis in shape if axis is not None)
    return known if len(known) == len(shape) else None
