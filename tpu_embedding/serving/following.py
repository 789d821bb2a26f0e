"""Served tables that follow their trainer: a graph that checks and applies deltas.

A table has more rows than its vocabulary. An index says in which of them the row of
each id is, and the others are spare. A delta is written into spare rows, block by
block; its last block then points the index at them. The rows that this frees are
written again by the next delta but one at the earliest, because a delta may change no
more than half of the spare rows and those are taken in a ring. So a lookup that sees
fewer than two commits while it runs has read whole rows, and any other looks again.

The ids of a growing table are numbered: a hash table has the number of each, and the
index the row of each number. Numbers are used again as spare rows are.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable.trackable_utils import escape_local_name

from tpu_embedding.lookup.graph_checks import Check, require, text
from tpu_embedding.serving.conversion import ConvertedTable
from tpu_embedding.serving.delta_files import (
    BEGIN_FIELDS,
    END,
    HEAD_BYTES,
    ROWS_FIELDS,
    Base,
    BaseTable,
)
from tpu_embedding.serving.growing_tables import ChangingRowOfIds
from tpu_embedding.tables.readers import TableReader

STATE, APPLY = SIGNATURES = ("delta_state", "apply_delta")


def ids_key(index: int) -> str:
    """What `delta_state` calls the ids of a growing table of the base."""
    return f"ids_{index}"


SMALL_TABLE = 4096  # One delta may change all rows of a table of up to so many.
_NO_IDS: Any = np.zeros([0], np.int64)
_MOST_ROWS = 2**31 - 1  # With the spare ones: the index is int32.


def most_changed(rows: int, share: float) -> int:
    """The number of rows of a table that one delta may change.

    >>> most_changed(1000, 0.125), most_changed(1_000_000, 0.125)
    (1000, 125000)
    """
    return min(rows, max(SMALL_TABLE, math.ceil(rows * share)))


def most_ids(ids: int, max_rows: int) -> int:
    """The most ids that a growing table may have while it takes deltas."""
    return min(max_rows, 2 * ids + SMALL_TABLE)


def height_of(spec: BaseTable) -> int:
    """How many numbers the index has: of a growing table spare ones for new ids."""
    return spec.rows + (2 * spec.most_changed if spec.grows else 0)


def stored_place(spec: BaseTable) -> str:
    """Where the parts of a table are in the objects of an export."""
    shared = "ids/shared/" if spec.shared else ""
    return f"tables/{escape_local_name(spec.name)}/{shared}stored"


class GrowingBase(NamedTuple):
    """A growing table as it is exported.

    Attributes:
      ids: int64 [n], of its first rows.
      missing: What ids without a row look up, unless they share a row.
    """

    ids: np.ndarray
    missing: Callable[[tf.Tensor], tf.Tensor]


class FollowingTable(TableReader, tf.Module):
    """A table with spare rows, and the index of the rows that are served."""

    def __init__(
        self,
        stored: ConvertedTable,
        spec: BaseTable,
        sequence: Any,
        ids: FollowingIds | None = None,
    ) -> None:
        """Takes the table with its spare rows; the first of its rows are served."""
        super().__init__()
        self.stored, self.ids = stored, ids
        height = height_of(spec)
        self.index = _variable(tf.range(height))
        self.ring = _variable(tf.range(height, height + 2 * spec.most_changed))
        self.staged_keys = _variable(tf.zeros([spec.most_changed], tf.int64))
        self._dim, self._sequence = spec.dim, sequence

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        """See `TableReader.read`; of a growing table `rows` are ids."""

        def look(values: tf.Tensor, commits: tf.Tensor) -> list[tf.Tensor]:
            del values, commits
            before = self._sequence.read_value()
            with tf.control_dependencies([before]):
                values = self._look(rows)
            with tf.control_dependencies([values]):
                return [values, self._sequence.read_value() - before]

        values, _ = tf.while_loop(
            lambda _, commits: commits > 1,
            look,
            [tf.zeros([0, self._dim]), tf.constant(2, tf.int64)],
            [tf.TensorShape([None, self._dim]), tf.TensorShape([])],
            parallel_iterations=1,
        )
        return tf.ensure_shape(values, [rows.shape[0], self._dim])

    def _look(self, rows: tf.Tensor) -> tf.Tensor:
        if self.ids is None:
            return self.stored.read(tf.gather(self.index, rows))
        numbers = self.ids.number_of(rows)
        known = numbers >= 0
        values = self.stored.read(tf.gather(self.index, tf.maximum(numbers, 0)))
        return tf.where(known[:, tf.newaxis], values, self.ids.missing(rows))

    def numbered(self, keys: tf.Tensor, deleted: tf.Tensor) -> Numbered:
        """What a delta does to the numbers of the index."""
        if self.ids is not None:
            return self.ids.numbered(keys, deleted)
        return Numbered(keys, tf.constant(True), list)


class Numbered(NamedTuple):
    """The numbers of the ids of a delta.

    Attributes:
      numbers: Of each changed id, int [n].
      fits: Whether the delta can be applied.
      change: Makes the ops that give and take numbers, after the index was changed.
    """

    numbers: tf.Tensor
    fits: tf.Tensor
    change: Callable[[], list[Any]]


class FollowingIds(tf.Module):
    """The ids of a growing table that follows its trainer.

    Attributes:
      number_of: The number of each id.
      shared: The row that ids without one have, if it is trained.
    """

    def __init__(
        self,
        spec: BaseTable,
        ids: np.ndarray,
        missing: Callable[[tf.Tensor], tf.Tensor],
        shared: FollowingTable | None,
    ) -> None:
        """Takes int64 [n], and what ids without a row look up if they share none."""
        super().__init__()
        self.number_of = ChangingRowOfIds(spec.rows, spec.most_changed)
        self.number_of.assign(ids)
        height = height_of(spec)
        self.free = _variable(tf.roll(tf.range(height), -len(ids), 0))
        # How many ids there are, and the place of the number that is free longest.
        self.counts = _variable(tf.constant([len(ids), 0], tf.int64))
        self.staged_keys = _variable(tf.zeros([spec.most_changed], tf.int64))
        self.shared, self._missing = shared, missing
        self._most, self._height = spec.rows, height

    def missing(self, ids: tf.Tensor) -> tf.Tensor:
        """What ids without a row look up, [n, D] or [1, D]."""
        if self.shared is not None:
            return self.shared.read(tf.zeros([1], tf.int64))
        return self._missing(ids)

    def numbered(self, keys: tf.Tensor, deleted: tf.Tensor) -> Numbered:
        """See `FollowingTable.numbered`."""
        old, lost = self.number_of(keys), self.number_of(deleted)
        is_new = old < 0
        size, head = tf.unstack(self.counts.read_value())
        order = tf.cumsum(tf.cast(is_new, tf.int64), exclusive=True)
        free = tf.gather(self.free, (head + order) % self._height)
        numbers = tf.where(is_new, free, old)
        freed, removed = lost[lost >= 0], deleted[lost >= 0]
        created = tf.reduce_sum(tf.cast(is_new, tf.int64))
        after = size + created - tf.size(freed, tf.int64)
        both = tf.concat([keys, deleted], 0)
        once = tf.equal(tf.size(tf.unique(both).y), tf.size(both))

        def change() -> list[Any]:
            tail = head + self._height - size + tf.range(tf.size(freed, tf.int64))
            return [
                *self.number_of.change(keys[is_new], numbers[is_new], removed),
                _scatter(self.free, tail % self._height, freed),
                self.counts.assign(
                    [after, (head + created) % self._height], read_value=False
                ),
            ]

        return Numbered(numbers, once & (after <= self._most), change)


class _State(tf.Module):
    """What was applied, and what is staged; all numbers are int64.

    Attributes:
      description: The `Base` as JSON.
      sequence: The delta applied last; 0 for none.
      run: The run that wrote it; the base's id for none.
      staging: The next block, the checksum of those before it, and the run and the
        sequence number of the delta that is staged.
      announced: [num_tables, 2], the rows that this delta changes, and its deletions.
      staged: [num_tables, 2], those that came; the rows are in spare rows.
      heads: [num_tables], the place in the ring of the first row that is spare longest.
    """

    def __init__(self, base: Base) -> None:
        super().__init__()
        self.description = _variable(tf.constant(base.to_json()))
        self.sequence = _variable(tf.constant(0, tf.int64))
        self.run = _variable(tf.constant(base.id, tf.int64))
        self.staging = _variable(tf.zeros([4], tf.int64))
        zeros = tf.zeros([len(base.tables)], tf.int64)
        both = tf.zeros([len(base.tables), 2], tf.int64)
        self.announced, self.staged = _variable(both), _variable(both)
        self.heads = _variable(zeros)


class Follower:
    """The tables of an export that takes deltas, and the signatures that apply them.

    Attributes:
      base: The export.
      state: To be saved with the model.
      tables: By index.
    """

    def __init__(
        self,
        base: Base,
        stored: Sequence[ConvertedTable],
        growing: Mapping[str, GrowingBase],
    ) -> None:
        """Takes tables of as many rows as `height_of` and twice `most_changed`.

        The row that ids of a growing table share comes before it.
        """
        for table in base.tables:
            height = height_of(table)
            if height + 2 * table.most_changed > _MOST_ROWS:
                raise ValueError(
                    f"Table {table.name} has {height} rows and needs "
                    f"{2 * table.most_changed} spare ones: with `deltas` a table may "
                    f"have at most {_MOST_ROWS} of both. Pass a smaller `deltas`."
                )
        self.base, self.state = base, _State(base)
        self.tables: list[FollowingTable] = []
        shared: dict[str, FollowingTable] = {}
        for spec, table in zip(base.tables, stored, strict=True):
            ids = None
            if spec.grows:
                ids = FollowingIds(spec, *growing[spec.name], shared.get(spec.name))
            following = FollowingTable(table, spec, self.state.sequence, ids)
            if spec.shared:
                shared[spec.name] = following
            self.tables.append(following)

    def functions(self) -> dict[str, Any]:
        """The traced functions of both signatures."""
        block = tf.TensorSpec([], tf.string, "block")
        apply = tf.function(self._apply, [block], autograph=False)
        state = tf.function(self._read_state, [], autograph=False)
        return {
            STATE: state.get_concrete_function(),
            APPLY: apply.get_concrete_function(),
        }

    def _read_state(self) -> dict[str, tf.Tensor]:
        return {
            "base": tf.constant(self.base.id, tf.int64),
            "description": self.state.description.read_value(),
            "sequence": self.state.sequence.read_value(),
            "run": self.state.run.read_value(),
            "next_block": self.state.staging[0],
            **{
                ids_key(index): table.ids.number_of.ids()
                for index, table in enumerate(self.tables)
                if table.ids is not None
            },
        }

    def _apply(self, block: tf.Tensor) -> dict[str, tf.Tensor]:
        """Checks a block, then stages or commits it; one call at a time."""
        name = f"tpu_embedding_deltas_{self.base.id}"
        mutex = tf.raw_ops.MutexV2(container="", shared_name=name)
        lock = tf.raw_ops.MutexLock(mutex=mutex)
        with tf.control_dependencies([lock]):
            taken = tf.identity(block)
            done = self._take(taken)
            with tf.control_dependencies([done]):
                found = [
                    self.state.sequence.read_value(),
                    self.state.staging.read_value()[0],
                ]
        with tf.control_dependencies(found):
            release = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        with tf.control_dependencies([release]):
            sequence, number = map(tf.identity, found)
        return {"sequence": sequence, "next_block": number}

    def _take(self, block: tf.Tensor) -> tf.Tensor:
        size = tf.strings.length(block)
        whole = _check(
            size >= HEAD_BYTES,
            "A block of a delta has {size} bytes: truncated.",
            size=size,
        )
        with tf.control_dependencies(require([whole])):
            expected, kind, number = tf.unstack(_numbers(block, 0, 3))
            content = tf.io.decode_raw(tf.strings.substr(block, 8, size - 8), tf.uint8)
        intact = [
            _check(
                tf.equal(_checksum(content), expected),
                "Block {number} of a delta is damaged.",
                number=number,
            ),
            _check(
                (kind >= 0) & (kind <= END),
                "A delta has a block of the unknown kind {kind}.",
                kind=kind,
            ),
        ]
        with tf.control_dependencies(require(intact)):
            kind = tf.cast(kind, tf.int32)
        total = _checksum(_bytes([self.state.staging[1], expected]))

        def in_order(take: Callable[..., list[Any]]) -> tf.Tensor:
            return _done(take(block, number, total, self._require_next(number)))

        return tf.switch_case(
            kind,
            [
                lambda: _done(self._begin(block, expected, number)),
                lambda: in_order(self._rows),
                lambda: in_order(self._commit),
            ],
        )

    def _begin(
        self, block: tf.Tensor, checksum: tf.Tensor, number: tf.Tensor
    ) -> list[Any]:
        state, tables = self.state, self.base.tables
        base, run, follows, sequence, count = tf.unstack(
            _numbers(block, HEAD_BYTES, BEGIN_FIELDS)
        )
        names = {"sequence": sequence, "base": base, "own": self.base.id}
        names["applied"], names["before"] = state.sequence.read_value(), follows
        names["missing"], names["run"] = names["applied"] + 1, state.run.read_value()
        own = [
            _check(
                tf.equal(base, self.base.id)
                & tf.equal(count, len(tables))
                & tf.equal(number, 0),
                "Delta {sequence} is foreign: this model is the export {own}, and the "
                "delta follows the export {base}.",
                **names,
            ),
            _check(
                sequence > names["applied"],
                "Delta {sequence} is repeated: delta {applied} was applied last.",
                **names,
            ),
            _check(
                sequence <= names["missing"],
                "Delta {missing} is missing: delta {sequence} came after {applied}.",
                **names,
            ),
            _check(
                tf.equal(follows, names["run"]),
                "Delta {sequence} is foreign: it follows a delta of run {before}, and "
                "the last one here is of run {run}. The trainer went back to a "
                "checkpoint before it. Export anew.",
                **names,
            ),
        ]
        with tf.control_dependencies(require(own)):
            start = HEAD_BYTES + 8 * BEGIN_FIELDS
            counts = _numbers(block, start, 2 * len(tables))
        both = tf.reshape(counts, [-1, 2])
        with tf.control_dependencies(self._require_room(sequence, both)):
            total = _checksum(_bytes([tf.constant(0, tf.int64), checksum]))
            return [
                state.staging.assign([1, total, run, sequence], read_value=False),
                state.announced.assign(both, read_value=False),
                state.staged.assign(tf.zeros_like(both), read_value=False),
            ]

    def _require_room(self, sequence: tf.Tensor, both: tf.Tensor) -> list[Any]:
        tables = self.base.tables
        upserts, deletions = tf.unstack(both, axis=1)
        most = tf.constant([table.most_changed for table in tables], tf.int64)
        names = tf.constant([table.name for table in tables])
        grows = tf.constant([table.grows for table in tables])
        deleting = tf.not_equal(deletions, 0) & ~grows
        wrong = (both < 0) | (both > most[:, tf.newaxis])
        too_many = tf.reduce_any(wrong, axis=1)
        first = tf.argmax(too_many)
        bad = tf.where(wrong[:, 0], upserts, deletions)
        return require(
            [
                _check(
                    ~deleting,
                    "Delta {sequence} deletes rows of table {table}, whose ids are "
                    "fixed.",
                    sequence=sequence,
                    table=tf.gather(names, tf.argmax(deleting)),
                ),
                _check(
                    ~too_many,
                    "Delta {sequence} changes {rows} rows of table {table}, and this "
                    "export takes {most} at a time. Export anew.",
                    sequence=sequence,
                    rows=tf.gather(bad, first),
                    table=tf.gather(names, first),
                    most=tf.gather(most, first),
                ),
            ]
        )

    def _require_next(self, number: tf.Tensor) -> list[Any]:
        following, _, _, sequence = tf.unstack(self.state.staging.read_value())
        return require(
            [
                _check(
                    following > 0,
                    "Block {number} came, and no delta has begun. Send all blocks of a "
                    "delta, from the first one on.",
                    number=number,
                ),
                _check(
                    tf.equal(number, following),
                    "Block {number} of delta {sequence} came where block {next} is "
                    "next.",
                    number=number,
                    sequence=sequence,
                    next=following,
                ),
            ]
        )

    def _rows(
        self, block: tf.Tensor, number: tf.Tensor, total: tf.Tensor, controls: list[Any]
    ) -> list[Any]:
        with tf.control_dependencies(controls):
            table, upserts, deletions = tf.unstack(
                _numbers(block, HEAD_BYTES, ROWS_FIELDS)
            )
        known = _check(
            (table >= 0)
            & (table < len(self.tables))
            & (upserts >= 0)
            & (deletions >= 0),
            "Block {number} of a delta has wrong numbers.",
            number=number,
        )
        with tf.control_dependencies(require([known])):
            chosen = tf.cast(table, tf.int32)
        branches = [
            lambda t=t: _done(self._stage(t, block, upserts, deletions))
            for t in range(len(self.tables))
        ]
        with tf.control_dependencies([tf.switch_case(chosen, branches)]):
            staging = self.state.staging
            return [
                tf.raw_ops.ResourceScatterAdd(
                    resource=self.state.staged.handle,
                    indices=table,
                    updates=tf.stack([upserts, deletions]),
                ),
                staging.assign(
                    [number + 1, total, staging[2], staging[3]], read_value=False
                ),
            ]

    def _stage(
        self, index: int, block: tf.Tensor, count: tf.Tensor, deletions: tf.Tensor
    ) -> list[Any]:
        """Writes rows of one table into spare rows."""
        spec, table = self.base.tables[index], self.tables[index]
        staged, deleted = tf.unstack(self.state.staged[index])
        coming = self.state.staged[index] + tf.stack([count, deletions])
        parts = list(table.stored.parts.values())
        start = HEAD_BYTES + 8 * ROWS_FIELDS
        widths = [part.shape[1] * part.dtype.size for part in parts]
        size = tf.cast(tf.strings.length(block, "BYTE"), tf.int64)
        expected = start + count * (8 + sum(widths)) + 8 * deletions
        fits = [
            _check(
                tf.equal(size, expected),
                "A block of rows of table {table} has {size} bytes for {count} rows.",
                table=spec.name,
                size=size,
                count=count,
            ),
            _check(
                coming <= self.state.announced[index],
                "A delta has more rows of table {table} than it says.",
                table=spec.name,
            ),
        ]
        with tf.control_dependencies(require(fits)):
            number, lost = tf.cast(count, tf.int32), tf.cast(deletions, tf.int32)
            keys = _numbers(block, start, number)
            gone = _numbers(block, start + 8 * number, lost)
        if table.ids is None:
            in_order = _check(
                _ascend(table.staged_keys, staged, keys)
                & (keys >= 0)
                & (keys < spec.rows),
                "The ids of table {table} in a delta must ascend, and be below {rows}.",
                table=spec.name,
                rows=spec.rows,
            )
        else:
            in_order = _check(
                tf.reduce_all(_ascend(table.staged_keys, staged, keys))
                & tf.reduce_all(_ascend(table.ids.staged_keys, deleted, gone)),
                "The ids of table {table} in a delta must ascend.",
                table=spec.name,
            )
        with tf.control_dependencies(require([in_order])):
            within = staged + tf.range(count)
            places = tf.gather(table.ring, self._slots(index, within))
            done = [_scatter(table.staged_keys, within, keys)]
            if table.ids is not None:
                after = deleted + tf.range(deletions)
                done.append(_scatter(table.ids.staged_keys, after, gone))
            place = start + 8 * (number + lost)
            for part, width in zip(parts, widths, strict=True):
                content = tf.strings.substr(block, place, width * number)
                values = tf.reshape(_decode(content, part.dtype), [-1, part.shape[1]])
                done.append(_scatter(part, places, values))
                place += width * number
            return done

    def _slots(self, index: int, within: tf.Tensor) -> tf.Tensor:
        """Places in a ring, counted from its head."""
        spare = 2 * self.base.tables[index].most_changed
        return (self.state.heads[index] + within) % spare

    def _commit(
        self, block: tf.Tensor, number: tf.Tensor, total: tf.Tensor, controls: list[Any]
    ) -> list[Any]:
        state = self.state
        del number, total
        with tf.control_dependencies(controls):
            expected = _numbers(block, HEAD_BYTES, 1)[0]
        complete = _check(
            tf.equal(expected, state.staging[1])
            & tf.reduce_all(tf.equal(state.staged, state.announced)),
            "Delta {sequence} is truncated, or blocks of two deltas were mixed.",
            sequence=state.staging[3],
        )
        with tf.control_dependencies(require([complete])):
            staged, staging = state.staged.read_value(), state.staging.read_value()
        with tf.control_dependencies([staged]):
            numbered = [
                table.numbered(
                    tf.gather(table.staged_keys, tf.range(staged[index, 0])),
                    _NO_IDS
                    if table.ids is None
                    else tf.gather(table.ids.staged_keys, tf.range(staged[index, 1])),
                )
                for index, table in enumerate(self.tables)
            ]
        fitting = [
            _check(
                of_table.fits,
                "Delta {sequence} gives table {table} more than {most} ids, or changes "
                "and deletes one.",
                sequence=state.staging[3],
                table=spec.name,
                most=spec.rows,
            )
            for of_table, spec in zip(numbered, self.base.tables, strict=True)
            if spec.grows
        ]
        flips = []
        with tf.control_dependencies(require(fitting)):
            for index, (table, of_table) in enumerate(
                zip(self.tables, numbered, strict=True)
            ):
                numbers = tf.identity(of_table.numbers)
                slots = self._slots(index, tf.range(staged[index, 0]))
                new, old = tf.gather(table.ring, slots), tf.gather(table.index, numbers)
                with tf.control_dependencies([new, old]):
                    flips.append(_scatter(table.index, numbers, new))
                    flips.append(_scatter(table.ring, slots, old))
        with tf.control_dependencies(flips):
            changes = [op for of_table in numbered for op in of_table.change()]
        spare = [2 * table.most_changed for table in self.base.tables]
        with tf.control_dependencies([*flips, *changes]):
            heads = (state.heads + staged[:, 0]) % tf.constant(spare, tf.int64)
            return [
                state.heads.assign(heads, read_value=False),
                state.staged.assign(tf.zeros_like(staged), read_value=False),
                state.staging.assign(tf.zeros_like(staging), read_value=False),
                state.run.assign(staging[2], read_value=False),
                state.sequence.assign(staging[3], read_value=False),
            ]


def _check(ok: tf.Tensor, message: str, **values: Any) -> Check:
    """A check whose message has scalars in the places of their names."""

    def made() -> tf.Tensor:
        parts = []
        for words, name, _, _ in string.Formatter().parse(message):
            parts.append(words)
            if name is not None:
                value = values[name]
                parts.append(str(value) if isinstance(value, int) else value)
        return text(*parts)

    return Check(ok, made)


def _ascend(variable: Any, staged: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """Whether each id is above the one before it, or above the one staged last."""
    last = tf.gather(variable, tf.maximum(staged - 1, 0))
    before = tf.concat([[last], keys], 0)[:-1]
    return (keys > before) | tf.equal(staged + tf.range(tf.size(keys, tf.int64)), 0)


def _variable(value: tf.Tensor) -> Any:
    return tf.Variable(value, trainable=False)


def _done(ops: list[Any]) -> tf.Tensor:
    with tf.control_dependencies(ops):
        return tf.constant(True)


def _scatter(variable: Any, rows: tf.Tensor, values: tf.Tensor) -> Any:
    return tf.raw_ops.ResourceScatterUpdate(
        resource=variable.handle, indices=rows, updates=values
    )


def _numbers(block: tf.Tensor, start: Any, count: Any) -> tf.Tensor:
    """int64 [count], from the byte `start` of a block on."""
    found = tf.io.decode_raw(tf.strings.substr(block, start, 8 * count), tf.int64)
    return tf.ensure_shape(found, [count if isinstance(count, int) else None])


def _decode(content: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.bfloat16:  # decode_raw has no kernel for it.
        return tf.bitcast(tf.io.decode_raw(content, tf.int16), tf.bfloat16)
    return tf.io.decode_raw(content, dtype)


def _bytes(numbers: list[tf.Tensor]) -> tf.Tensor:
    return tf.reshape(tf.bitcast(tf.stack(numbers), tf.uint8), [-1])


def _checksum(content: tf.Tensor) -> tf.Tensor:
    """As `delta_files.checksum`, of uint8 [n]."""
    found = tf.raw_ops.Fingerprint(data=content[tf.newaxis], method="farmhash64")
    return tf.bitcast(found, tf.int64)[0]
