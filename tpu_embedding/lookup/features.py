"""Looks up all features of a plan, in tables stored in any form.

It reads the selected rows and sums them by sample.
Gradients of the weights of ids, which no engine computes, come from such a lookup.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record

from tpu_embedding.config import QuantizationConfig
from tpu_embedding.hashing import ids_of_strings
from tpu_embedding.inputs import IdBatch, InputKind
from tpu_embedding.layout.output_shapes import (
    InputShapes,
    OutputShapes,
    Shape,
    from_input,
)
from tpu_embedding.layout.plan import FeatureSpec, Plan, refuse_custom
from tpu_embedding.lookup.entries import Entries, Selection, select
from tpu_embedding.lookup.feature_structure import read_features
from tpu_embedding.lookup.input_rows import MAX_SAMPLES, FeatureInput
from tpu_embedding.tables.readers import TableReader, VariableReader

# A plan, and the reader of each of its tables by index.
Lookup = tuple[Plan, Mapping[int, TableReader]]


@dataclasses.dataclass(frozen=True)
class FeatureLookup:
    """Looks up features of a plan.

    Attributes:
      plan: The features.
      readers: The tables by index; unused tables may be missing.
      max_samples: The largest number of samples that sparse input may claim to have.
      check_numerics: Whether weights must be finite.
      batch_size: The size that static shapes must agree with, or None for any size.
      any_batch_size: Whether features may have another batch size than their
        `output_shape`. Ragged features fill one of several axes.
      positions: The number of positions in each ragged row, by path of the features
        whose rows have several; None if ragged rows do not tell the positions.
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
        """Looks up features in a TPU program, which cannot fail and has fixed shapes.

        The static shape of a feature gives the number of entries of a sample. If it is
        unknown, as for ragged features, the largest number in the batch is used.
        `on_host` calls a function so that its ops run on the TPU's host.
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
        """Returns the number of samples of a ragged row; 0 if a row is one sample."""
        if batch.kind is not InputKind.RAGGED:
            return 0
        positions = self.positions.get(spec.path, 0)
        if positions is None:
            raise ValueError(
                f"Feature {spec.path} was trained on inputs of several axes, but "
                "ragged rows do not show which ids belong together unless each "
                "position has one id and each batch the same number of positions. Pass "
                '`signatures=["dense", "sparse"]`, or set FeatureConfig(output_shape), '
                "which ragged rows fill."
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


def is_watched(value: Any) -> bool:
    """Returns whether a tf.GradientTape watches a dense, sparse or ragged tensor.

    In a tf.function it knows the tapes that are opened there, and which of the
    variables read there other tapes watch. TensorFlow has no public function for this.
    """
    leaves = tf.nest.flatten(value, expand_composites=True)
    floats = [x for x in leaves if isinstance(x, tf.Tensor) and x.dtype.is_floating]
    return bool(floats) and record.should_record_backprop(floats)


def watched(weights: Sequence[Any]) -> list[int]:
    """Returns the features whose weights a tape watches."""
    return [i for i, w in enumerate(weights) if w is not None and is_watched(w)]


def with_weight_gradients(
    activations: Sequence[tf.Tensor],
    features: Sequence[int],
    lookup: Lookup,
    values: Sequence[Any],
    weights: Sequence[Any],
) -> list[tf.Tensor]:
    """Makes the activations' gradient also reach the weights of `features`.

    The gradients come from a second lookup of these features by TensorFlow's ops. It
    reads the rows now, so later updates do not change the gradients. `lookup` is the
    plan, and the reader of each table by index.
    """
    plan, readers = lookup
    specs = [plan.features[i] for i in features]
    found = FeatureLookup(plan, readers)(
        specs, [values[i] for i in features], [weights[i] for i in features]
    )
    results = list(activations)
    for i, of_weights in zip(features, found, strict=True):
        results[i] = _join(results[i], of_weights)
    return results


def with_rows_of_ids(
    features: Sequence[int],
    lookup: Lookup,
    values: Sequence[Any],
    reads: Mapping[int, Callable[[tf.Tensor], tf.Tensor]],
) -> tuple[Lookup, list[Any]]:
    """Returns the arguments of `with_weight_gradients`, without growing tables.

    Static tables replace them; their rows are those of a batch's ids, in order.

    Args:
      features: Indices of the features.
      lookup: As for `with_weight_gradients`.
      values: As for `with_weight_gradients`.
      reads: For each growing table by index, a function that reads ids, int64 [n].
    """
    plan, readers = lookup
    tables, found, own = list(plan.tables), dict(readers), list(values)
    for table, read in reads.items():
        batch = [i for i in features if plan.features[i].table == table]
        if not batch:
            continue
        ids = [_flat_ids(values[i]) for i in batch]
        found[table] = VariableReader(read(tf.concat(ids, 0)))
        config = dataclasses.replace(
            plan.tables[table].config, vocabulary_size=2**31 - 1, string_ids=False
        )
        tables[table] = dataclasses.replace(plan.tables[table], config=config)
        first = tf.constant(0, tf.int64)
        for i, flat in zip(batch, ids, strict=True):
            own[i] = _with_flat_ids(
                values[i], first + tf.range(tf.size(flat, tf.int64))
            )
            first += tf.size(flat, tf.int64)
    return (Plan(tuple(tables), plan.features), found), own


def _flat_ids(value: Any) -> tf.Tensor:
    values = tf.convert_to_tensor(getattr(value, "values", value))
    if values.dtype == tf.string:
        values = ids_of_strings(values)
    return tf.reshape(tf.cast(values, tf.int64), [-1])


def _with_flat_ids(value: Any, ids: tf.Tensor) -> Any:
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensor(value.indices, ids, value.dense_shape)
    if isinstance(value, tf.RaggedTensor):
        return value.with_values(ids)
    return tf.reshape(ids, tf.shape(value))


@tf.custom_gradient
def _join(activation: tf.Tensor, of_weights: tf.Tensor) -> Any:
    """Returns the activation; both arguments get its gradient."""
    shape = tf.shape(of_weights)

    def gradient(upstream: tf.Tensor) -> Any:
        return upstream, tf.reshape(upstream, shape)

    return tf.identity(activation), gradient


@dataclasses.dataclass(frozen=True)
class SimulatedQuantization(TableReader):
    """Quantizes the values of another reader (docs/semantics.md, section 1).

    Gradients pass through unchanged.
    """

    reader: TableReader
    config: QuantizationConfig

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        quantize = tf.grad_pass_through(lambda x: _quantize(x, self.config))
        return quantize(self.reader.read(rows))


def reader_of(
    reader: TableReader, quantization: QuantizationConfig | None
) -> TableReader:
    """Returns the reader, with simulated quantization if the table has one."""
    if quantization is None:
        return reader
    return SimulatedQuantization(reader, quantization)


_add_in_order = tf.math.unsorted_segment_sum
_BLOCK = 4096  # So many values are added one after the other, as in the C++ core.

# Combine rows by sample; a sample without rows gives zeros.
_SEGMENT_OPS = {
    "sum": tf.raw_ops.SparseSegmentSumWithNumSegments,
    "mean": tf.raw_ops.SparseSegmentMeanWithNumSegments,
    "sqrtn": tf.raw_ops.SparseSegmentSqrtNWithNumSegments,
}


def combine(selection: Selection, reader: TableReader) -> tf.Tensor:
    """Combines the rows of a feature in as few ops as possible, float32 [*axes, D]."""
    if selection.weights is not None:
        return look_up(reader, selection.entries())
    if selection.one_each:
        return reader.read(selection.rows)
    data, indices = reader.operand(selection.rows)
    sums = _SEGMENT_OPS[selection.combiner](
        data=data,
        indices=indices,
        segment_ids=selection.unchecked_samples,
        num_segments=selection.num_samples,
    )
    return sums if len(selection.axes) == 1 else _shaped(sums, tf.stack(selection.axes))


def look_up(
    reader: TableReader, entries: Entries, add: Callable[..., tf.Tensor] = _add_in_order
) -> tf.Tensor:
    """Sums the rows of each sample, each row times its gain: float32 [*shape, D]."""
    values = reader.read(entries.rows) * entries.gains[:, tf.newaxis]
    sums = add(values, entries.samples, entries.num_samples)
    return _shaped(sums, entries.shape)


def sum_segments(
    values: tf.Tensor, segments: tf.Tensor, num_segments: tf.Tensor
) -> tf.Tensor:
    """Adds the values, float32 [n, D], of each segment; long segments by blocks."""
    return tf.cond(
        _has_long_segment(segments, num_segments),
        lambda: _add_by_blocks(values, segments, num_segments),
        lambda: _add_in_order(values, segments, num_segments),
    )


def _has_long_segment(segments: tf.Tensor, num_segments: tf.Tensor) -> tf.Tensor:
    counts = tf.math.unsorted_segment_sum(
        tf.ones_like(segments, tf.int32), segments, num_segments
    )
    return tf.reduce_any(counts > _BLOCK)


def _add_by_blocks(
    values: tf.Tensor, segments: tf.Tensor, num_segments: tf.Tensor
) -> tf.Tensor:
    order = tf.argsort(segments, stable=True)
    ordered = tf.gather(segments, order)
    place = tf.range(tf.size(order)) - tf.searchsorted(ordered, ordered)
    begins = tf.equal(place % _BLOCK, 0)  # In graphs of TensorFlow 1 `==` is identity.
    block = tf.cumsum(tf.cast(begins, tf.int32)) - 1
    sums = tf.math.segment_sum(tf.gather(values, order), block)
    owners = tf.boolean_mask(ordered, begins)
    return tf.math.unsorted_segment_sum(sums, owners, num_segments)


def _shaped(sums: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    """Reshapes [samples, D] to [*shape, D]."""
    return tf.reshape(sums, tf.concat([shape, tf.shape(sums, tf.int64)[1:]], 0))


def _quantize(values: tf.Tensor, quantization: QuantizationConfig) -> tf.Tensor:
    """Rounds to the nearest of `num_buckets` levels, in float32 as in the C++ core."""
    lower, upper = np.float32(quantization.lower), np.float32(quantization.upper)
    step = (upper - lower) / np.float32(quantization.num_buckets - 1)
    clipped = tf.minimum(tf.maximum(values, lower), upper)
    return tf.floor((clipped - lower) / step + 0.5) * step + lower


@dataclasses.dataclass(frozen=True)
class Padded:
    """The entries of one feature, padded to the same number for each sample.

      ragged [[7, 2], [], [7]], combiner mean      rows:  [[ 7, 2 ], [-1,-1 ], [ 7,-1 ]]
                                                   gains: [[.5,.5 ], [ 0, 0 ], [ 1, 0 ]]

    It serves TPU programs, whose shapes must not depend on values and which cannot
    fail: the host checks and pads the entries, and the program only gathers and sums.
    For padding it gathers the first row of the sample again, so that a gradient names
    only rows of the batch. A sample without entries reads row 0.

    Attributes:
      rows: The rows of a sample, then -1 for padding, int32 [*output shape, K]; or
        [*output shape] if each sample has exactly one entry, of weight 1.
      gains: The gains, 0 for padding, float32 [*output shape, K]; or None if each
        sample has exactly one entry, of weight 1.
    """

    rows: tf.Tensor
    gains: tf.Tensor | None


def pad(
    selection: Selection, shape: tuple[int | None, ...], most: int | None
) -> Padded:
    """Pads each sample's entries to `most`; None means the most that a sample has."""
    axes = tf.stack(selection.axes)
    if selection.one_each and selection.weights is None:
        rows = tf.reshape(tf.cast(selection.rows, tf.int32), axes)
        return Padded(tf.ensure_shape(rows, shape), None)
    entries = selection.entries()
    count = entries.num_samples
    begins = tf.searchsorted(entries.samples, tf.range(count), out_type=tf.int64)
    index = tf.range(tf.size(entries.rows, tf.int64))
    position = index - tf.gather(begins, entries.samples)
    known = None if most is None else max(most, 1)
    width = tf.constant(known or 1, tf.int64)
    if known is None:  # At least 1, even if there are no entries.
        width = tf.maximum(tf.reduce_max(position) + 1, width)
    places = tf.stack([entries.samples, position], axis=1)

    def spread(values: tf.Tensor) -> tf.Tensor:
        padded = tf.scatter_nd(places, values, tf.stack([count, width]))
        padded = tf.reshape(padded, tf.concat([axes, [width]], 0))
        return tf.ensure_shape(padded, (*shape, known))

    # A scatter fills with zeros, which become -1.
    rows = spread(tf.cast(entries.rows, tf.int32) + 1) - 1
    return Padded(rows, spread(entries.gains))


def combine_padded(padded: Padded, reader: TableReader) -> tf.Tensor:
    """Combines the rows of a feature in a TPU program, float32 [*output shape, D]."""
    if padded.gains is None:
        return reader.read(padded.rows)
    is_entry = padded.rows >= 0
    first = tf.maximum(tf.gather(padded.rows, [0], axis=-1), 0)
    values = reader.read(tf.where(is_entry, padded.rows, first))
    # A NaN in a row must count for an entry of gain 0, but not for padding.
    products = values * tf.expand_dims(padded.gains, -1)
    products = tf.where(tf.expand_dims(is_entry, -1), products, 0.0)
    return tf.reduce_sum(products, axis=-2)
