"""Makes the tables of an embedding part of TensorFlow's checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_context
from tensorflow.python.trackable.trackable_utils import escape_local_name

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.hashings import (
    HashingRecord,
    check_hashing,
    check_hashings,
    hashing_name,
    stored_hashings,
)
from tpu_embedding.checkpoint.restoring import Restore
from tpu_embedding.checkpoint.sparse_core_format import (
    LAYOUTS,
    LayoutRecord,
    other_stacks,
    parse_layouts,
    same_layouts,
)
from tpu_embedding.checkpoint.stored import EngineTables, SavesTables, StoredTables
from tpu_embedding.checkpoint.tensorflow_format import Bundle, read_tensorflow
from tpu_embedding.checkpoint.writing import NoProgress
from tpu_embedding.config import STORAGES, RowStorage
from tpu_embedding.engines.base import TableStore
from tpu_embedding.layout.partition import TableLayout
from tpu_embedding.layout.plan import UPDATES, Plan
from tpu_embedding.tables.trackable import VALUE_KEY


class RestoresLayouts(tf.__internal__.tracking.Trackable):
    """An object into which tf.train.Checkpoint restores whole and stacked tables.

    TensorFlow pairs the children of an object with those in the checkpoint by name. If
    the object has whole tables and the checkpoint stacks, or the reverse, the names
    differ: then this class copies the tables as `checkpoint.restore` does.

    Other modules of this package see the object through its `core`.
    """

    core: StoredTables
    _conversion: _Conversion | None = None

    @property
    def _stored_layouts(self) -> tuple[TableLayout, ...]:
        """The place of each table if its checkpoints hold stacks, else nothing."""
        return ()

    @property
    def _table_names(self) -> Collection[str]:
        return [table.name for table in self.core.plan.tables]

    @property
    def _hashing_records(self) -> Mapping[str, HashingRecord]:
        return self.core.hashing_records

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        # A SavedModel gets them too, because tf_keras reads it as a checkpoint.
        children = super()._trackable_children(save_type, **kwargs)
        return {**children, **self._hashing_records}

    def _checkpoint_adapter(self, path: str) -> Any:
        # Restoring calls this once for each object, before it reads any value.
        root = _root_to_convert(path, self._stored_layouts, self._table_names)
        _check_growth(path, self.core.plan, converts=root is not None)
        _check_stored_hashings(path, self.core.plan)
        self._conversion = None if root is None else _Conversion(self, path, root)
        return super()._checkpoint_adapter(path)

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # Restoring calls this for each child that the saved object had.
        conversion = self._conversion
        if conversion is not None and name in conversion.names:
            conversion.awaited = True
            return None
        if name == LAYOUTS and not self._stored_layouts:
            raise ValueError(
                "This checkpoint holds these tables twice: whole, and stacked in "
                "shards for SparseCores. tf.train.Checkpoint cannot tell which of them "
                "to restore here. Use tpu_embedding.checkpoint.restore(embedding, "
                "path, root=...)."
            )
        if name in self._hashing_records:
            return self._hashing_records[name]
        return super()._lookup_dependency(name, *args, **kwargs)

    @property
    def _deferred_dependencies(self) -> Any:
        # Restoring reads this once after each lookup that returned None, to add the
        # position of the child.
        if self._conversion is not None and self._conversion.awaited:
            self._conversion.awaited = False
            return self._conversion
        return super()._deferred_dependencies


class _Conversion:
    """One restore of tables from a checkpoint with another layout.

    Attributes:
      names: The children of the object in the checkpoint that hold its tables.
      awaited: Whether the position of a child is about to be added.
    """

    def __init__(self, tables: RestoresLayouts, path: str, root: str) -> None:
        """Checks everything that will be restored.

        Raises:
          KeyError: If the checkpoint lacks a table.
          ValueError: If a table has another shape.
          tf.errors.DataLossError: If a file is truncated or damaged.
          NotImplementedError: If a table has a CustomCombiner with weights.
        """
        live = tables.core.checkpoint_tables()
        source = read_tensorflow(path, root, list(live))
        values = Bundle(path).objects[root].values
        self.names = values.keys() - {UPDATES}
        self.awaited = False
        self._tables = tables
        check_hashings(source, tables.core.plan.tables, {n: n for n in live})
        targets = [(table, name) for name, table in live.items()]
        self._restore = Restore.prepared(source, targets, NoProgress())
        self._parts: list[Any] = []  # Positions hold weak references.

    def setdefault(self, name: str, default: Any) -> _Conversion:
        """Returns this object in place of a child's list of positions."""
        del name, default
        return self

    def append(self, position: Any) -> None:
        """Marks a child as restored, and restores all tables with the first one."""
        part = tf.__internal__.tracking.Trackable()
        part._maybe_initialize_trackable()
        position.bind_object(part)
        restored = position.checkpoint
        part._update_uid = restored.restore_uid
        self._parts.append(part)
        if len(self._parts) > 1:
            return
        self._restore.run(self._tables.core, NoProgress())
        # The status of the restore counts these as matched.
        children = self._tables._trackable_children()
        own = [child for name, child in children.items() if name != UPDATES]
        for number, child in enumerate(own):
            restored.object_by_proto_id[-1 - number] = child


