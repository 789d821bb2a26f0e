"""What the stacks of SparseCores start as."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.engines.base import EngineOptions
from tpu_embedding.engines.initial_values import (
    ShardInfo,
    initial_value,
    initializer_of,
    takes_shard_info,
)
from tpu_embedding.layout.stacked_rows import MutableUnstackedRows
from tpu_embedding.layout.stacking import Stack, TableLayout
from tpu_embedding.layout.table_arrays import MutableRows


def fill_tables(options: EngineOptions, stacks: Sequence[MutableRows]) -> None:
    """Fills the parameters of all stacks, as `SparseCoreEmbeddingConfig` says.

    Args:
      options: Whose plan has the initializers.
      stacks: For each stack of the layout its parameters, all zero.
    """
    topology = options.topology
    assert topology.tpu is not None
    on_host = options.sparse_core.initialize_tables_on_host
    device = topology.device if on_host else topology.tpu.devices[0][0]
    fill = (
        _fill_at_once
        if options.sparse_core.enable_fast_table_initialization
        else _fill_one_by_one
    )
    with tf.device(device):
        fill(options, stacks)


def _fill_one_by_one(options: EngineOptions, stacks: Sequence[MutableRows]) -> None:
    """In the order of the plan, as on the host engine: the same random numbers."""
    places = {
        index: (stack, layout, rows)
        for stack, rows in zip(options.layout.stacks, stacks, strict=True)
        for index, layout in zip(stack.tables, stack.layouts, strict=True)
    }
    for spec in options.plan.tables:
        stack, layout, rows = places[spec.index]
        initializer = initializer_of(spec)
        if takes_shard_info(initializer):
            _fill_by_device(initializer, stack, layout, rows)
            continue
        shape = (spec.config.vocabulary_size, spec.config.dim)
        value = initial_value(
            spec.name,
            shape,
            lambda call=initializer, shape=shape: call(shape, dtype=tf.float32),
        )
        table = MutableUnstackedRows(rows, layout)
        for start, stop in table.slices():
            table.write(start, value[start:stop].numpy())


def _fill_by_device(
    initializer: Callable[..., Any],
    stack: Stack,
    layout: TableLayout,
    rows: MutableRows,
) -> None:
    """Calls the initializer for the part of each device, as TensorFlow's class does.

    The part is told by its first row in a table whose shards lie one after another.
    """
    total, width = layout.unsharded_padded_shape
    cores = layout.num_sparse_cores // layout.num_partitions
    height = total // layout.num_sparse_cores
    for device in range(layout.num_partitions):
        first = (device * cores - layout.sparse_core_shard_rotation) * height % total
        info = ShardInfo((cores * height, width), (first, 0))
        part = initial_value(
            layout.table_name,
            (cores * height, width),
            lambda info=info: initializer(
                (total, width), dtype=tf.float32, shard_info=info
            ),
        )
        for core in range(cores):
            shard = (device * cores + core) * stack.rows_per_shard
            begin = shard + layout.sparse_core_shard_row_offset
            rows.write(begin, part[core * height : (core + 1) * height].numpy())


def _fill_at_once(options: EngineOptions, stacks: Sequence[MutableRows]) -> None:
    """Whole parts by the initializer of the first table of each stack."""
    for stack, rows in zip(options.layout.stacks, stacks, strict=True):
        initializer = initializer_of(options.plan.tables[stack.tables[0]])
        shape = (stack.rows_per_device, stack.width)
        for device in range(stack.num_devices):
            part = initial_value(
                stack.name,
                shape,
                lambda call=initializer, shape=shape: call(shape, dtype=tf.float32),
            )
            rows.write(device * shape[0], part.numpy())
