"""Finds the limits that a batch needs, by partitioning it without limits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.config import SparseCoreEmbeddingConfig
from tpu_embedding.inputs import InputKind
from tpu_embedding.layout.csr import (
    Partitioning,
    make_partitioning,
    stacking_options,
)
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.plan import Plan, make_plan
from tpu_embedding.layout.stacking import make_layout
from tpu_embedding.lookup.feature_structure import FeatureStructure, read_features
from tpu_embedding.preprocessing import PartitionOptions, partition
from tpu_embedding.tf_configs import convert_features, convert_optimizer

_NO_LIMIT = 2**31 - 1
# The smallest id buffer for any number of samples. Dropped ids do not matter here.
_SMALLEST_BUFFER = 8


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
    tables = [
        dataclasses.replace(
            table,
            max_ids_per_partition=_NO_LIMIT,
            max_unique_ids_per_partition=_NO_LIMIT,
        )
        for table in partitioning.tables
    ]
    return dataclasses.replace(partitioning, tables=tuple(tables))


def _limits(most: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns limits for the largest numbers found; no limit is less than 1."""
    return {name: tf.maximum(value, 1) for name, value in _int32(most).items()}


def _int32(values: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {name: tf.cast(value, tf.int32) for name, value in values.items()}


def _per_sample(
    partitioning: Partitioning, required: dict[str, tf.Tensor]
) -> tf.Tensor:
    """Returns ids per sample that make every buffer sufficient, a multiple of 8."""
    per_sample = [-(-required[t.name] // t.samples) for t in partitioning.tables]
    common = math.gcd(_SMALLEST_BUFFER, *(t.samples for t in partitioning.tables))
    step = _SMALLEST_BUFFER // common
    most = tf.maximum(tf.reduce_max(tf.stack(per_sample)), 1)
    return tf.cast(-(-most // step) * step, tf.int32)
