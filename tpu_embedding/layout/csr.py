"""Batches as CSR: their tensors, and how SparseCores stack and partition them.

TPUEmbeddingV2 returns batches as tuples of tensors. They can pass through tf.function,
tf.data and strategy.run like any structure of tensors.

The tables of one width are *stacked*: the rows of one table follow those of another,
and so do the samples of the features in the stacked batch. `TableLayout.division` says
in which shard a row is stored, and where. A *partition* holds the entries that one
SparseCore fetches from one shard. This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tpu_embedding.config import SparseCoreEmbeddingConfig
from tpu_embedding.layout.plan import FeatureSpec, Plan, require_options
from tpu_embedding.layout.stacking import Layout, Stack, StackingOptions
from tpu_embedding.tpu_generations import CUSTOM_IDS_PER_SAMPLE

# TensorFlow's defaults, for stacks without a limit.
DEFAULT_MAX_IDS_PER_TABLE = 256
DEFAULT_MAX_UNIQUE_IDS_PER_TABLE = 256


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

    On parameter servers `row_pointers` of a batch that was looked up has an attribute
    with what the servers keep for its update. It is no field, because the variants of
    servers must not leave the function, loop or branch.
    """

    tables: dict[str, PartitionedCsrFormatTensor]
    output_shapes: tuple[Any, ...]
    dropped_ids: dict[str, Any]
    sizes: dict[str, BufferSizes]
    sorted_pos_ids: dict[str, Any] = {}  # noqa: RUF012 - nobody writes into it
    marks: Any = ()
    inputs: tuple[Any, ...] = ()
    refusal: Any = ()


@dataclasses.dataclass(frozen=True)
class PartitionedFeature:
    """One feature and its place in a stack.

    An id i is row `row_offset + i // num_shards * num_shards + (i + rotation) %
    num_shards` of the stack.

    Attributes:
      path: Path of the feature in the user's structure, for error messages.
      table: Name of the unstacked table, for error messages.
      vocabulary_size: Valid ids are in [0, vocabulary_size).
      combiner: "sum", "mean" or "sqrtn"; "sum" for a CustomCombiner.
      invalid_ids: Policy for all other ids: "error", "drop" or "mod".
      samples: Samples per replica, a multiple of the SparseCores of a device.
      sample_offset: First sample in the stacked batch, also such a multiple.
      row_offset: First row of the table in the stack, a multiple of the shards.
      rotation: Number of shards by which the table is rotated.
      output_shape: Shape of the activations per replica, without the embedding axis;
        its product is `samples`.
      sequence_length: FeatureConfig.max_sequence_length; 0 for none.
      max_valency: Maximum ids per sample of a CustomCombiner; 0 for no limit.
      shape_source: The source of `output_shape`, for error messages.
    """

    path: str
    table: str
    vocabulary_size: int
    combiner: str
    invalid_ids: str
    samples: int
    sample_offset: int
    row_offset: int
    rotation: int
    output_shape: tuple[int, ...]
    sequence_length: int = 0
    max_valency: int = 0
    # Not part of the checksum: it changes no batch.
    shape_source: str = dataclasses.field(default=FeatureSpec.shape_source, repr=False)


