"""Chooses the ops that preprocess: those of this package, or TensorFlow's for TPUs.

TensorFlow's are for hosts without this package's library, such as the workers of a
remote TPU. No other module makes this choice.
"""

from __future__ import annotations

import enum
import functools
import os

import tensorflow as tf
from absl import logging
from tensorflow.python.framework import kernels

from tpu_embedding.ops import library

HOST_OPS_VARIABLE = "TPU_EMBEDDING_HOST_OPS"
_STOCK_OP = "ConvertToListOfSparseCoreCooTensors"
_LOCAL_JOBS = (None, "localhost")


class HostOps(enum.Enum):
    """The ops that preprocess."""

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
            needed = f" They are needed: {reason}" if asked is None else ""
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
