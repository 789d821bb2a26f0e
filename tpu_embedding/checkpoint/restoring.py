"""Copies the arrays of a checkpoint into those of an embedding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.checkpoint_view import LogicalCheckpoint, LogicalTable
from tpu_embedding.checkpoint.stored import StoredTables
from tpu_embedding.checkpoint.writing import Progress, in_all_processes
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.tables.codes import stored_as_codes
from tpu_embedding.tables.growing import first_slots, first_stored
from tpu_embedding.tables.initial import FirstValues
from tpu_embedding.tables.rows import (
    PARAMETERS,
    SCALE_OFFSET,
    MutableTableRows,
    ProcessGroup,
    TableRows,
)
from tpu_embedding.tables.table import Table
from tpu_embedding.tables.vocabularies import Vocabulary
from tpu_embedding.tables.vocabulary_parts import PLACES, renumbered
from tpu_embedding.vocabulary import (
    PARTS,
    PARTS_OF_IDS,
    SHARED_ID,
    STATE_SIZE,
    UPDATES_BEGUN,
)

_SHOWN = 10  # The most ids that a warning lists.
_Convert = Callable[[np.ndarray], dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class _Copy:
    table: str
    array: str
    source: TableRows
    target: MutableTableRows
    places: np.ndarray | None = None  # The source row of each target row, or -1.

    def stored(self) -> list[_Copy]:
        """Returns this copy, or copies of the int8 codes if both sides store codes."""
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
            _write_places(self.target, self.places, lambda places: stored[places])
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
    """Resets a slot's rows whose place is not -1, or all if `places` is None."""

    target: MutableTableRows
    places: np.ndarray | None

    def run(self) -> None:
        initial = self.target.initial_rows
        if self.places is not None:
            _write_places(self.target, self.places, lambda places: initial(len(places)))
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
        """The numbers from 0 on of target rows that the checkpoint lacks, else -1."""
        copy = self.copy
        lacks = np.arange(copy.target.shape[0]) >= copy.source.shape[0]
        if copy.places is not None:
            lacks = copy.places < 0
        return np.where(lacks, np.cumsum(lacks) - 1, -1)

    @functools.cached_property
    def _values(self) -> np.ndarray:
        """The new values of the table's rows that the checkpoint lacks, [n, D]."""
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
            _write_places(target, self._places, lambda places: self._values[places])
        else:
            _Reset(target, self._places).run()


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
    """Replaces rows whose place is not -1 by what `values_of` makes of the places."""
    for start, stop in target.slices():
        of_slice = places[start:stop]
        chosen = of_slice >= 0
        if chosen.any():
            values = target.read(start, stop)
            values[chosen] = values_of(of_slice[chosen])
            target.write(start, values)


