"""Converts batches and gradients between features on the host and a TPU's stacks.

The samples of a replica are divided among its SparseCores: each SparseCore has a block
of the samples of every feature, one feature after another. A stack lists its samples
SparseCore by SparseCore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.layout.csr import (
    BufferSizes,
    CombinedCsrFormatTensor,
    PartitionedCsrFormatTensor,
    PartitionedTable,
    Partitioning,
    PreprocessedFeatures,
)
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Layout
from tpu_embedding.lookup.graph_checks import Check, require, text
from tpu_embedding.lookup.input_rows import finite_gradient

_NUM_CUTS = 63  # Places at which 64 buckets of rows can be cut apart.


class StackedSamples:
    """Converts activations and gradients between features and stacks."""

    def __init__(self, plan: Plan, layout: Layout, sparse_cores: int) -> None:
        """Takes a plan with stacks; the SparseCores of a device divide all samples."""
        self._layout = layout
        self._cores = sparse_cores
        self._dims = plan.dims
        self._shapes: list[Any] = list(layout.output_shapes)

    def split(self, stacks: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
        """Returns the features' activations, [output shape..., dim], from stacks."""
        by_core = [
            tf.reshape(stacks[stack.name], [self._cores, -1, stack.width])
            for stack in self._layout.stacks
        ]
        activations = []
        for feature, stack in enumerate(self._layout.feature_stacks):
            begin = self._layout.sample_offsets[feature] // self._cores
            end = begin + self._layout.samples[feature] // self._cores
            dim = self._dims[feature]
            own = by_core[stack][:, begin:end, :dim]
            activations.append(tf.reshape(own, [*self._shapes[feature], dim]))
        return activations

    def join(self, gradients: Sequence[tf.Tensor | None]) -> dict[str, tf.Tensor]:
        """Joins gradients of features by stack, [samples, width]; None means zeros."""
        joined = {}
        for stack in self._layout.stacks:
            parts = [self._part(gradients[f], f, stack.width) for f in stack.features]
            joined[stack.name] = tf.reshape(
                tf.concat(parts, 1), [stack.samples, stack.width]
            )
        return joined

    def _part(self, gradient: tf.Tensor | None, feature: int, width: int) -> tf.Tensor:
        shape = [self._cores, self._layout.samples[feature] // self._cores]
        if gradient is None:
            return tf.zeros([*shape, width])
        dim = self._dims[feature]
        return tf.pad(
            tf.reshape(gradient, [*shape, dim]), [[0, 0], [0, 0], [0, width - dim]]
        )


def batch_specs(partitioning: Partitioning) -> PreprocessedFeatures:
    """Returns specs of the tensors that `copy_to_device` needs, for full buffers."""
    size = tf.TensorSpec([], tf.int32)

    def entries(table: PartitionedTable, dtype: tf.DType = tf.int32) -> tf.TensorSpec:
        ids = table.samples * partitioning.max_ids_per_chip_per_sample
        return tf.TensorSpec([ids], dtype)

    return PreprocessedFeatures(
        tables={
            table.name: PartitionedCsrFormatTensor(
                row_pointers=tf.TensorSpec([partitioning.num_row_pointers], tf.int32),
                sorted_sample_ids=entries(table),
                sorted_token_ids=entries(table),
                sorted_gains=entries(table, tf.float32),
                sample_count=size,
                num_minibatches_per_physical_sparse_core=size,
            )
            for table in partitioning.tables
        },
        output_shapes=(),
        dropped_ids={},
        sizes={table.name: BufferSizes(size, size) for table in partitioning.tables},
        sorted_pos_ids={t.name: entries(t) for t in partitioning.tables if t.positions},
        marks=tf.TensorSpec([len(partitioning.marks)], tf.int64),
    )


def check_gradients(
    plan: Plan, gradients: Sequence[tf.Tensor | None]
) -> list[tf.Tensor | None]:
    """Returns the same gradients, after checking that they are finite."""
    checks = [
        finite_gradient(spec.path, gradient)
        for spec, gradient in zip(plan.features, gradients, strict=True)
        if gradient is not None
    ]
    with tf.control_dependencies(require(checks)):
        return [None if g is None else tf.identity(g) for g in gradients]


def cuts_to_sum(cuts: tf.Tensor) -> tf.Tensor:
    """Spreads minibatch cuts, the bits of int64 [stacks], over int32 [stacks, cuts].

    TPUs can only sum over replicas, so each bit becomes a number of its own.
    """
    bits = tf.range(_NUM_CUTS, dtype=tf.int64)
    words = tf.broadcast_to(cuts[:, tf.newaxis], [cuts.shape[0], _NUM_CUTS])
    flags = tf.bitwise.bitwise_and(tf.bitwise.right_shift(words, bits), 1)
    return tf.cast(flags, tf.int32)


def cuts_of_sum(total: tf.Tensor) -> tf.Tensor:
    """Returns the cuts of all replicas, from the sum of what `cuts_to_sum` returned."""
    bits = tf.cast(total > 0, tf.int64)
    places = tf.range(_NUM_CUTS, dtype=tf.int64)
    return tf.reduce_sum(tf.bitwise.left_shift(bits, places), 1)


def copy_to_device(
    batch: PreprocessedFeatures, partitioning: Partitioning, whole: bool
) -> dict[str, Any]:
    """Copies the used part of each buffer into the memory of the TPU.

    With `whole` it copies whole buffers. TensorFlow moves the op that copies a part
    from the host to the TPU only if it stands before everything that the TPU computes;
    elsewhere it would stay on the host, which has no kernel for it.

    Returns:
      A PartitionedCsrFormatTensor by stack name; for a CustomCombiner a
      CombinedCsrFormatTensor, without the fields that its lookup adds.
    """
    with tf.control_dependencies(require([_was_made_for(batch, partitioning)])):
        tables = tf.nest.map_structure(tf.identity, batch.tables)
    return {
        name: table
        if whole
        else _copy_table(table, batch.sizes[name], batch.sorted_pos_ids.get(name))
        for name, table in tables.items()
    }


def _was_made_for(batch: PreprocessedFeatures, partitioning: Partitioning) -> Check:
    own = partitioning.marks
    marks = tf.ensure_shape(tf.cast(batch.marks, tf.int64), [len(own)])

    def message() -> tf.Tensor:
        hardware = text(
            "The preprocessed batch was made for ",
            marks[0],
            " devices of ",
            marks[1],
            f" SparseCores each, but this embedding has {own[0]} devices of {own[1]}. "
            "Preprocess it with this embedding.",
        )
        tables = text(
            "The preprocessed batch was made by an embedding with other tables, "
            "features or limits. Preprocess it with this embedding."
        )
        return tf.where(tf.reduce_any(marks[:2] != own[:2]), hardware, tables)

    return Check(tf.reduce_all(marks == own), message)


def _copy_table(
    table: PartitionedCsrFormatTensor, sizes: BufferSizes, positions: Any
) -> PartitionedCsrFormatTensor | CombinedCsrFormatTensor:
    buffers = [*table[:4], *([] if positions is None else [positions])]
    entries = len(buffers) - 1
    copied = tf.raw_ops.TPUCopyWithDynamicShape(
        tensors=buffers, unpadded_sizes=[sizes.row_pointers, *[sizes.ids] * entries]
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


def check_sizes(tables: Mapping[str, Any], partitioning: Partitioning) -> None:
    """Refuses preserved outputs with buffers made for other hardware or limits."""
    for table in partitioning.tables:
        batch = tables[table.name]
        expected = {
            "row_pointers": partitioning.num_row_pointers,
            "sorted_token_ids": table.samples
            * partitioning.max_ids_per_chip_per_sample,
        }
        found: dict[str, Any] = {f: getattr(batch, f).shape for f in expected}
        wrong = [f for f in expected if not found[f].is_compatible_with([expected[f]])]
        count = tf.get_static_value(batch.sample_count)
        if count is not None and count != table.samples:
            wrong.append("sample_count")
            expected["sample_count"], found["sample_count"] = table.samples, count
        if wrong:
            raise ValueError(
                f"Preserved outputs of stacked table {table.name!r}: `{wrong[0]}` has "
                f"size {found[wrong[0]]}, but this embedding has {expected[wrong[0]]}. "
                "Pass the second output of its own embedding_lookup."
            )
