"""The form in which every kind of checkpoint is read: tables with slots, unpadded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable import base

from tpu_embedding.checkpoint import errors
from tpu_embedding.layout.plan import HASHING, Plan, TableSpec
from tpu_embedding.tables.codes import CodedRows
from tpu_embedding.tables.rows import (
    PARAMETERS,
    SCALE_OFFSET,
    TableRows,
    by_checkpoint_name,
    checkpoint_name,
    stored_arrays,
)
from tpu_embedding.vocabulary import COMBINES, PARTS, Hashing

VALUE_KEY: str = vars(base)["VARIABLE_VALUE_KEY"]  # pyright sees none of its names.
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


def hashing_name(table: str) -> str:
    """Returns the name under which files store the Hashing of a table."""
    return checkpoint_name(table, HASHING)


def hashing_numbers(hashing: Hashing) -> np.ndarray:
    """Returns the numbers that files store for a Hashing, int64 [4]."""
    combine = COMBINES.index(hashing.combine)
    return np.array([hashing.num_rows, hashing.hashes, combine, hashing.salt], np.int64)


def hashing_vectors(tables: Mapping[str, Hashing | None]) -> dict[str, Vector]:
    """Returns the vectors that files store for hashed tables, by name."""
    return {
        hashing_name(name): Vector(len(numbers), lambda numbers=numbers: numbers)
        for name, own in tables.items()
        if own is not None
        for numbers in [hashing_numbers(own)]
    }


def stored_hashing(
    path: str, table: str, vectors: Mapping[str, Vector]
) -> Hashing | None:
    """Returns the Hashing that a file stores for a table, or None if it is not hashed.

    Raises:
      tf.errors.DataLossError: If the stored numbers do not describe a Hashing.
    """
    vector = vectors.get(hashing_name(table))
    return None if vector is None else parse_hashing(path, vector.read())


def parse_hashing(path: str, numbers: Any) -> Hashing:
    """Reverses `hashing_numbers`; the errors are those of `stored_hashing`."""
    try:
        num_rows, hashes, combine, salt = np.asarray(numbers).tolist()
        return Hashing(num_rows, hashes, COMBINES[combine], salt)
    except (TypeError, ValueError, IndexError) as error:
        raise errors.corrupted(
            path, f"{numbers!r} does not describe a Hashing"
        ) from error


class HashingRecord(tf.__internal__.tracking.Trackable):
    """The Hashing of one table, as TensorFlow's checkpoints store it."""

    def __init__(self, hashing: Hashing) -> None:
        """Takes the Hashing that is saved."""
        self.hashing = hashing

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        object_map[self] = self  # It does not change while an asynchronous save writes.

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {VALUE_KEY: tf.constant(hashing_numbers(self.hashing))}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, Any]) -> None:
        if not tf.executing_eagerly():
            return  # This is the graph of a SavedModel, which reads its own record.
        # `RestoresLayouts` checked the records before, but cannot tell which of several
        # records belongs to this object.
        numbers = restored_tensors[VALUE_KEY].numpy()
        stored = parse_hashing("the checkpoint", numbers)
        if stored != self.hashing:
            raise differs("A table", "the checkpoint", self.hashing, stored)


def hashing_records(plan: Plan) -> dict[str, HashingRecord]:
    """Returns the records of an embedding by their names in checkpoints."""
    return {
        hashing_name(spec.name): HashingRecord(spec.hashing)
        for spec in plan.tables
        if spec.hashing is not None
    }


def check_hashings(
    source: LogicalCheckpoint,
    specs: Iterable[TableSpec],
    names: Mapping[str, str],
    *,
    resize: bool = False,
) -> None:
    """Refuses tables whose ids belong to other rows in a checkpoint.

    Args:
      source: The checkpoint.
      specs: The tables of the embedding.
      names: The name in the checkpoint of each table to restore; tables that the
        checkpoint lacks are not checked.
      resize: Whether tables may have other numbers of rows.

    Raises:
      ValueError: If a table is hashed differently, or hashed on only one side.
      NotImplementedError: If, with `resize`, the Hashings of a table differ.
    """
    for spec in specs:
        table = source.get(names.get(spec.name, spec.name))
        if spec.name not in names or table is None:
            continue
        stored = table.hashing
        if resize and None not in (stored, spec.hashing) and stored != spec.hashing:
            raise NotImplementedError(
                f"`resize=True` does not support table {spec.name!r}, which is hashed: "
                "another number of rows gives each id other rows. Leave `resize` out, "
                f"and create the table with {stored}."
            )
        check_hashing(spec, source.path, stored)


def check_hashing(spec: TableSpec, path: str, stored: Hashing | None) -> None:
    """Checks one table as `check_hashings` does; `stored` is its Hashing there."""
    if stored != spec.hashing:
        raise differs(f"Table {spec.name!r}", path, spec.hashing, stored)


def differs(
    table: str, path: str, own: Hashing | None, stored: Hashing | None
) -> ValueError:
    """Returns the error for a table whose ids have other rows in a file."""
    here = "is not hashed" if own is None else f"has {own}"
    there = "it is not hashed" if stored is None else f"it has {stored}"
    return ValueError(
        f"{table} {here}, but in {path} {there}, so its rows belong to other ids. Use "
        "the Hashing of the file, or none if the file has none."
    )


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
