"""What waits in the queue of a step, as one variant tensor and back."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tpu_embedding.engines.portable.cells import pack, unpack
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.plan import Plan
from tpu_embedding.lookup.entries import Entries


def pack_entries(entries: Sequence[Entries]) -> tf.Tensor:
    """The entries of all features."""
    return pack([x for e in entries for x in (e.rows, e.samples, e.gains, e.shape)])


def unpack_entries(
    packed: tf.Tensor, plan: Plan, shapes: OutputShapes
) -> list[Entries]:
    """What `pack_entries` packed."""
    specs = []
    for feature in plan.features:
        rank = len(shapes.activation(feature.index))
        ids, gains = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None])
        specs += [ids, ids, gains, tf.TensorSpec([rank], tf.int64)]
    tensors = unpack(packed, specs)
    return [Entries(*tensors[i : i + 4]) for i in range(0, len(tensors), 4)]


def unpack_row_sums(packed: tf.Tensor, plan: Plan) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """For each table rows, int64 [n], and the sums of their gradients, [n, D]."""
    specs = []
    for table in plan.tables:
        specs.append(tf.TensorSpec([None], tf.int64))
        specs.append(tf.TensorSpec([None, table.config.dim]))
    tensors = unpack(packed, specs)
    return list(zip(tensors[::2], tensors[1::2], strict=True))
