"""Tables in several processes, here two threads, and in this one alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tpu_embedding.layout.placement import ALL_PROCESSES, BY_ID, Placement
from tpu_embedding.tables.codes import CodedRows
from tpu_embedding.tables.reach import (
    ALONE,
    InJob,
    MergedOrder,
    MergedRows,
    Reach,
    ReachedRows,
)
from tpu_embedding.tables.rows import ArrayRows
from tpu_embedding.tables.variables import VariableRows

VALUES = np.arange(10, dtype=np.float32).reshape(5, 2)


class Group:
    """A process of two."""

    size = 2

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self._board, self._barrier = rank, board, barrier

    def agree(self, phase: str, call: str = "") -> None:
        del phase, call

    def all_gather(self, phase: str, content: bytes, call: str = "") -> list[bytes]:
        return self.all_to_all(phase, [content] * self.size, call)

    def all_to_all(
        self, phase: str, contents: Sequence[bytes], call: str = ""
    ) -> list[bytes]:
        self._board[self.rank] = contents
        self._barrier.wait()
        received = [sent[self.rank] for sent in self._board]
        self._barrier.wait()
        return received


def rows_of(local: np.ndarray, reach: Reach) -> ReachedRows:
    return ReachedRows("films", 5, VariableRows(tf.Variable(local)), 0, reach)


def in_both(owner: int, call: Callable[[ReachedRows, InJob], Any]) -> list[Any]:
    """What a call returns in each of two processes with parts of a table."""
    board, barrier = [None, None], threading.Barrier(2, timeout=30.0)

    def run(rank: int) -> Any:
        placement = Placement(rank, 2, (owner,))
        local = VALUES if owner == BY_ID else VALUES[list(placement.rows_of(0, 5))]
        reach = InJob(placement, Group(rank, board, barrier))
        # A part without rows is a variable of one row.
        return call(rows_of(local if len(local) else VALUES[:1] * 0.0, reach), reach)

    with futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


@pytest.mark.parametrize("owner", [ALL_PROCESSES, 0, 1])
def test_both_processes_read_and_write_a_whole_table(owner: int) -> None:
    def call(rows: ReachedRows, reach: InJob) -> tuple[np.ndarray, ...]:
        assert rows.variable is None
        assert rows.group is reach.group
        before, received = rows.read(1, 4), rows.read_in(1, 0, 5)
        rows.write(1, -VALUES[1:4])
        return before, received, rows.numpy()

    expected = VALUES.copy()
    expected[1:4] *= -1.0
    results = in_both(owner, call)
    np.testing.assert_array_equal(results[1][1], VALUES)
    for before, _, after in results:
        np.testing.assert_array_equal(before, VALUES[1:4])
        np.testing.assert_array_equal(after, expected)


def test_both_processes_get_the_arrays_of_the_owner() -> None:
    def call(rows: ReachedRows, reach: InJob) -> tuple[bool, list[Any]]:
        local = {"a": np.full([2, 1], reach.rank), "b": np.array(reach.rank + 0.5)}
        return reach.has(0), reach.from_owners(0, [local], "reading")

    (first, arrays), (second, others) = in_both(1, call)
    assert (first, second) == (False, True)
    for (found,) in (arrays, others):
        np.testing.assert_array_equal(found["a"], [[1], [1]])
        assert found["b"] == 1.5


def test_parts_of_a_growing_table_come_by_process() -> None:
    def call(rows: ReachedRows, reach: InJob) -> list[Any]:
        assert reach.has(0)
        return reach.from_owners(0, [{"a": np.full([2], reach.rank)}], "reading")

    for found in in_both(BY_ID, call):
        assert [part["a"].tolist() for part in found] == [[0, 0], [1, 1]]


def test_alone_a_table_is_its_variable() -> None:
    rows = rows_of(VALUES, ALONE)
    rows.write(0, VALUES[3:])
    assert rows.group is None
    np.testing.assert_array_equal(rows.variable[:2], VALUES[3:])
    np.testing.assert_array_equal(rows.read(1, 3), [VALUES[4], VALUES[2]])


@pytest.mark.parametrize("size", [0, 1, 500])
def test_entries_of_parts_are_merged(size: int, rng: np.random.Generator) -> None:
    """Any blocks of them, also with the least and the largest key."""
    keys = np.unique([-(2**63), 2**63 - 1, *rng.integers(-(2**63), 2**63, 500)])
    keys = rng.permutation(keys)[:size]
    parts = [np.sort(part) for part in np.split(keys, [size // 5, size // 2])]
    order = MergedOrder(parts, ALONE, "")
    none = np.zeros(0, np.int64)
    rows = MergedRows(order, "", none, lambda part, cut: parts[part][cut])
    rows.slice_rows = 70
    assert np.array_equal(rows.numpy()[:, 0], np.sort(keys))
    for _ in range(9):
        start, stop = np.sort(rng.integers(0, size + 1, 2)).tolist()
        assert np.array_equal(rows.read(start, stop)[:, 0], np.sort(keys)[start:stop])


def test_short_reads_of_merged_entries_find_few_places() -> None:
    order = MergedOrder([np.arange(1 << 15)], ALONE, "")
    assert order.cuts([0, 1], 1) == [[0], [1]]
    assert len(order._cuts) <= (1 << 12) + 3


@pytest.mark.parametrize(("dim", "size"), [(20, 49_152), (63, 16_384), (200, 5_242)])
def test_slices_of_int8_tables_are_whole_blocks(dim: int, size: int) -> None:
    codes = ArrayRows(np.zeros([1, dim], np.uint8))
    assert CodedRows(codes, ArrayRows(np.zeros([1, 2]))).slice_rows == size
