"""Looks up all features of a plan, in tables stored in any form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.inputs import IdBatch, InputKind
from tpu_embedding.layout.output_shapes import (
    InputShapes,
    OutputShapes,
    Shape,
    from_input,
)
from tpu_embedding.layout.plan import FeatureSpec, Plan, refuse_custom
from tpu_embedding.lookup.combine import combine, combine_padded, pad, reader_of
from tpu_embedding.lookup.entries import Selection, select
from tpu_embedding.lookup.feature_structure import read_features
from tpu_embedding.lookup.input_rows import MAX_SAMPLES, FeatureInput
from tpu_embedding.tables.readers import TableReader


@dataclasses.dataclass(frozen=True)
class FeatureLookup:
    """Looks features of a plan up.

    Attributes:
      plan: The features.
      readers: The tables by index; unused tables may be missing.
      max_samples: The largest number of samples that sparse input may claim to have.
      check_numerics: Whether weights must be finite.
      batch_size: The size that static shapes must agree with, or None for any size.
      any_batch_size: Whether features may have another batch size than their
        `output_shape`. Ragged features fill one of several axes.
      positions: The number of positions, by path of the features whose ragged rows are
        samples of several; None if ragged rows do not tell the positions.
      inputs: An object that receives the shapes of inputs, or None.
    """

    plan: Plan
    readers: Mapping[int, TableReader]
    max_samples: int = MAX_SAMPLES
    check_numerics: bool = False
    batch_size: int | None = None
    any_batch_size: bool = False
    positions: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    inputs: InputShapes | None = None

    def __call__(
        self,
        specs: Sequence[FeatureSpec],
        values: Sequence[Any],
        weights: Sequence[Any],
    ) -> list[tf.Tensor]:
        """Returns the activations; errors are those of `serving_embedding_lookup`."""
        activations = []
        for chosen in self._choose(specs, values, weights):
            activation = combine(chosen.selection, self._reader(chosen.spec))
            activation.set_shape((*chosen.shape, self._dim(chosen.spec)))
            declared = chosen.spec.config.output_shape
            fills = declared is not None and len(declared) > 1
            if not (fills and chosen.batch.kind is InputKind.RAGGED):
                static = tuple(chosen.batch.static_shape.as_list())
                rows = from_input(chosen.spec.path, chosen.spec.config, static)
                activation.set_shape((*rows, self._dim(chosen.spec)))
            activations.append(activation)
        return activations

    def in_program(
        self,
        specs: Sequence[FeatureSpec],
        values: Sequence[Any],
        weights: Sequence[Any],
        on_host: Callable[..., Any],
    ) -> list[tf.Tensor]:
        """Looks features up in a TPU program, which cannot fail and has fixed shapes.

        The number of entries of a sample is that of the static shape of a feature. If
        it is unknown, as for ragged features, it is the largest in the batch. `on_host`
        calls a function so that its ops run on the TPU's host.
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
        # Renumber them: these may be only some of the features of the plan.
        numbers = [spec.index for spec in specs]
        specs = [dataclasses.replace(s, index=i) for i, s in enumerate(specs)]
        batches = read_features(specs, values, weights)
        shapes = self._check_shapes(specs, batches)
        for number, batch in zip(numbers, batches, strict=True):
            if self.inputs is not None and batch.kind is not InputKind.RAGGED:
                self.inputs.add(number, tuple(batch.static_shape.as_list()))
        selections = select(
            [
                FeatureInput(
                    spec=spec,
                    table=self.plan.tables[spec.table],
                    batch=batch,
                    declared=shapes.declared(spec.index),
                    check_numerics=self.check_numerics,
                    max_samples=self.max_samples,
                    positions=self._positions(spec, batch),
                )
                for spec, batch in zip(specs, batches, strict=True)
            ]
        )
        return [
            _Chosen(spec, batch, selection, shapes.activation(spec.index))
            for spec, batch, selection in zip(specs, batches, selections, strict=True)
        ]

    def _positions(self, spec: FeatureSpec, batch: IdBatch) -> int:
        """Returns how many positions each ragged row has as one sample, else 0."""
        if batch.kind is not InputKind.RAGGED:
            return 0
        positions = self.positions.get(spec.path, 0)
        if positions is None:
            raise ValueError(
                f"Feature {spec.path} was trained on inputs of several axes, and its "
                "ragged rows do not tell which ids belong together: that takes one id "
                "for each position, and an equal number of positions in each batch. "
                'Pass `signatures=["dense", "sparse"]`, or set '
                "FeatureConfig(output_shape), which ragged rows fill."
            )
        return positions

    def _reader(self, spec: FeatureSpec) -> TableReader:
        config = self.plan.tables[spec.table].config
        return reader_of(self.readers[spec.table], config.quantization_config)

    def _dim(self, spec: FeatureSpec) -> int:
        return self.plan.tables[spec.table].config.dim

    def _check_shapes(
        self, specs: Sequence[FeatureSpec], batches: Sequence[IdBatch]
    ) -> OutputShapes:
        expected, shapes = OutputShapes(specs), OutputShapes(specs)
        if self.batch_size is not None:
            expected.set_batch_size(self.batch_size)
        for spec, batch in zip(specs, batches, strict=True):
            shape = tuple(batch.static_shape.as_list())
            ragged = batch.kind is InputKind.RAGGED
            for declared in (expected, shapes):
                known = spec.config.output_shape or ()
                if self.any_batch_size and not (ragged and len(known) > 1):
                    declared.allow_any_batch_size(spec.index)
                if not self._positions(spec, batch):
                    declared.check_input(spec.index, shape, ragged=ragged)
        return shapes


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """The rows that one feature of a batch looks up.

    Attributes:
      shape: The static output shape, without the embedding axis.
    """

    spec: FeatureSpec
    batch: IdBatch
    selection: Selection
    shape: Shape

    @property
    def most_entries(self) -> int | None:
        """The largest number of entries of a sample, or None if unknown."""
        static = self.batch.static_shape
        if self.spec.config.max_sequence_length or static.rank == 1:
            return 1
        return static[-1]
