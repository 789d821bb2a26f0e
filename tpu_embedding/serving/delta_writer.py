"""DeltaWriter writes the rows of a trained embedding that changed."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable.trackable_utils import escape_local_name

from tpu_embedding import errors
from tpu_embedding.checkpoint.object_graph import variable_key
from tpu_embedding.checkpoint.tensorflow_format import Bundle
from tpu_embedding.checkpoint.trackable import StoredTables
from tpu_embedding.checkpoint.writing import (
    in_all_processes,
    require_alike,
    slice_spec,
)
from tpu_embedding.serving.conversion import ConvertedTable
from tpu_embedding.serving.delta_files import (
    Base,
    BaseTable,
    DeltaRows,
    Header,
    new_id,
    rows_of_block,
    write_delta,
)
from tpu_embedding.serving.quantization import converter

_COMPARED_BYTES = 1 << 20  # Of float32 values that are compared at once.
_NOTHING = np.zeros([0], np.int64)


class DeltaWriter(tf.__internal__.tracking.Trackable):
    """Writes the rows that changed, for one consumer: served models of one export.

    From its construction on, the rows that updates change are noted, a bit for each,
    and `export_delta` writes them. Several writers have marks of their own. A
    tf.train.Checkpoint that has the writer beside the embedding keeps them.

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
      run: A number of this writer, which its deltas have.
      sequence: The number of the delta written last, 0 for none.
    """

    def __init__(
        self, embedding: Any, base: str | os.PathLike[str], consumer: str
    ) -> None:
        """Begins to note changes; builds the embedding if that has not happened.

        Every row is compared with the export once, so that what was trained since the
        export is in the first delta.

        Args:
          embedding: A TPUEmbedding, a TPUEmbeddingV2 or a Keras layer.
          base: The folder of its export with `deltas`.
          consumer: A name; each writer of an embedding has another one.

        Raises:
          TypeError: If an argument is of another type.
          ValueError: If the export takes no deltas, or deltas were applied to it, or
            its tables are others, or the name is in use.
          NotImplementedError: If the engine of the embedding does not track changes: on
            TPUs and on the portable engine, and in a Keras layer with
            `trainable_tables=True`; or if a table grows.
          tf.errors.InvalidArgumentError: If a row cannot be stored as in the export.
          tf.errors.AbortedError: If another process of the job raises an error.
        """
        super().__init__()
        core = getattr(embedding, "core", None)
        if not isinstance(core, StoredTables):
            raise errors.argument_type(
                "embedding", embedding, "a TPUEmbedding, TPUEmbeddingV2 or Keras layer"
            )
        if not isinstance(consumer, str) or not consumer:
            raise errors.argument_type("consumer", consumer, "a name")
        self._core: Any = core
        self._changes = self._core.changes(consumer)
        growing = [t.name for t in self._core.plan.tables if t.config.vocabulary]
        if growing:
            raise NotImplementedError(
                f"Deltas have no rows of growing tables: {', '.join(growing)}. Give "
                "the table a vocabulary of fixed size, or export the model anew."
            )
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
        self._core.flush()
        self._changes.mark([_NOTHING] * len(self._forms))  # From here on.
        try:
            self._mark_differences(bundle)
        except BaseException:
            self._changes.commit(end=True)
            raise
        self._core.delta_writers[consumer] = self

    def export_delta(self, path: str | os.PathLike[str]) -> dict[str, int]:
        """Writes the rows that changed since the last delta.

        The pending update is applied first. If it fails, no file is left, and the next
        delta has the rows, too.

        Args:
          path: A file that does not exist yet.

        Returns:
          The number of rows by name of the table.

        Raises:
          RuntimeError: In a tf.function, or after `stop`.
          ValueError: If the file exists, or more rows of a table changed than the
            export takes at a time.
          tf.errors.InvalidArgumentError: If a row cannot be stored as in the export.
          tf.errors.AbortedError: If another process of the job raises an error.
        """
        self._require_active()
        group = self._changes.group
        require_alike(group, {"path": os.fspath(path)})
        self._core.flush()
        changed = self._changes.take()
        for spec, ids in zip(self._base.tables, changed, strict=True):
            if len(ids) > spec.most_changed:
                raise ValueError(
                    f"{len(ids)} rows of table {spec.name} changed since delta "
                    f"{self.sequence}, and the export takes {spec.most_changed} at a "
                    "time. Export the model anew, with a larger `deltas`, or write "
                    "deltas more often."
                )
        counts = tuple((len(ids), 0) for ids in changed)
        header = Header(self._base, self.run, self._follows, self.sequence + 1, counts)
        with in_all_processes(group) as rest:
            blocks = self._blocks(changed)
            rest.append(blocks)  # Other processes read their rows through this one.
            if group is None or group.rank == 0:
                write_delta(path, header, blocks)
            else:
                collections.deque(blocks, maxlen=0)
        self._changes.commit()
        self.sequence, self._follows = self.sequence + 1, self.run
        return {
            spec.name: len(ids)
            for spec, ids in zip(self._base.tables, changed, strict=True)
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from the delta that the served models applied last.

        For a trainer that went back to a checkpoint. Unless that delta is the last one
        of this writer, too, the next delta has all rows.

        Args:
          state: What the signature "delta_state" returned.

        Raises:
          RuntimeError: In a tf.function, or after `stop`.
          ValueError: If it is the state of another export.
        """
        self._require_active()
        base, sequence, run = (int(state[key]) for key in ("base", "sequence", "run"))
        require_alike(self._changes.group, {"state": [base, sequence, run]})
        if base != self.base:
            raise ValueError(
                f"The model serves the export {base}, and this DeltaWriter is of the "
                f"export {self.base}."
            )
        if (sequence, run) != (self.sequence, self._follows):
            self.mark_all_rows()
            self.sequence, self._follows = sequence, run

    def mark_all_rows(self) -> None:
        """Makes the next delta have all rows, for values that you assigned yourself.

        Restored checkpoints and weights do it by themselves.
        """
        self._require_active()
        step = 1 << 20
        for index, spec in enumerate(self._base.tables):
            for start in range(0, spec.rows, step):
                ids = np.arange(start, min(start + step, spec.rows))
                self._changes.mark(self._rows_of(index, ids))

    def stop(self) -> None:
        """Notes nothing any more, and frees the memory of the marks.

        Raises:
          RuntimeError: In a tf.function, or after `stop`.
        """
        self._require_active()
        self._changes.commit(end=True)
        del self._core.delta_writers[self._consumer]

    def _new_run(self) -> int:
        """A number that this process chose, or the first one of a job."""
        run, group = new_id(), self._changes.group
        if group is None:
            return run
        return int(group.all_gather("checkpoint", str(run).encode())[0])

    def _require_active(self) -> None:
        if not tf.executing_eagerly():
            raise RuntimeError(
                "A DeltaWriter is used outside of tf.function. Call it between steps."
            )
        if self._core.delta_writers.get(self._consumer) is not self:
            raise RuntimeError("This DeltaWriter was stopped. Make a new one.")

    def _require_same_tables(self, path: str) -> None:
        def shapes(tables: Any) -> list[tuple[str, int, int]]:
            return [(t.name, t.rows, t.dim) for t in tables]

        own = [
            BaseTable(t.name, t.config.vocabulary_size, t.config.dim, "", 0)
            for t in self._core.plan.tables
        ]
        if shapes(own) != shapes(self._base.tables):
            raise ValueError(
                f"{path} has the tables (name, rows, dim) {shapes(self._base.tables)}, "
                f"and the embedding has {shapes(own)}."
            )

    def _read(self, index: int, ids: np.ndarray) -> np.ndarray:
        """Rows of the embedding, float32 [n, D]."""
        spec = self._base.tables[index]
        values = self._changes.read(index, ids)
        self._forms[index].require_storable(spec.name, ids, values)
        return values

    def _rows_of(self, index: int, ids: np.ndarray) -> list[np.ndarray]:
        """The rows of one table, and none of the others."""
        rows = [_NOTHING] * len(self._forms)
        rows[index] = ids
        return rows

    def _blocks(self, changed: Sequence[np.ndarray]) -> Iterator[DeltaRows]:
        for index, ids in enumerate(changed):
            form = self._forms[index]
            step = rows_of_block(form.row_bytes(self._base.tables[index].dim))
            for start in range(0, len(ids), step):
                some = ids[start : start + step]
                parts = form.convert(self._read(index, some)).parts
                yield DeltaRows(index, some, _NOTHING, parts)

    def _mark_differences(self, bundle: Bundle) -> None:
        for index, spec in enumerate(self._base.tables):
            step = max(1, _COMPARED_BYTES // (4 * spec.dim))
            for start in range(0, spec.rows, step):
                ids = np.arange(start, min(start + step, spec.rows))
                parts = self._forms[index].convert(self._read(index, ids)).parts
                stored = _stored_rows(bundle, spec, self._forms[index], ids)
                differs = np.zeros([len(ids)], bool)
                for own, other in zip(parts, stored, strict=True):
                    differs |= (_bytes(own) != _bytes(other)).any(axis=1)
                self._changes.mark(self._rows_of(index, ids[differs]))

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        self._require_active()
        self._core.flush()
        changed = dict(enumerate(self._changes.take()))
        state = tf.constant([self.base, self.sequence, self._follows], tf.int64)
        rows = {f"rows_{index}": tf.constant(ids) for index, ids in changed.items()}
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
                f"The checkpoint has marks for the export {base}, and this DeltaWriter "
                f"is of the export {self.base}."
            )
        self.run = self._new_run()
        if sequence < self.sequence or (
            sequence == self.sequence and follows != self._follows
        ):
            self.mark_all_rows()  # Deltas were written after the checkpoint.
            return
        self._changes.take()
        self._changes.commit()
        self._changes.mark(rows)
        self.sequence, self._follows = sequence, follows


def _read_base(path: str) -> tuple[Bundle, Base]:
    bundle = Bundle(f"{path}/variables/variables")
    key = variable_key("deltas", "description")
    if key not in bundle.shapes:
        raise ValueError(
            f"{path} takes no deltas. Export it with te.serving.export(..., "
            "deltas=True)."
        )
    if bundle.restore(variable_key("deltas", "sequence")):
        raise ValueError(
            f"Deltas were applied to {path}. Pass the export that they follow, and let "
            "the DeltaWriter `resume` from the state of the model."
        )
    return bundle, Base.from_json(bundle.restore(key))


def _stored_rows(
    bundle: Bundle, spec: BaseTable, form: ConvertedTable, ids: np.ndarray
) -> list[np.ndarray]:
    """The parts of some rows in a row, as the export has them."""
    place = f"tables/{escape_local_name(spec.name)}/stored"
    found = []
    for part in form.parts:
        key = variable_key(place, part)
        rows, columns = bundle.shapes[key]
        whole = slice_spec((rows, columns), int(ids[0]), int(ids[-1]) + 1)
        found.append(bundle.restore(key, whole))
    return found


def _bytes(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint8)
