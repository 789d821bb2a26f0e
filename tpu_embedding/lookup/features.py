"""Features of a plan, looked up at once in tables of any form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.inputs import IdBatch, InputKind, to_id_batch
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.tables import FeatureSpec, Plan
from tpu_embedding.lookup.combine import TableReader, combine, reader_of
from tpu_embedding.lookup.entries import select
from tpu_embedding.lookup.rows import MOST_SAMPLES, FeatureInput


@dataclasses.dataclass(frozen=True)
class FeatureLookup:
    """Features of a plan, looked up in tables of any form.

    Attributes:
      plan: The features.
      readers: By index of the table; of those that are used.
      most_samples: Sparse input that claims more samples is refused.
      check_numerics: Whether weights must be finite.
      batch_size: The size of a batch, where it is known before the graph runs; an
        exported graph takes any. None: any.
    """

    plan: Plan
    readers: Mapping[int, TableReader]
    most_samples: int = MOST_SAMPLES
    check_numerics: bool = False
    batch_size: int | None = None

    def __call__(
        self,
        specs: Sequence[FeatureSpec],
        values: Sequence[Any],
        weights: Sequence[Any],
    ) -> list[tf.Tensor]:
        """The activation of each feature.

        Args:
          specs: Features of the plan.
          values: Their ids.
          weights: For each weights or None.

        Raises:
          TypeError, ValueError, tf.errors.InvalidArgumentError: If a feature is not
            what its configuration takes, as in `serving_embedding_lookup`.
        """
        # Numbered anew, as these may be some of the features only.
        specs = [dataclasses.replace(s, index=i) for i, s in enumerate(specs)]
        batches = [
            to_id_batch(spec.path, value, weight)
            for spec, value, weight in zip(specs, values, weights, strict=True)
        ]
        shapes = self._check_shapes(specs, batches)
        selections = select(
            [
                FeatureInput(
                    spec=spec,
                    table=self.plan.tables[spec.table],
                    batch=batch,
                    declared=shapes.declared(spec.index),
                    check_numerics=self.check_numerics,
                    most_samples=self.most_samples,
                )
                for spec, batch in zip(specs, batches, strict=True)
            ]
        )
        activations = []
        for spec, selection in zip(specs, selections, strict=True):
            config = self.plan.tables[spec.table].config
            reader = reader_of(self.readers[spec.table], config.quantization_config)
            activation = combine(selection, reader)
            activation.set_shape((*shapes.activation(spec.index), config.dim))
            activations.append(activation)
        return activations

    def _check_shapes(
        self, specs: Sequence[FeatureSpec], batches: Sequence[IdBatch]
    ) -> OutputShapes:
        static = [tuple(batch.static_shape.as_list()) for batch in batches]
        expected, shapes = OutputShapes(specs), OutputShapes(specs)
        if self.batch_size is not None:
            expected.set_batch_size(self.batch_size)
        for spec, batch, shape in zip(specs, batches, static, strict=True):
            ragged = batch.kind is InputKind.RAGGED
            expected.check_input(spec.index, shape, ragged=ragged)
        shapes.remember_ranks(static)
        return shapes
