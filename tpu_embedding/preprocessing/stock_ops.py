"""Partitions batches by TensorFlow's slower host ops, on hosts without the library.

  feature -> ConvertToListOfSparseCoreCooTensors: the entries of each SparseCore
  stack and SparseCore -> SortListOfSparseCoreCooTensors: partitions
  stack -> ConvertToSparseCoreCsrWrappedCooTensor: the padded CSR

Ids, weights and shapes are checked first, with ops that every TensorFlow has. The
results equal those of this package's op bit for bit, unless a divisor of mean or sqrtn
exceeds float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.csr import (
    PartitionedCsrFormatTensor,
    PartitionedFeature,
    PartitionedStack,
    Partitioning,
)
from tpu_embedding.layout.output_shapes import Declared
from tpu_embedding.layout.plan import FeatureSpec, TableSpec
from tpu_embedding.lookup.entries import Selection, select
from tpu_embedding.lookup.input_rows import FeatureInput
from tpu_embedding.preprocessing.library_ops import PartitionedBatch, PartitionOptions

_ALIGNMENT = 8  # Each partition starts at a multiple of it.
_WIDTH = 8  # An attribute that the ops ignore.


class _Stack(NamedTuple):
    """One stack, with the fields of PartitionedBatch.

    Only `dropped_ids` is keyed by table.
    """

    csr: PartitionedCsrFormatTensor
    row_pointers_size: tf.Tensor
    ids_size: tf.Tensor
    dropped_ids: dict[str, tf.Tensor]
    required_ids: tf.Tensor
    max_ids: tf.Tensor
    max_unique_ids: tf.Tensor


def partition(
    batches: Sequence[IdBatch],
    partitioning: Partitioning,
    splits: Sequence[tf.Tensor] | None,
    options: PartitionOptions,
) -> PartitionedBatch:
    """See `preprocessing.partition`.

    Raises:
      NotImplementedError: If minibatches, splits or positions are needed.
    """
    _refuse(partitioning, splits)
    selections = select(
        [
            _input(feature, batch, options.check_numerics)
            for feature, batch in zip(partitioning.features, batches, strict=True)
        ]
    )
    stacks = {
        stack.name: _stack(partitioning, stack, selections, padded=options.padded)
        for stack in partitioning.stacks
    }

    def each(field: str) -> dict[str, Any]:
        return {name: getattr(stack, field) for name, stack in stacks.items()}

    return PartitionedBatch(
        tables=each("csr"),
        row_pointers_sizes=each("row_pointers_size"),
        ids_sizes=each("ids_size"),
        sorted_pos_ids={},
        dropped_ids={
            name: count
            for stack in stacks.values()
            for name, count in stack.dropped_ids.items()
        },
        required_ids=each("required_ids"),
        max_ids=each("max_ids"),
        max_unique_ids=each("max_unique_ids"),
        splits={name: tf.constant(0, tf.int64) for name in stacks},
    )


def _refuse(partitioning: Partitioning, splits: Sequence[tf.Tensor] | None) -> None:
    for stack in partitioning.stacks:
        missing = None
        if partitioning.minibatching or splits is not None:
            missing = "minibatches. Raise the limits of the table"
        elif stack.positions:
            missing = "the positions that a CustomCombiner needs. Use another combiner"
        if missing:
            raise NotImplementedError(
                f"Table {stack.name}: TensorFlow's host ops, which preprocess this "
                f"batch, do not support {missing}, or let the library of this package "
                "preprocess (TPU_EMBEDDING_HOST_OPS=library)."
            )


def _input(
    feature: PartitionedFeature, batch: IdBatch, check_numerics: bool
) -> FeatureInput:
    """Returns the input of `lookup.entries.select`, with the fields that it reads."""
    table = TableConfig(
        feature.vocabulary_size,
        1,
        combiner=feature.combiner,
        invalid_ids=feature.invalid_ids,
    )
    config = FeatureConfig(table, max_sequence_length=feature.sequence_length)
    return FeatureInput(
        spec=FeatureSpec(0, feature.path, config, 0),
        table=TableSpec(0, feature.table, table, key=None, optimizer=None, features=()),
        batch=batch,
        declared=Declared(feature.output_shape, feature.shape_source),
        check_numerics=check_numerics,
    )


def _stack(
    partitioning: Partitioning,
    stack: PartitionedStack,
    selections: Sequence[Selection],
    *,
    padded: bool,
) -> _Stack:
    cores = _sort(
        partitioning,
        stack,
        [
            _lists(partitioning, stack, partitioning.features[f], selections[f])
            for f in stack.features
        ],
    )
    csr = _wrap(partitioning, stack, cores)
    sizes = csr.row_pointers_unpadded_size, csr.ids_unpadded_size
    counts = tf.stack([core.id_counts[1:] - core.id_counts[:-1] for core in cores])
    room, required = _buffer(
        counts, partitioning.max_ids_per_chip_per_sample * stack.samples
    )
    entries = [csr.sorted_sample_ids, csr.sorted_token_ids, csr.sorted_gains]
    return _Stack(
        csr=PartitionedCsrFormatTensor(
            csr.row_pointers if padded else csr.row_pointers[: sizes[0]],
            *(entries if padded else [column[: sizes[1]] for column in entries]),
            sample_count=stack.samples,
            num_minibatches_per_physical_sparse_core=(csr.num_minibatches_per_sc),
        ),
        row_pointers_size=sizes[0],
        ids_size=sizes[1],
        dropped_ids=_dropped(partitioning, stack, cores, room),
        required_ids=required,
        max_ids=tf.cast(tf.reduce_max(counts), tf.int64),
        max_unique_ids=tf.reduce_max(tf.stack([_most_unique(core) for core in cores])),
    )


def _sort(
    partitioning: Partitioning, stack: PartitionedStack, lists: Sequence[Any]
) -> list[Any]:
    """Returns the partitions of each SparseCore."""
    features = [partitioning.features[f] for f in stack.features]
    cores = partitioning.sparse_cores_per_device
    return [
        tf.raw_ops.SortListOfSparseCoreCooTensors(
            row_ids_list=[one.row_ids_list[core] for one in lists],
            col_ids_list=[one.col_ids_list[core] for one in lists],
            gains_list=[one.gains_list[core] for one in lists],
            sample_count_list=[feature.samples // cores for feature in features],
            col_offset_list=[feature.row_offset for feature in features],
            num_replica=partitioning.num_replicas,
            table_vocab_size=stack.rows,
            feature_width=_WIDTH,
            num_sc_per_chip=cores,
            max_ids_per_sparse_core=stack.max_ids_per_partition,
            max_unique_ids_per_sparse_core=stack.max_unique_ids_per_partition,
            table_name=stack.name,
        )
        for core in range(cores)
    ]


def _lists(
    partitioning: Partitioning,
    stack: PartitionedStack,
    feature: PartitionedFeature,
    selection: Selection,
) -> Any:
    """Returns the entries of one feature, for each SparseCore."""
    samples = tf.range(feature.samples + 1, dtype=tf.int64)
    weights = selection.weights
    return tf.raw_ops.ConvertToListOfSparseCoreCooTensors(
        indices_or_row_splits=tf.searchsorted(selection.samples, samples),
        values=tf.cast(selection.rows, tf.int32),
        weights=tf.ones_like(selection.rows, tf.float32)
        if weights is None
        else weights,
        sample_count=feature.samples,
        num_sc_per_chip=partitioning.sparse_cores_per_device,
        row_offset=feature.sample_offset,
        col_offset=feature.row_offset,
        col_shift=feature.rotation,
        num_sc_shards=partitioning.num_shards,
        stacked_table_sample_count=stack.samples,
        combiner=feature.combiner,
    )


def _wrap(
    partitioning: Partitioning, stack: PartitionedStack, cores: Sequence[Any]
) -> Any:
    return tf.raw_ops.ConvertToSparseCoreCsrWrappedCooTensor(
        sorted_row_ids_list=[core.sorted_row_ids for core in cores],
        sorted_col_ids_list=[core.sorted_col_ids for core in cores],
        sorted_gains_list=[core.sorted_gains for core in cores],
        id_counts_list=[core.id_counts for core in cores],
        splits=tf.constant(0, tf.int64),
        sample_count_per_sc=stack.samples // partitioning.sparse_cores_per_device,
        num_replica=partitioning.num_replicas,
        max_minibatches_per_sc=partitioning.max_minibatches,
        max_ids_per_chip_per_sample=partitioning.max_ids_per_chip_per_sample,
        table_vocab_size=stack.rows,
        feature_width=_WIDTH,
        table_name=stack.name,
        allow_id_dropping=partitioning.allow_id_dropping,
    )


def _most_unique(core: Any) -> tf.Tensor:
    """Returns the maximum number of different rows in a partition; int64 scalar.

    TensorFlow's op for it (GetStatsFromListOfSparseCoreCooTensors) would sort again.
    """
    begins, ends = core.id_counts[:-1], core.id_counts[1:]
    tokens = core.sorted_col_ids
    size = tf.size(tokens)
    # An entry is new unless the entry before it, in the same partition, has its row.
    same = tf.concat([[False], tokens[1:] == tokens[:-1]], 0)[:size]
    first = tf.scatter_nd(begins[:, None], ends > begins, [size + 1])[:size]
    new = tf.cast(~same | first, tf.int64)
    sums = tf.concat([tf.zeros([1], tf.int64), tf.cumsum(new)], 0)
    return tf.reduce_max(tf.gather(sums, ends) - tf.gather(sums, begins))


def _buffer(counts: tf.Tensor, capacity: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Divides the id buffer among the partitions.

    `counts` is int32 [SparseCores, shards], the entries of each partition, and
    `capacity` a multiple of 8. Returns the space of each, int64 of that shape, and the
    buffer size that would hold all entries, an int64 scalar.
    """
    flat = tf.cast(tf.reshape(counts, [-1]), tf.int64)
    padded = -(-flat // _ALIGNMENT) * _ALIGNMENT
    room = tf.maximum(capacity - tf.cumsum(padded, exclusive=True), 0)
    return tf.reshape(room, tf.shape(counts)), tf.reduce_sum(padded)


def _dropped(
    partitioning: Partitioning,
    stack: PartitionedStack,
    cores: Sequence[Any],
    room: tf.Tensor,
) -> dict[str, tf.Tensor]:
    """Returns the number of dropped entries of each table of a stack, by table name."""
    features = [partitioning.features[f] for f in stack.features]
    # Within a partition the entries are in the order of the tables in the stack.
    tables = {feature.row_offset: feature.table for feature in features}
    starts = sorted(tables)
    total = tf.zeros([len(starts)], tf.int64)
    for core, own_room in zip(cores, tf.unstack(room, len(cores)), strict=True):
        begins, ends = core.id_counts[:-1], core.id_counts[1:]
        size = tf.cast(ends[-1], tf.int64)
        ends = tf.repeat(tf.cast(begins, tf.int64) + own_room, ends - begins)
        tokens = core.sorted_col_ids[:size]
        lost = tokens[tf.range(size) >= ends]
        local = tf.constant([start // partitioning.num_shards for start in starts])
        of_table = tf.searchsorted(local, lost, side="right") - 1
        total += tf.math.bincount(
            of_table, minlength=len(starts), maxlength=len(starts), dtype=tf.int64
        )
    return {
        tables[start]: count
        for start, count in zip(starts, tf.unstack(total, len(starts)), strict=True)
    }
