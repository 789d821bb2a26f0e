"""Records in files of how the ids of hashed tables become rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tpu_embedding.checkpoint.checkpoint_view import (
    LogicalCheckpoint,
    hashing_name,
    hashing_numbers,
    parse_hashing,
)
from tpu_embedding.checkpoint.sparse_core_format import (
    LAYOUTS,
    VALUE_KEY,
    parse_layouts,
)
from tpu_embedding.checkpoint.tensorflow_format import Bundle
from tpu_embedding.layout.plan import Plan, TableSpec
from tpu_embedding.vocabulary import Hashing


class HashingRecord(tf.__internal__.tracking.Trackable):
    """The Hashing of one table, as TensorFlow's checkpoints store it."""

    def __init__(self, hashing: Hashing) -> None:
        """Takes what is saved."""
        self.hashing = hashing

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        object_map[self] = self  # It does not change while an asynchronous save writes.

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {VALUE_KEY: tf.constant(hashing_numbers(self.hashing))}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, Any]) -> None:
        if not tf.executing_eagerly():
            return  # The graph of a SavedModel, which reads its own record.
        # `check_bundle` came first, but cannot tell which of several records is this
        # one's.
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
    """Refuses tables whose ids have other rows in a checkpoint.

    Args:
      source: The checkpoint.
      specs: The tables of the embedding.
      names: The name in the checkpoint of each table to restore; tables that the
        checkpoint lacks are not checked.
      resize: Whether tables may have other numbers of rows.

    Raises:
      ValueError: If a table is hashed differently, or only there or only here.
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
                "with another number of rows each id has other ones. Leave `resize` "
                f"out, and make the table with {stored}."
            )
        check_hashing(spec, source.path, stored)


def check_hashing(spec: TableSpec, path: str, stored: Hashing | None) -> None:
    """Checks one table as `check_hashings` does, with what is stored of it."""
    if stored != spec.hashing:
        raise differs(f"Table {spec.name!r}", path, spec.hashing, stored)


def check_bundle(path: str, plan: Plan) -> None:
    """Checks tables as `check_hashings` does, before tf.train.Checkpoint restores.

    If several objects have a table of the same name, one of these must fit.
    """
    bundle = Bundle(path)
    objects = bundle.objects().values()
    for spec in plan.tables:
        stored: list[Hashing | None] = []
        for node in objects:
            key = node.values.get(hashing_name(spec.name))
            if key is not None:
                stored.append(parse_hashing(path, bundle.restore(key)))
            elif spec.name in node.values or spec.name in node.parts:
                stored.append(None)
            elif spec.hashing is not None and LAYOUTS in node.values:
                layouts = parse_layouts(path, bundle.record(node.values[LAYOUTS]))
                stored += [None for la in layouts if la.table_name == spec.name]
        if stored and spec.hashing not in stored:
            check_hashing(spec, path, stored[0])


def differs(
    table: str, path: str, own: Hashing | None, stored: Hashing | None
) -> ValueError:
    """Returns the error for a table whose ids have other rows in a file."""
    here = "is not hashed" if own is None else f"has {own}"
    there = "it is not hashed" if stored is None else f"it has {stored}"
    return ValueError(
        f"{table} {here}, but in {path} {there}: its rows are those of other ids. "
        "Use the Hashing of the file, or none if it has none."
    )
