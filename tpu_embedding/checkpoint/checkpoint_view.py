"""The form in which every kind of checkpoint is read: tables with slots, unpadded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.hashings import stored_hashing
from tpu_embedding.layout.plan import HASHING
from tpu_embedding.tables.codes import CodedRows
from tpu_embedding.tables.rows import (
    PARAMETERS,
    SCALE_OFFSET,
    TableRows,
    by_checkpoint_name,
    stored_arrays,
)
from tpu_embedding.vocabulary import PARTS, Hashing

_SUFFIX = f"/{PARAMETERS}"
_DTYPES = {
    np.dtype(dtype.as_numpy_dtype)
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64)
}


@dataclasses.dataclass(frozen=True)
class Vector:
    """Numbers that a file stores of a growing or hashed table, read on request.

    Attributes:
      length: How many numbers there are.
      read: Returns the numbers, int64 [length].
      rows: The numbers as rows [length, 1], if several processes may hold them.
    """

    length: int
    read: Callable[[], np.ndarray]
    rows: TableRows | None = None

    @classmethod
    def of(cls, rows: TableRows) -> Vector:
        """Makes a vector of the numbers that `rows` reads."""
        return cls(rows.shape[0], lambda: rows.numpy()[:, 0], rows)

    @property
    def nbytes(self) -> int:
        """Size of the numbers in bytes."""
        return 8 * self.length


@dataclasses.dataclass(frozen=True, eq=False)
class LogicalTable:
    """Holds one table of a checkpoint.

    Attributes:
      name: Name of the table in the checkpoint.
      parameters: The rows, [V, D].
      slots: The slots by name, [V, D] or [V, 1].
      vocabulary: What is known of a growing table's ids, by name. `parameters` and
        `slots` have the rows of "ids", which ascend, and then the row that ids share,
        if there is one. Empty for a static table, whose row r belongs to id r.
      hashing: The Hashing of a hashed table, else None.
    """

    name: str
    parameters: TableRows
    slots: Mapping[str, TableRows]
    vocabulary: Mapping[str, Vector] = dataclasses.field(default_factory=dict)
    hashing: Hashing | None = None

    @property
    def ids(self) -> np.ndarray:
        """The ids that have a row, int64, in the order of the rows."""
        if self.vocabulary:
            return self.vocabulary["ids"].read()
        return np.arange(self.parameters.shape[0], dtype=np.int64)

    @functools.cached_property
    def arrays(self) -> dict[str, TableRows]:
        """The parameters, then the slots."""
        return {PARAMETERS: self.parameters, **self.slots}

    @property
    def stored(self) -> dict[str, TableRows]:
        """The arrays in TensorFlow's files, with int8 as codes and (scale, offset)."""
        return stored_arrays(self.arrays)


@dataclasses.dataclass(frozen=True)
class NumberedSlots:
    """The variables of a Keras optimizer, which Keras's files identify by numbers.

    Attributes:
      optimizer: The name of the optimizer or of its class, in small letters, or "" if
        the file does not have it.
      shapes: The shapes of all variables.
      slots: The variables that are matrices, by number.
      iterations: The number of updates, or None.
    """

    optimizer: str
    shapes: list[tuple[int, ...]]
    slots: Mapping[int, TableRows]
    iterations: int | None


