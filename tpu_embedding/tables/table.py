"""Tables and their changes, as checkpoints, serving, deltas and Keras see them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tpu_embedding.layout.partition import Division
from tpu_embedding.layout.placement import Placement
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.ops import library
from tpu_embedding.tables.codes import CODED_DTYPES, CodedReader, values_of
from tpu_embedding.tables.reach import ALONE, Reach, ReachedRows
from tpu_embedding.tables.readers import (
    PartsReader,
    StoredReader,
    TableReader,
    VariableReader,
)
from tpu_embedding.tables.rows import (
    PARAMETERS,
    STORED,
    MutableTableRows,
    TableRows,
    by_checkpoint_name,
    checkpoint_name,
    interleaved,
    stored_arrays,
)
from tpu_embedding.tables.variables import TableVariables, variable_rows
from tpu_embedding.tables.vocabularies import Changed, StoredVocabulary, Vocabulary

_BLOCK_IDS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Identity:
    """The ids of a static table, whose row r belongs to id r.

    Attributes:
      name: Name of the table.
      rows: See `Table.rows`.
    """

    name: str
    rows: Mapping[str, MutableTableRows]

    def known(self) -> Iterator[np.ndarray]:
        """Yields the ids that have a row, int64 [n] in blocks."""
        height = self.rows[PARAMETERS].shape[0]
        for start in range(0, height, _BLOCK_IDS):
            yield np.arange(start, min(start + _BLOCK_IDS, height))

    def objects(self, made: Callable[[str, MutableTableRows], Any]) -> dict[str, Any]:
        """Returns the objects that checkpoints save and restore, by name there.

        If an array is one variable, the object is that variable, else what `made`
        returns. A growing table is one object, its vocabulary.
        """
        return {
            name: made(name, rows) if rows.variable is None else rows.variable
            for name, rows in by_checkpoint_name(
                {self.name: stored_arrays(self.rows)}
            ).items()
        }

    def parameters(self, made: Callable[[str, MutableTableRows], Any]) -> Any:
        """Returns the table by value: its variable, else what `made` returns.

        For a growing table it returns the current rows, without the ids.
        """
        rows = self.rows[PARAMETERS]
        return made(self.name, rows) if rows.variable is None else rows.variable

    def values(self) -> dict[str, Any]:
        """Returns each array by name: a variable if it is one, else current values."""
        return {
            name: tf.constant(rows.numpy()) if rows.variable is None else rows.variable
            for name, rows in self.rows.items()
        }

    def served(self) -> tuple[TableRows, np.ndarray | None]:
        """Returns rows to export, and a growing table's ids of all but the last row.

        Ids that a growing table lacks look up the last row. In a job only the first
        process gets the ids.
        """
        return self.rows[PARAMETERS], None

    def saved(self) -> tuple[Mapping[str, TableRows], Mapping[str, TableRows]]:
        """Returns arrays by name, and what a growing table knows of its ids."""
        return self.rows, {}

    def changed(self, consumer: str, marked: Callable[[], Changed]) -> Changed:
        """Returns what changed for a consumer of deltas: the marked rows."""
        del consumer
        return marked()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """One table of an engine and its slots, in full form: unsharded, without padding.

    Checkpoints, serving, deltas, the Keras layer and `TPUEmbedding.variables` use this
    view. Call `TableStore.retrieve` before reading a value, and `TableStore.load` after
    writing one.

    Attributes:
      spec: The table.
      ids: The ids of the rows, which also decide how rows are read and written.
      stored: Gathers the rows of the parameters that this process reaches.
      values: Returns tf.Variables by "parameters" and slot name if each array is one,
        else tensors of the current values; also the weights of a CustomCombiner.
        Raises RuntimeError if the tables are in the TPU's memory.
      shards: Returns (device, rows there) for each part of the parameters.
      variables: Returns the variables that store the parameters, or the stack with
        them, in the order of the rows. Raises RuntimeError if the tables are in the
        TPU's memory, and NotImplementedError if other processes have parts.
      reach: How this process reaches the table.
    """

    spec: TableSpec
    ids: Identity | Vocabulary
    stored: StoredReader
    values: Callable[[], Mapping[str, Any]]
    shards: Callable[[], list[tuple[str, tf.Tensor]]]
    variables: Callable[[], Sequence[tf.Variable]]
    reach: Reach = ALONE

    @property
    def rows(self) -> Mapping[str, MutableTableRows]:
        """The matrices, read and written by rows, by "parameters" and slot name.

        A growing table has none here, as its rows mean nothing without their ids.
        `rows[name].variable` is the tf.Variable if one variable is the matrix.
        """
        return self.ids.rows

    @property
    def reader(self) -> StoredReader:
        """The reader of the parameters in any graph, by TensorFlow's ops."""
        return self.reach.reader(self.stored)

    def matrix(self, rows: np.ndarray, call: str) -> TableRows:
        """Returns parameters of rows int64 [n]; all processes must make each read."""
        made = _ChosenRows(self, self.stored, self.spec.config.dim, rows, call)
        if isinstance(self.stored, CodedReader):
            parts = zip(STORED, self.stored.parts, (made.shape[1], 2), strict=True)
            made.coded = {
                name: _ChosenRows(self, part, columns, rows, f"{call} ({name})")
                for name, part, columns in parts
            }
            for part, dtype in zip(made.coded.values(), CODED_DTYPES, strict=True):
                part.dtype = dtype
        return made

    def gather(self, reader: TableReader, rows: np.ndarray, call: str) -> np.ndarray:
        owned = self.reach.owned(self.spec.index, rows)
        _, local = owned[self.reach.rank]
        stored = self.reach.call(lambda: reader.read(tf.constant(local)).numpy())
        values = np.empty([len(rows), stored.shape[1]], np.float32)
        for (has, _), part in zip(owned, self.reach.gather(stored, call), strict=True):
            values[has] = part
        return values


