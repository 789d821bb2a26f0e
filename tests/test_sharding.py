"""Ids and their places in shards and stacks, held against TensorFlow's own."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.python.tpu import tpu_embedding_v3_utils as stock

from tpu_embedding.layout.partition import Division


@st.composite
def divisions(draw: st.DrawFn, most_offset: int = 10**6) -> Division:
    shards = draw(st.integers(1, 20))
    return Division(
        shards,
        rotation=draw(st.integers(0, shards - 1)),
        offset=draw(st.integers(0, most_offset)),
    )


@given(division=divisions(), size=st.integers(1, 200))
def test_places_are_those_of_tensorflow(division: Division, size: int) -> None:
    ids = np.arange(size)
    shards, rows = stock.map_indices_in_shard(
        division.parts, division.offset, division.rotation, ids
    )
    np.testing.assert_array_equal(division.owner(ids), shards)
    np.testing.assert_array_equal(division.local(ids), rows)


@given(division=divisions(), start=st.integers(0, 100), size=st.integers(0, 100))
def test_runs_have_each_row_once(division: Division, start: int, size: int) -> None:
    rows = np.arange(start, start + size)
    found = []
    for part, first, within in division.runs(start, start + size):
        found.append(rows[within])
        local = np.arange(first, first + len(found[-1]))
        np.testing.assert_array_equal(division.owner(found[-1]), part)
        np.testing.assert_array_equal(division.local(found[-1]), local)
        np.testing.assert_array_equal(division.row(part, local), found[-1])
        own = division.rows(part, start + size)
        assert found[-1].tolist() == [row for row in own if row >= start]
    np.testing.assert_array_equal(np.sort(np.concatenate([[], *found])), rows)


@given(
    division=divisions(most_offset=5),
    size=st.integers(1, 60),
    others=st.integers(0, 3),
)
def test_tensorflow_reads_what_was_stacked(
    division: Division, size: int, others: int
) -> None:
    ids = np.arange(size)
    own = -(-size // division.parts)
    rows_per_shard = division.offset + own + others
    stacked = np.full([division.parts * rows_per_shard, 1], -1.0, np.float32)
    stacked[division.stacked(ids, rows_per_shard), 0] = ids
    assert (stacked >= 0).sum() == size  # No two ids share a row.
    read: Any = stock.unshuffle_from_sc_to_cpu(
        stacked, division.parts, division.offset, own, division.rotation
    )
    np.testing.assert_array_equal(read[:size, 0], ids)
