"""Private: converts the features of one replica to the CSR of SparseCores.

docs/formats.md draws the format. Preprocessing has no state, so it can run inside
tf.data.Dataset.map, in parallel with training.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.partitioning import Partitioning
from tpu_embedding.preprocessing import library_ops, stock_ops
from tpu_embedding.preprocessing.choice import HOST_OPS_VARIABLE, HostOps, choose
from tpu_embedding.preprocessing.library_ops import PartitionedBatch, PartitionOptions

__all__ = [
    "HOST_OPS_VARIABLE",
    "HostOps",
    "PartitionOptions",
    "PartitionedBatch",
    "choose",
    "partition",
]

_DEFAULTS = PartitionOptions()
_PARTITIONERS = {
    HostOps.LIBRARY: library_ops.partition,
    HostOps.STOCK: stock_ops.partition,
}


@tf.autograph.experimental.do_not_convert  # Converting it takes time for nothing.
def partition(
    batches: Sequence[IdBatch],
    partitioning: Partitioning,
    splits: Sequence[tf.Tensor] | None = None,
    options: PartitionOptions = _DEFAULTS,
) -> PartitionedBatch:
    """Partitions the features of one replica.

    Args:
      batches: One for each of `partitioning.features`, in the same order.
      partitioning: The places of features and tables.
      splits: For each of `partitioning.tables` an int64 scalar with the cuts between
        minibatches that the batches of all replicas need: the bitwise OR of the
        `splits` that a call without this argument returns in each replica.
      options: See PartitionOptions.

    Raises:
      tf.errors.InvalidArgumentError: If an input does not fit its feature; if an id is
        invalid and `invalid_ids` is "error"; if a partition exceeds its limits (and
        minibatching is off or does not help); if the id buffer is too small and
        `allow_id_dropping` is off.
      NotImplementedError: If TensorFlow's ops are chosen and lack an option.
      RuntimeError: If the chosen ops are not available.
    """
    host_ops = choose(options.device, asked=options.host_ops)
    return _PARTITIONERS[host_ops](batches, partitioning, splits, options)