@dataclasses.dataclass(frozen=True)
class Restore:
    """A restore that `prepared` has checked, and that `run` carries out.

    Attributes:
      copies: Parameters and slots that the checkpoint has.
      fills: Rows that the checkpoint lacks, if they get new values.
      resets: Slots that the checkpoint lacks.
      lacking: The names of these slots.
      growing: The restores of growing tables.
    """

    copies: list[_Copy] = dataclasses.field(default_factory=list)
    fills: list[_Fill] = dataclasses.field(default_factory=list)
    resets: list[_Reset] = dataclasses.field(default_factory=list)
    lacking: list[str] = dataclasses.field(default_factory=list)
    growing: list[_Growth] = dataclasses.field(default_factory=list)

    @classmethod
    def prepared(
        cls,
        source: LogicalCheckpoint,
        targets: Sequence[tuple[Table, str]],
        progress: Progress,
        *,
        slots: bool = True,
        resize: Any = False,
        ids: Mapping[str, np.ndarray] | None = None,
    ) -> Restore:
        """Checks that what is stored fits into the arrays of an embedding.

        All values are read once, and nothing changes.

        Args:
          source: The checkpoint.
          targets: The tables to restore, each with its name in the checkpoint.
          progress: What shows how far the check is.
          slots: False restores the tables alone.
          resize: Whether a static table may have another number of rows there; rows
            that the checkpoint lacks stay as they are, or get what `resize` makes if it
            is not a bool (see `_Fill.make`).
          ids: By table, the ids whose rows are restored; for a static table in the
            order of its rows.

        Raises:
          KeyError: If the checkpoint lacks a table.
          ValueError: If a table has another shape, if it grows in the checkpoint only
            and has no `ids`, or if a growing table cannot hold what is stored.
          tf.errors.DataLossError: If a file is truncated or damaged.
        """
        fill = None if isinstance(resize, bool) else resize
        restore = cls._matched(source, targets, slots, fill, ids or {})
        restore._check_shapes(source.path, resize is not False)
        restore._verify(progress)
        return restore

    @classmethod
    def _matched(
        cls,
        source: LogicalCheckpoint,
        targets: Sequence[tuple[Table, str]],
        slots: bool,
        fill: Any,
        ids: Mapping[str, np.ndarray],
    ) -> Restore:
        """Finds what is stored for each array of the embedding."""
        missing = [name for _, name in targets if name not in source]
        if missing:
            raise KeyError(
                f"{source.path} has no table called {', '.join(missing)}. It has: "
                f"{', '.join(source) or 'none'}. If a table has another name there, "
                "pass `rename={'name in the embedding': 'name in the checkpoint'}`."
            )
        restore = cls()
        for target, name in targets:
            table, stored = target.spec.name, source[name]
            if isinstance(target.ids, Vocabulary):
                chosen = ids.get(table)
                growth = _Growth(
                    target.spec, target.ids, stored, source.path, slots, chosen
                )
                restore.growing.append(growth)
                continue
            arrays = stored.arrays
            places = None
            if table in ids:
                height = target.rows[PARAMETERS].shape[0]
                places = _places(stored, ids[table], table, height)
            elif stored.vocabulary:
                raise ValueError(
                    f"Table {table!r} grows in {source.path}, so its rows are in "
                    f"another order. Pass `ids={{{table!r}: ...}}` with the id of each "
                    "row."
                )
            for array, rows in target.rows.items():
                if array in arrays and (slots or array == PARAMETERS):
                    copy = _Copy(table, array, arrays[array], rows, places)
                    restore.copies.extend(copy.stored())
                    if fill is not None:
                        restore.fills.append(_Fill(copy, fill))
                else:
                    restore.resets.append(_Reset(rows, places))
                    restore.lacking.append(f"{table}/{array}")
        for growth in restore.growing:
            restore.lacking.extend(growth.lacking)
        return restore

    @property
    def _nbytes(self) -> int:
        static = sum(copy.source.nbytes for copy in self.copies)
        return static + sum(growth.nbytes for growth in self.growing)

    def _check_shapes(self, path: str, resize: bool) -> None:
        """Raises ValueError unless every shape of a static table fits."""
        heights: dict[str, int] = {}  # By table; a table is checked before its slots.
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

    def _verify(self, progress: Progress) -> None:
        """Reads all values once; damaged files raise tf.errors.DataLossError."""
        progress.start("Checking", self._nbytes)
        for copy in self.copies:
            copy.source.verify()
            progress.advance(copy.source.nbytes)
        for fill in self.fills:
            fill.verify()
        for growth in self.growing:
            _ = growth.parts
            progress.advance(growth.nbytes)

    def run(
        self, core: StoredTables, progress: Progress, group: ProcessGroup | None = None
    ) -> None:
        """Assigns all values, after the pending update.

        Args:
          core: What has the tables.
          progress: What shows how far the restore is.
          group: The processes that restore together, or None.

        Raises:
          tf.errors.DataLossError: If a file changed after it was checked.
        """
        core.refresh()
        with in_all_processes(group):
            self._assign(progress)
            core.load_checkpoint_rows()

    def _assign(self, progress: Progress) -> None:
        progress.start("Restoring", self._nbytes)
        try:
            for copy in self.copies:
                copy.run(progress)
            for fill in self.fills:
                fill.run()
            for copy in self.copies:  # Only now: tables of a stack share a tensor.
                copy.source.release()
            for reset in self.resets:
                reset.run()
            for growth in self.growing:
                growth.load()
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
    _warn_of_ids(table, ids, stored)
    places = np.full(height, -1, np.int64)
    places[: len(ids)] = np.where(found, rows, -1)
    logging.info("Table %s: %d of %d rows are restored.", table, found.sum(), height)
    return places


