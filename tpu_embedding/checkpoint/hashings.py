"""How files store the Hashing of a table, and the check that ids have the same rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tpu_embedding.checkpoint import errors
from tpu_embedding.layout.plan import HASHING, Plan, TableSpec
from tpu_embedding.tables.rows import checkpoint_name
from tpu_embedding.tables.trackable import VALUE_KEY
from tpu_embedding.vocabulary import COMBINES, Hashing

if TYPE_CHECKING:
    from tpu_embedding.checkpoint.checkpoint_view import LogicalCheckpoint, Vector
    from tpu_embedding.checkpoint.tensorflow_format import Bundle


def hashing_name(table: str) -> str:
    """Returns the name under which files store the Hashing of a table."""
    return checkpoint_name(table, HASHING)


def hashing_numbers(hashing: Hashing) -> np.ndarray:
    """Returns the numbers that files store for a Hashing, int64 [4]."""
    combine = COMBINES.index(hashing.combine)
    return np.array([hashing.num_rows, hashing.hashes, combine, hashing.salt], np.int64)


def hashing_arrays(tables: Mapping[str, Hashing | None]) -> dict[str, np.ndarray]:
    """Returns the numbers that files store for hashed tables, by name."""
    return {
        hashing_name(name): hashing_numbers(hashing)
        for name, hashing in tables.items()
        if hashing is not None
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


def stored_hashings(
    bundle: Bundle, record: str, tables: Collection[str]
) -> list[Hashing | None]:
    """Returns the Hashing of each object of a checkpoint that has a table.

    Args:
      bundle: The checkpoint.
      record: The name of the child of an object that holds the Hashing.
      tables: The names that the table may have.

    Returns:
      For each object with a record or a table its Hashing, or None without a record.
    """
    found: list[Hashing | None] = []
    for node in bundle.objects.values():
        if record in node.values:
            numbers = bundle.restore(node.values[record])
            found.append(parse_hashing(bundle.prefix, numbers))
        elif any(name in node.values or name in node.parts for name in tables):
            found.append(None)
    return found


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
