"""The state of growing tables by parts, as `Vocabulary.read` returns it.

Parts are joined, divided over another number of parts, and fitted into other limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tpu_embedding.layout.placement import IdDivision
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.vocabulary import (
    CLOCK,
    COUNTS,
    EVICTED,
    NEXT_CANDIDATE,
    NUM_ROWS,
    PARTS,
    PARTS_OF_CANDIDATES,
    PARTS_OF_IDS,
    STATE_SIZE,
    SWEEP,
    UPDATES_BEGUN,
    GrowingVocabulary,
)

# The field of a new part with the places of its rows in the arrays that are read.
PLACES = "places"

Arrays = dict[str, Any]  # NumPy arrays


def num_shared(vocabulary: GrowingVocabulary, state: Mapping[str, np.ndarray]) -> int:
    """Returns the number of shared rows of a state: 1 once an update has made one."""
    return int(vocabulary.unknown == "shared_row" and state["state"][NUM_ROWS] > 0)


def _states_of(table: str, state: np.ndarray) -> np.ndarray:
    """Returns the state of each part of a table, int64 [parts, STATE_SIZE]."""
    if len(state) == STATE_SIZE - 1:  # Files of earlier releases have no clock.
        state = np.append(state, 0)
    if not len(state) or len(state) % STATE_SIZE:
        raise tf.errors.InvalidArgumentError(
            None,
            None,
            f"The vocabulary of table {table} in the file is damaged: its state has "
            f"{len(state)} numbers.",
        )
    return state.reshape(-1, STATE_SIZE)


def _total(states: np.ndarray) -> np.ndarray:
    """Returns a whole table's state, int64 [STATE_SIZE], from the states of its parts.

    The state has no sweep under way, and its candidates begin with the oldest.
    """
    if len(states) == 1:
        return states[0]
    total = states.max(axis=0)
    total[[NUM_ROWS, *range(STATE_SIZE)[COUNTS]]] = 0
    total[NUM_ROWS], total[COUNTS] = states[:, NUM_ROWS].sum(), states[:, COUNTS].sum(0)
    total[SWEEP] = total[NEXT_CANDIDATE] = 0
    return total


def total_state(table: str, state: np.ndarray) -> np.ndarray:
    """Returns the state of a whole table, int64 [STATE_SIZE], from those of its parts.

    Raises:
      tf.errors.InvalidArgumentError: If `state` is damaged.
    """
    return _total(_states_of(table, state))


def updates_begun(table: str, state: np.ndarray) -> int:
    """Returns the number of updates of a table with this state."""
    return int(total_state(table, state)[UPDATES_BEGUN])


def renumbered(table: str, state: np.ndarray, num_rows: int) -> np.ndarray:
    """Returns the state of a table with rows numbered anew, from that in a file."""
    total = total_state(table, state).copy()
    total[NUM_ROWS], total[SWEEP] = num_rows, 0
    return total


def fitted_parts(
    spec: TableSpec, known: Mapping[str, np.ndarray], num_parts: int, *, limited: bool
) -> list[Arrays]:
    """Returns the new content of `num_parts` parts, from what `Vocabulary.fit` takes.

    Raises:
      ValueError: As `Vocabulary.write` does.
    """
    vocabulary = spec.growth
    whole = {name: np.asarray(value) for name, value in known.items()}
    states = _states_of(spec.name, whole["state"]).copy()
    total = _total(states)
    shared = num_shared(vocabulary, {"state": total})
    if len(whole[PLACES]) != len(whole["ids"]) + shared:
        raise ValueError(
            f"Table {spec.name!r} has unknown={vocabulary.unknown!r}, but was saved "
            "with another value. Use the saved value."
        )
    if not total[UPDATES_BEGUN]:
        states[:, CLOCK] = vocabulary.clock
    parts = _divided(whole, states, num_parts, shared)
    if not limited:
        return parts
    if (_total(states)[CLOCK] > 0) != vocabulary.clock:
        raise ValueError(
            f"Table {spec.name!r} has clock={vocabulary.clock}, but was saved with "
            f"clock={not vocabulary.clock}. Use the saved value."
        )
    for number, part in enumerate(parts):
        name, own = spec.name, vocabulary.part(num_parts)
        if num_parts > 1:
            name = f"{name} (part {number} of {num_parts})"
        _keep_ids(part, name, own, shared)
        _keep_candidates(part, own)
    return parts


def joined_parts(parts: Sequence[Arrays]) -> Arrays:
    """Joins parts to a table: their rows follow one another, and so do their states."""
    if len(parts) == 1:
        return parts[0]
    counts = [part["state"][NUM_ROWS] for part in parts]
    starts = np.cumsum([0, *counts[:-1]])
    parts = [
        {**part, "rows": part["rows"] + start}
        for part, start in zip(parts, starts, strict=True)
    ]
    joined = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    order = np.argsort(joined["ids"])
    of_ids = joined.keys() - {*PARTS_OF_CANDIDATES, "state"}
    return joined | {name: joined[name][order] for name in of_ids}


def _divided(
    whole: Arrays, states: np.ndarray, number: int, shared: int
) -> list[Arrays]:
    """Divides a table into the parts that were joined, if their number is the same.

    Otherwise the parts are new, with their rows in order.
    """
    owners = IdDivision(number).owner(whole["ids"])
    if len(states) == number == 1:
        return [whole | {"state": states[0]}]
    again = len(states) == number
    if not again:
        whole = whole | _in_order(whole, states)
    of_candidates = IdDivision(number).owner(whole["candidates"])
    starts = np.cumsum([0, *states[:-1, NUM_ROWS]])
    parts = []
    for k in range(number):
        kept = np.flatnonzero(owners == k)
        part = {name: whole[name][of_candidates == k] for name in PARTS_OF_CANDIDATES}
        part |= {name: whole[name][kept] for name in PARTS_OF_IDS}
        rows = np.append(kept, [len(owners)] * shared).astype(np.int64)
        arrays = whole.keys() - {*PARTS}
        part |= {name: whole[name][rows] for name in arrays}
        if again:
            part["rows"] = part["rows"] - starts[k]
            part["state"] = states[k]
        else:
            part["rows"] = np.argsort(np.argsort(part["rows"])) + shared
            part["state"] = _total(states).copy()
            part["state"][NUM_ROWS], part["state"][SWEEP] = len(rows), 0
            part["state"][NEXT_CANDIDATE] = 0
            if k:  # Part 0 keeps the counts of the table.
                part["state"][COUNTS] = 0
        parts.append(part)
    return parts


def _in_order(whole: Arrays, states: np.ndarray) -> Arrays:
    """Returns the candidates of all parts, each from the oldest on."""
    owners = IdDivision(len(states)).owner(whole["candidates"])
    ordered = np.concatenate(
        [
            np.roll(np.flatnonzero(owners == k), -state[NEXT_CANDIDATE])
            for k, state in enumerate(states)
        ]
    )
    ordered = ordered[whole["candidate_hits"][ordered] > 0]
    return {name: whole[name][ordered] for name in PARTS_OF_CANDIDATES}


def _keep_ids(
    fitting: Arrays, table: str, vocabulary: GrowingVocabulary, shared: int
) -> None:
    """Leaves out the ids that an eviction would evict, and rows without an id.

    Raises:
      ValueError: If no id may be left out.
    """
    size, numbers = len(fitting["ids"]), fitting["state"]
    room = vocabulary.max_rows - (vocabulary.unknown == "shared_row")
    if size > room:
        if vocabulary.eviction is None:
            raise ValueError(
                f"Table {table!r} has max_rows={vocabulary.max_rows}, but the table "
                f"that was saved has {size} ids. Raise max_rows, or set `eviction`."
            )
        key = "hits" if vocabulary.eviction == "lfu" else "last_updates"
        by_age = np.lexsort((fitting["rows"], fitting[key]))
        kept = np.sort(by_age[size - room :])
        for name in PARTS_OF_IDS:
            fitting[name] = fitting[name][kept]
        kept = np.append(kept, [size] * shared).astype(np.int64)
        for name in fitting.keys() - {*PARTS}:
            fitting[name] = fitting[name][kept]
        numbers[EVICTED] += size - room
        logging.warning("Table %s: %d ids were evicted.", table, size - room)
    full = len(fitting["ids"]) + shared
    if numbers[NUM_ROWS] > (full if vocabulary.eviction is None else room + shared):
        # Evicted rows are left out.
        rank = np.argsort(np.argsort(fitting["rows"]))
        fitting["rows"] = rank + shared
        numbers[NUM_ROWS], numbers[SWEEP] = full, 0


def _keep_candidates(fitting: Arrays, vocabulary: GrowingVocabulary) -> None:
    """Leaves out the oldest ids without a row that would not be remembered."""
    numbers = fitting["state"]
    most = vocabulary.max_candidates or vocabulary.max_rows
    for name in PARTS_OF_CANDIDATES:
        ordered = np.roll(fitting[name], -numbers[NEXT_CANDIDATE])
        kept = ordered[-most:] if vocabulary.min_count > 1 else ordered[:0]
        fitting[name] = kept
    numbers[NEXT_CANDIDATE] = 0
