"""Batches on their way from the host to a TPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tpu_embedding.layout import errors
from tpu_embedding.layout.csr import (
    BufferSizes,
    CombinedCsrFormatTensor,
    PartitionedCsrFormatTensor,
    PreprocessedFeatures,
)
from tpu_embedding.layout.partitions import Partitioning
from tpu_embedding.lookup.graph_checks import Check, require, text


def copy_to_device(
    batch: PreprocessedFeatures, partitioning: Partitioning
) -> dict[str, Any]:
    """The batch in the memory of the TPU, of each buffer what is in use.

    By name of the stack a PartitionedCsrFormatTensor, or for a CustomCombiner a
    CombinedCsrFormatTensor with what is known before the lookup.

    Raises:
      tf.errors.InvalidArgumentError: If the batch was preprocessed for others than
        `partitioning`.
    """
    with tf.control_dependencies(require([_is_own(batch, partitioning)])):
        tables = tf.nest.map_structure(tf.identity, batch.tables)
    return {
        name: _copy_table(table, batch.sizes[name], batch.sorted_pos_ids.get(name))
        for name, table in tables.items()
    }


def _is_own(batch: PreprocessedFeatures, partitioning: Partitioning) -> Check:
    own = partitioning.marks
    marks = tf.ensure_shape(tf.cast(batch.marks, tf.int64), [len(own)])

    def message() -> tf.Tensor:
        other = tf.reduce_any(marks[:2] != own[:2])
        hardware = text(
            "The preprocessed batch was made for ",
            marks[0],
            " devices of ",
            marks[1],
            f" SparseCores each, but here are {own[0]} of {own[1]}. Preprocess it with "
            "this embedding.",
        )
        tables = text(
            "The preprocessed batch was made by an embedding with other tables, "
            "features or limits. Preprocess it with this embedding."
        )
        return tf.where(other, hardware, tables)

    return Check(tf.reduce_all(marks == own), message)


def _copy_table(
    table: PartitionedCsrFormatTensor, sizes: BufferSizes, positions: Any
) -> PartitionedCsrFormatTensor | CombinedCsrFormatTensor:
    buffers = [*table[:4], *([] if positions is None else [positions])]
    entries = len(buffers) - 1
    copied = tf.raw_ops.TPUCopyWithDynamicShape(
        tensors=buffers,
        unpadded_sizes=[sizes.row_pointers, *[sizes.ids] * entries],
    )
    annotated = tf.raw_ops.TPUAnnotateTensorsWithDynamicShape(tensors=copied)
    for tensor, buffer in zip(annotated, buffers, strict=True):
        tensor.set_shape(buffer.shape)
    pointers, sample_ids, token_ids, gains = annotated[:4]
    found = table._replace(
        row_pointers=pointers,
        sorted_sample_ids=sample_ids,
        sorted_token_ids=token_ids,
        sorted_gains=gains,
    )
    if positions is None:
        return found
    return CombinedCsrFormatTensor(*found, annotated[4], None, None, None)


def check_shapes(tables: Mapping[str, Any], partitioning: Partitioning) -> None:
    """Refuses preserved outputs whose buffers are those of other hardware or limits.

    Raises:
      ValueError: It names the stack and both sizes.
    """
    for table in partitioning.tables:
        batch = tables[table.name]
        ids = table.samples * partitioning.max_ids_per_chip_per_sample
        for field, size in (
            ("row_pointers", partitioning.num_row_pointers),
            ("sorted_token_ids", ids),
        ):
            shape = getattr(batch, field).shape
            if not shape.is_compatible_with([size]):
                raise errors.preserved_size(table.name, field, shape, size)
        count = tf.get_static_value(batch.sample_count)
        if count is not None and count != table.samples:
            raise errors.preserved_size(
                table.name, "sample_count", count, table.samples
            )
