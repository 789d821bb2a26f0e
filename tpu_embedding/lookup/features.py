"""Features of a plan, looked up at once in tables of any form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.inputs import IdBatch, InputKind, to_id_batch
from tpu_embedding.layout.output_shapes import OutputShapes, Shape
from tpu_embedding.layout.plan import FeatureSpec, Plan, refuse_custom
from tpu_embedding.lookup.combine import TableReader, combine, reader_of
from tpu_embedding.lookup.entries import Selection, select
from tpu_embedding.lookup.input_rows import MOST_SAMPLES, FeatureInput
from tpu_embedding.lookup.padded import combine_padded, pad


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
        activations = []
        for chosen in self._choose(specs, values, weights):
            activation = combine(chosen.selection, self._reader(chosen.spec))
            activation.set_shape((*chosen.shape, self._dim(chosen.spec)))
            activations.append(activation)
        return activations

    def in_program(
        self,
        specs: Sequence[FeatureSpec],
        values: Sequence[Any],
        weights: Sequence[Any],
        on_host: Callable[..., Any],
    ) -> list[tf.Tensor]:
        """As a call, in a program of a TPU: it cannot fail, and its shapes are fixed.

        The number of entries of a sample is fixed by the static shape of a feature;
        where it has none, as with ragged features, by the largest of the batch.

        Args:
          specs: Features of the plan.
          values: Their ids.
          weights: For each weights or None.
          on_host: Calls a function so that its ops run on the host.

        Raises:
          As a call, but on the host.
        """

        def padded() -> list[Any]:
            return [
                pad(chosen.selection, chosen.shape, chosen.most_entries)
                for chosen in self._choose(specs, values, weights)
            ]

        return [
            combine_padded(entries, self._reader(spec))
            for spec, entries in zip(specs, on_host(padded), strict=True)
        ]

    def _choose(
        self,
        specs: Sequence[FeatureSpec],
        values: Sequence[Any],
        weights: Sequence[Any],
    ) -> list[_Chosen]:
        refuse_custom([self.plan.tables[s.table] for s in specs], optimizers=False)
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
        return [
            _Chosen(spec, batch, selection, shapes.activation(spec.index))
            for spec, batch, selection in zip(specs, batches, selections, strict=True)
        ]

    def _reader(self, spec: FeatureSpec) -> TableReader:
        config = self.plan.tables[spec.table].config
        return reader_of(self.readers[spec.table], config.quantization_config)

    def _dim(self, spec: FeatureSpec) -> int:
        return self.plan.tables[spec.table].config.dim

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


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """What one feature of a batch looks up.

    Attributes:
      shape: What is known of the output shape, without the embedding axis.
    """

    spec: FeatureSpec
    batch: IdBatch
    selection: Selection
    shape: Shape

    @property
    def most_entries(self) -> int | None:
        """The most entries that a sample can have, where that is known."""
        static = self.batch.static_shape
        if self.spec.config.max_sequence_length or static.rank == 1:
            return 1
        return static[-1]
