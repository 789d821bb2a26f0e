"""Tables that the optimizer of the model trains, like any other weight."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.checkpoint.stored import VariableTables
from tpu_embedding.distribution import Topology
from tpu_embedding.keras.conversion import Features
from tpu_embedding.keras.keras_api import keras_api
from tpu_embedding.layout.plan import Plan, require_dtypes
from tpu_embedding.lookup.features import FeatureLookup
from tpu_embedding.tables.initial import table_values
from tpu_embedding.tables.readers import VariableReader
from tpu_embedding.tables.rows import PARAMETERS


class KerasTrainedTables(VariableTables):
    """Tables that are trainable weights of the layer, and their core.

    The class has the methods of `EngineTrainedTables`, which describes them.
    """

    def __init__(
        self, features: Features, topology: Topology, *, check_numerics: bool
    ) -> None:
        """Checks the plan; `build` creates the tables."""
        if topology.tpu is not None:
            raise NotImplementedError(
                "`trainable_tables=True` looks up with TensorFlow ops that TPU "
                "programs do not support. Leave it at False under a TPU strategy, "
                "where each table has its own optimizer, or use "
                "keras.layers.Embedding."
            )
        plan = features.plan
        require_dtypes(plan, ("float32",), "trainable_tables=True")
        for spec in plan.tables:
            if spec.optimizer is not None:
                raise ValueError(
                    "With `trainable_tables=True` the optimizer of the model trains "
                    f"the tables, so table {spec.name} cannot have its own optimizer. "
                    "Pass `optimizer=None` to the layer and leave "
                    "TableConfig.optimizer at None."
                )
        super().__init__(
            plan, features.structure, self._arrays, check_numerics=check_numerics
        )
        self._weights: dict[str, Any] = {}

    @property
    def core(self) -> KerasTrainedTables:
        return self

    def can_build(self) -> bool:
        return True

    def build(self, layer: Any, input_shapes: Any) -> None:
        del input_shapes
        for spec in self.plan.tables:
            values = table_values(spec)
            self._weights[spec.name] = keras_api.add_weight(
                layer, values.name, values.shape, values.initializer
            )

    def variables(self) -> dict[str, Any]:
        return dict(self._weights)

    def parameters(self) -> dict[str, Any]:
        return self.variables()

    def _arrays(self) -> dict[str, dict[str, Any]]:
        return {name: {PARAMETERS: w.value} for name, w in self._weights.items()}

    def start_counting(self, every: int) -> None:
        """Refuses telemetry."""
        del every
        raise NotImplementedError(
            "Telemetry counts the updates of the tables' own optimizers. With "
            "`trainable_tables=True` the optimizer of the model trains the tables: "
            "leave `trainable_tables` at False."
        )

    def stored(self) -> list[Any]:
        return [keras_api.value_of(weight) for weight in self._weights.values()]

    def refusing(self, *, trainable: bool) -> contextlib.AbstractContextManager[None]:
        """See `EngineTrainedTables.refusing`: a look-up here is not collective."""
        del trainable
        return contextlib.nullcontext()

    def look_up(
        self, values: Sequence[Any], weights: Sequence[Any], *, trainable: bool
    ) -> list[tf.Tensor]:
        return self.serve(self.plan, values, weights, trainable=trainable)

    def serve(
        self,
        plan: Plan,
        values: Sequence[Any],
        weights: Sequence[Any],
        *,
        trainable: bool,
    ) -> list[tf.Tensor]:
        del trainable  # Keras leaves frozen weights out of trainable_variables.
        lookup = FeatureLookup(
            plan,
            {
                spec.index: VariableReader(keras_api.value_of(self._weights[spec.name]))
                for spec in plan.tables
            },
            check_numerics=self.check_numerics,
            any_batch_size=plan is not self.plan,
            inputs=self.inputs if plan is self.plan else None,
        )
        return lookup(plan.features, values, weights)