@dataclasses.dataclass(frozen=True)
class PartitionedStack:
    """One stack and the features that look it up.

    Attributes:
      name: Name of the stack.
      rows: Rows with the padding of each table: a multiple of the shards.
      samples: Samples of the stacked batch per replica.
      features: Indices into `Partitioning.features`, in the order of their entries.
      max_ids_per_partition: Maximum entries of one partition.
      max_unique_ids_per_partition: Maximum different rows of one partition.
      positions: Whether to keep the position of each entry in its sample
        (`sorted_pos_ids`), which a CustomCombiner needs.
    """

    name: str
    rows: int
    samples: int
    features: tuple[int, ...]
    max_ids_per_partition: int
    max_unique_ids_per_partition: int
    positions: bool = False


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """All stacks of an embedding and the hardware that they are partitioned for.

    Attributes:
      sparse_cores_per_device: SparseCores of each device.
      num_replicas: Devices that share the tables.
      features: The features in the order of the user's structure.
      stacks: The stacks. Every feature is in one of them.
      max_ids_per_chip_per_sample: Capacity of the per-device id buffer, in ids per
        stacked sample.
      allow_id_dropping: Drop entries that exceed the id buffer instead of failing.
      max_minibatches: Maximum number of minibatches of one batch.
      minibatching: Split a batch that exceeds the limits of a partition instead of
        failing.
    """

    sparse_cores_per_device: int
    num_replicas: int
    features: tuple[PartitionedFeature, ...]
    stacks: tuple[PartitionedStack, ...]
    max_ids_per_chip_per_sample: int = 64
    allow_id_dropping: bool = False
    max_minibatches: int = 64
    minibatching: bool = False

    @property
    def num_shards(self) -> int:
        """The number of shards of each stack: one for each SparseCore."""
        return self.sparse_cores_per_device * self.num_replicas

    @property
    def fingerprint(self) -> tuple[int, int, int]:
        """The devices, the SparseCores of each, and a checksum of everything else."""
        rest = (self.features, self.stacks, self.max_ids_per_chip_per_sample)
        checksum = zlib.crc32(repr(rest).encode())
        return self.num_replicas, self.sparse_cores_per_device, checksum

    @property
    def num_row_pointers(self) -> int:
        """The number of row pointers of a device; a multiple of 8 in each minibatch."""
        padded_shards = -(-self.num_shards // 8) * 8
        return self.sparse_cores_per_device * self.max_minibatches * padded_shards


def stacking_options(
    num_devices: int,
    sparse_cores_per_device: int,
    config: SparseCoreEmbeddingConfig,
    **multiples: int,
) -> StackingOptions:
    """Returns the options for stacking the tables of SparseCores.

    `multiples` are `width_multiple` and `row_multiple`, if the hardware is known.
    """
    return StackingOptions(
        num_devices=num_devices,
        sparse_cores_per_device=sparse_cores_per_device,
        disable_table_stacking=config.disable_table_stacking,
        stock_feature_counts=config.stock_feature_counts,
        shard_loads=config.shard_loads or {},
        **multiples,
    )


def make_partitioning(
    plan: Plan,
    layout: Layout,
    options: StackingOptions,
    config: SparseCoreEmbeddingConfig,
) -> Partitioning:
    """Returns what the preprocessor needs for the batches of a plan.

    `layout` has the output shape of each feature, and was made with `options`.
    """
    for table in plan.tables:
        if config.minibatching and table.config.custom_combiner is not None:
            raise NotImplementedError(
                f"Table {table.name!r}: minibatching is not supported with a "
                "CustomCombiner, because TensorFlow's ops for it take whole batches. "
                "Set SparseCoreEmbeddingConfig.minibatching to False, or use another "
                "combiner."
            )
    names = [stack.name for stack in layout.stacks]
    _check_names("max_ids_per_table", config.max_ids_per_table, names)
    _check_names("max_unique_ids_per_table", config.max_unique_ids_per_table, names)
    limits = [
        _partition_limits(plan, stack, options.sparse_cores_per_device, config)
        for stack in layout.stacks
    ]
    return Partitioning(
        sparse_cores_per_device=options.sparse_cores_per_device,
        num_replicas=options.num_devices,
        features=_features(plan, layout, options.sparse_cores_per_device),
        stacks=tuple(
            PartitionedStack(
                name=stack.name,
                rows=stack.rows,
                samples=stack.samples,
                features=stack.features,
                max_ids_per_partition=max_ids,
                max_unique_ids_per_partition=max_unique_ids,
                positions=plan.tables[stack.tables[0]].config.custom_combiner
                is not None,
            )
            for stack, (max_ids, max_unique_ids) in zip(
                layout.stacks, limits, strict=True
            )
        ),
        max_ids_per_chip_per_sample=config.max_ids_per_chip_per_sample,
        allow_id_dropping=config.allow_id_dropping,
        minibatching=config.minibatching,
    )


def custom_limit(plan: Plan, stack: Stack, sparse_cores_per_device: int) -> int | None:
    """Returns the limit of a partition that the user's functions are compiled with.

    The ops of a CustomOptimizer and of a CustomCombiner have no attributes for limits:
    the TPU's compiler derives one limit, for both ids and distinct ids, from the number
    of samples. Returns None for a stack without such functions.
    """
    spec = plan.tables[stack.tables[0]]
    if spec.function is None:
        return None
    return CUSTOM_IDS_PER_SAMPLE * stack.samples // sparse_cores_per_device


def _partition_limits(
    plan: Plan,
    stack: Stack,
    sparse_cores_per_device: int,
    config: SparseCoreEmbeddingConfig,
) -> tuple[int, int]:
    """Returns the maximum ids and distinct ids of a partition of a stack."""
    compiled = custom_limit(plan, stack, sparse_cores_per_device)
    limits = []
    for argument, default in (
        ("max_ids_per_table", DEFAULT_MAX_IDS_PER_TABLE),
        ("max_unique_ids_per_table", DEFAULT_MAX_UNIQUE_IDS_PER_TABLE),
    ):
        asked = (getattr(config, argument) or {}).get(stack.name)
        if compiled is None:
            limits.append(default if asked is None else asked)
            continue
        if asked is not None and asked > compiled:
            raise ValueError(
                f"SparseCoreEmbeddingConfig.{argument} is {asked} for stack "
                f"{stack.name!r}, but a TPU compiles the functions of its "
                f"CustomOptimizer or CustomCombiner with a limit of {compiled}: "
                f"{CUSTOM_IDS_PER_SAMPLE} for each of the "
                f"{stack.samples // sparse_cores_per_device} samples of a SparseCore. "
                f"Set it to at most {compiled}, or use larger batches."
            )
        limits.append(min(default if asked is None else asked, compiled))
    return limits[0], limits[1]


def check_optimizers(plan: Plan) -> None:
    """Checks that SparseCore ops support the optimizer of each table."""
    for table in plan.tables:
        optimizer = table.optimizer
        if optimizer is None:
            raise ValueError(
                f"Table {table.name!r} has no optimizer, but SparseCores need one. "
                "Pass `optimizer` to the TableConfig or to the embedding. For lookups "
                "alone, create the embedding outside the strategy's scope."
            )
        if optimizer.sparse_core_op is None and not optimizer.is_custom:
            raise NotImplementedError(
                f"Table {table.name!r}: SparseCores have no op for "
                f"{type(optimizer).__name__}. Use SGD, Adagrad, AdagradMomentum, FTRL "
                "or Adam, or the host engine."
            )
        for slot in optimizer.slots:
            if slot.per_row:
                raise NotImplementedError(
                    f"Table {table.name!r}: slot {slot.name!r} of its "
                    f"{type(optimizer).__name__} has one number for each row, which "
                    "the SparseCore ops of TensorFlow 2.20 do not support: they crash "
                    "the process. Set its `slot_dims` to 2 and use one column, or use "
                    "the host engine."
                )
    require_options(plan, "sparse_core")


def _features(
    plan: Plan, layout: Layout, sparse_cores_per_device: int
) -> tuple[PartitionedFeature, ...]:
    features = []
    for spec, shape in zip(plan.features, layout.output_shapes, strict=True):
        assert shape is not None
        table = plan.tables[spec.table]
        samples = layout.samples[spec.index]
        combiner = table.config.custom_combiner
        if samples % sparse_cores_per_device:
            raise ValueError(
                f"Feature {spec.path}: its output_shape has {samples} samples per "
                f"replica, which is not a multiple of the {sparse_cores_per_device} "
                "SparseCores of a device. Choose a batch size per replica that is a "
                f"multiple of {sparse_cores_per_device}."
            )
        features.append(
            PartitionedFeature(
                path=spec.path,
                table=table.name,
                vocabulary_size=table.config.vocabulary_size,
                combiner=table.config.entry_combiner,
                invalid_ids=table.config.invalid_ids,
                samples=samples,
                sample_offset=layout.sample_offsets[spec.index],
                row_offset=layout.row_offsets[spec.index],
                rotation=layout.tables[spec.table].sparse_core_shard_rotation,
                output_shape=shape,
                shape_source=spec.shape_source,
                sequence_length=spec.config.max_sequence_length,
                max_valency=combiner.max_valency if combiner else 0,
            )
        )
    return tuple(features)


def _check_names(
    argument: str, limits: Mapping[str, int] | None, names: Sequence[str]
) -> None:
    unknown = sorted(set(limits or ()) - set(names))
    if unknown:
        raise ValueError(
            f"SparseCoreEmbeddingConfig.{argument} names {', '.join(unknown)}, but the "
            f"stacked tables are {', '.join(names)}. Limits are keyed by the name of "
            'the stack: the names of its tables, sorted and joined by "_".'
        )
