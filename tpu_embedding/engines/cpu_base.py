"""What the engines share that keep each table as one variable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.config import DTYPES, SparseCoreEmbeddingConfig
from tpu_embedding.distribution import Topology
from tpu_embedding.engines.base import Engine, EngineOptions, TableArrays
from tpu_embedding.engines.rates import Rates
from tpu_embedding.engines.stacked import (
    StackedBatches,
    lay_out_whole,
    refuse_tpu_options,
)
from tpu_embedding.engines.variables import (
    TableVariables,
    create_counter,
    create_variables,
    named_variables,
    variable_rows,
)
from tpu_embedding.layout.plan import UPDATES, Plan
from tpu_embedding.layout.stacking import Layout
from tpu_embedding.layout.table_arrays import PARAMETERS, MutableRows
from tpu_embedding.lookup.combine import VariableReader


class WholeTablesEngine(Engine):
    """Each table and slot is one variable on one device; abstract."""

    table_dtypes = DTYPES

    def __init__(self, options: EngineOptions) -> None:
        """Makes the variables; see `Engine`."""
        super().__init__(options)
        self._pipelined = options.pipelined
        self._num_replicas = options.topology.num_replicas
        self._stacks = StackedBatches(options.plan, options.layout)
        self._variables: list[TableVariables] = create_variables(
            options.plan, self._device
        )
        self._rates = Rates(
            options.plan, lambda: create_counter("updates", self._device)
        )

    @classmethod
    def check_plan(cls, plan: Plan, topology: Topology) -> None:
        """See `Engine.check_plan`."""
        del topology
        refuse_tpu_options(cls.name, plan)

    @classmethod
    def lay_out(
        cls, plan: Plan, topology: Topology, config: SparseCoreEmbeddingConfig
    ) -> Layout:
        """See `Engine.lay_out`."""
        del topology
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

        def arrays(table: TableVariables, rows: dict[str, MutableRows]) -> TableArrays:
            parameters = table.parameters
            return TableArrays(
                rows=rows,
                reader=VariableReader(parameters),
                values=lambda: {PARAMETERS: parameters, **table.slots},
                shards=lambda: [(parameters.device, parameters.read_value())],
            )

        return {
            spec.name: arrays(table, variable_rows(spec, table))
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