def _root_to_convert(
    path: str, own: Sequence[TableLayout], names: Collection[str]
) -> str | None:
    """Finds the object of a checkpoint that holds tables in another layout.

    Args:
      path: The checkpoint's prefix.
      own: The place of each table on SparseCores; empty for whole tables.
      names: The names of the tables.

    Returns:
      The path of the object, or None if TensorFlow can restore the tables by name.

    Raises:
      ValueError: If several objects hold them.
    """
    bundle = Bundle(path)
    stacked, whole = [], []
    for root, node in bundle.objects.items():
        if LAYOUTS in node.values:
            record = parse_layouts(path, bundle.record(node.values[LAYOUTS]))
            if same_layouts(own, record):
                return None
            if any(layout.table_name in names for layout in record):
                stacked.append(root)
        elif any(name in node.values for name in names):
            whole.append(root)
    if not own and (whole or not stacked):
        return None
    found = [*stacked, *whole]
    if len(found) == 1:
        return found[0]
    if not found:
        raise other_stacks(path)
    raise ValueError(
        f"Several objects in {path} hold these tables in another layout: "
        f"{', '.join(map(repr, found))}. tf.train.Checkpoint cannot tell which of them "
        "to restore. Use tpu_embedding.checkpoint.restore(embedding, path, root=...)."
    )


class TrackableTables(
    SavesTables, RestoresLayouts, tf.__internal__.tracking.AutoTrackable
):
    """An object whose tables tf.train.Checkpoint and `checkpoint.save` can save.

    The pending update of a pipelined embedding is applied before any value is read.
    """

    core: EngineTables

    @property
    def _stored_layouts(self) -> tuple[TableLayout, ...]:
        return self.core.layouts

    def __deepcopy__(self, memo: Any) -> Any:
        """Raises TypeError: the strategy that holds the tables cannot be copied."""
        raise errors.deep_copy(type(self).__name__)

    def _track_state(self, engine: TableStore) -> None:
        """Makes the variables of the engine children of this object."""
        for name, part in engine.checkpoint_variables().items():
            self._track_trackable(part, name)
        if self.core.layouts:
            self._track_trackable(LayoutRecord(self.core.layouts), LAYOUTS)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        # Saving and restoring begin with this call, and would silently leave out tables
        # that do not exist after it. The thread of an asynchronous save also calls it.
        # Tables that cannot be created yet are restored on creation.
        if _in_caller() and self.core.can_create_engine():
            self.core.create_engine(to_restore=True)
        if save_type != "checkpoint":  # A model: its functions are traced now.
            self._sync()
        return super()._trackable_children(save_type, **kwargs)

    def _sync(self) -> None:
        if _in_caller():
            self.core.complete()
            self.core.retrieve()

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        # Only saving calls this, before it reads any value. The tables are children
        # and save themselves; if they cannot be created yet, creating them raises.
        self._sync()
        return {} if self.core.can_create_engine() else {"tables": self._unsaved}

    def _unsaved(self, name: str = "") -> Any:
        del name
        self.core.create_engine()

    def _checkpoint_adapter(self, path: str) -> Any:
        adapter = super()._checkpoint_adapter(path)
        if self._conversion is None:
            storages = {t.name: t.config.storage for t in self.core.plan.tables}
            _check_dtypes(path, storages)
            if _in_caller():  # The checkpoint is accepted: values are written next.
                self.core.retrieve()
            self.core.tables_replaced()
        return adapter

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        # An asynchronous save copies all values in one traced function, parents before
        # children: this applies the pending update before the values are copied.
        del object_map
        self.core.complete()
        self.core.flush()


