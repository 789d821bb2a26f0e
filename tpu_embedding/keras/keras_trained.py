"""Tables that the optimizer of the model trains, as any other weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tpu_embedding import distribution
from tpu_embedding.engines.table_dtypes import require_dtypes
from tpu_embedding.initializers import default_initializer
from tpu_embedding.keras import errors
from tpu_embedding.keras.resolve import Resolved
from tpu_embedding.keras.tables import LayerTables
from tpu_embedding.keras.weights import flat_name
from tpu_embedding.lookup.combine import VariableReader
from tpu_embedding.lookup.features import FeatureLookup


class TrainableTables(LayerTables):
    """Tables that are weights of the layer, trained by the optimizer of the model."""

    def __init__(self, resolved: Resolved, *, check_numerics: bool) -> None:
        """Refuses optimizers that would have nothing to do.

        Raises:
          ValueError: If a table has an optimizer.
          NotImplementedError: Under a TPU strategy; or if a table is not float32, which
            the optimizer of the model would round to the nearest and so lose its steps.
        """
        if distribution.is_tpu():
            raise errors.trainable_tables_on_tpu()
        require_dtypes(resolved.plan, ("float32",), "trainable_tables=True")
        for spec in resolved.plan.tables:
            if spec.optimizer is not None:
                raise errors.trainable_tables_optimizer(f"table {spec.name}")
        self._resolved = resolved
        self._check_numerics = check_numerics
        self._variables: dict[str, Any] = {}

    def build(self, layer: keras.layers.Layer) -> None:
        for spec in self._resolved.plan.tables:
            config = spec.config
            self._variables[spec.name] = layer.add_weight(
                name=flat_name(spec.name),
                shape=(config.vocabulary_size, config.dim),
                initializer=config.initializer or default_initializer(config.dim),
                dtype="float32",
                autocast=False,
            )

    def variables(self) -> dict[str, Any]:
        return dict(self._variables)

    def stored(self) -> list[Any]:
        return [variable.value for variable in self._variables.values()]

    def look_up(
        self, values: Sequence[Any], weights: Sequence[Any], *, trainable: bool
    ) -> list[tf.Tensor]:
        return self.serve(self._resolved, values, weights, trainable=trainable)

    def serve(
        self,
        resolved: Resolved,
        values: Sequence[Any],
        weights: Sequence[Any],
        *,
        trainable: bool,
    ) -> list[tf.Tensor]:
        del trainable  # Keras leaves frozen weights out of trainable_variables.
        lookup = FeatureLookup(
            resolved.plan,
            {
                spec.index: VariableReader(self._variables[spec.name].value)
                for spec in resolved.plan.tables
            },
            check_numerics=self._check_numerics,
        )
        return lookup(resolved.plan.features, values, weights)
