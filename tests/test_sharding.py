"""Ids and their places, tables and their stacks: there and back again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.python.tpu import tpu_embedding_v3_utils as stock

from tpu_embedding.layout.sharding import ModSharding, StackedTable, Storage

WIDTH = 8


@st.composite
def shardings(draw: st.DrawFn) -> ModSharding:
    devices, cores = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return ModSharding(
        devices,
        cores,
        rotation=draw(st.integers(0, devices * cores - 1)),
        row_offset=draw(st.integers(0, 10**6)),
    )


@given(sharding=shardings(), id_=st.integers(0, 2**40))
def test_an_id_is_found_where_it_was_put(sharding: ModSharding, id_: int) -> None:
    place = sharding.place_of(id_)
    assert 0 <= place.device < sharding.num_devices
    assert 0 <= place.sparse_core < sharding.sparse_cores_per_device
    assert place.row >= sharding.row_offset
    assert sharding.id_of(place) == id_
    token = sharding.token_of(id_)
    shard = place.device * sharding.sparse_cores_per_device + place.sparse_core
    assert (token % sharding.num_shards, token // sharding.num_shards) == (
        shard,
        place.row,
    )


@given(sharding=shardings(), size=st.integers(1, 200))
def test_no_two_ids_share_a_place(sharding: ModSharding, size: int) -> None:
    ids = np.arange(size)
    assert np.unique(sharding.token_of(ids)).size == size
    np.testing.assert_array_equal(sharding.id_of(sharding.place_of(ids)), ids)


@given(sharding=shardings(), size=st.integers(1, 50))
def test_places_are_those_of_tensorflow(sharding: ModSharding, size: int) -> None:
    ids = np.arange(size)
    shards, rows = stock.map_indices_in_shard(
        sharding.num_shards, sharding.row_offset, sharding.rotation, ids
    )
    np.testing.assert_array_equal(sharding.shard_of(ids), shards)
    np.testing.assert_array_equal(sharding.local_row(ids), rows)


@st.composite
def storages(draw: st.DrawFn) -> Storage:
    devices, cores = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    tables, offset = [], 0
    for index in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(1, 40))
        rotation = draw(st.integers(0, devices * cores - 1))
        tables.append(
            StackedTable(
                f"t{index}",
                (rows, draw(st.integers(1, WIDTH))),
                ModSharding(devices, cores, rotation, offset),
            )
        )
        offset += -(-rows // (devices * cores)) + draw(st.integers(0, 2))
    return Storage(tuple(tables), offset, WIDTH, devices, cores)


def self_naming(storage: Storage, per_row: bool) -> dict[str, np.ndarray]:
    """Values that say table, row and column."""
    return {
        table.name: (
            1000 * number
            + np.arange(table.shape[0])[:, np.newaxis]
            + np.arange(1 if per_row else table.shape[1]) / 16
        ).astype(np.float32)
        for number, table in enumerate(storage.tables, 1)
    }


@given(storage=storages(), per_row=st.booleans())
def test_tables_and_slots_come_back_from_the_devices(
    storage: Storage, per_row: bool
) -> None:
    values = self_naming(storage, per_row)
    stacked = storage.stack(values, fill=-1.0)
    assert stacked.shape[0] == storage.rows
    assert (stacked == -1).sum() == stacked.size - sum(v.size for v in values.values())
    shards = storage.shard(stacked)
    assert len(shards) == storage.num_devices
    for table in storage.tables:
        place = table.sharding.place_of(np.arange(table.shape[0]))
        rows = place.sparse_core * storage.rows_per_shard + place.row
        for row, (device, local) in enumerate(zip(place.device, rows, strict=True)):
            assert shards[device][local, 0] == values[table.name][row, 0]
    restored = storage.unstack(storage.unshard(shards))
    assert restored.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(restored[name][:, : value.shape[1]], value)


@given(storage=storages())
def test_tensorflow_reads_what_was_stacked(storage: Storage) -> None:
    values = self_naming(storage, per_row=False)
    stacked = storage.stack(values)
    for table in storage.tables:
        num_shards = table.sharding.num_shards
        read: Any = stock.unshuffle_from_sc_to_cpu(
            np.asarray(stacked),
            num_shards,
            table.sharding.row_offset,
            -(-table.shape[0] // num_shards),
            table.sharding.rotation,
        )
        rows, dim = table.shape
        np.testing.assert_array_equal(read[:rows, :dim], values[table.name])


STORAGE = Storage((StackedTable("a", (5, 3), ModSharding(2, 2)),), 2, WIDTH, 2, 2)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a value for table 'a'; give all"):
        STORAGE.stack({})
    with pytest.raises(ValueError, match=r"shape \(4, 3\), but its layout says \(5, 3"):
        STORAGE.stack({"a": np.zeros([4, 3])})
    text = r"The stack of tables a has shape \(9, 8\), but its layout says \(8, 8\)"
    with pytest.raises(ValueError, match=text):
        STORAGE.unstack(np.zeros([9, 8]))
    with pytest.raises(ValueError, match=text):
        STORAGE.shard(np.zeros([9, 8]))
    with pytest.raises(ValueError, match=r"has shape \(4, 8\)"):
        STORAGE.unshard([np.zeros([4, 8])])
