"""Partitions batches by the op of this package: one op for all tables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tpu_embedding.inputs import IdBatch, op_inputs
from tpu_embedding.layout.csr import PartitionedCsrFormatTensor, Partitioning
from tpu_embedding.ops import library


class PartitionedBatch(NamedTuple):
    """The batch of one replica, in dicts that are keyed by stack name unless noted.

    Attributes:
      tables: The CSR of each stack.
      row_pointers_sizes: int32 scalars, the used size of `row_pointers`.
      ids_sizes: int32 scalars, the used size of the other tensors.
      sorted_pos_ids: int32, parallel to `sorted_sample_ids`: the position of each
        entry in its sample; only for stacks that keep positions.
      dropped_ids: int64 scalars by table name: number of entries that were dropped
        because the id buffer was full.
      required_ids: int64 scalars: size of the id buffer that would hold all entries.
      max_ids: int64 scalars: maximum number of entries in a partition.
      max_unique_ids: int64 scalars: maximum number of different rows in a partition.
      splits: int64 scalars: one bit for each cut between minibatches.
    """

    tables: dict[str, PartitionedCsrFormatTensor]
    row_pointers_sizes: dict[str, tf.Tensor]
    ids_sizes: dict[str, tf.Tensor]
    sorted_pos_ids: dict[str, tf.Tensor]
    dropped_ids: dict[str, tf.Tensor]
    required_ids: dict[str, tf.Tensor]
    max_ids: dict[str, tf.Tensor]
    max_unique_ids: dict[str, tf.Tensor]
    splits: dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class PartitionOptions:
    """Options of one call.

    Attributes:
      padded: Return tensors of the full size of the buffers, which is known while
        tracing; values beyond the used sizes are undefined. Otherwise return only the
        used part.
      check_numerics: Refuse weights that are not finite.
      host_ops: "library", "stock", or None for the default; see `preprocessing.choose`.
      device: Device name of the host that preprocesses, "" for this process. It does
        not place ops; use tf.device for that.
    """

    padded: bool = True
    check_numerics: bool = False
    host_ops: str | None = None
    device: str = ""


def partition(
    batches: Sequence[IdBatch],
    partitioning: Partitioning,
    splits: Sequence[tf.Tensor] | None,
    options: PartitionOptions,
) -> PartitionedBatch:
    """See `preprocessing.partition`."""
    result = library.load().tpu_embedding_partition(
        inputs=op_inputs(batches),
        splits=[0] * len(partitioning.stacks) if splits is None else list(splits),
        num_tables=len(partitioning.stacks),
        num_positions=sum(stack.positions for stack in partitioning.stacks),
        plan=_plan(partitioning, options.padded, options.check_numerics),
        call=library.serialize(
            training=False,
            kinds=[b.kind.value for b in batches],
            has_weights=[b.weights is not None for b in batches],
            has_weight_structure=[b.weight_structure is not None for b in batches],
            declared_shapes=[
                tf.TensorShape(f.output_shape) for f in partitioning.features
            ],
            declared_sources=[f.shape_source for f in partitioning.features],
        ),
    )
    return _read(result, partitioning)


def _read(result: Any, partitioning: Partitioning) -> PartitionedBatch:
    names = [stack.name for stack in partitioning.stacks]

    def by_name(values: Any) -> dict[str, Any]:
        return dict(zip(names, values, strict=True))

    positions = [stack.name for stack in partitioning.stacks if stack.positions]
    tables = [feature.table for feature in partitioning.features]
    return PartitionedBatch(
        tables={
            stack.name: PartitionedCsrFormatTensor(
                row_pointers=result.row_pointers[t],
                sorted_sample_ids=result.sorted_sample_ids[t],
                sorted_token_ids=result.sorted_token_ids[t],
                sorted_gains=result.sorted_gains[t],
                sample_count=stack.samples,
                num_minibatches_per_physical_sparse_core=result.num_minibatches[t],
            )
            for t, stack in enumerate(partitioning.stacks)
        },
        row_pointers_sizes=by_name(result.row_pointers_sizes),
        ids_sizes=by_name(result.ids_sizes),
        sorted_pos_ids=dict(zip(positions, result.sorted_pos_ids, strict=True)),
        dropped_ids=dict(zip(tables, tf.unstack(result.dropped_ids), strict=True)),
        required_ids=by_name(tf.unstack(result.required_ids)),
        max_ids=by_name(tf.unstack(result.max_ids)),
        max_unique_ids=by_name(tf.unstack(result.max_unique_ids)),
        splits=by_name(tf.unstack(result.own_splits)),
    )


@functools.lru_cache(maxsize=64)
def _plan(partitioning: Partitioning, padded: bool, check_numerics: bool) -> bytes:
    """Returns the stacked tables as cc/kernels/partition.cc reads them."""
    return library.serialize(
        padded=padded,
        check_numerics=check_numerics,
        num_sparse_cores=partitioning.sparse_cores_per_device,
        num_replicas=partitioning.num_replicas,
        max_ids_per_chip_per_sample=partitioning.max_ids_per_chip_per_sample,
        allow_id_dropping=partitioning.allow_id_dropping,
        max_minibatches=partitioning.max_minibatches,
        minibatching=partitioning.minibatching,
        features=[
            library.record(
                path=feature.path,
                table_name=feature.table,
                rows=feature.vocabulary_size,
                combiner=feature.combiner,
                invalid_ids=feature.invalid_ids,
                sequence_length=feature.sequence_length,
                samples=feature.samples,
                sample_offset=feature.sample_offset,
                row_offset=feature.row_offset,
                rotation=feature.rotation,
                max_valency=feature.max_valency,
            )
            for feature in partitioning.features
        ],
        tables=[
            library.record(
                name=stack.name,
                rows=stack.rows,
                samples=stack.samples,
                features=list(stack.features),
                max_ids=stack.max_ids_per_partition,
                max_unique_ids=stack.max_unique_ids_per_partition,
                keep_positions=stack.positions,
            )
            for stack in partitioning.stacks
        ],
    )
