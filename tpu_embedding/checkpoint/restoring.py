"""Copies the arrays of a checkpoint into those of an embedding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.checkpoint_view import LogicalCheckpoint
from tpu_embedding.checkpoint.writing import Progress
from tpu_embedding.tables.rows import PARAMETERS, MutableTableRows, TableRows


@dataclasses.dataclass(frozen=True)
class _Copy:
    table: str
    array: str
    source: TableRows
    target: MutableTableRows

    def run(self, progress: Progress) -> None:
        common = min(self.source.shape[0], self.target.shape[0])
        dtype = self.target.dtype
        for start, stop in self.source.slices():
            if start < common:
                values = self.source.read(start, min(stop, common))
                self.target.write(start, values.astype(dtype, copy=False))
            progress.advance((stop - start) * self.source.row_bytes)


@dataclasses.dataclass(frozen=True)
class Job:
    """The work of one restore.

    Attributes:
      copies: Parameters and slots that the checkpoint has.
      resets: Slots that start at their initial value.
      lacking: Names of `resets`.
    """

    copies: list[_Copy] = dataclasses.field(default_factory=list)
    resets: list[MutableTableRows] = dataclasses.field(default_factory=list)
    lacking: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def match(
        cls,
        source: LogicalCheckpoint,
        live: Mapping[str, Mapping[str, MutableTableRows]],
        names: Mapping[str, str],
        *,
        slots: bool,
    ) -> Job:
        """Pairs what is stored with the arrays of an embedding.

        Args:
          source: The checkpoint.
          live: The arrays of each table to restore.
          names: By table its name in the checkpoint.
          slots: False restores the tables alone.

        Raises:
          KeyError: If the checkpoint lacks a table.
        """
        missing = [name for name in names.values() if name not in source]
        if missing:
            raise KeyError(
                f"{source.path} has no table called {', '.join(missing)}. It has: "
                f"{', '.join(source) or 'none'}. If a table has another name there, "
                "pass `rename={'name in the embedding': 'name in the checkpoint'}`."
            )
        job = cls()
        for table, arrays in live.items():
            stored = source[names[table]].arrays
            for name, target in arrays.items():
                if name in stored and (slots or name == PARAMETERS):
                    job.copies.append(_Copy(table, name, stored[name], target))
                else:
                    job.resets.append(target)
                    job.lacking.append(f"{table}/{name}")
        return job

    @property
    def _nbytes(self) -> int:
        return sum(copy.source.nbytes for copy in self.copies)

    def check(self, path: str, *, resize: bool) -> None:
        """Raises ValueError unless every shape fits."""
        heights: dict[str, int] = {}  # Of each stored table; it comes before its slots.
        for copy in self.copies:
            expected, actual = copy.target.shape, copy.source.shape
            there = f"but in {path} it has shape {errors.shape_text(actual)}"
            if copy.array == PARAMETERS:
                heights[copy.table] = actual[0]
                same_dim = expected[1] == actual[1]
                if same_dim and (resize or expected[0] == actual[0]):
                    continue
                way_out = (
                    "Pass `resize=True` to keep the rows that both have."
                    if same_dim
                    else "Tables of another dim cannot be restored."
                )
                raise ValueError(
                    f"Table {copy.table} has shape {errors.shape_text(expected)}, "
                    f"{there}. {way_out}"
                )
            expected = (heights[copy.table], expected[1])
            if actual != expected:
                raise ValueError(
                    f"Table {copy.table}: {copy.array} has shape "
                    f"{errors.shape_text(expected)}, {there}. Pass `slots=False` to "
                    "restore tables alone."
                )

    def verify(self, progress: Progress) -> None:
        """Reads all values once; damaged files raise tf.errors.DataLossError."""
        progress.start("Checking", self._nbytes)
        for copy in self.copies:
            copy.source.verify()
            progress.advance(copy.source.nbytes)

    def run(self, progress: Progress) -> None:
        """Assigns all values.

        Raises:
          tf.errors.DataLossError: If a file changed after `verify`.
        """
        progress.start("Restoring", self._nbytes)
        try:
            for copy in self.copies:
                copy.run(progress)
        except tf.errors.DataLossError as error:
            raise tf.errors.DataLossError(
                None,
                None,
                f"{error.message} The file was whole when it was checked. Some tables "
                "have its values already, and others do not: restore again.",
            ) from error
        for copy in self.copies:  # Tables of one stack share what is kept in memory.
            copy.source.release()
        for target in self.resets:
            for start, stop in target.slices():
                target.write(start, target.initial_rows(stop - start))