class LogicalCheckpoint(Mapping[str, LogicalTable]):
    """Holds all tables of a checkpoint by name. Values are read on request.

    Attributes:
      path: Path of the checkpoint.
      format: Kind of the checkpoint, e.g. "TensorFlow".
      updates: Number of updates applied to the tables, or None if not stored.
      numbered: The slots of a Keras file, which does not say which tables have them.
    """

    def __init__(
        self,
        path: str,
        format: str,  # noqa: A002 - the word for it.
        tables: Mapping[str, LogicalTable],
        updates: int | None = None,
        numbered: NumberedSlots | None = None,
    ) -> None:
        """Takes the tables by name.

        Raises:
          TypeError: If a table or slot has no floating point dtype.
        """
        self.path = path
        self.format = format
        self.updates = updates
        self.numbered = numbered
        self._tables = dict(tables)
        arrays = {name: table.arrays for name, table in tables.items()}
        for name, rows in by_checkpoint_name(arrays).items():
            if not is_floating(rows.dtype):
                raise TypeError(
                    f"{name} in {path} has dtype {rows.dtype}. Tables and slots are "
                    "float16, bfloat16, float32 or float64. Convert the array first, "
                    "e.g. with `.astype('float32')`."
                )

    def __getitem__(self, name: str) -> LogicalTable:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def verify(self) -> None:
        """Reads all values once.

        Raises:
          tf.errors.DataLossError: If a file is truncated or damaged.
        """
        for table in self._tables.values():
            for rows in table.arrays.values():
                rows.verify()
            for vector in table.vocabulary.values():
                vector.read()


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Returns whether tables and slots may have this dtype, of either byte order."""
    return dtype.newbyteorder("=") in _DTYPES


def update_count(path: str, value: Any) -> int:
    """Returns the number of updates that a file stores.

    Raises:
      tf.errors.DataLossError: If the stored value is not a number of updates.
    """
    stored = np.asarray(value)
    if stored.shape or stored.dtype.kind not in "iu" or stored < 0:
        raise errors.corrupted(path, f"{value!r} is not a number of updates")
    return int(stored)


def vector_owner(name: str) -> str:
    """Returns the table whose vocabulary or Hashing stores the vector `name`, or "".

    >>> vector_owner("films/ids"), vector_owner("films/accumulators")
    ('films', '')
    """
    table, _, part = name.rpartition("/")
    return table if part in (*PARTS, HASHING) else ""


def group_tables(
    path: str,
    matrices: Mapping[str, TableRows],
    tables: Collection[str] = (),
    vectors: Mapping[str, Vector] | None = None,
) -> dict[str, LogicalTable]:
    """Groups matrices named `<table>` and `<table>/<slot>` into tables with slots.

    A matrix `<table>/parameters` is the table `<table>`, unless `<table>` is a matrix
    too or the matrix has slots of its own: then it is a table of that full name. A
    name with a slash is a table of its own unless the part before the last slash is a
    table with as many rows.

    Args:
      path: Path of the checkpoint, for messages.
      matrices: The matrices by name.
      tables: Names known to be tables.
      vectors: The vectors by name: `<table>/hashing`, and `<table>/ids` and others of
        `PARTS`, which are ignored for a table without ids.
    """
    holders = {name.rpartition("/")[0] for name in matrices}

    def plain_name(name: str) -> str:
        table = name.removesuffix(_SUFFIX)
        own = name in tables or name in holders or table in matrices
        return name if own else table

    plain = {plain_name(name): rows for name, rows in matrices.items()}
    owners = {name: _owner(name, plain, tables) for name in plain}
    grouped: dict[str, LogicalTable] = {}
    for name, owner in owners.items():
        if owner is None:
            slots = {
                other[len(name) + 1 :]: plain[other]
                for other, its in owners.items()
                if its == name
            }
            found = {p: v for p in PARTS if (v := (vectors or {}).get(f"{name}/{p}"))}
            vocabulary = found if "ids" in found else {}
            hashing = stored_hashing(path, name, vectors or {})
            rows = plain[name]
            if rows.dtype == np.uint8 and SCALE_OFFSET in slots:
                rows = CodedRows(rows, slots.pop(SCALE_OFFSET))
            grouped[name] = LogicalTable(name, rows, slots, vocabulary, hashing)
    return grouped


def _owner(
    name: str, matrices: Mapping[str, TableRows], tables: Collection[str]
) -> str | None:
    """Returns the table that `name` is a slot of, or None if it is a table."""
    before, slash, _ = name.rpartition("/")
    is_table = name in tables or name.endswith(_SUFFIX)
    if is_table or not slash or before not in matrices:
        return None
    same_rows = matrices[before].shape[0] == matrices[name].shape[0]
    return before if before in tables or same_rows else None


def choose_root(
    path: str,
    root: str | None,
    tables: Collection[str],
    holders: Mapping[str, Mapping[str, LogicalTable]],
    mixed: Collection[str] = (),
) -> str:
    """Chooses the object to read: the one named, else the most likely one.

    Args:
      path: Path of the checkpoint, for messages.
      root: Name of the object, or None.
      tables: Names that its tables may have.
      holders: The tables of each object, by the name of the object.
      mixed: Objects that also hold vectors, as layers with a bias do.

    Raises:
      ValueError: If no object has tables, `root` has none, or several objects are
        equally likely.
    """
    if not holders:
        raise errors.no_tables(path)
    if root is not None:
        if root not in holders:
            raise ValueError(
                f"The object {root!r} of {path} holds no tables. Objects that hold "
                f"tables: {', '.join(map(repr, holders))}."
            )
        return root
    with_names = [p for p, found in holders.items() if set(tables) & set(found)]
    with_slots = [
        p
        for p, found in holders.items()
        if p not in mixed and any(t.slots for t in found.values())
    ]
    pure = [p for p in holders if p not in mixed]
    likeliest = with_names or with_slots or pure or list(holders)
    if len(likeliest) > 1:
        raise ValueError(
            f"Several objects in {path} hold tables: {', '.join(map(repr, likeliest))}."
            " Choose one with `root=`."
        )
    return likeliest[0]
