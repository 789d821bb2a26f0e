"""DeltaWriter writes the rows of a trained embedding that changed."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.checkpoint.object_graph import variable_key
from tpu_embedding.checkpoint.stored import StoredTables, tables_of_weights
from tpu_embedding.checkpoint.tensorflow_format import Bundle
from tpu_embedding.checkpoint.writing import in_all_processes, require_alike, slice_spec
from tpu_embedding.engines.process_group import calling
from tpu_embedding.hashing import unmixed_bits
from tpu_embedding.serving.conversion import ConvertedTable
from tpu_embedding.serving.delta_files import (
    Base,
    BaseTable,
    DeltaRows,
    Header,
    base_tables,
    new_id,
    rows_of_block,
    write_delta,
)
from tpu_embedding.serving.following import ids_key
from tpu_embedding.serving.following_tables import stored_place
from tpu_embedding.serving.growing_tables import APART, is_used
from tpu_embedding.serving.quantization import converter
from tpu_embedding.tables.growing import first_stored
from tpu_embedding.tables.rows import STORED
from tpu_embedding.tables.vocabularies import Changed, array_rows
from tpu_embedding.vocabulary import SHARED_ID

_COMPARED_BYTES = 1 << 20  # The bytes of float32 values that are compared at once.
_NOTHING = np.zeros([0], np.int64)


class DeltaWriter(tf.__internal__.tracking.Trackable):
    """Writes the rows that changed, for one consumer: served models of one export.

    From its construction on, it marks the rows that updates change, with a bit for
    each, and `export_delta` writes them. For te.keras.Embedding it keeps a fingerprint
    of each row instead. Each writer has its own marks, which a tf.train.Checkpoint of
    the embedding and the writer saves.

    All processes of a job make the same calls, with the same arguments and paths that
    all of them see. The first one writes.

    >>> import tempfile
    >>> import tensorflow as tf
    >>> import tpu_embedding as te
    >>> films = te.TableConfig(8, 2, initializer=te.RowIdInitializer(), name="films")
    >>> embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))
    >>> folder = tempfile.mkdtemp()
    >>> _ = te.serving.export(embedding, f"{folder}/base", deltas=True)
    >>> writer = te.serving.DeltaWriter(embedding, f"{folder}/base", "replicas")
    >>> embedding.enqueue({"film": tf.constant([3, 5, 3])})
    >>> _ = embedding.dequeue()
    >>> embedding.apply_gradients({"film": tf.ones([3, 2])})
    >>> writer.export_delta(f"{folder}/1.delta")
    {'films': 2}
    >>> model = tf.saved_model.load(f"{folder}/base")
    >>> te.serving.apply_delta(model, f"{folder}/1.delta")
    1
    >>> model.signatures["dense"](film=tf.constant([3, 4], tf.int64))["film"].numpy()
    array([[2., 2.],
           [4., 4.]], dtype=float32)

    Attributes:
      base: The number of the export.
      run: The number of this writer, which its deltas contain.
      sequence: The number of the delta written last, or 0.
    """

    @calling("DeltaWriter")
    def __init__(
        self, embedding: Any, base: str | os.PathLike[str], consumer: str
    ) -> None:
        """Begins to note changes; builds the embedding if it is not built yet.

        It compares every row with the export once, so that the first delta contains
        what was trained since the export.

        Args:
          embedding: A TPUEmbedding, a TPUEmbeddingV2, a Keras layer, or a Keras model
            with te.keras.Embedding.
          base: The folder of its export with `deltas`.
          consumer: A name that no other writer of the embedding has.

        Raises:
          TypeError: If an argument is of another type.
          ValueError: If the export does not take deltas, deltas were applied to it, its
            tables differ, or the name is in use.
          tf.errors.NotFoundError: If there is no export.
          NotImplementedError: If the engine of the embedding does not track changes: on
            TPUs and on the portable engine, and in a Keras layer with
            `trainable_tables=True`; or if the model has weights beside its tables
            (LoRA, quantization), or slots of an unknown optimizer.
          tf.errors.InvalidArgumentError: If a row cannot be stored as in the export.
          tf.errors.AbortedError: If another process of the job raises an error.
        """
        super().__init__()
        core = getattr(embedding, "core", None) or tables_of_weights(embedding)
        if not isinstance(core, StoredTables):
            raise errors.argument_type(
                "embedding",
                embedding,
                "a TPUEmbedding, TPUEmbeddingV2, Keras layer or model with "
                "te.keras.Embedding",
            )
        if not isinstance(consumer, str) or not consumer:
            raise errors.argument_type("consumer", consumer, "a name")
        self._core: Any = core
        self._changes = self._core.changes(consumer)
        if consumer in self._core.delta_writers:
            raise ValueError(
                f"The embedding has a DeltaWriter for {consumer!r}. Use that one, or "
                "stop it first."
            )
        with in_all_processes(self._changes.group):
            bundle, self._base = _read_base(os.fspath(base))
            self._require_same_tables(os.fspath(base))
        alike = {"base": self._base.id, "consumer": consumer}
        require_alike(self._changes.group, alike)
        self.base, self.run, self.sequence = self._base.id, self._new_run(), 0
        self._follows = self.base
        self._consumer = consumer
        self._forms = [converter(spec.storage, spec.dim) for spec in self._base.tables]
        # By index of a growing table, the ids that the models have after the last
        # written delta, ascending. Tables whose ids are not known are left out.
        self._ids = {
            index: _stored_ids(bundle, spec)
            for index, spec in self._base.growing.items()
        }
        self._core.refresh()
        self._changes.mark(self._rows_of(0, _NOTHING))  # Tracking begins here.
        try:
            self._mark_differences(bundle)
        except BaseException:
            self._changes.commit(end=True)
            raise
        self._core.delta_writers[consumer] = self

    @calling("export_delta")
    def export_delta(self, path: str | os.PathLike[str]) -> dict[str, int]:
        """Writes the rows that changed since the last delta.

        For a growing table it also writes the ids that were evicted, and the row that
        ids without one share. The pending update is applied first. If the call fails,
        it leaves no file, and the next delta contains the rows.

        Args:
          path: A file that does not exist yet.

        Returns:
          The number of rows by name of the table, evicted ids included.

        Raises:
          RuntimeError: In a tf.function, or after `stop`.
          ValueError: If the file exists, or more rows of a table changed than the
            export takes at a time, or a growing table has more ids than it takes.
          tf.errors.InvalidArgumentError: If a row cannot be stored as in the export.
          tf.errors.AbortedError: If another process of the job raises an error.
        """
        self._require_active()
        group = self._changes.group
        require_alike(group, {"path": os.fspath(path)})
        self._core.refresh()
        changed = self._take()
        for spec, rows in zip(self._base.tables, changed, strict=True):
            for what, number, most in (
                ("rows changed", len(rows.keys), spec.most_changed),
                ("rows were evicted", len(rows.deleted), spec.most_changed),
                ("ids exist", rows.size, spec.rows),
            ):
                if number > most:
                    raise ValueError(
                        f"Table {spec.name}: {number} {what} since delta "
                        f"{self.sequence}, but the export takes at most {most}. Export "
                        "the model again with a larger `deltas`, or write deltas more "
                        "often."
                    )
        counts = tuple((len(rows.keys), len(rows.deleted)) for rows in changed)
        header = Header(self._base, self.run, self._follows, self.sequence + 1, counts)
        with in_all_processes(group) as rest:
            blocks = self._blocks(changed)
            rest.append(blocks)  # Each item is an exchange with other processes.
            if group is None or group.rank == 0:
                write_delta(path, header, blocks)
            else:
                collections.deque(blocks, maxlen=0)
        self._changes.commit()
        for index, ids in self._ids.items():
            left = np.delete(ids, np.searchsorted(ids, changed[index].deleted))
            new = changed[index].keys
            new = new[~_among(new, left)]
            self._ids[index] = np.insert(left, np.searchsorted(left, new), new)
        self.sequence, self._follows = self.sequence + 1, self.run
        return {
            spec.name: len(rows.keys) + len(rows.deleted)
            for spec, rows in zip(self._base.tables, changed, strict=True)
            if not spec.shared
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continues from the delta that the served models applied last.

        Call it after the trainer went back to a checkpoint. Unless that delta is also
        the last one of this writer, the next delta has all rows, and deletes the ids of
        growing tables that only the models have.

        Args:
          state: What the signature "delta_state" returned.

        Raises:
          RuntimeError: In a tf.function, or after `stop`.
          TypeError: If `state` is not a mapping.
          ValueError: If it is the state of another export, or lacks a part of it.
        """
        self._require_active()
        if not isinstance(state, Mapping):
            raise errors.argument_type("state", state, "what delta_state returned")
        keys = {index: ids_key(index) for index in self._base.growing}
        lacking = sorted({"base", "sequence", "run", *keys.values()} - {*state})
        if lacking:
            raise ValueError(
                f"`state` lacks {', '.join(lacking)}. Pass everything that the "
                "signature delta_state returned."
            )
        base, sequence, run = (int(state[key]) for key in ("base", "sequence", "run"))
        require_alike(self._changes.group, {"state": [base, sequence, run]})
        if base != self.base:
            raise ValueError(
                f"The model serves the export {base}, but this DeltaWriter writes "
                f"deltas for the export {self.base}."
            )
        self._ids = {i: np.sort(np.asarray(state[key])) for i, key in keys.items()}
        if (sequence, run) != (self.sequence, self._follows):
            self.mark_all_rows()
            for index, ids in self._ids.items():
                self._changes.mark(self._rows_of(index, ids))
            self.sequence, self._follows = sequence, run

    def mark_all_rows(self) -> None:
        """Makes the next delta contain all rows, after you assigned values yourself.

        Restoring a checkpoint or weights does it by itself. A te.keras.Embedding does
        not need it: its rows are compared.
        """
        self._require_active()
        tables = self._core.tables()
        for index, spec in enumerate(self._base.tables):
            if not spec.shared:
                for ids in tables[spec.name].ids.known():
                    self._changes.mark(self._rows_of(index, ids))

    def stop(self) -> None:
        """Stops noting rows, and frees the memory of the marks.

        Raises:
          RuntimeError: In a tf.function, or after `stop`.
        """
        self._require_active()
        self._changes.commit(end=True)
        del self._core.delta_writers[self._consumer]

    def _new_run(self) -> int:
        """Returns a number that this process chose, or the first one of a job."""
        run, group = new_id(), self._changes.group
        if group is None:
            return run
        return int(group.all_gather("checkpoint", str(run).encode())[0])

    def _require_active(self) -> None:
        if not tf.executing_eagerly():
            raise RuntimeError(
                "A DeltaWriter cannot be used inside a tf.function. Call it between "
                "steps."
            )
        if self._core.delta_writers.get(self._consumer) is not self:
            raise RuntimeError("This DeltaWriter was stopped. Create a new one.")

    def _require_same_tables(self, path: str) -> None:
        pairs = [(t, s.index) for s in self._core.plan.tables for t in base_tables(s)]
        self._numbers = [number for _, number in pairs]
        trained = [table.identity for table, _ in pairs]
        exported = [table.identity for table in self._base.tables]
        if trained != exported:
            raise ValueError(
                f"{path} has the tables {', '.join(map(str, exported))}, but the "
                f"embedding has {', '.join(map(str, trained))}. Export this embedding "
                "with deltas=True."
            )

    def _take(self) -> list[Changed]:
        """Takes the changes of each table of the base; deltas always have shared rows.

        It leaves out evicted ids that the models never had.
        """
        taken = self._changes.take()
        found = [
            self._shared(taken[number], number) if spec.shared else taken[number]
            for spec, number in zip(self._base.tables, self._numbers, strict=True)
        ]
        for index, ids in self._ids.items():
            deleted = found[index].deleted
            deleted = deleted[_among(deleted, ids)]
            found[index] = dataclasses.replace(found[index], deleted=deleted)
        return found

    def _shared(self, table: Changed, number: int) -> Changed:
        row = table.shared
        if row is None or not row.shape[0]:  # No update has made it yet.
            spec = self._core.plan.tables[number]
            row = array_rows(first_stored(spec, tf.constant([SHARED_ID], tf.int64)))
        return Changed(np.zeros([1], np.int64), row)

    def _rows_of(self, index: int, ids: np.ndarray) -> list[np.ndarray]:
        """Returns ids for each table of the plan: `ids` for one, none for others."""
        rows = [_NOTHING] * len(self._core.plan.tables)
        rows[self._numbers[index]] = ids
        return rows

    def _blocks(self, changed: Sequence[Changed]) -> Iterator[DeltaRows]:
        for index, (spec, rows) in enumerate(
            zip(self._base.tables, changed, strict=True)
        ):
            form = self._forms[index]
            step = rows_of_block(form.row_bytes(spec.dim))
            for start in range(0, len(rows.keys), step):
                some = rows.keys[start : start + step]
                parts = self._parts(index, rows, start, start + len(some))
                yield DeltaRows(index, some, _NOTHING, parts)
            step = rows_of_block(0)
            for start in range(0, len(rows.deleted), step):
                yield DeltaRows(index, _NOTHING, rows.deleted[start : start + step], ())

    def _parts(
        self, index: int, changed: Changed, start: int, stop: int
    ) -> Sequence[np.ndarray]:
        """Returns the changed rows [start, stop) of a table as the base stores them."""
        form, rows = self._forms[index], changed.rows
        values = rows.read(start, stop).astype(np.float32, copy=False)
        name = self._base.tables[index].name
        form.require_storable(name, changed.keys[start:stop], values)
        if form.keeps_codes and rows.coded:
            return [part.read(start, stop) for part in rows.coded.values()]
        return form.convert(values).parts

    def _mark_differences(self, bundle: Bundle) -> None:
        for index, spec in enumerate(self._base.tables):
            form = self._forms[index]
            for start, today in self._exported(index):
                ids = today.keys
                parts = self._parts(index, today, 0, len(ids))
                stored = _stored_rows(bundle, spec, form, start, start + len(ids))
                differs = np.zeros([len(ids)], bool)
                for own, other in zip(parts, stored, strict=True):
                    differs |= (_bytes(own) != _bytes(other)).any(axis=1)
                self._changes.mark(self._rows_of(index, ids[differs]))

    def _exported(self, index: int) -> Iterator[tuple[int, Changed]]:
        """Yields (first row, current values) for slices of the rows of the export.

        It marks the ids that only the growing table or only its export has.
        """
        spec, number = self._base.tables[index], self._numbers[index]
        step = max(1, _COMPARED_BYTES // (4 * spec.dim))
        if spec.shared:
            return
        if not spec.grows:
            for start in range(0, spec.rows, step):
                ids = np.arange(start, min(start + step, spec.rows))
                yield start, Changed(ids, self._changes.matrix(number, ids))
            return
        own, stored = self._core.growing()[spec.name].read(), self._ids[index]
        arrays = [(name, own[name]) for name in STORED if name in own]
        self._changes.mark(self._rows_of(index, np.setxor1d(own["ids"], stored)))
        for start in range(0, len(stored), step):
            ids = stored[start : start + step]
            known = np.isin(ids, own["ids"])
            places = np.searchsorted(own["ids"], ids[known])
            today = {n: np.zeros((len(ids), a.shape[1]), a.dtype) for n, a in arrays}
            for name, array in arrays:
                today[name][known] = array[places]
            yield start, Changed(ids, array_rows(today))

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        self._require_active()
        self._core.refresh()
        taken = dict(enumerate(self._take()))
        state = tf.constant([self.base, self.sequence, self._follows], tf.int64)
        ids = {i: [rows.keys, rows.deleted] for i, rows in taken.items()}
        rows = {f"rows_{i}": tf.concat(both, 0) for i, both in ids.items()}
        return {"state": state, **rows}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, Any]) -> None:
        rows = [restored_tensors[f"rows_{index}"] for index in range(len(self._forms))]
        values = [restored_tensors["state"], *rows]
        if tf.executing_eagerly():
            self._restore(*values)
        else:  # TensorFlow restores into several machines in a tf.function.
            tf.py_function(self._restore, values, [])

    def _restore(self, state: tf.Tensor, *rows: tf.Tensor) -> None:
        base, sequence, follows = state.numpy().tolist()
        if base != self.base:
            raise ValueError(
                f"The checkpoint has marks for the export {base}, but this DeltaWriter "
                f"writes deltas for the export {self.base}."
            )
        self.run = self._new_run()
        if sequence < self.sequence or (
            sequence == self.sequence and follows != self._follows
        ):
            self.mark_all_rows()  # Deltas were written after the checkpoint.
            return
        self._changes.take()
        self._changes.commit()
        if (sequence, follows) != (self.sequence, self._follows):
            self._ids = {}  # The ids after another writer's delta are not known.
        for index, ids in enumerate(rows):
            if not self._base.tables[index].shared:
                self._changes.mark(self._rows_of(index, ids.numpy()))
        self.sequence, self._follows = sequence, follows


