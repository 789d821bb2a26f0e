"""From a layout to what the preprocessor takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.config import SparseCoreEmbeddingConfig
from tpu_embedding.layout import errors
from tpu_embedding.layout.partitions import (
    PartitionedFeature,
    PartitionedTable,
    Partitioning,
)
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Layout, StackingOptions

# TensorFlow's own, for stacks that no limit is given for.
DEFAULT_MAX_IDS_PER_TABLE = 256
DEFAULT_MAX_UNIQUE_IDS_PER_TABLE = 256


def stacking_options(
    num_devices: int,
    sparse_cores_per_device: int,
    config: SparseCoreEmbeddingConfig,
    **multiples: int,
) -> StackingOptions:
    """How the tables of SparseCores are stacked.

    Args:
      num_devices: That share the tables.
      sparse_cores_per_device: Of each.
      config: What the user said.
      **multiples: `width_multiple` and `row_multiple`, where the hardware is known.
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
    """What the preprocessor needs for the batches of a plan.

    Args:
      plan: The tables and features; each feature has a full `output_shape`.
      layout: Where the tables are, of the same plan.
      options: What the layout was made for.
      config: The limits.

    Raises:
      NotImplementedError: If minibatching is asked for beside a CustomCombiner.
      ValueError: If a limit is given for a stack that does not exist, a feature has
        no output shape, or its samples cannot be divided by the SparseCores.
    """
    names = [stack.name for stack in layout.stacks]
    for table in plan.tables:
        if config.minibatching and table.config.custom_combiner is not None:
            raise errors.combiner_with_minibatching(table.name)
    for argument in ("max_ids_per_table", "max_unique_ids_per_table"):
        _check_names(argument, getattr(config, argument), names)
    ids, unique = config.max_ids_per_table, config.max_unique_ids_per_table
    return Partitioning(
        num_sparse_cores=options.sparse_cores_per_device,
        num_replicas=options.num_devices,
        features=tuple(
            _feature(plan, layout, i, options.sparse_cores_per_device)
            for i in range(len(plan.features))
        ),
        tables=tuple(
            PartitionedTable(
                name=stack.name,
                rows=stack.rows,
                samples=stack.samples,
                features=stack.features,
                max_ids_per_partition=(ids or {}).get(
                    stack.name, DEFAULT_MAX_IDS_PER_TABLE
                ),
                max_unique_ids_per_partition=(unique or {}).get(
                    stack.name, DEFAULT_MAX_UNIQUE_IDS_PER_TABLE
                ),
                positions=_combiner_of(plan, stack.tables[0]) is not None,
            )
            for stack in layout.stacks
        ),
        max_ids_per_chip_per_sample=config.max_ids_per_chip_per_sample,
        allow_id_dropping=config.allow_id_dropping,
        minibatching=config.minibatching,
    )


def refuse_for_sparse_cores(plan: Plan) -> None:
    """Refuses what the SparseCore ops cannot carry, by name.

    Args:
      plan: The tables; their optimizers say what they need.

    Raises:
      NotImplementedError: If a table has such an optimizer or option.
    """
    for table in plan.tables:
        if table.optimizer is None:
            continue
        if table.optimizer.sparse_core_op is None and not table.optimizer.is_custom:
            raise errors.sparse_core_rule(table.name, type(table.optimizer).__name__)
        for option, value in table.optimizer.sparse_core_values.items():
            own = getattr(table.optimizer, option)
            if own != value:
                raise errors.sparse_core_option(table.name, option, own, value)


def require_names_and_optimizers(plan: Plan) -> None:
    """Refuses tables and features that a strategy of SparseCores has no use for.

    Raises:
      ValueError: If a table or feature has no name, or a table no optimizer.
    """
    for feature in plan.features:
        table = plan.tables[feature.table]
        for what, config in (("table", table.config), ("feature", feature.config)):
            if config.name is None:
                raise errors.sparse_core_without_name(feature.path, what)
        if table.optimizer is None:
            raise errors.sparse_core_without_optimizer(table.name)


def full_output_shapes(plan: Plan) -> list[tuple[int, ...]]:
    """The declared output shape of each feature, which SparseCores need.

    Raises:
      ValueError: If a feature has none, or one with an unknown axis.
    """
    shapes = []
    for spec in plan.features:
        shape = spec.config.output_shape
        if spec.config.max_sequence_length:
            raise errors.sparse_core_sequence(
                spec.path, spec.config.max_sequence_length
            )
        if shape is None or None in shape:
            raise errors.output_shape_missing(spec.path, shape)
        shapes.append(tuple(shape))
    return shapes


def _feature(
    plan: Plan, layout: Layout, index: int, sparse_cores: int
) -> PartitionedFeature:
    spec = plan.features[index]
    table = plan.tables[spec.table]
    place = layout.tables[spec.table]
    samples = layout.samples[index]
    combiner = _combiner_of(plan, spec.table)
    if samples % sparse_cores:
        raise errors.samples_not_divisible(spec.path, samples, sparse_cores)
    return PartitionedFeature(
        path=spec.path,
        table=table.name,
        vocabulary_size=table.config.vocabulary_size,
        combiner=table.config.entry_combiner,
        invalid_ids=table.config.invalid_ids,
        samples=samples,
        sample_offset=layout.sample_offsets[index],
        row_offset=layout.first_tokens[index],
        shift=place.sparse_core_shard_rotation,
        output_shape=full_output_shapes(plan)[index],
        sequence_length=spec.config.max_sequence_length,
        max_valency=combiner.max_valency if combiner else 0,
    )


def _combiner_of(plan: Plan, table: int) -> CustomCombiner | None:
    return plan.tables[table].config.custom_combiner


def _check_names(
    argument: str, limits: Mapping[str, int] | None, names: Sequence[str]
) -> None:
    unknown = sorted(set(limits or ()) - set(names))
    if unknown:
        raise errors.limit_of_unknown_stack(argument, unknown, names)