def _warn_of_ids(table: str, ids: np.ndarray, stored: np.ndarray) -> None:
    """Warns of ids to restore that the checkpoint lacks, or that come twice."""
    each, counts = np.unique(ids, return_counts=True)
    for what, told in (
        ("ids that are not in the checkpoint", np.setdiff1d(each, stored)),
        ("ids that occur more than once", each[counts > 1]),
    ):
        if len(told):
            shown = ", ".join(map(str, told[:_SHOWN]))
            more = ", ..." if len(told) > _SHOWN else ""
            logging.warning(
                "Table %s: `ids` has %d %s: %s%s.",
                *(table, len(told), what, shown, more),
            )


@dataclasses.dataclass(frozen=True)
class _Growth:
    """The restore of one growing table.

    Attributes:
      spec: The table.
      target: The ids, rows and slots of the table in the embedding.
      source: The table in the checkpoint: a growing one, or a static one, whose row r
        belongs to id r.
      path: The path of the checkpoint.
      slots: Whether slots are restored.
      ids: The ids to restore, int64 [n]; None for all.
    """

    spec: TableSpec
    target: Vocabulary
    source: LogicalTable
    path: str
    slots: bool
    ids: np.ndarray | None

    @property
    def nbytes(self) -> int:
        """The number of bytes that are read."""
        return sum(self.source.arrays[name].nbytes for name in self._stored)

    @property
    def lacking(self) -> list[str]:
        """Slots that start at their initial values."""
        names = [n for n in self.target.parts if n not in (*PARTS, SCALE_OFFSET)]
        return [f"{self.spec.name}/{n}" for n in names if n not in self._stored]

    @property
    def _stored(self) -> list[str]:
        wanted = [PARAMETERS, *(self.source.slots if self.slots else ())]
        return [name for name in wanted if name in self.target.parts]

    def load(self) -> None:
        """Writes the table, and frees the memory of `parts`."""
        self.target.load(self.parts, self.rows)
        vars(self).pop("parts")

    @functools.cached_property
    def parts(self) -> list[dict[str, np.ndarray]]:
        """What the parts of the table here will contain; checks everything.

        Raises:
          ValueError: If the table does not fit, or its stored arrays do not agree.
          tf.errors.DataLossError: If a file is truncated or damaged.
        """
        found = {name: v.read() for name, v in self.source.vocabulary.items()}
        ids = self.source.ids
        size, stored = len(ids), self.source.parameters.shape[0]
        if not 0 <= stored - size <= 1:
            raise self._refused(f"has {size} ids, but {stored} rows")
        for name, vector in found.items():
            if name in PARTS_OF_IDS and len(vector) != size:
                raise self._refused(
                    f"has {size} ids, but {len(vector)} numbers in {name!r}"
                )
        order = np.argsort(ids, kind="stable")
        if (np.diff(ids[order]) == 0).any():
            raise self._refused("has an id twice")
        self._check_arrays(stored)
        shares, grew = stored > size, "state" in found
        chosen = order
        if self.ids is not None:
            _warn_of_ids(self.spec.name, self.ids, ids)
            chosen = order[np.isin(ids[order], self.ids)]
        if len(chosen) < size:
            logging.warning(
                "Table %s: %d of %d ids of %s were left out.",
                *(self.spec.name, size - len(chosen), size, self.path),
            )
        state = {name: np.zeros(len(chosen), np.int64) for name in PARTS_OF_IDS}
        empty = np.zeros(0, np.int64)
        state |= {name: found.get(name, empty) for name in PARTS if name not in state}
        state |= {name: found[name][chosen] for name in PARTS_OF_IDS if name in found}
        state["ids"] = ids[chosen]
        must_share = self.spec.growth.unknown == "shared_row"
        shares |= must_share and not grew and len(ids) > 0
        state[PLACES] = np.append(chosen, [size] * shares).astype(np.int64)
        if not grew or len(chosen) < size:  # Rows are numbered anew, without gaps.
            known = state["rows"] if "rows" in found else chosen
            state["rows"] = np.argsort(np.argsort(known)) + int(shares)
            numbers = found.get("state", np.zeros(STATE_SIZE, np.int64))
            numbers = renumbered(self.spec.name, numbers, len(chosen) + int(shares))
            last = state["last_updates"].max(initial=0)
            numbers[UPDATES_BEGUN] = max(numbers[UPDATES_BEGUN], last)
            state["state"] = numbers
        return self.target.fit(state)

    def _check_arrays(self, height: int) -> None:
        """Reads the table and its slots once; raises the errors of `parts`."""
        for name, _, width in self._of_target():
            if name not in self._stored:
                continue
            rows, shape = self.source.arrays[name], (height, width)
            if rows.shape != shape:
                what = "the table" if name == PARAMETERS else name
                raise self._refused(
                    f"has {what} of shape {errors.shape_text(rows.shape)}, but this "
                    f"table needs {errors.shape_text(shape)}"
                )
            rows.verify()

    def rows(self, places: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows by array name; places past the end get the first shared row.

        Raises:
          tf.errors.DataLossError: If a file changed after `parts`.
        """
        arrays: dict[str, np.ndarray] = {}
        for name, start, width in self._of_target():
            if name not in self._stored:
                arrays[name] = np.full((len(places), width), start, np.float32)
                continue
            rows = self.source.arrays[name]
            for convert, stored in self._conversions(name, rows):
                arrays |= _read(stored, places, convert)
            rows.release()
        missing = places >= self.source.parameters.shape[0]
        if missing.any():
            for name, row in self._shared_row():
                arrays[name][missing] = row
        return arrays

    def _conversions(
        self, name: str, rows: TableRows
    ) -> list[tuple[_Convert, TableRows]]:
        """Returns (function from stored rows to arrays by name, stored rows) pairs."""
        storage = self.spec.config.storage
        if name == PARAMETERS and storage.is_coded:
            if not rows.coded:
                return [(stored_as_codes, rows)]
            return [(lambda v, n=n: {n: v}, part) for n, part in rows.coded.items()]
        dtype: Any = np.float32
        if name == PARAMETERS:
            dtype = tf.as_dtype(storage.stored_dtype).as_numpy_dtype
        return [(lambda v: {name: v.astype(dtype, copy=False)}, rows)]

    def _of_target(self) -> list[tuple[str, float, int]]:
        """Returns (name, initial value, width) of the table and its slots."""
        dim, optimizer = self.spec.config.dim, self.spec.optimizer
        slots = optimizer.slots if optimizer else ()
        starts = first_slots(self.spec)
        widths = [1 if slot.per_row else dim for slot in slots]
        names = [slot.name for slot in slots]
        return [(PARAMETERS, 0.0, dim), *zip(names, starts, widths, strict=True)]

    def _shared_row(self) -> list[tuple[str, np.ndarray]]:
        """Returns the first shared row of the table and its slots, each [1, width]."""
        first = first_stored(self.spec, tf.constant([SHARED_ID], tf.int64))
        slots = self._of_target()[1:]
        rows = [(n, np.full((1, width), v, np.float32)) for n, v, width in slots]
        return [*first.items(), *rows]

    def _refused(self, reason: str) -> ValueError:
        return ValueError(
            f"Table {self.source.name} of {self.path} {reason}. It cannot be restored "
            f"into the growing table {self.spec.name}."
        )


def _read(
    rows: TableRows, places: np.ndarray, convert: _Convert
) -> dict[str, np.ndarray]:
    """Reads the rows at `places` slice by slice, and returns them after `convert`."""
    order = np.argsort(places, kind="stable")
    ascending = places[order]
    made = convert(np.zeros((0, rows.shape[1]), rows.dtype))
    found = {n: np.empty((len(places), v.shape[1]), v.dtype) for n, v in made.items()}
    for start, stop in rows.slices():
        first, last = np.searchsorted(ascending, (start, stop))
        if first < last:
            values = rows.read(start, stop)[ascending[first:last] - start]
            for name, column in convert(values).items():
                found[name][order[first:last]] = column
    return found
