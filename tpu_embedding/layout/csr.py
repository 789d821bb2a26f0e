"""Batches in the form that TPUEmbeddingV2 hands to the user: tuples of tensors.

They pass through tf.function, tf.data and strategy.run as any structure of tensors
does. Nothing here needs TensorFlow.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class PartitionedCsrFormatTensor(NamedTuple):
    """The entries of one stacked table, of one replica.

    An entry is an id with its gain: activation[s] is the sum of gain * row over the
    entries of sample s. On the host engine these are plain CSR without padding: the
    entries of sample s are those from row_pointers[s] to row_pointers[s + 1], and a
    token is the first row of the table in its stack plus the id.

    Attributes:
      row_pointers: int32 [samples + 1] on the host engine; for SparseCores, where each
        partition ends in the three tensors below (docs/formats.md).
      sorted_sample_ids: int32 [entries], the sample of each entry.
      sorted_token_ids: int32 [entries], the row of each entry in the stack.
      sorted_gains: float32 [entries].
      sample_count: int32 scalar, the samples of the stack. On the host engine int32
        [features of the stack], where two of them or more have no output_shape.
      num_minibatches_per_physical_sparse_core: int32 scalar; 1 on the host engine.
    """

    row_pointers: Any
    sorted_sample_ids: Any
    sorted_token_ids: Any
    sorted_gains: Any
    sample_count: Any
    num_minibatches_per_physical_sparse_core: Any


class CombinedCsrFormatTensor(NamedTuple):
    """The entries of a table with a CustomCombiner, and what its lookup found.

    The first six are those of PartitionedCsrFormatTensor. The others are the user's to
    pass on, not to read: what they hold differs from engine to engine.

    Attributes:
      row_pointers: As there, and so on.
      sorted_sample_ids: As there.
      sorted_token_ids: As there.
      sorted_gains: As there; the weights of the ids.
      sample_count: As there.
      num_minibatches_per_physical_sparse_core: As there; 1.
      sorted_pos_ids: int32 [entries], the position of each entry in its sample.
      valencies: int32 [samples], the entries of each sample.
      vectors: float32 [samples, max_valency, width], what they are.
      weights: float32 [num_weights], those of the combiner at the lookup.
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
    """How much of the buffers of one stacked table is set; int32 scalars.

    Attributes:
      row_pointers: Of `row_pointers`.
      ids: Of the tensors of entries.
    """

    row_pointers: Any
    ids: Any


class PreprocessedFeatures(NamedTuple):
    """One replica's batch, ready to be looked up.

    Attributes:
      tables: By name of the stack its entries.
      output_shapes: For each feature, flat, int64 [k]: the shape of its activations
        without the embedding axis.
      dropped_ids: By name of the table, not of its stack, int64 scalar: entries left
        out because the id buffer of a device was full. Ids that a sample has twice
        are one entry. The host engine has no such buffer: zeros.
      sizes: By name of the stack the sizes of the batch. Empty on the host engine,
        whose tensors are of just these sizes.
      sorted_pos_ids: By name of the stacks with a CustomCombiner the position of each
        entry in its sample, int32. Empty on the host engine.
      marks: int64 [3], for SparseCores: devices, SparseCores of each, and a number of
        the tables, features and limits, by which a batch of another embedding is
        known. () on the host engine.
    """

    tables: dict[str, PartitionedCsrFormatTensor]
    output_shapes: tuple[Any, ...]
    dropped_ids: dict[str, Any]
    sizes: dict[str, BufferSizes]
    sorted_pos_ids: dict[str, Any] = {}  # noqa: RUF012 - nobody writes into it
    marks: Any = ()