def _in_caller() -> bool:
    """Returns whether this is an eager call from the user's own thread.

    The thread of an asynchronous save writes copies, while training continues.
    """
    return tf.executing_eagerly() and not checkpoint_context.in_async_metrics_context()


def _check_dtypes(path: str, own: Mapping[str, RowStorage]) -> None:
    """Refuses a checkpoint whose tables tf.train.Checkpoint could not restore.

    Args:
      path: The checkpoint's prefix.
      own: How the embedding stores the rows of each table, by the table's name.

    Raises:
      TypeError: If objects of the checkpoint have all these tables, but none has them
        in these dtypes.
    """
    stored = tf.train.load_checkpoint(path).get_variable_to_dtype_map()
    found = [_stored_in(stored, name) for name in own]
    holders = set(found[0]).intersection(*found[1:])
    others = [
        [
            (name, storage.dtype, dtypes[holder].name)
            for (name, storage), dtypes in zip(own.items(), found, strict=True)
            if dtypes[holder].name != storage.stored_dtype
        ]
        for holder in sorted(holders)
    ]
    if others and all(others):
        name, dtype, stored_dtype = others[0][0]
        stored_as = {s.stored_dtype: s.dtype for s in STORAGES.values()}
        other = stored_as.get(stored_dtype, stored_dtype)
        raise TypeError(
            f"Table {name} is {dtype}, but in {path} it is {other}, and "
            "tf.train.Checkpoint does not convert. Use "
            "tpu_embedding.checkpoint.restore(embedding, path), which does."
        )


def _check_stored_hashings(path: str, plan: Plan) -> None:
    """Checks tables as `check_hashings` does, before tf.train.Checkpoint restores.

    If several objects have a table of the same name, one of these must fit.
    """
    bundle = Bundle(path)
    values = [node.values for node in bundle.objects.values()]
    records = [keys[LAYOUTS] for keys in values if LAYOUTS in keys]
    for spec in plan.tables:
        stored = stored_hashings(bundle, hashing_name(spec.name), [spec.name])
        if spec.hashing is not None:  # Stacks have no hashed tables.
            layouts = [
                x for r in records for x in parse_layouts(path, bundle.record(r))
            ]
            stored += [None for layout in layouts if layout.table_name == spec.name]
        if stored and spec.hashing not in stored:
            check_hashing(spec, path, stored[0])


def _check_growth(path: str, plan: Plan, *, converts: bool) -> None:
    """Refuses to restore a growing table into a static one, and the reverse.

    Args:
      path: The checkpoint's prefix.
      plan: The tables.
      converts: Whether the checkpoint has the tables in another layout.

    Raises:
      ValueError: If the checkpoint has a table only of the other kind.
    """
    stored = tf.train.load_checkpoint(path).get_variable_to_dtype_map()
    for table in plan.tables:
        grows = table.config.vocabulary is not None
        of_kind = {True: "ids", False: VALUE_KEY}
        other = _stored_in(stored, table.name, of_kind[not grows])
        if (grows and converts) or (
            other and not _stored_in(stored, table.name, of_kind[grows])
        ):
            there = "does not grow" if grows else "grows"
            raise ValueError(
                f"Table {table.name!r} {there} in {path}, so its rows are in another "
                "order. Use tpu_embedding.checkpoint.restore(embedding, "
                f"path{'' if grows else ', ids=...'}), which matches rows by id."
            )


def _stored_in(
    stored: Mapping[str, tf.DType], table: str, attribute: str = VALUE_KEY
) -> dict[str, tf.DType]:
    """Returns the dtype of each table of that name by the key of its object."""
    end = f"/{escape_local_name(table)}/.ATTRIBUTES/{attribute}"
    # The slash lets `end` match tables of the root, which has no key of its own.
    keys = {f"/{key}": dtype for key, dtype in stored.items()}
    return {key[: -len(end)]: d for key, d in keys.items() if key.endswith(end)}
