"""Private: converts the features of one replica to the CSR of SparseCores.

docs/formats.md draws the format. Preprocessing has no state, so it can run inside
tf.data.Dataset.map, in parallel with training. The ops are those of this package, or
TensorFlow's for TPUs on hosts without the library, such as the workers of a remote TPU.
`requirements` finds the limits that a batch needs, by partitioning it without limits.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging
from tensorflow.python.framework import kernels

from tpu_embedding import errors
from tpu_embedding.config import SparseCoreEmbeddingConfig
from tpu_embedding.inputs import IdBatch, InputKind
from tpu_embedding.layout.csr import (
    Partitioning,
    make_partitioning,
    stacking_options,
)
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.plan import Plan, make_plan
from tpu_embedding.layout.stacking import make_layout
from tpu_embedding.lookup.feature_structure import FeatureStructure, read_features
from tpu_embedding.ops import library
from tpu_embedding.preprocessing import library_ops, stock_ops
from tpu_embedding.preprocessing.library_ops import PartitionedBatch, PartitionOptions
from tpu_embedding.tf_configs import convert_features, convert_optimizer

__all__ = [
    "HOST_OPS_VARIABLE",
    "Hardware",
    "HostOps",
    "PartitionOptions",
    "PartitionedBatch",
    "SparseCoreRequirements",
    "choose",
    "partition",
    "requirements",
]

HOST_OPS_VARIABLE = "TPU_EMBEDDING_HOST_OPS"
_STOCK_OP = "ConvertToListOfSparseCoreCooTensors"
_LOCAL_JOBS = (None, "localhost")
_NO_LIMIT = 2**31 - 1
# The smallest id buffer for any number of samples. Dropped ids do not matter here.
_SMALLEST_BUFFER = 8


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
      splits: An int64 scalar for each of `partitioning.stacks`, with the cuts between
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


class SparseCoreRequirements(NamedTuple):
    """The smallest limits under which a batch is neither refused nor split.

    Attributes:
      max_ids: The max_ids_per_table by stack name, int32 scalars >= 1.
      max_unique_ids: The max_unique_ids_per_table by stack name, int32 scalars >= 1.
      required_ids: The size of a device's id buffer with its padding, by stack name,
        int32 scalars.
      max_ids_per_chip_per_sample: int32 scalar that gives every stack an id buffer of
        the required size or more.
    """

    max_ids: dict[str, tf.Tensor]
    max_unique_ids: dict[str, tf.Tensor]
    required_ids: dict[str, tf.Tensor]
    max_ids_per_chip_per_sample: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The hardware that a batch is partitioned for.

    Attributes:
      num_devices: Devices that share the tables; TensorFlow's chips.
      sparse_cores_per_device: SparseCores of each device.

    Raises:
      ValueError: If a number is not an int >= 1. The error uses TPUEmbeddingV2's names.
    """

    num_devices: int
    sparse_cores_per_device: int

    def __post_init__(self) -> None:
        for argument, number in (
            ("num_tpu_chips", self.num_devices),
            ("num_sc_per_chip", self.sparse_cores_per_device),
        ):
            errors.check_int(argument, number, 1)


@tf.autograph.experimental.do_not_convert  # Converting it takes time for nothing.
def requirements(
    features: Any,
    feature_config: Any,
    hardware: Hardware,
    optimizer: Any,
    config: SparseCoreEmbeddingConfig,
) -> SparseCoreRequirements:
    """Returns the limits that a replica's batch needs; those of `config` are ignored.

    The other arguments are those of TPUEmbeddingV2; each feature must have an
    output_shape.
    """
    converted = convert_features(feature_config)
    plan = make_plan(*converted, convert_optimizer(optimizer), custom=True)
    partitioning = _unlimited(plan, hardware, config)
    shapes = OutputShapes(plan.features)
    structure = FeatureStructure(feature_config, plan.features)
    values = structure.for_plan(structure.flatten("features", features))
    batches = read_features(plan.features, values, [None] * len(values))
    for spec, batch in zip(plan.features, batches, strict=True):
        shape = tuple(batch.static_shape.as_list())
        ragged = batch.kind is InputKind.RAGGED
        shapes.check_input(spec.index, shape, ragged=ragged)
    found = partition(batches, partitioning, options=PartitionOptions(padded=False))
    return SparseCoreRequirements(
        max_ids=_limits(found.max_ids),
        max_unique_ids=_limits(found.max_unique_ids),
        required_ids=_int32(found.required_ids),
        max_ids_per_chip_per_sample=_per_sample(partitioning, found.required_ids),
    )


def _unlimited(
    plan: Plan, hardware: Hardware, config: SparseCoreEmbeddingConfig
) -> Partitioning:
    options = stacking_options(
        hardware.num_devices, hardware.sparse_cores_per_device, config
    )
    layout = make_layout(plan, OutputShapes(plan.features).full(), options)
    partitioning = make_partitioning(
        plan,
        layout,
        options,
        SparseCoreEmbeddingConfig(
            max_ids_per_chip_per_sample=_SMALLEST_BUFFER, allow_id_dropping=True
        ),
    )
    stacks = [
        dataclasses.replace(
            stack,
            max_ids_per_partition=_NO_LIMIT,
            max_unique_ids_per_partition=_NO_LIMIT,
        )
        for stack in partitioning.stacks
    ]
    return dataclasses.replace(partitioning, stacks=tuple(stacks))


def _limits(most: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns limits for the largest numbers found; no limit is less than 1."""
    return {name: tf.maximum(value, 1) for name, value in _int32(most).items()}


def _int32(values: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {name: tf.cast(value, tf.int32) for name, value in values.items()}


def _per_sample(
    partitioning: Partitioning, required: dict[str, tf.Tensor]
) -> tf.Tensor:
    """Returns ids per sample that make every buffer sufficient, a multiple of 8."""
    per_sample = [-(-required[t.name] // t.samples) for t in partitioning.stacks]
    common = math.gcd(_SMALLEST_BUFFER, *(t.samples for t in partitioning.stacks))
    step = _SMALLEST_BUFFER // common
    most = tf.maximum(tf.reduce_max(tf.stack(per_sample)), 1)
    return tf.cast(-(-most // step) * step, tf.int32)
