"""Tables as lookups made of TensorFlow's ops read them, however they are stored."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.tables.waiting import flush_before


class TableReader(abc.ABC):
    """A table as lookups read it, whatever form it is stored in."""

    @abc.abstractmethod
    def read(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the rows, float32 [n, D], for int64 [n]."""

    def operand(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns data, float32 [m, D], and the rows' indices in it, int64 [n]."""
        return self.read(rows), tf.range(tf.size(rows, tf.int64))


class StoredReader(TableReader):
    """A table in variables."""

    @property
    @abc.abstractmethod
    def variables(self) -> Sequence[Any]:
        """The variables that it reads."""

    def in_steps(self) -> TableReader:
        """Returns a reader for graphs that may update the table; none is exported."""
        return self


@dataclasses.dataclass(frozen=True)
class VariableReader(StoredReader):
    """A table that may be trained at the same time.

    Reads rows only. Updates are made in place, and reading the whole variable after
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
    """Rows of a variable or tensor [V, D] as it is."""

    table: Any

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.gather(self.table, rows), tf.float32)


@dataclasses.dataclass(frozen=True)
class PartsReader(StoredReader):
    """A table in parts, one below the other, which may be trained at the same time.

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
