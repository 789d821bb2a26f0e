"""Tables to be exported, read a slice at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.layout.table_arrays import Rows

SLICE_BYTES = 1 << 18  # of float32 values that are converted at once


@dataclasses.dataclass(frozen=True, eq=False)
class GatheredRows(Rows):
    """A variable or tensor [V, D] of the user's, on whatever device."""

    values: Any

    @property
    def shape(self) -> tuple[int, int]:
        rows, dim = self.values.shape
        return rows, dim

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.values.dtype.as_numpy_dtype)

    @property
    def variable(self) -> Any:
        return self.values if isinstance(self.values, tf.Variable) else None

    def read(self, start: int, stop: int) -> np.ndarray:
        # gather reads these rows of a variable, and [start:stop] all of it.
        return tf.gather(self.values, tf.range(start, stop)).numpy()


@dataclasses.dataclass(frozen=True)
class Source:
    """A table to be exported.

    Attributes:
      name: The table's, for messages.
      rows: Its values.
    """

    name: str
    rows: Rows

    @property
    def shape(self) -> tuple[int, int]:
        """(V, D)."""
        return self.rows.shape

    @property
    def variable(self) -> Any:
        """The one float32 variable that is the table, or None."""
        return self.rows.variable if self.rows.dtype == np.float32 else None

    def slices(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (first row, float32 rows) for the rows [start, stop)."""
        step = max(1, SLICE_BYTES // (4 * self.shape[1]))
        for begin in range(start, stop, step):
            rows = self.rows.read(begin, min(begin + step, stop))
            yield begin, rows.astype(np.float32, copy=False)