def _read_base(path: str) -> tuple[Bundle, Base]:
    try:
        bundle = Bundle(f"{path}/variables/variables")
    except tf.errors.NotFoundError as error:
        raise tf.errors.NotFoundError(
            None, None, f"{path} is not an export of te.serving.export."
        ) from error
    key = variable_key("deltas", "description")
    if key not in bundle.shapes:
        raise ValueError(
            f"{path} does not take deltas. Export it with te.serving.export(..., "
            "deltas=True)."
        )
    if bundle.restore(variable_key("deltas", "sequence")):
        raise ValueError(
            f"Deltas were applied to {path}. Pass the original export, and call "
            "`resume` of the DeltaWriter with the state of the model."
        )
    return bundle, Base.from_json(bundle.restore(key))


def _stored_rows(
    bundle: Bundle, spec: BaseTable, form: ConvertedTable, start: int, stop: int
) -> list[np.ndarray]:
    """Reads the parts of the rows [start, stop), as the export has them."""
    found = []
    for part in form.parts:
        key = variable_key(stored_place(spec), part)
        rows, columns = bundle.shapes[key]
        whole = slice_spec((rows, columns), start, stop)
        found.append(bundle.restore(key, whole))
    return found


def _stored_ids(bundle: Bundle, spec: BaseTable) -> np.ndarray:
    """Reads the ids of a growing table of the export, in the order of its rows."""
    place = f"{stored_place(spec).removesuffix('stored')}ids/number_of/tables/0"
    keys = np.ravel(bundle.restore(f"{place}/table/.ATTRIBUTES/table-keys"))
    apart = bundle.restore(variable_key(place, "apart")) >= 0
    ids = np.append(keys[is_used(keys)], np.array(APART)[apart])
    return np.sort(unmixed_bits(tf.constant(ids)).numpy() if spec.mixed else ids)


def _among(ids: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Returns whether ids are known, bool [n]; `known` must ascend."""
    if not len(known):
        return np.zeros(len(ids), bool)
    places = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return known[places] == ids


def _bytes(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint8)
