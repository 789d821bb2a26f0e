"""Partitions by TensorFlow's own host ops: slower, for hosts without our library.

  feature -> ConvertToListOfSparseCoreCooTensors: for each SparseCore its entries
  stack and SparseCore -> SortListOfSparseCoreCooTensors: its partitions
  stack -> ConvertToSparseCoreCsrWrappedCooTensor: the padded CSR

The checks of ids, weights and shapes come first, out of ops that every TensorFlow
has. The numbers are those of our op, bit for bit, where float32 can hold the divisors
of mean and sqrtn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.csr import PartitionedCsrFormatTensor
from tpu_embedding.layout.output_shapes import Declared
from tpu_embedding.layout.partitioning import (
    PartitionedFeature,
    PartitionedTable,
    Partitioning,
)
from tpu_embedding.layout.plan import FeatureSpec, TableSpec
from tpu_embedding.lookup.entries import Selection, select
from tpu_embedding.lookup.input_rows import FeatureInput
from tpu_embedding.preprocessing.library_ops import PartitionedBatch, PartitionOptions

_ALIGNMENT = 8  # Each partition begins at a multiple of it.
_WIDTH = 8  # An attribute that the ops do not look at.


class _Stack(NamedTuple):
    """One stacked table; the fields of PartitionedBatch, which says what they are.

    Only `dropped_ids` goes by table already.
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
    """As `preprocessing.partition`.

    Raises:
      NotImplementedError: If minibatches, splits or positions are asked for.
    """
    _refuse(partitioning, splits)
    selections = select(
        [
            _input(feature, batch, options.check_numerics)
            for feature, batch in zip(partitioning.features, batches, strict=True)
        ]
    )
    stacks = {
        table.name: _stack(partitioning, table, selections, padded=options.padded)
        for table in partitioning.tables
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
    for table in partitioning.tables:
        if partitioning.minibatching or splits is not None:
            raise NotImplementedError(
                f"Table {table.name}: TensorFlow's own host ops, which preprocess "
                "here, cannot cut a batch into minibatches by the limits of its table. "
                "Raise max_ids_per_table and max_unique_ids_per_table, or let the "
                "custom-op library preprocess (TPU_EMBEDDING_HOST_OPS=library)."
            )
        if table.positions:
            raise NotImplementedError(
                f"Table {table.name}: TensorFlow's own host ops, which preprocess "
                "here, cannot keep the positions that a CustomCombiner needs. Use "
                "another combiner, or let the custom-op library preprocess "
                "(TPU_EMBEDDING_HOST_OPS=library)."
            )


def _input(
    feature: PartitionedFeature, batch: IdBatch, check_numerics: bool
) -> FeatureInput:
    """What `lookup` takes, with just what it looks at."""
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
        declared=Declared(feature.output_shape, "FeatureConfig.output_shape"),
        check_numerics=check_numerics,
    )


def _stack(
    partitioning: Partitioning,
    table: PartitionedTable,
    selections: Sequence[Selection],
    *,
    padded: bool,
) -> _Stack:
    cores = _sort(
        partitioning,
        table,
        [
            _lists(partitioning, table, partitioning.features[f], selections[f])
            for f in table.features
        ],
    )
    csr = _wrap(partitioning, table, cores)
    sizes = csr.row_pointers_unpadded_size, csr.ids_unpadded_size
    counts = tf.stack([core.id_counts[1:] - core.id_counts[:-1] for core in cores])
    room, required = _buffer(
        counts, partitioning.max_ids_per_chip_per_sample * table.samples
    )
    entries = [csr.sorted_sample_ids, csr.sorted_token_ids, csr.sorted_gains]
    return _Stack(
        csr=PartitionedCsrFormatTensor(
            csr.row_pointers if padded else csr.row_pointers[: sizes[0]],
            *(entries if padded else [column[: sizes[1]] for column in entries]),
            sample_count=table.samples,
            num_minibatches_per_physical_sparse_core=(csr.num_minibatches_per_sc),
        ),
        row_pointers_size=sizes[0],
        ids_size=sizes[1],
        dropped_ids=_dropped(partitioning, table, cores, room),
        required_ids=required,
        max_ids=tf.cast(tf.reduce_max(counts), tf.int64),
        max_unique_ids=tf.reduce_max(tf.stack([_most_unique(core) for core in cores])),
    )


