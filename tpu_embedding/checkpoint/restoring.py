"""Copies the arrays of a checkpoint into those of an embedding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.checkpoint_view import LogicalCheckpoint, LogicalTable
from tpu_embedding.checkpoint.growing_tables import Growth, warn_of_ids
from tpu_embedding.checkpoint.writing import Progress
from tpu_embedding.tables.initial import FirstValues
from tpu_embedding.tables.rows import PARAMETERS, MutableTableRows, TableRows
from tpu_embedding.tables.table import Table
from tpu_embedding.tables.vocabularies import Vocabulary


@dataclasses.dataclass(frozen=True)
class _Copy:
    table: str
    array: str
    source: TableRows
    target: MutableTableRows
    places: np.ndarray | None = None  # By row of the target that of the source, or -1.

    def stored(self) -> list[_Copy]:
        """Returns this copy, or those of the int8 codes if both sides store codes."""
        coded: Any = self.target.coded
        if not coded or not self.source.coded:
            return [self]
        return [
            dataclasses.replace(
                self, array=array, source=self.source.coded[array], target=rows
            )
            for array, rows in coded.items()
        ]

    def run(self, progress: Progress) -> None:
        if self.places is not None:
            stored = self.source.numpy()
            _write_places(self.target, self.places, lambda own: stored[own])
            progress.advance(self.source.nbytes)
            return
        common = min(self.source.shape[0], self.target.shape[0])
        dtype = self.target.dtype
        for start, stop in self.source.slices():
            if start < common:
                values = self.source.read(start, min(stop, common))
                self.target.write(start, values.astype(dtype, copy=False))
            progress.advance((stop - start) * self.source.row_bytes)


@dataclasses.dataclass(frozen=True)
class _Reset:
    """Resets all rows of a slot, or those with a place, to their initial value."""

    target: MutableTableRows
    places: np.ndarray | None

    def run(self) -> None:
        initial = self.target.initial_rows
        if self.places is not None:
            _write_places(self.target, self.places, lambda own: initial(len(own)))
            return
        for start, stop in self.target.slices():
            self.target.write(start, initial(stop - start))


@dataclasses.dataclass(frozen=True)
class _Fill:
    """The rows of a table or slot that the checkpoint lacks, which get new values.

    Attributes:
      copy: The copy of the rows that the checkpoint has.
      make: A function of (shape, dtype=dtype) that makes a table's rows, or "mean" for
        the mean of the rows of the checkpoint. A slot starts at its initial value.
    """

    copy: _Copy
    make: Any

    @functools.cached_property
    def _places(self) -> np.ndarray:
        """Numbers for the rows of the target that the checkpoint lacks, else -1."""
        copy = self.copy
        lacks = np.arange(copy.target.shape[0]) >= copy.source.shape[0]
        if copy.places is not None:
            lacks = copy.places < 0
        return np.where(lacks, np.cumsum(lacks) - 1, -1)

    @functools.cached_property
    def _values(self) -> np.ndarray:
        """The new values of these rows of a table."""
        target = self.copy.target
        shape = (int(self._places.max(initial=-1)) + 1, target.shape[1])
        if self.make == "mean":
            mean = _mean(self.copy.source).astype(target.dtype)
            return np.broadcast_to(mean, shape)
        dtype = tf.as_dtype(target.dtype)
        return FirstValues(self.copy.table, shape, self.make, dtype).whole().numpy()

    def verify(self) -> None:
        """Makes the values, which may raise what the initializer raises."""
        if self.copy.array == PARAMETERS:
            _ = self._values

    def run(self) -> None:
        target = self.copy.target
        if self.copy.array == PARAMETERS:
            _write_places(target, self._places, lambda own: self._values[own])
        else:
            _write_places(
                target, self._places, lambda own: target.initial_rows(len(own))
            )


def _mean(rows: TableRows) -> np.ndarray:
    """Returns the mean of all rows, float64 [D]; zeros if there are none."""
    total = np.zeros(rows.shape[1])
    for start, stop in rows.slices():
        total += rows.read(start, stop).sum(axis=0, dtype=np.float64)
    return total / max(1, rows.shape[0])


def _write_places(
    target: MutableTableRows,
    places: np.ndarray,
    values_of: Callable[[np.ndarray], np.ndarray],
) -> None:
    """Replaces the rows that have a place, by what `values_of` makes of the places."""
    for start, stop in target.slices():
        own = places[start:stop]
        chosen = own >= 0
        if chosen.any():
            values = target.read(start, stop)
            values[chosen] = values_of(own[chosen])
            target.write(start, values)


@dataclasses.dataclass(frozen=True)
class Job:
    """The work of one restore.

    Attributes:
      copies: Parameters and slots that the checkpoint has.
      fills: Rows that the checkpoint lacks, if they get new values.
      resets: Slots that the checkpoint lacks.
      lacking: The names of these slots.
      growing: The restores of growing tables.
      parts: The future content of the parts of each, which `verify` makes.
    """

    copies: list[_Copy] = dataclasses.field(default_factory=list)
    fills: list[_Fill] = dataclasses.field(default_factory=list)
    resets: list[_Reset] = dataclasses.field(default_factory=list)
    lacking: list[str] = dataclasses.field(default_factory=list)
    growing: list[Growth] = dataclasses.field(default_factory=list)
    parts: list[list[dict[str, np.ndarray]]] = dataclasses.field(default_factory=list)

    @classmethod
    def match(
        cls,
        source: LogicalCheckpoint,
        live: Mapping[str, Table],
        names: Mapping[str, str],
        *,
        slots: bool,
        fill: Any = None,
        ids: Mapping[str, np.ndarray] | None = None,
    ) -> Job:
        """Makes the job that copies what is stored into the arrays of an embedding.

        Args:
          source: The checkpoint.
          live: The tables of the embedding by name.
          names: The name in the checkpoint of each table to restore.
          slots: False restores the tables alone.
          fill: See `_Fill.make`; None leaves other rows as they are.
          ids: By table, the ids whose rows are restored; for a static table in the
            order of its rows.

        Raises:
          KeyError: If the checkpoint lacks a table.
          ValueError: If a table grows there, but not here, and it has no `ids`.
        """
        missing = [name for name in names.values() if name not in source]
        if missing:
            raise KeyError(
                f"{source.path} has no table called {', '.join(missing)}. It has: "
                f"{', '.join(source) or 'none'}. If a table has another name there, "
                "pass `rename={'name in the embedding': 'name in the checkpoint'}`."
            )
        job, chosen = cls(), ids or {}
        for table, name in names.items():
            target, stored = live[table], source[name]
            if isinstance(target.ids, Vocabulary):
                own = chosen.get(table)
                growth = Growth(
                    target.spec, target.ids, stored, source.path, slots, own
                )
                job.growing.append(growth)
                continue
            arrays = stored.arrays
            places = None
            if table in chosen:
                height = target.rows[PARAMETERS].shape[0]
                places = _places(stored, chosen[table], table, height)
            elif stored.vocabulary:
                raise ValueError(
                    f"Table {table!r} grows in {source.path}, so its rows are in "
                    f"another order. Pass `ids={{{table!r}: ...}}` with the id of each "
                    "row."
                )
            for array, rows in target.rows.items():
                if array in arrays and (slots or array == PARAMETERS):
                    copy = _Copy(table, array, arrays[array], rows, places)
                    job.copies.extend(copy.stored())
                    if fill is not None:
                        job.fills.append(_Fill(copy, fill))
                else:
                    job.resets.append(_Reset(rows, places))
                    job.lacking.append(f"{table}/{array}")
        for growth in job.growing:
            job.lacking.extend(growth.lacking)
        return job

    @property
    def _nbytes(self) -> int:
        static = sum(copy.source.nbytes for copy in self.copies)
        return static + sum(growth.nbytes for growth in self.growing)

    def check(self, path: str, *, resize: bool) -> None:
        """Raises ValueError unless every shape fits."""
        heights: dict[str, int] = {}  # Of each stored table; it comes before its slots.
        for copy in self.copies:
            expected, actual = copy.target.shape, copy.source.shape
            there = f"but in {path} it has shape {errors.shape_text(actual)}"
            if copy.array == PARAMETERS:
                heights[copy.table] = actual[0]
                same_dim = expected[1] == actual[1]
                any_size = resize or copy.places is not None
                if same_dim and (any_size or expected[0] == actual[0]):
                    continue
                way_out = (
                    "Pass `resize=True` to restore the rows that exist in both."
                    if same_dim
                    else "A table with another dim cannot be restored."
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
                    "restore tables without slots."
                )

    def verify(self, progress: Progress) -> None:
        """Reads all values once; damaged files raise tf.errors.DataLossError.

        Raises:
          ValueError: If a growing table cannot hold what is stored.
        """
        progress.start("Checking", self._nbytes)
        for copy in self.copies:
            copy.source.verify()
            progress.advance(copy.source.nbytes)
        for fill in self.fills:
            fill.verify()
        for growth in self.growing:
            self.parts.append(growth.parts())
            progress.advance(growth.nbytes)

    def run(self, progress: Progress) -> None:
        """Assigns all values.

        Raises:
          tf.errors.DataLossError: If a file changed after `verify`.
        """
        progress.start("Restoring", self._nbytes)
        try:
            for copy in self.copies:
                copy.run(progress)
            for fill in self.fills:
                fill.run()
            for copy in self.copies:  # Tables of one stack share what is in memory.
                copy.source.release()
            for reset in self.resets:
                reset.run()
            for growth in self.growing:
                growth.run(self.parts.pop(0))
                progress.advance(growth.nbytes)
        except tf.errors.DataLossError as error:
            raise errors.data_loss(
                f"{error.message} The file was intact when it was checked, so some "
                "tables already have its values and others do not: restore again."
            ) from error


def _places(
    source: LogicalTable, ids: np.ndarray, table: str, height: int
) -> np.ndarray:
    """Returns for each row of a static table the stored row of its id, or -1.

    Raises:
      ValueError: If there are more ids than rows.
    """
    if len(ids) > height:
        raise ValueError(
            f"`ids` has {len(ids)} ids for table {table!r}, which has {height} rows."
        )
    stored = source.ids
    order = np.argsort(stored, kind="stable")
    at = np.searchsorted(stored, ids, sorter=order)
    rows = order[np.minimum(at, len(order) - 1)] if len(order) else at
    found = stored[rows] == ids if len(order) else np.zeros(len(ids), bool)
    warn_of_ids(table, ids, stored)
    places = np.full(height, -1, np.int64)
    places[: len(ids)] = np.where(found, rows, -1)
    logging.info("Table %s: %d of %d rows are restored.", table, found.sum(), height)
    return places