class _ChosenRows(TableRows):
    """Chosen rows of a table, in any order; see `Table.matrix`."""

    def __init__(
        self,
        table: Table,
        reader: TableReader,
        columns: int,
        rows: np.ndarray,
        call: str,
    ) -> None:
        super().__init__((len(rows), columns), np.dtype(np.float32))
        self._table, self._reader, self._rows, self._call = table, reader, rows, call

    def read(self, start: int, stop: int) -> np.ndarray:
        rows, call = self._rows[start:stop], f"{self._call}, {start} to {stop}"
        return self._table.gather(self._reader, rows, call).astype(self.dtype)


def stored_table(
    spec: TableSpec,
    parts: Sequence[TableVariables],
    reach: Reach = ALONE,
    vocabulary: Sequence[StoredVocabulary] = (),
) -> Table:
    """Returns a table whose parts are variables that this process reaches.

    Args:
      spec: The table.
      parts: The variables of each part of a `Division`.
      reach: How this process reaches the table.
      vocabulary: The vocabulary of each part of a growing table; empty for others.
    """
    by_part = [variable_rows(spec, part) for part in parts]

    def whole(array: str, local: Sequence[MutableTableRows]) -> MutableTableRows:
        rows = interleaved(local)
        if reach is ALONE:  # Saves need fewer calls without a wrapper.
            return rows
        height, index = spec.config.vocabulary_size, spec.index
        name = checkpoint_name(spec.name, array)
        return ReachedRows(name, height, rows, index, reach)

    rows = {array: whole(array, [p[array] for p in by_part]) for array in by_part[0]}
    stored = _stored_reader([part.parameters for part in parts], spec.config.dim)
    grids = [part.scale_offset for part in parts if part.scale_offset is not None]
    if grids:
        stored = CodedReader(stored, _stored_reader(grids, 2))
        coded: Any = [p[PARAMETERS].coded for p in by_part if p]
        if rows and rows[PARAMETERS] is not by_part[0][PARAMETERS]:
            rows[PARAMETERS].coded = {
                array: whole(array, [local[array] for local in coded])
                for array in coded[0]
            }
    parameters = [part.parameters for part in parts]
    ids = (
        Vocabulary(spec, vocabulary, reach) if vocabulary else Identity(spec.name, rows)
    )

    def shards() -> list[tuple[str, tf.Tensor]]:
        # A part without rows is a variable of one row.
        has = reach.within(spec.index, reach.rank, 0, spec.config.max_rows).count
        values = [(p.device, p.read_value()) for p in parameters]
        if grids:
            values = [
                (p.device, tf.constant(values_of(p.numpy(), own.numpy())))
                for p, own in zip(parameters, grids, strict=True)
            ]
        return values if has else [(device, value[:0]) for device, value in values]

    def variables() -> Sequence[tf.Variable]:
        if grids:
            raise NotImplementedError(
                f"Table {spec.name} is stored as int8 codes, scales and offsets, so no "
                "variables hold its values. Use `embedding_tables`."
            )
        return reach.variables(stored)

    return Table(
        spec=spec,
        ids=ids,
        stored=stored,
        values=ids.values,
        shards=shards,
        variables=variables,
        reach=reach,
    )


