"""Readers of tables, however these are stored, for lookups by TensorFlow's ops."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.tables.waiting import flush_before


class TableReader(abc.ABC):
    """Reads a table for lookups, in whatever form it is stored."""

    @abc.abstractmethod
    def read(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the rows with these numbers, int64 [n], as float32 [n, D]."""

    def operand(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns data, float32 [m, D], and the rows' indices in it, int64 [n]."""
        return self.read(rows), tf.range(tf.size(rows, tf.int64))


class StoredReader(TableReader):
    """Reads a table in variables."""

    @property
    @abc.abstractmethod
    def variables(self) -> Sequence[Any]:
        """The variables that the reader reads."""

    def in_steps(self) -> TableReader:
        """Returns a reader for graphs that may update the table, never for exports."""
        return self


@dataclasses.dataclass(frozen=True)
class VariableReader(StoredReader):
    """Reads a table that may be trained at the same time.

    It reads only rows: updates are made in place, and reading the whole variable after
    such an update would copy it.

    Attributes:
      table: A variable or tensor [V, D] of any floating point dtype.
    """

    table: Any

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        with flush_before():  # The graph may be exported.
            return self.in_steps().read(rows)

    def in_steps(self) -> TableReader:
        return _GatheredRows(self.table)

    @property
    def variables(self) -> Sequence[Any]:
        return (self.table,)


@dataclasses.dataclass(frozen=True)
class _GatheredRows(TableReader):
    """Reads rows of a variable or tensor [V, D] in its own dtype."""

    table: Any

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.gather(self.table, rows), tf.float32)


@dataclasses.dataclass(frozen=True)
class PartsReader(StoredReader):
    """Reads a table in parts, one below the other, which may be trained meanwhile.

    Attributes:
      parts: Variables [rows, width]; if their number does not divide the number of
        all rows, the first parts have one row more.
      row_of: A function from int64 ids to their rows among all rows.
      columns: Number of columns of the table; further columns are padding.
    """

    parts: Sequence[tf.Variable]
    row_of: Callable[[tf.Tensor], tf.Tensor]
    columns: int

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        with flush_before():
            found = tf.compat.v1.nn.embedding_lookup(
                list(self.parts), self.row_of(rows), partition_strategy="div"
            )
        return tf.cast(found[:, : self.columns], tf.float32)

    @property
    def variables(self) -> Sequence[tf.Variable]:
        return self.parts
