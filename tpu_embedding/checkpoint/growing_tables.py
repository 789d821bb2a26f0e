"""Restores growing tables from checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.checkpoint_view import LogicalTable
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.tables.codes import stored_as_codes
from tpu_embedding.tables.growing import first_slots, first_stored
from tpu_embedding.tables.rows import PARAMETERS, SCALE_OFFSET, TableRows
from tpu_embedding.tables.vocabularies import Vocabulary
from tpu_embedding.tables.vocabulary_parts import PLACES, renumbered
from tpu_embedding.vocabulary import (
    PARTS,
    PARTS_OF_IDS,
    SHARED_ID,
    STATE_SIZE,
    UPDATES_BEGUN,
)

_SHOWN = 10  # Ids of a warning.
_Convert = Callable[[np.ndarray], dict[str, np.ndarray]]


def warn_of_ids(table: str, ids: np.ndarray, stored: np.ndarray) -> None:
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
class Growth:
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

    def parts(self) -> list[dict[str, np.ndarray]]:
        """Checks everything; returns the future content of the parts here, for `run`.

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
            warn_of_ids(self.spec.name, self.ids, ids)
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

    def run(self, parts: Sequence[dict[str, np.ndarray]]) -> None:
        """Writes what `parts` returned, and reads the rows of one part at a time.

        Raises:
          tf.errors.DataLossError: If a file changed after `parts`.
        """
        self.target.load(parts, self._rows)

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

    def _rows(self, places: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows by array name; places past the end get the first shared row."""
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
        """Returns functions from stored rows to arrays by name, each with its rows."""
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
    """Reads the rows at places by slices, and returns what `convert` makes of them."""
    order = np.argsort(places, kind="stable")
    ascending = places[order]
    made = convert(np.zeros((0, rows.shape[1]), rows.dtype))
    found = {n: np.empty((len(places), v.shape[1]), v.dtype) for n, v in made.items()}
    for start, stop in rows.slices():
        first, last = np.searchsorted(ascending, (start, stop))
        if first < last:
            values = rows.read(start, stop)[ascending[first:last] - start]
            for name, own in convert(values).items():
                found[name][order[first:last]] = own
    return found
