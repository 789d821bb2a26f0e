"""Counts what happens inside of the tables while they train.

>>> import tensorflow as tf
>>> import tpu_embedding as te
>>> films = te.TableConfig(8, 2, initializer=te.RowIdInitializer(), name="films")
>>> embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))
>>> telemetry = te.Telemetry(embedding, every=1)
>>> embedding.enqueue({"film": tf.constant([3, 5, 3])})
>>> _ = embedding.dequeue()
>>> embedding.apply_gradients({"film": tf.ones([3, 2])})
>>> figures = telemetry.read()["films"]
>>> figures["distinct_ids"]
Figure(value=2, exact=True)
>>> figures["hottest_rows"].value
[(3, 2), (5, 1)]
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tpu_embedding import errors
from tpu_embedding.checkpoint.stored import tables_of_weights
from tpu_embedding.cluster_config import STATUS_VARIABLE, replace_file
from tpu_embedding.engines.calls import Counts, TableCounts

ALL_TABLES = "*"  # The key of figures that belong to no single table.
_RATES = (
    "steps_per_second",
    "samples_per_second",
    "bytes_per_step",
)  # The rates of a status that TensorBoard shows.
_LARGEST = 2**63 - 1  # The largest int of the kernels; no count reaches it.
_BUCKETS = 30  # The buckets of a histogram.

# Figures of a table that are sums; TensorBoard shows their means over updates.
_TOTALS = ("ids", "distinct_ids", "invalid_ids", "samples", "samples_without_ids")
# Totals of growing tables, which are always exact.
_OF_VOCABULARY = ("unknown_ids", "admitted_ids", "refused_ids", "evicted_ids")


class Figure(NamedTuple):
    """Holds one figure of a table.

    Attributes:
      value: An int, a float, or for "hottest_rows" a list of (row, ids).
      exact: Whether it covers every update since telemetry began. If not, it covers
        the counted ones, every n-th.
    """

    value: Any
    exact: bool


class Telemetry:
    """Counts the ids, rows, gradients and updates of each table.

    Every n-th update is counted while it is applied, so steps that were refused or
    discarded, and evaluation batches, are not counted. With pipelining an update is
    counted one step later, and the replicas of a strategy count as one batch. Nothing
    is counted before this object is made, and checkpoints do not save the counts.
    docs/telemetry.md explains each figure.

    It works with TPUEmbedding, TPUEmbeddingV2 and the Keras layer on CPUs, under
    MirroredStrategy, MultiWorkerMirroredStrategy and ParameterServerStrategy. In a job
    each process counts the rows that it holds; the rows of all servers are counted
    together. For a Keras model with te.keras.Embedding, the one that `fit` trains, it
    counts the updates of its te.keras.RowSparseOptimizer.
    """

    def __init__(self, embedding: Any, *, every: int = 100, hottest: int = 10) -> None:
        """Begins to count; builds the embedding if that has not happened.

        Args:
          embedding: A TPUEmbedding, a TPUEmbeddingV2, a Keras layer of this package, or
            a model with te.keras.Embedding.
          every: Count the next update and every n-th after it. Counting takes about as
            long as the update itself and 4 bytes for each row of the tables (8 for
            te.keras.Embedding, and copies of a table with dense gradients). With 1
            every figure is exact.
          hottest: The number of rows in the figure "hottest_rows".

        Raises:
          TypeError: If `embedding` is of another class.
          ValueError: If `every` is not an int >= 1 or `hottest` not an int >= 0, or if
            a table is called "*".
          NotImplementedError: If the engine of the embedding has no telemetry: on TPUs,
            on the portable engine, in a Keras layer with `trainable_tables=True`; and
            for te.keras.Embedding under a strategy, or with another optimizer.
        """
        errors.check_int("every", every, 1)
        errors.check_int("hottest", hottest, 0)
        core = getattr(embedding, "core", None) or tables_of_weights(embedding)
        if not hasattr(core, "start_counting"):
            raise errors.argument_type(
                "embedding", embedding, "a TPUEmbedding, TPUEmbeddingV2 or Keras layer"
            )
        self._core: Any = core
        if ALL_TABLES in [table.name for table in self._core.plan.tables]:
            raise ValueError(
                f"A table is called {ALL_TABLES!r}, but Telemetry uses this name for "
                "the figures of all tables. Give its TableConfig another `name`."
            )
        self._every, self._hottest = min(every, _LARGEST), min(hottest, _LARGEST)
        with tf.init_scope():
            self._read_counts = self._core.start_counting(self._every)
            # What growing tables had counted before; a restore changes it.
            tables = self._read_counts(0).tables
        self._begun = {name: table.vocabulary for name, table in tables.items()}
        self._core.telemetry = self
        self._written: Counts | None = None
        # The time of the last `status`, and the steps, samples, and bytes sent by then.
        self._seen = (time.monotonic(), 0, 0, 0)

    @property
    def is_counting(self) -> bool:
        """Whether it counts: until `stop`, or until a later Telemetry is made."""
        return self._core.telemetry is self

    def read(self) -> dict[str, dict[str, Figure]]:
        """Returns the figures, by name of the table and name of the figure.

        Figures that belong to no single table are under "*". Call it eagerly.

        Raises:
          RuntimeError: In a tf.function, after `stop`, or if a later Telemetry counts
            for the same embedding.
        """
        counts = self._counts(self._hottest)
        exact = counts.counted_steps == counts.steps
        figures = {ALL_TABLES: _figures_of_all(counts)}
        for name, table in counts.tables.items():
            figures[name] = {
                figure: Figure(value, exact)
                for figure, value in self._table_values(table).items()
            } | {
                figure: Figure(value, True)
                for figure, value in self._of_vocabulary(name, table).items()
            }
        return figures

    def status(self) -> dict[str, Any]:
        """Returns the progress of the training, in types that JSON can hold.

        In a process of `python -m tpu_embedding launch --status` the status also goes
        into the line of the job.

        Returns:
          "steps", "queue_depth" and "pending_updates" as in `read`. Since the previous
          status, "steps_per_second" and, without servers, "samples_per_second", which
          counts this process's samples of the feature with the fewest. In a job also
          "bytes_per_step", sent by this process since then, and "waited_seconds", how
          long it has waited for each process so far: most of all for the slowest.

        Raises:
          RuntimeError: As `read` does.
        """
        return self._status(self._counts(None))

    def _status(self, counts: Counts) -> dict[str, Any]:
        sent = sum((counts.bytes_sent or {}).values())
        (then, steps, samples, bytes_sent), now = self._seen, time.monotonic()
        self._seen = (now, counts.steps, counts.samples or 0, sent)
        done, seconds = counts.steps - steps, max(now - then, 1e-9)
        found: dict[str, Any] = {
            "steps": counts.steps,
            "steps_per_second": done / seconds,
            "queue_depth": counts.queue_depth,
            "pending_updates": counts.pending_updates,
        }
        if counts.samples is not None:
            found["samples_per_second"] = (counts.samples - samples) / seconds
        if counts.waited_seconds is not None:
            found["bytes_per_step"] = (sent - bytes_sent) / max(done, 1)
            found["waited_seconds"] = list(counts.waited_seconds)
        if path := os.environ.get(STATUS_VARIABLE):
            try:
                replace_file(path, json.dumps({"time": time.time(), **found}))
            except OSError as error:  # Nobody watches then, and training goes on.
                logging.warning("The status is not written: %s.", error)
        return found

    def write(self, step: int, *, name: str = "embedding") -> None:
        """Writes the figures for TensorBoard, to the default writer of tf.summary.

        Scalars are what `status` returns, counts as their mean over the updates counted
        since the last `write`, and other figures as `read` gives them. Histograms show
        ids, and norms of gradients and of updates, over the rows of the last counted
        update. A text lists the hottest rows. The description of each says whether it
        is exact or sampled. Nothing is written unless a default writer is set, and
        nothing of the tables if no update was counted since the last `write`.

        Args:
          step: The step that TensorBoard shows.
          name: The first part of the tags.

        Raises:
          RuntimeError: As `read` does.
        """
        counts = self._counts(self._hottest)
        before, self._written = self._written, counts
        note = "Exact."
        if counts.counted_steps != counts.steps:
            note = f"Sampled: every update number n * {self._every}."
        counted = counts.counted_steps - (before.counted_steps if before else 0)
        status = self._status(counts)
        values = {n: value for n, (value, _) in _figures_of_all(counts).items()}
        values |= {n: status[n] for n in _RATES if n in status}
        for figure, value in values.items():
            _write(f"{name}/{figure}", "scalars", value, step, "Exact.")
        for table_name, table in counts.tables.items() if counted else ():
            tag = f"{name}/{table_name}"
            old = before.tables[table_name] if before else TableCounts()
            own = counted
            if table.counted_steps is not None:
                own = max(1, table.counted_steps - (old.counted_steps or 0))
            for figure, value in self._table_values(table).items():
                if figure in _TOTALS:
                    mean = (value - getattr(old, figure)) / own
                    described = f"Mean of an update. {note}"
                    _write(f"{tag}/{figure}", "scalars", mean, step, described)
                elif figure != "hottest_rows":
                    _write(f"{tag}/{figure}", "scalars", value, step, note)
            for figure, value in self._of_vocabulary(table_name, table).items():
                _write(f"{tag}/{figure}", "scalars", value, step, "Exact.")
            _write_rows(tag, table, step, note)

    def stop(self) -> None:
        """Stops counting, and frees the memory of the counts.

        Raises:
          RuntimeError: As `read` does.
        """
        self._require_counting()
        self._core.start_counting(0)
        self._core.telemetry = None

    def _counts(self, num_hot_rows: int | None) -> Counts:
        self._require_counting()
        return self._read_counts(num_hot_rows)

    def _require_counting(self) -> None:
        if not tf.executing_eagerly():
            raise RuntimeError(
                "Telemetry cannot be read inside a tf.function. Call read, write and "
                "stop between steps."
            )
        if not self.is_counting:
            raise RuntimeError(
                "This Telemetry no longer counts: it was stopped, or another one was "
                "created for the embedding. Use that one, or create a new one."
            )

    def _of_vocabulary(self, name: str, table: TableCounts) -> dict[str, int]:
        """Returns the figures that only a growing table has; {} for other tables."""
        figures = zip(_OF_VOCABULARY, table.vocabulary, self._begun[name], strict=False)
        return {figure: now - before for figure, now, before in figures}

    def _table_values(self, table: TableCounts) -> dict[str, Any]:
        values = {
            **{figure: getattr(table, figure) for figure in _TOTALS},
            "rows_touched": table.rows_touched,
            "gradient_norm": _norm(table.gradient_norms),
            "update_norm": _norm(table.update_norms),
        }
        if table.hot_rows is not None:
            values["hottest_rows"] = [tuple(hot) for hot in table.hot_rows.tolist()]
        if not self._core.knows_invalid_ids:
            values["invalid_ids"] = None
        return {figure: value for figure, value in values.items() if value is not None}


def _figures_of_all(counts: Counts) -> dict[str, Figure]:
    values = {
        "steps": counts.steps,
        "counted_steps": counts.counted_steps,
        "queue_depth": counts.queue_depth,
        "pending_updates": counts.pending_updates,
    }
    if counts.bytes_sent is not None:
        values |= {f"bytes_sent/{p}": sent for p, sent in counts.bytes_sent.items()}
    if counts.waited_seconds is not None:
        waited = enumerate(counts.waited_seconds)
        values |= {f"waited_seconds/{p}": seconds for p, seconds in waited}
    return {figure: Figure(value, True) for figure, value in values.items()}


def _write_rows(tag: str, table: TableCounts, step: int, note: str) -> None:
    """Writes what is known of single rows."""
    described = f"Of the rows of the last counted update. {note}"
    for figure, values in (
        ("ids_by_row", table.row_ids),
        ("gradient_norms_by_row", table.gradient_norms),
        ("update_norms_by_row", table.update_norms),
    ):
        if len(values):
            _write(f"{tag}/{figure}", "histograms", _buckets(values), step, described)
    if table.hot_rows is None:
        return
    lines = ["| row | ids |", "|---|---|"]
    lines += [f"| {row} | {ids} |" for row, ids in table.hot_rows]
    _write(f"{tag}/hottest_rows", "text", "\n".join(lines), step, note)


def _write(tag: str, plugin: str, value: Any, step: int, description: str) -> None:
    """Writes a summary as tf.summary does, which needs TensorBoard to be installed.

    The plugin "scalars" shows a number, "text" Markdown, and "histograms" the left end,
    right end and count of each bucket, [buckets, 3].
    """
    metadata = tf.compat.v1.SummaryMetadata(summary_description=description)
    metadata.plugin_data.plugin_name = plugin
    # DATA_CLASS_SCALAR or DATA_CLASS_TENSOR of TensorFlow's summary.proto.
    metadata.data_class = 1 if plugin == "scalars" else 2
    if plugin == "scalars":
        value = tf.constant(value, tf.float32)
    elif plugin == "histograms":
        value = tf.constant(value, tf.float64)
    tf.summary.write(tag, value, step, metadata)


def _buckets(values: np.ndarray) -> np.ndarray:
    """Returns float64 [n, 3]: left and right edge and size of equally wide buckets."""
    values = values.astype(np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        return np.zeros([0, 3])
    if values.min() == values.max():
        return np.array([[values.min() - 0.5, values.max() + 0.5, len(values)]])
    sizes, edges = np.histogram(values, _BUCKETS)
    return np.stack([edges[:-1], edges[1:], sizes], 1)


def _norm(norms: np.ndarray) -> float:
    return float(np.sqrt(np.square(norms.astype(np.float64)).sum()))