def _stored_reader(parameters: Sequence[tf.Variable], columns: int) -> StoredReader:
    if len(parameters) == 1:
        return VariableReader(parameters[0])
    # The rows of parts of growing tables are read by their ids only.
    heights: list[Any] = [variable.shape[0] or 0 for variable in parameters]
    starts = [sum(heights[:k]) for k in range(len(heights))]
    division = Division(len(parameters))

    def row_of(ids: tf.Tensor) -> tf.Tensor:
        first = tf.gather(tf.constant(starts, tf.int64), division.owner(ids))
        return first + division.local(ids)

    return PartsReader(parameters, row_of, columns)


class NotesChanges(Protocol):
    """A part of the tables, whose step queue `handle` notes changed rows.

    `engines.host.part.TablePart` describes the attributes.
    """

    handle: tf.Tensor
    device: str
    placement: Placement
    tables: Sequence[int]


class RowChanges:
    """The rows of tables that changed for one consumer of deltas; used eagerly.

    All processes of a job must make every call with the same arguments, and all get
    the same results.

    Attributes:
      group: The processes; None for this one alone.
    """

    def __init__(
        self,
        parts: Sequence[NotesChanges],
        tables: Sequence[Table],
        consumer: str,
        reach: Reach,
    ) -> None:
        """Keeps the arguments; nothing is noted before the first mark.

        Args:
          parts: The parts on which ops of this process work.
          tables: The tables by index in the plan.
          consumer: The name of the consumer.
          reach: How this process reaches the tables.
        """
        self._ops = library.load()
        self._parts, self._tables, self._consumer = parts, tables, consumer
        self._reach, self.group = reach, reach.group

    def mark(self, rows: Sequence[Any]) -> None:
        """Marks rows of each table as changed; `rows` has int64 [n] for each table.

        For a growing table they are ids, with or without a row.
        """

        def mark() -> None:
            for part in self._parts:
                local = [
                    part.placement.owned(k, np.asarray(rows[t]))[1]
                    for k, t in enumerate(part.tables)
                ]
                with tf.device(part.device):
                    self._ops.tpu_embedding_mark_rows(
                        queue=part.handle, rows=local, consumer=self._consumer
                    )

        self._reach.call(mark)

    def take(self) -> list[Changed]:
        """Returns the changed rows of each table since the last commit."""
        taken = self._reach.call(self._take)
        return [
            table.ids.changed(self._consumer, functools.partial(self._marked, k, rows))
            for k, (table, rows) in enumerate(zip(self._tables, taken, strict=True))
        ]

    def _take(self) -> list[list[np.ndarray]]:
        """Returns the changed rows of each part, by table."""
        result: list[list[np.ndarray]] = [[] for _ in self._tables]
        for part in self._parts:
            with tf.device(part.device):
                taken = self._ops.tpu_embedding_take_rows(
                    queue=part.handle,
                    num_tables=len(part.tables),
                    consumer=self._consumer,
                )
            for k, (table, rows) in enumerate(zip(part.tables, taken, strict=True)):
                result[table].append(part.placement.rows_at(k, rows.numpy()))
        return result

    def _marked(self, table: int, rows: Sequence[np.ndarray]) -> Changed:
        local = np.concatenate(rows)
        everywhere = self._reach.gather(local, self._described("changed rows"))
        keys = np.sort(np.concatenate(everywhere))
        return Changed(keys, self.matrix(table, keys))

    def matrix(self, table: int, rows: np.ndarray) -> TableRows:
        """See `Table.matrix`, of rows int64 [n] of a table."""
        what = self._described(f"{len(rows)} rows of table {table}")
        return self._tables[table].matrix(rows, what)

    def _described(self, what: str) -> str:
        return f"the reading of {what} for the DeltaWriter of {self._consumer}"

    def commit(self, *, end: bool = False) -> None:
        """Forgets what was taken last; `end` also stops tracking changes."""

        def commit() -> None:
            for part in self._parts:
                with tf.device(part.device):
                    self._ops.tpu_embedding_commit_rows(
                        queue=part.handle, consumer=self._consumer, end=end
                    )

        self._reach.call(commit)
