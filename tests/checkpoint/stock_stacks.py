"""Stacks and their checkpoints as TensorFlow's own code makes them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from checkpoint import models
from tensorflow.core.tpu.kernels import sparse_core_layout_pb2
from tensorflow.python.tpu import (
    _pywrap_sparse_core_layout,
    tpu_embedding_v3_checkpoint_adapter,
    tpu_embedding_v3_utils,
)

from tpu_embedding.layout.partition import TableLayout

_protos: Any = sparse_core_layout_pb2
_stacking: Any = _pywrap_sparse_core_layout

SIZES = {"films": (37, 3), "genres": (5, 8), "users": (70, 6)}


def stock_layouts(devices: int, cores: int) -> list[Any]:
    """What TensorFlow's stacker makes of SIZES."""
    stacker = _stacking.SparseCoreLayoutStacker(
        num_partitions=devices,
        disable_table_stacking=False,
        sparse_cores_per_partition=cores,
    )
    for name, (rows, dim) in SIZES.items():
        # Of one group, but for the users.
        group = "own" if name == "users" else "shared"
        stacker.AddTable(
            table_name=name,
            table_height=rows,
            table_width=dim,
            group=group,
            output_samples=16,
            num_features=1,
        )
    return list(stacker.GetLayouts().tables)


def stock_stack(tables: Sequence[np.ndarray], protos: Sequence[Any]) -> np.ndarray:
    """TensorFlow's own way from plain to sharded."""
    first = protos[0]
    rows = first.total_rows_per_sparse_core_shard * first.num_sparse_cores
    width = first.unsharded_padded_shape[1]
    adapter: Any = tpu_embedding_v3_checkpoint_adapter
    stacked = adapter._shard_from_cpu_to_sc(
        [tf.constant(t) for t in tables], f"{rows} {width} 0,{rows}:0,{width}", protos
    )
    return stacked.numpy()


def by_stack(protos: Sequence[Any]) -> dict[str, list[Any]]:
    stacks: dict[str, list[Any]] = {}
    for proto in sorted(protos, key=lambda p: p.sparse_core_shard_row_offset):
        stacks.setdefault(proto.stacked_table_name, []).append(proto)
    return stacks


def write_as_stock(
    path: pathlib.Path, values: models.Values, protos: Sequence[Any]
) -> str:
    """A checkpoint with the objects of tf.tpu.experimental.embedding.TPUEmbeddingV2."""
    record = _protos.SparseCoreTableLayouts(tables=protos)
    trackable: Any = tf.__internal__.tracking.AutoTrackable()
    trackable._track_trackable(
        tpu_embedding_v3_utils.SparseCoreLayoutsTrackable(
            tf.constant(record.SerializeToString())
        ),
        tpu_embedding_v3_utils.SPARSECORE_LAYOUTS_CHECKPOINT_KEY,
    )
    for stack, members in by_stack(protos).items():
        for array in ("parameters", "accumulators"):
            tables = [values[proto.table_name][array] for proto in members]
            name = stack if array == "parameters" else f"{stack}/{array}"
            trackable._track_trackable(tf.Variable(stock_stack(tables, members)), name)
    return tf.train.Checkpoint(embedding=trackable).write(path)


def layout_of(proto: Any) -> TableLayout:
    values = {f.name: getattr(proto, f.name) for f in dataclasses.fields(TableLayout)}
    for name in ("unsharded_shape", "unsharded_padded_shape"):
        values[name] = tuple(values[name])
    return TableLayout(**values)