def _sort(
    partitioning: Partitioning, table: PartitionedTable, lists: Sequence[Any]
) -> list[Any]:
    """The partitions of each SparseCore."""
    features = [partitioning.features[f] for f in table.features]
    cores = partitioning.sparse_cores_per_device
    return [
        tf.raw_ops.SortListOfSparseCoreCooTensors(
            row_ids_list=[one.row_ids_list[core] for one in lists],
            col_ids_list=[one.col_ids_list[core] for one in lists],
            gains_list=[one.gains_list[core] for one in lists],
            sample_count_list=[feature.samples // cores for feature in features],
            col_offset_list=[feature.row_offset for feature in features],
            num_replica=partitioning.num_replicas,
            table_vocab_size=table.rows,
            feature_width=_WIDTH,
            num_sc_per_chip=cores,
            max_ids_per_sparse_core=table.max_ids_per_partition,
            max_unique_ids_per_sparse_core=table.max_unique_ids_per_partition,
            table_name=table.name,
        )
        for core in range(cores)
    ]


def _lists(
    partitioning: Partitioning,
    table: PartitionedTable,
    feature: PartitionedFeature,
    selection: Selection,
) -> Any:
    """The entries of one feature, for each SparseCore."""
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
        stacked_table_sample_count=table.samples,
        combiner=feature.combiner,
    )


def _wrap(
    partitioning: Partitioning, table: PartitionedTable, cores: Sequence[Any]
) -> Any:
    return tf.raw_ops.ConvertToSparseCoreCsrWrappedCooTensor(
        sorted_row_ids_list=[core.sorted_row_ids for core in cores],
        sorted_col_ids_list=[core.sorted_col_ids for core in cores],
        sorted_gains_list=[core.sorted_gains for core in cores],
        id_counts_list=[core.id_counts for core in cores],
        splits=tf.constant(0, tf.int64),
        sample_count_per_sc=table.samples // partitioning.sparse_cores_per_device,
        num_replica=partitioning.num_replicas,
        max_minibatches_per_sc=partitioning.max_minibatches,
        max_ids_per_chip_per_sample=partitioning.max_ids_per_chip_per_sample,
        table_vocab_size=table.rows,
        feature_width=_WIDTH,
        table_name=table.name,
        allow_id_dropping=partitioning.allow_id_dropping,
    )


def _most_unique(core: Any) -> tf.Tensor:
    """Different rows in the partition that has most of them; int64 scalar.

    The op for it (GetStatsFromListOfSparseCoreCooTensors) would sort once more.
    """
    begins, ends = core.id_counts[:-1], core.id_counts[1:]
    tokens = core.sorted_col_ids
    size = tf.size(tokens)
    # An entry is new unless the one before it, in its partition, has its token.
    same = tf.concat([[False], tokens[1:] == tokens[:-1]], 0)[:size]
    first = tf.scatter_nd(begins[:, None], ends > begins, [size + 1])[:size]
    new = tf.cast(~same | first, tf.int64)
    sums = tf.concat([tf.zeros([1], tf.int64), tf.cumsum(new)], 0)
    return tf.reduce_max(tf.gather(sums, ends) - tf.gather(sums, begins))


def _buffer(counts: tf.Tensor, capacity: int) -> tuple[tf.Tensor, tf.Tensor]:
    """How many ids of each partition have room, and the size with room for all.

    Args:
      counts: int32 [SparseCores, shards], the entries of each partition.
      capacity: A multiple of 8.

    Returns:
      (int64 [SparseCores, shards], int64 scalar).
    """
    flat = tf.cast(tf.reshape(counts, [-1]), tf.int64)
    padded = -(-flat // _ALIGNMENT) * _ALIGNMENT
    room = tf.maximum(capacity - tf.cumsum(padded, exclusive=True), 0)
    return tf.reshape(room, tf.shape(counts)), tf.reduce_sum(padded)


def _dropped(
    partitioning: Partitioning,
    table: PartitionedTable,
    cores: Sequence[Any],
    room: tf.Tensor,
) -> dict[str, tf.Tensor]:
    """For each table of a stack, by name, how many of its entries have no room."""
    features = [partitioning.features[f] for f in table.features]
    # Within a partition entries are in the order of the stack's tables.
    first_rows = {feature.row_offset: feature.table for feature in features}
    starts = sorted(first_rows)
    total = tf.zeros([len(starts)], tf.int64)
    for core, own_room in zip(cores, tf.unstack(room, len(cores)), strict=True):
        begins, ends = core.id_counts[:-1], core.id_counts[1:]
        size = tf.cast(ends[-1], tf.int64)
        ends = tf.repeat(tf.cast(begins, tf.int64) + own_room, ends - begins)
        tokens = core.sorted_col_ids[:size]
        lost = tokens[tf.range(size) >= ends]
        first_tokens = [start // partitioning.num_shards for start in starts]
        of_table = tf.searchsorted(tf.constant(first_tokens), lost, side="right") - 1
        total += tf.math.bincount(
            of_table,
            minlength=len(starts),
            maxlength=len(starts),
            dtype=tf.int64,
        )
    return {
        first_rows[start]: count
        for start, count in zip(starts, tf.unstack(total, len(starts)), strict=True)
    }
