"""Matrices of any size, read and written by ranges of rows.

What stores one, a variable, a file, the shards of a TPU, is the business of a
subclass. Checkpoints know tables and slots only in this form.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

PARAMETERS = "parameters"  # The name of the table itself among its slots.
SLICE_BYTES = 4 << 20  # What is held in memory of a matrix at a time.

_T = TypeVar("_T")


def checkpoint_name(table: str, array: str) -> str:
    """What a table, or a slot of it, is called in checkpoints.

    >>> checkpoint_name("films", PARAMETERS), checkpoint_name("films", "accumulators")
    ('films', 'films/accumulators')
    """
    return table if array == PARAMETERS else f"{table}/{array}"


def by_checkpoint_name(tables: Mapping[str, Mapping[str, _T]]) -> dict[str, _T]:
    """All arrays by what they are called in checkpoints.

    Args:
      tables: By name of the table what is kept by "parameters" and slots.
    """
    return {
        checkpoint_name(table, array): value
        for table, arrays in tables.items()
        for array, value in arrays.items()
    }


class Rows(abc.ABC):
    """A matrix [V, C] that is read by ranges of rows."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """[V, C]; V is the vocabulary without padding."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """Of the values, a floating point one."""

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> np.ndarray:
        """The rows [start, stop)."""

    @property
    def variable(self) -> Any:
        """The one variable that is this matrix, or None where there is none."""
        return None

    def verify(self) -> None:
        """Raises tf.errors.DataLossError unless all rows can be read."""
        return  # Nothing can be wrong with what is in memory.

    @property
    def row_bytes(self) -> int:
        """The size of a row."""
        return self.shape[1] * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The size of the whole."""
        return self.shape[0] * self.row_bytes

    @property
    def slice_rows(self) -> int:
        """How many rows make a slice of about `SLICE_BYTES`."""
        return max(1, SLICE_BYTES // max(1, self.row_bytes))

    def slices(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows, each a slice, that make up the whole."""
        for start in range(0, self.shape[0], self.slice_rows):
            yield start, min(self.shape[0], start + self.slice_rows)

    def numpy(self) -> np.ndarray:
        """The whole matrix."""
        return self.read(0, self.shape[0])


InitialValue = float | Callable[[tuple[int, int]], Any] | None


class MutableRows(Rows):
    """A matrix that is also written by ranges of rows: a part of a live embedding.

    Attributes:
      initial_value: What the rows of a slot start as: a number, or a function of the
        shape that gives them; None for a table, which has an initializer.
    """

    initial_value: InitialValue

    def initial_rows(self, count: int) -> np.ndarray:
        """What that many rows of a slot start as."""
        assert self.initial_value is not None
        shape = (count, self.shape[1])
        if callable(self.initial_value):
            return np.asarray(self.initial_value(shape), self.dtype)
        return np.full(shape, self.initial_value, self.dtype)

    @abc.abstractmethod
    def write(self, start: int, values: np.ndarray) -> None:
        """Replaces the rows from `start` on."""
