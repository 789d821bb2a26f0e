"""The signatures of an export that check deltas and apply them, block by block.

    block        checked                        changed
    begin        base, sequence, run, room      staging: the delta that is announced
    rows, ...    order, sizes, ascending ids    spare rows, which no lookup reads
    end          checksum of all, completeness  index: lookups read the new rows

A block that is refused changes nothing. A new "begin" discards what was staged, so a
sender that lost an answer sends its delta from the first block on.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.lookup.graph_checks import Check, require, text
from tpu_embedding.serving.conversion import ConvertedTable
from tpu_embedding.serving.delta_files import (
    APPLY,
    BEGIN_FIELDS,
    END,
    HEAD_BYTES,
    ROWS_FIELDS,
    STATE,
    Base,
)
from tpu_embedding.serving.following_tables import (
    FollowingIds,
    FollowingTable,
    GrowingBase,
)
from tpu_embedding.tables.variables import create_state
from tpu_embedding.tables.waiting import scatter


def ids_key(index: int) -> str:
    """Returns the name in `delta_state` of the ids of a growing table of the base."""
    return f"ids_{index}"


_NO_IDS: Any = np.zeros([0], np.int64)
_MOST_ROWS = 2**31 - 1  # With the spare ones: the index is int32.


class _State(tf.Module):
    """The delta that was applied, and the one that is staged; all numbers are int64.

    Attributes:
      description: The `Base` as JSON.
      sequence: The number of the delta applied last, or 0.
      run: The run that wrote that delta; before any delta the id of the base.
      staging: The next block, the checksum of those before it, and the run and the
        sequence number of the delta that is staged.
      announced: How many rows the staged delta changes and deletes, [num_tables, 2].
      staged: How many of these have come, [num_tables, 2]; spare rows hold the rows.
      heads: The place in the ring of the row that has been spare longest, [num_tables].
    """

    def __init__(self, base: Base) -> None:
        super().__init__()
        self.description = create_state("description", tf.constant(base.to_json()))
        self.sequence = create_state("sequence", tf.constant(0, tf.int64))
        self.run = create_state("run", tf.constant(base.id, tf.int64))
        self.staging = create_state("staging", tf.zeros([4], tf.int64))
        zeros = tf.zeros([len(base.tables)], tf.int64)
        both = tf.zeros([len(base.tables), 2], tf.int64)
        self.announced = create_state("announced", both)
        self.staged = create_state("staged", both)
        self.heads = create_state("heads", zeros)


class Follower:
    """The tables of an export that takes deltas, and the signatures that apply them.

    Attributes:
      base: The export.
      state: What is saved with the model.
      tables: The tables in the order of `base.tables`.
    """

    def __init__(
        self,
        base: Base,
        stored: Sequence[ConvertedTable],
        growing: Mapping[str, GrowingBase],
    ) -> None:
        """Takes tables with `height` rows and twice `most_changed` spare rows.

        The shared row of a growing table comes before that table.
        """
        for table in base.tables:
            height = table.height
            if height + 2 * table.most_changed > _MOST_ROWS:
                raise ValueError(
                    f"Table {table.name} has {height} rows and needs "
                    f"{2 * table.most_changed} spare rows, but with `deltas` a table "
                    f"may have at most {_MOST_ROWS} of both. Pass a smaller `deltas`."
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
        """Traces the functions of both signatures."""
        block = tf.TensorSpec([], tf.string, "block")
        apply = tf.function(self._apply, [block], autograph=False)
        state = tf.function(self._read_state, [], autograph=False)
        return {
            STATE: state.get_concrete_function(),
            APPLY: apply.get_concrete_function(),
        }

    def _alone(self, act: Callable[[], dict[str, tf.Tensor]]) -> dict[str, tf.Tensor]:
        """Calls `act` while no other call of these signatures runs."""
        name = f"tpu_embedding_deltas_{self.base.id}"
        mutex = tf.raw_ops.MutexV2(container="", shared_name=name)
        lock = tf.raw_ops.MutexLock(mutex=mutex)
        with tf.control_dependencies([lock]):
            found = act()
        with tf.control_dependencies(found.values()):
            release = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        with tf.control_dependencies([release]):
            return {name: tf.identity(value) for name, value in found.items()}

    def _read_state(self) -> dict[str, tf.Tensor]:
        """Reads the state while no delta is applied, so that ids and sequence agree."""
        constant = {
            "base": tf.constant(self.base.id, tf.int64),
            "description": self.state.description.read_value(),
        }
        return constant | self._alone(
            lambda: {
                "sequence": self.state.sequence.read_value(),
                "run": self.state.run.read_value(),
                "next_block": self.state.staging.read_value()[0],
                **{
                    ids_key(index): table.ids.number_of.ids()
                    for index, table in enumerate(self.tables)
                    if table.ids is not None
                },
            }
        )

    def _apply(self, block: tf.Tensor) -> dict[str, tf.Tensor]:
        """Checks a block, then stages or commits it."""

        def act() -> dict[str, tf.Tensor]:
            with tf.control_dependencies([self._take(tf.identity(block))]):
                return {
                    "sequence": self.state.sequence.read_value(),
                    "next_block": self.state.staging.read_value()[0],
                }

        return self._alone(act)

    def _take(self, block: tf.Tensor) -> tf.Tensor:
        size = tf.strings.length(block)
        whole = _check(
            size >= HEAD_BYTES,
            "A block of a delta has only {size} bytes: it is truncated.",
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
                "Delta {sequence} belongs to another export: this model is the export "
                "{own}, but the delta follows the export {base}.",
                **names,
            ),
            _check(
                sequence > names["applied"],
                "Delta {sequence} is repeated: delta {applied} was applied last.",
                **names,
            ),
            _check(
                sequence <= names["missing"],
                "Delta {missing} is missing: delta {sequence} was sent after delta "
                "{applied}.",
                **names,
            ),
            _check(
                tf.equal(follows, names["run"]),
                "Delta {sequence} belongs to another run: it follows a delta of run "
                "{before}, but the one applied last is of run {run}. The trainer went "
                "back to an earlier checkpoint. Write a new export.",
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
        most_deleted = tf.constant([table.most_deleted for table in tables], tf.int64)
        names = tf.constant([table.name for table in tables])
        deleting = tf.not_equal(deletions, 0) & tf.equal(most_deleted, 0)
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
                    "Delta {sequence} changes {rows} rows of table {table}, but this "
                    "export takes at most {most}. Write a new export.",
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
                    "Block {number} was sent, but no delta has begun. Send all blocks "
                    "of a delta, beginning with the first.",
                    number=number,
                ),
                _check(
                    tf.equal(number, following),
                    "Block {number} of delta {sequence} was sent, but block {next} is "
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
            "Block {number} of a delta has an invalid table index or number of rows.",
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
                "A block of rows of table {table} has {size} bytes, which do not fit "
                "its {count} rows.",
                table=spec.name,
                size=size,
                count=count,
            ),
            _check(
                coming <= self.state.announced[index],
                "A delta has more rows of table {table} than its header announces.",
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
                "The ids of table {table} in a delta must ascend and be from 0 to "
                "{last}.",
                table=spec.name,
                last=spec.rows - 1,
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
            done = [scatter(table.staged_keys, within, keys)]
            if table.ids is not None:
                after = deleted + tf.range(deletions)
                done.append(scatter(table.ids.staged_keys, after, gone))
            place = start + 8 * (number + lost)
            for part, width in zip(parts, widths, strict=True):
                content = tf.strings.substr(block, place, width * number)
                values = tf.reshape(_decode(content, part.dtype), [-1, part.shape[1]])
                done.append(scatter(part, places, values))
                place += width * number
            return done

    def _slots(self, index: int, within: tf.Tensor) -> tf.Tensor:
        """Returns places in the ring; `within` counts from its head."""
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
                "and deletes the same id.",
                sequence=state.staging[3],
                table=spec.name,
                most=spec.rows,
            )
            for of_table, spec in zip(numbered, self.base.tables, strict=True)
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
                    flips.append(scatter(table.index, numbers, new))
                    flips.append(scatter(table.ring, slots, old))
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
    """Makes a check; `message` is a format string for the scalars `values`."""

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
    """Returns whether each id is above the one before it, or the last one staged."""
    last = tf.gather(variable, tf.maximum(staged - 1, 0))
    before = tf.concat([[last], keys], 0)[:-1]
    return (keys > before) | tf.equal(staged + tf.range(tf.size(keys, tf.int64)), 0)


def _done(ops: list[Any]) -> tf.Tensor:
    with tf.control_dependencies(ops):
        return tf.constant(True)


def _numbers(block: tf.Tensor, start: Any, count: Any) -> tf.Tensor:
    """Reads int64 [count] from the byte `start` of a block on."""
    found = tf.io.decode_raw(tf.strings.substr(block, start, 8 * count), tf.int64)
    return tf.ensure_shape(found, [count if isinstance(count, int) else None])


def _decode(content: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.bfloat16:  # decode_raw has no kernel for it.
        return tf.bitcast(tf.io.decode_raw(content, tf.int16), tf.bfloat16)
    return tf.io.decode_raw(content, dtype)


def _bytes(numbers: list[tf.Tensor]) -> tf.Tensor:
    return tf.reshape(tf.bitcast(tf.stack(numbers), tf.uint8), [-1])


def _checksum(content: tf.Tensor) -> tf.Tensor:
    """Computes the `delta_files.checksum` of uint8 [n]."""
    found = tf.raw_ops.Fingerprint(data=content[tf.newaxis], method="farmhash64")
    return tf.bitcast(found, tf.int64)[0]
