"""The calls of TensorFlow's SparseCore ops, as data of the rule says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.config import QuantizationConfig
from tpu_embedding.layout.batches import (
    BufferSizes,
    PartitionedCsrFormatTensor,
    PreprocessedFeatures,
)
from tpu_embedding.layout.partitions import PartitionedTable, Partitioning
from tpu_embedding.optimizers import Optimizer


def copy_to_device(
    batch: PreprocessedFeatures,
) -> dict[str, PartitionedCsrFormatTensor]:
    """The batch in the memory of the TPU, of each buffer what is in use."""
    return {
        name: _copy_table(table, batch.sizes[name])
        for name, table in batch.tables.items()
    }


def _copy_table(
    table: PartitionedCsrFormatTensor, sizes: BufferSizes
) -> PartitionedCsrFormatTensor:
    buffers = list(table[:4])
    copied = tf.raw_ops.TPUCopyWithDynamicShape(
        tensors=buffers,
        unpadded_sizes=[sizes.row_pointers, sizes.ids, sizes.ids, sizes.ids],
    )
    annotated = tf.raw_ops.TPUAnnotateTensorsWithDynamicShape(tensors=copied)
    for tensor, buffer in zip(annotated, buffers, strict=True):
        tensor.set_shape(buffer.shape)
    pointers, sample_ids, token_ids, gains = annotated
    return table._replace(
        row_pointers=pointers,
        sorted_sample_ids=sample_ids,
        sorted_token_ids=token_ids,
        sorted_gains=gains,
    )


def look_up(
    table: PartitionedTable,
    batch: PartitionedCsrFormatTensor,
    parameters: tf.Tensor,
    quantization: QuantizationConfig | None,
) -> tf.Tensor:
    """The activations of one stack, float32 [samples, width].

    Args:
      table: The stack and its limits.
      batch: What to look up.
      parameters: The part of the stack on this device.
      quantization: Of all its tables.
    """
    return tf.raw_ops.XlaSparseDenseMatmulWithStaticBufferSize(
        **_batch_inputs(batch),
        embedding_table=parameters,
        input_size=table.samples,
        quantization_config_low=quantization.lower if quantization else 0.0,
        quantization_config_high=quantization.upper if quantization else 0.0,
        quantization_config_num_buckets=quantization.num_buckets if quantization else 0,
        **_table_attributes(table),
    )


def update(
    table: PartitionedTable,
    optimizer: Optimizer,
    inputs: Mapping[str, Any],
    parameters: tf.Tensor,
    slots: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """What a stack and its slots become; all replicas call it for one update.

    Args:
      table: The stack and its limits.
      optimizer: Of all its tables.
      inputs: What `update_inputs` gave.
      parameters: The part of the stack on this device.
      slots: Likewise, in the order of `Optimizer.slots`.
    """
    op = optimizer.sparse_core_op
    assert op is not None
    updated = getattr(
        tf.raw_ops, f"XlaSparseDenseMatmulGradWith{op.name}AndStaticBufferSize"
    )(
        **inputs,
        embedding_table=parameters,
        **dict(zip(op.slots, slots, strict=True)),
        **{name: getattr(optimizer, field) for name, field in op.attributes.items()},
        **_clip_attributes(optimizer),
        **_table_attributes(table),
    )
    return list(updated) if op.slots else [updated]


def update_inputs(
    batch: PartitionedCsrFormatTensor, gradient: tf.Tensor, rate: tf.Tensor
) -> dict[str, tf.Tensor]:
    """What one update of a stack takes besides the stack, by input of the op.

    Args:
      batch: What was looked up.
      gradient: float32 [samples, width].
      rate: float32 scalar.
    """
    return {
        **_batch_inputs(batch),
        "activation_gradients": gradient,
        "learning_rate": rate,
    }


def update_input_specs(
    partitioning: Partitioning, table: PartitionedTable, width: int
) -> dict[str, tf.TensorSpec]:
    """The shapes and dtypes of `update_inputs`, of buffers of full size."""
    ids = table.samples * partitioning.max_ids_per_chip_per_sample
    pointers = partitioning.num_row_pointers
    return {
        "row_pointers": tf.TensorSpec([pointers], tf.int32),
        "sorted_sample_ids": tf.TensorSpec([ids], tf.int32),
        "sorted_token_ids": tf.TensorSpec([ids], tf.int32),
        "sorted_gains": tf.TensorSpec([ids], tf.float32),
        "num_minibatches_per_physical_sparse_core": tf.TensorSpec([], tf.int32),
        "activation_gradients": tf.TensorSpec([table.samples, width], tf.float32),
        "learning_rate": tf.TensorSpec([], tf.float32),
    }


def _batch_inputs(batch: PartitionedCsrFormatTensor) -> dict[str, tf.Tensor]:
    minibatches = batch.num_minibatches_per_physical_sparse_core
    return {
        "row_pointers": batch.row_pointers,
        "sorted_sample_ids": batch.sorted_sample_ids,
        "sorted_token_ids": batch.sorted_token_ids,
        "sorted_gains": batch.sorted_gains,
        "num_minibatches_per_physical_sparse_core": minibatches,
    }


def _table_attributes(table: PartitionedTable) -> dict[str, Any]:
    return {
        "max_ids_per_sparse_core": table.max_ids_per_partition,
        "max_unique_ids_per_sparse_core": table.max_unique_ids_per_partition,
        "table_name": table.name,
    }


def _clip_attributes(optimizer: Optimizer) -> dict[str, float]:
    limits = {
        "clip_weight_min": optimizer.clip_weight_min,
        "clip_weight_max": optimizer.clip_weight_max,
    }
    return {name: limit for name, limit in limits.items() if limit is not None}
