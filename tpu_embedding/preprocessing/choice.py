"""Whose ops preprocess: ours, or those that TensorFlow brings for TPUs.

No other module decides it. TensorFlow's are for hosts that lack our library, such as
the workers of a remote TPU.
"""

from __future__ import annotations

import enum
import functools
import os

import tensorflow as tf
from absl import logging
from tensorflow.python.framework import kernels

from tpu_embedding.ops import library
from tpu_embedding.preprocessing import errors

HOST_OPS_VARIABLE = "TPU_EMBEDDING_HOST_OPS"
_STOCK_OP = "ConvertToListOfSparseCoreCooTensors"
_LOCAL_JOBS = (None, "localhost")


class HostOps(enum.Enum):
    """Who preprocesses."""

    LIBRARY = "library"
    STOCK = "stock"


def choose(device: str = "", *, asked: str | None = None) -> HostOps:
    """Whose ops preprocess on `device`.

    What is asked for counts first, then the environment variable
    TPU_EMBEDDING_HOST_OPS. If neither says, it is our library, except on another
    machine, which cannot be expected to have it, and where it cannot be loaded here.

    Args:
      device: The host's, "" for this process.
      asked: "library", "stock" or None.

    Raises:
      ValueError: If `asked` or the variable is none of these.
      RuntimeError: If what is asked for, or all there is, cannot run in this process.
    """
    where = "PartitionOptions.host_ops"
    if asked is None and os.environ.get(HOST_OPS_VARIABLE):
        where, asked = HOST_OPS_VARIABLE, os.environ[HOST_OPS_VARIABLE]
    names = [host_ops.value for host_ops in HostOps]
    if asked is not None and asked not in names:
        raise errors.unknown_host_ops(where, asked, names)
    if asked is not None:
        chosen = HostOps(asked)
    elif _is_remote(device) or library.unavailable_reason() is not None:
        chosen = HostOps.STOCK
    else:
        chosen = HostOps.LIBRARY
    _check_runs(chosen, device, automatic=asked is None)
    return chosen


def _check_runs(chosen: HostOps, device: str, *, automatic: bool) -> None:
    reason = library.unavailable_reason()
    if chosen is HostOps.LIBRARY and reason is not None:
        raise errors.no_library(reason)
    if chosen is HostOps.STOCK and not _is_remote(device):
        if not _has_stock_kernels():
            raise errors.no_stock_kernels(reason if automatic else None)
        if automatic:
            _warn(reason)


@functools.cache
def _warn(reason: str | None) -> None:
    logging.warning("TensorFlow's own host ops preprocess for SparseCores: %s", reason)


def _is_remote(device: str) -> bool:
    return tf.DeviceSpec.from_string(device).job not in _LOCAL_JOBS


def _has_stock_kernels() -> bool:
    """Whether this TensorFlow was built for TPUs, or the software TPU is loaded."""
    return bool(kernels.get_registered_kernels_for_op(_STOCK_OP).kernel)
