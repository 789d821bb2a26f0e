"""Finds the rows that changed by comparing tables that anybody may write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.tables.rows import PARAMETERS, TableRows
from tpu_embedding.tables.table import Table
from tpu_embedding.tables.vocabularies import Changed


class ComparedRows:
    """The rows of static tables that changed for one consumer; see `RowChanges`.

    Nothing has to note an update: of each row it keeps a fingerprint, of 64 bits.
    Two values of a row have the same one with a probability of about 2^-64.
    """

    group = None

    def __init__(self, tables: Callable[[], Mapping[str, Table]]) -> None:
        self._tables = tables
        self.commit(end=True)

    def mark(self, rows: Sequence[Any]) -> None:
        """See `RowChanges.mark`. Changes count from the first call on."""
        if not self._marked:
            self._taken = [_fingerprints(table) for table in self._tables().values()]
            self.commit()
        for marked, some in zip(self._marked, rows, strict=True):
            marked[some] = True

    def take(self) -> list[Changed]:
        """See `RowChanges.take`."""
        tables = list(self._tables().values())
        self._taken = [_fingerprints(table) for table in tables]
        columns = zip(self._taken, self._committed, self._marked, strict=True)
        rows = [np.flatnonzero((now != before) | m) for now, before, m in columns]
        return [
            Changed(own, table.matrix(own, "export_delta"))
            for table, own in zip(tables, rows, strict=True)
        ]

    def matrix(self, table: int, rows: np.ndarray) -> TableRows:
        """See `RowChanges.matrix`."""
        return list(self._tables().values())[table].matrix(rows, "export_delta")

    def commit(self, *, end: bool = False) -> None:
        """See `RowChanges.commit`."""
        if end:
            self._taken: list[np.ndarray] = []
        self._committed = self._taken
        self._marked = [np.zeros(len(each), bool) for each in self._committed]


def _fingerprints(table: Table) -> np.ndarray:
    """Returns a number for the value of each row, int64 [V]."""
    rows = table.rows[PARAMETERS]
    found = np.empty([rows.shape[0]], np.int64)
    for start in range(0, len(found), rows.slice_rows):
        stop = min(start + rows.slice_rows, len(found))
        values = tf.constant(rows.read(start, stop))
        prints = tf.raw_ops.Fingerprint(data=values, method="farmhash64")
        found[start:stop] = prints.numpy().view(np.int64)[:, 0]
    return found
