"""Tables that the optimizer of the model trains, like any other weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.distribution import Topology
from tpu_embedding.keras.keras_api import keras_api
from tpu_embedding.layout.plan import Plan, require_dtypes
from tpu_embedding.lookup.features import FeatureLookup
from tpu_embedding.tables.initial import table_values
from tpu_embedding.tables.readers import VariableReader
from tpu_embedding.tables.rows import PARAMETERS, MutableTableRows
from tpu_embedding.tables.variables import VariableRows


class KerasTrainedTables:
    """Tables that are trainable weights of the layer.

    Has the methods of `EngineTrainedTables`.
    """

    def __init__(self, plan: Plan, topology: Topology, *, check_numerics: bool) -> None:
        """Checks the plan; `build` creates the tables.

        Raises:
          ValueError: If a table has an optimizer.
          NotImplementedError: Under a TPU strategy; or if a table is not float32: the
            optimizer of the model would round to nearest and lose small steps.
        """
        if topology.tpu is not None:
            raise NotImplementedError(
                "`trainable_tables=True` looks up with TensorFlow ops that TPU "
                "programs do not support. Leave it at False under a TPU strategy, "
                "where each table has its own optimizer, or use "
                "keras.layers.Embedding."
            )
        require_dtypes(plan, ("float32",), "trainable_tables=True")
        for spec in plan.tables:
            if spec.optimizer is not None:
                raise ValueError(
                    "With `trainable_tables=True` the optimizer of the model trains "
                    f"the tables, so table {spec.name} cannot have its own optimizer. "
                    "Pass `optimizer=None` to the layer and leave "
                    "TableConfig.optimizer at None."
                )
        self._plan = plan
        self._check_numerics = check_numerics
        self._variables: dict[str, Any] = {}

    def can_build(self) -> bool:
        """See `EngineTrainedTables.can_build`."""
        return True

    def build(self, layer: Any, input_shapes: Any) -> None:
        """See `EngineTrainedTables.build`."""
        del input_shapes
        for spec in self._plan.tables:
            values = table_values(spec)
            self._variables[spec.name] = keras_api.add_weight(
                layer, values.name, values.shape, values.initializer
            )

    def variables(self) -> dict[str, Any]:
        """See `EngineTrainedTables.variables`."""
        return dict(self._variables)

    def checkpoint_rows(self) -> dict[str, dict[str, MutableTableRows]]:
        """See `RestoresLayouts.checkpoint_rows`."""
        return {
            name: {PARAMETERS: VariableRows(variable.value)}
            for name, variable in self._variables.items()
        }

    def checkpoint_targets(self) -> dict[str, dict[str, MutableTableRows]]:
        """See `RestoresLayouts.checkpoint_targets`."""
        return self.checkpoint_rows()

    def load_checkpoint_rows(self) -> None:
        """See `RestoresLayouts.load_checkpoint_rows`."""

    def core(self) -> Any:
        """See `EngineTrainedTables.core`.

        Raises:
          NotImplementedError: Always.
        """
        raise NotImplementedError(
            "Telemetry counts the updates of the tables' own optimizers. With "
            "`trainable_tables=True` the optimizer of the model trains the tables: "
            "leave it at False."
        )

    def stored(self) -> list[Any]:
        """See `EngineTrainedTables.stored`."""
        return [keras_api.value_of(weight) for weight in self._variables.values()]

    def look_up(
        self, values: Sequence[Any], weights: Sequence[Any], *, trainable: bool
    ) -> list[tf.Tensor]:
        """See `EngineTrainedTables.look_up`."""
        return self.serve(self._plan, values, weights, trainable=trainable)

    def serve(
        self,
        plan: Plan,
        values: Sequence[Any],
        weights: Sequence[Any],
        *,
        trainable: bool,
    ) -> list[tf.Tensor]:
        """See `EngineTrainedTables.serve`."""
        del trainable  # Keras leaves frozen weights out of trainable_variables.
        lookup = FeatureLookup(
            plan,
            {
                spec.index: VariableReader(
                    keras_api.value_of(self._variables[spec.name])
                )
                for spec in plan.tables
            },
            check_numerics=self._check_numerics,
            any_batch_size=plan is not self._plan,
        )
        return lookup(plan.features, values, weights)
