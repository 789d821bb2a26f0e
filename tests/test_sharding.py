"""Ids and their places in shards and stacks, held against TensorFlow's own."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.python.tpu import tpu_embedding_v3_utils as stock

from tpu_embedding.layout.stacking import ModSharding


@st.composite
def shardings(draw: st.DrawFn, most_offset: int = 10**6) -> ModSharding:
    shards = draw(st.integers(1, 20))
    return ModSharding(
        shards,
        rotation=draw(st.integers(0, shards - 1)),
        row_offset=draw(st.integers(0, most_offset)),
    )


@given(sharding=shardings(), size=st.integers(1, 200))
def test_places_are_those_of_tensorflow(sharding: ModSharding, size: int) -> None:
    ids = np.arange(size)
    shards, rows = stock.map_indices_in_shard(
        sharding.num_shards, sharding.row_offset, sharding.rotation, ids
    )
    np.testing.assert_array_equal(sharding.shard_of(ids), shards)
    np.testing.assert_array_equal(sharding.local_row(ids), rows)


@given(
    sharding=shardings(most_offset=5),
    size=st.integers(1, 60),
    others=st.integers(0, 3),
)
def test_tensorflow_reads_what_was_stacked(
    sharding: ModSharding, size: int, others: int
) -> None:
    ids = np.arange(size)
    own = -(-size // sharding.num_shards)
    rows_per_shard = sharding.row_offset + own + others
    stacked = np.full([sharding.num_shards * rows_per_shard, 1], -1.0, np.float32)
    stacked[sharding.stack_row(ids, rows_per_shard), 0] = ids
    assert (stacked >= 0).sum() == size  # No two ids share a row.
    read: Any = stock.unshuffle_from_sc_to_cpu(
        stacked, sharding.num_shards, sharding.row_offset, own, sharding.rotation
    )
    np.testing.assert_array_equal(read[:size, 0], ids)
