"""Private: the features of one replica -> the partitioned CSR of SparseCores.

docs/formats.md draws the format. The work has no state, so it can run inside
tf.data.Dataset.map beside training.
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


@tf.autograph.experimental.do_not_convert  # It would only cost time.
def partition(
    batches: Sequence[IdBatch],
    partitioning: Partitioning,
    splits: Sequence[tf.Tensor] | None = None,
    options: PartitionOptions = _DEFAULTS,
) -> PartitionedBatch:
    """Partitions the features of one replica.

    Args:
      batches: One for each of `partitioning.features`, in their order.
      partitioning: Where features and tables lie.
      splits: For each of `partitioning.tables` an int64 scalar: the `splits` that
        other replicas need. With minibatching all replicas must be cut alike: where
        the OR of their `splits` is more than this batch got, call again with it.
      options: See there.

    Raises:
      tf.errors.InvalidArgumentError: If an input does not fit its feature; if an id is
        invalid and `invalid_ids` is "error"; if a partition exceeds its limits (and
        minibatching is off or does not help); if the id buffer is too small and
        `allow_id_dropping` is off.
      NotImplementedError: If TensorFlow's own ops are to do it and cannot.
      RuntimeError: If nothing on this machine can.
    """
    host_ops = choose(options.device, asked=options.host_ops)
    return _PARTITIONERS[host_ops](batches, partitioning, splits, options)
