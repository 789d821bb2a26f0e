"""Batches in the form that TPUEmbeddingV2 returns to the user: tuples of tensors.

They can pass through tf.function, tf.data and strategy.run like any structure of
tensors. This module does not import TensorFlow.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class PartitionedCsrFormatTensor(NamedTuple):
    """Holds the entries of one stack and one replica.

    An entry is an id with its gain: activation[s] is the sum of gain * row over the
    entries of sample s. The host engine uses CSR without padding: sample s has the
    entries from row_pointers[s] to row_pointers[s + 1], and a token is the id plus
    the first row of its table in the stack.

    Attributes:
      row_pointers: int32 [samples + 1] on the host engine; on SparseCores they are the
        ends of the partitions in the next three tensors (docs/formats.md).
      sorted_sample_ids: int32 [entries], the sample of each entry.
      sorted_token_ids: int32 [entries], the row of each entry in the stack; for a
        growing table int64 [entries], the id of each entry.
      sorted_gains: float32 [entries], the gain of each entry.
      sample_count: int32 scalar, the number of samples of the stack; on the host
        engine int32 [features of the stack] if several have no output_shape.
      num_minibatches_per_physical_sparse_core: int32 scalar; 1 on the host engine.
    """

    row_pointers: Any
    sorted_sample_ids: Any
    sorted_token_ids: Any
    sorted_gains: Any
    sample_count: Any
    num_minibatches_per_physical_sparse_core: Any


class CombinedCsrFormatTensor(NamedTuple):
    """The entries of a table with a CustomCombiner, and the results of its lookup.

    The first six fields are those of PartitionedCsrFormatTensor. Pass the others on
    without reading them: their contents depend on the engine.

    Attributes:
      row_pointers: See PartitionedCsrFormatTensor.
      sorted_sample_ids: See PartitionedCsrFormatTensor.
      sorted_token_ids: See PartitionedCsrFormatTensor.
      sorted_gains: The weights of the ids.
      sample_count: See PartitionedCsrFormatTensor.
      num_minibatches_per_physical_sparse_core: 1.
      sorted_pos_ids: int32 [entries], the position of each entry in its sample.
      valencies: int32 [samples], the number of entries of each sample.
      vectors: float32 [samples, max_valency, width], the rows of the entries;
        max_valency is rounded up to a multiple of 8.
      weights: float32 [num_weights], the combiner's weights at the lookup.
    """

    row_pointers: Any
    sorted_sample_ids: Any
    sorted_token_ids: Any
    sorted_gains: Any
    sample_count: Any
    num_minibatches_per_physical_sparse_core: Any
    sorted_pos_ids: Any
    valencies: Any
    vectors: Any
    weights: Any


class BufferSizes(NamedTuple):
    """The used sizes of the buffers of one stack, as int32 scalars.

    Attributes:
      row_pointers: Used size of `row_pointers`.
      ids: Used size of the tensors of entries.
    """

    row_pointers: Any
    ids: Any


class PreprocessedFeatures(NamedTuple):
    """One replica's batch, ready for the lookup.

    Attributes:
      tables: Entries by stack name.
      output_shapes: For each feature of the flat structure, int64 [k]: the shape of
        the activations without the embedding axis.
      dropped_ids: By table name (not stack name), the number of entries that were
        dropped because the id buffer of a device was full, an int64 scalar. Equal ids
        of one sample are one entry. Zeros on the host engine, which has no such buffer.
      sizes: Used sizes by stack name. Empty on the host engine, whose tensors have
        no unused part.
      sorted_pos_ids: By name of the stacks with a CustomCombiner, the position of each
        entry in its sample, int32. Empty on the host engine.
      marks: int64 [3] on SparseCores: devices, SparseCores of each device, and a
        checksum of tables, features and limits, which identify batches of another
        embedding. () on the host engine.
      inputs: On TPU v2 to v4, the inputs of the op for each feature: (row_splits int32
        [samples + 1] or [0] if each sample has one id, ids int64 [n], weights float32
        [n] or [0] if all are 1); `tables` is empty there. () elsewhere.
      refusal: Under a MultiWorkerMirroredStrategy a string scalar: "", or the reason
        to refuse the batch, which its lookup raises in all processes. () elsewhere.
    """

    tables: dict[str, PartitionedCsrFormatTensor]
    output_shapes: tuple[Any, ...]
    dropped_ids: dict[str, Any]
    sizes: dict[str, BufferSizes]
    sorted_pos_ids: dict[str, Any] = {}  # noqa: RUF012 - nobody writes into it
    marks: Any = ()
    inputs: tuple[Any, ...] = ()
    refusal: Any = ()
