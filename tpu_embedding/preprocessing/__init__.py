"""Private: converts the features of one replica to the CSR of SparseCores.

docs/formats.md draws the format. Preprocessing has no state, so it can run inside
tf.data.Dataset.map, in parallel with training. The ops are those of this package, or
TensorFlow's for TPUs on hosts without the library, such as the workers of a remote TPU.
"""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Sequence

import tensorflow as tf
from absl import logging
from tensorflow.python.framework import kernels

from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.csr import Partitioning
from tpu_embedding.ops import library
from tpu_embedding.preprocessing import library_ops, stock_ops
from tpu_embedding.preprocessing.library_ops import PartitionedBatch, PartitionOptions

__all__ = [
    "HOST_OPS_VARIABLE",
    "HostOps",
    "PartitionOptions",
    "PartitionedBatch",
    "choose",
    "partition",
]

HOST_OPS_VARIABLE = "TPU_EMBEDDING_HOST_OPS"
_STOCK_OP = "ConvertToListOfSparseCoreCooTensors"
_LOCAL_JOBS = (None, "localhost")


class HostOps(enum.Enum):
    """The ops that preprocess batches."""

    LIBRARY = "library"
    STOCK = "stock"


def choose(device: str = "", *, asked: str | None = None) -> HostOps:
    """Chooses the ops that preprocess on `device`.

    `asked` has priority, then the environment variable TPU_EMBEDDING_HOST_OPS. By
    default the library of this package preprocesses, except on another machine, which
    may not have it, and where it cannot be loaded.

    Args:
      device: Device name of the host, "" for this process.
      asked: "library", "stock" or None.

    Raises:
      ValueError: If `asked` or the variable has another value.
      RuntimeError: If the chosen ops cannot run in this process.
    """
    source = "PartitionOptions.host_ops"
    if asked is None and os.environ.get(HOST_OPS_VARIABLE):
        source, asked = HOST_OPS_VARIABLE, os.environ[HOST_OPS_VARIABLE]
    names = [host_ops.value for host_ops in HostOps]
    if asked is not None and asked not in names:
        raise ValueError(
            f"{source} chooses the ops that preprocess for SparseCores. It must be "
            f"one of {', '.join(map(repr, names))}, or unset. Received: {asked!r}."
        )
    remote = tf.DeviceSpec.from_string(device).job not in _LOCAL_JOBS
    reason = library.unavailable_reason()
    if asked is not None:
        chosen = HostOps(asked)
    elif remote or reason is not None:
        chosen = HostOps.STOCK
    else:
        chosen = HostOps.LIBRARY
    if chosen is HostOps.LIBRARY and reason is not None:
        raise RuntimeError(f"The library of this package cannot preprocess. {reason}")
    if chosen is HostOps.STOCK and not remote:
        # They are registered if this TensorFlow was built for TPUs, or by the
        # software TPU.
        if not kernels.get_registered_kernels_for_op(_STOCK_OP).kernel:
            needed = (
                f" These ops are needed because the library cannot preprocess: {reason}"
                if asked is None
                else ""
            )
            raise RuntimeError(
                "This TensorFlow has no kernels for its SparseCore host ops, because "
                "it is not built for TPUs. Install tensorflow-tpu, or call "
                "tpu_embedding.testing.library.load() for those of the software TPU."
                f"{needed}"
            )
        if asked is None:
            _warn(reason)
    return chosen


@functools.cache
def _warn(reason: str | None) -> None:
    logging.warning("TensorFlow's host ops preprocess for SparseCores: %s", reason)


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
      batches: A batch for each of `partitioning.features`, in the same order.
      partitioning: The places of features and tables.
      splits: An int64 scalar for each of `partitioning.tables`, with the cuts between
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
