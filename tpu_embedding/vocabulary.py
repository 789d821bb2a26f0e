"""Classes that may replace a number as `vocabulary_size`; they need no TensorFlow."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from tpu_embedding import errors

EVICTIONS: tuple[str | None, ...] = (None, "lru", "lfu", "age")
UNKNOWNS: tuple[str, ...] = ("zeros", "initializer", "shared_row")
_MOST_ROWS = 2**30
_MAX_SEED = 2**63 - 1

# Files store a growing vocabulary as the int64 vectors of a VocabularySnapshot of
# core/vocabulary.h: those with an element for each id, those with one for each id that
# has no row yet, and "state".
PARTS_OF_IDS = ("ids", "rows", "hits", "last_updates")
PARTS_OF_CANDIDATES = ("candidates", "candidate_hits")
PARTS = (*PARTS_OF_IDS, *PARTS_OF_CANDIDATES, "state")
# The places of numbers in "state", in the order of the file.
NUM_ROWS, UPDATES_BEGUN = 0, 1
UNKNOWN, ADMITTED, REFUSED, EVICTED = range(2, 6)
COUNTS = slice(UNKNOWN, EVICTED + 1)
NEXT_CANDIDATE = 6
CURSOR, IS_SWEEPING, THRESHOLD, TIES = range(7, 11)
SWEEP = slice(CURSOR, TIES + 1)  # Which rows are about to be evicted.
CLOCK = 11  # The clock of the last update plus 1; 0 without a clock.
STATE_SIZE = 12
MIXING = 0xD6E8FEB86659FD93  # The factor of MixBits in core/id_map.h.
COMBINES: tuple[str, ...] = ("concat", "sum")
_MOST_HASHES = 16
SHARED_ID = 0x7465647261687365  # The id whose first values the shared row has.


@dataclasses.dataclass(frozen=True)
class GrowingVocabulary:
    """Gives rows to the ids that occur; used instead of a `vocabulary_size`.

    Any int64 is an id. An update gives rows to new ids, in the order in which they
    first occurred. The first values of a row depend only on the seed and the id.
    Evaluation and serving create no rows.

    >>> GrowingVocabulary(max_rows=1000, eviction="lru").least_rows
    900

    Attributes:
      max_rows: The largest number of rows, from 1 to 2**30. Memory is reserved for all
        of them, and used for the rows that exist.
      min_count: Number of occurrences in updates after which an id gets a row.
      max_candidates: How many ids that have no row yet are remembered with their
        counts; beyond that the oldest are forgotten. None means `max_rows`.
      eviction: Which rows are evicted for new ones: None evicts none; "lru" those whose
        last update is the longest ago; "lfu" those with the fewest occurrences; "age"
        those without an update for more than `max_age`. An id that comes back
        counts as new.
      max_age: With eviction="age", the age limit in updates or in units of the clock.
      clock: Whether, with eviction="age", rows age by the `clock` that you pass to
        apply_gradients, not by the number of updates.
      min_rows: Number of ids whose rows evictions keep. None means nine tenths of
        `max_rows`, so that an update can use a tenth of them for new ids (in small
        tables, all ids but one), and 0 with eviction="age".
      unknown: What an id without a row looks up: "zeros"; "initializer", its first
        values; "shared_row", one of the `max_rows`, which all such ids train. If the
        update is sure to give the id a row, its lookup reads the first values.
      when_full: What happens to a new id if no row is free and none may be evicted.
        With "error" the update fails and changes nothing; with "shared_row" the id
        reads and trains the shared row, for which `unknown` must be "shared_row".
      seed: Seed of the first values.

    Raises:
      ValueError: If a value is not allowed, or two of them contradict each other.
    """

    max_rows: int
    min_count: int = dataclasses.field(default=1, kw_only=True)
    max_candidates: int | None = dataclasses.field(default=None, kw_only=True)
    eviction: str | None = dataclasses.field(default=None, kw_only=True)
    max_age: int | None = dataclasses.field(default=None, kw_only=True)
    clock: bool = dataclasses.field(default=False, kw_only=True)
    min_rows: int | None = dataclasses.field(default=None, kw_only=True)
    unknown: str = dataclasses.field(default="zeros", kw_only=True)
    when_full: str = dataclasses.field(default="error", kw_only=True)
    seed: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        errors.check_int("max_rows", self.max_rows, 1, _MOST_ROWS)
        errors.check_int("min_count", self.min_count, 1, _MAX_SEED)
        errors.check_int("seed", self.seed, 0, _MAX_SEED)
        if self.max_candidates is not None:
            errors.check_int("max_candidates", self.max_candidates, 1, _MOST_ROWS)
        if self.min_rows is not None:
            errors.check_int("min_rows", self.min_rows, 0, self.max_rows)
        if self.max_age is not None:
            errors.check_int("max_age", self.max_age, 1, _MAX_SEED)
        if not isinstance(self.clock, bool):
            raise errors.argument_value("clock", self.clock, "a bool")
        if self.eviction not in EVICTIONS:
            raise errors.argument_value(
                "eviction", self.eviction, f"one of {EVICTIONS}"
            )
        if self.unknown not in UNKNOWNS:
            raise errors.argument_value("unknown", self.unknown, f"one of {UNKNOWNS}")
        if self.when_full not in ("error", "shared_row"):
            raise errors.argument_value(
                "when_full", self.when_full, '"error" or "shared_row"'
            )
        self._check_pairs()

    def _check_pairs(self) -> None:
        """Raises ValueError if two options contradict each other."""
        shared = self.unknown == "shared_row"
        if self.when_full == "shared_row" and not shared:
            raise errors.argument_value(
                "unknown", self.unknown, '"shared_row" if when_full="shared_row"'
            )
        if shared and self.max_rows < 2:
            raise errors.argument_value(
                "max_rows", self.max_rows, '>= 2 if unknown="shared_row"'
            )
        if self.min_rows and self.eviction is None:
            raise errors.argument_value(
                "min_rows", self.min_rows, "None unless `eviction` is set"
            )
        if (self.max_age is None) == (self.eviction == "age"):
            raise errors.argument_value(
                "max_age", self.max_age, 'set if eviction="age", and None otherwise'
            )
        if self.clock and self.eviction != "age":
            raise errors.argument_value(
                "clock", self.clock, 'False unless eviction="age"'
            )
        if self.max_candidates is not None and self.min_count == 1:
            raise errors.argument_value(
                "max_candidates", self.max_candidates, "None if min_count=1"
            )

    @property
    def least_rows(self) -> int:
        """The number of rows that evictions leave."""
        if self.min_rows is not None:
            return self.min_rows
        if self.eviction not in ("lru", "lfu"):
            return 0
        most_ids = self.max_rows - (self.unknown == "shared_row")
        return min(self.max_rows * 9 // 10, most_ids - 1)

    def part(self, parts: int) -> GrowingVocabulary:
        """Returns the vocabulary of one part of a table divided by rows into `parts`.

        >>> GrowingVocabulary(10, eviction="lru", min_rows=4).part(3).max_rows
        4
        """

        def share(number: int | None) -> int | None:
            return None if number is None else -(-number // parts)

        return dataclasses.replace(
            self,
            max_rows=-(-self.max_rows // parts),
            min_rows=share(self.min_rows),
            max_candidates=share(self.max_candidates),
        )


@dataclasses.dataclass(frozen=True)
class Hashing:
    """Gives every id `hashes` rows; used instead of a `vocabulary_size`.

    Any int64 is an id. No row is made, reserved or evicted. Two ids often share one of
    their rows, but hardly ever all of them.

    >>> Hashing(1000, hashes=2).salt
    0

    Attributes:
      num_rows: The number of rows, from 1 to 2**31 - 1.
      hashes: The number K of rows of an id, from 1 to 16.
      combine: "concat" puts the rows of an id side by side: the table has dim / K
        columns. "sum" adds them: it has `dim` columns.
      salt: A number from 0 to 2**63 - 1. Another salt gives ids other rows.

    Raises:
      ValueError: If a value is not allowed.
    """

    num_rows: int
    hashes: int = 4
    combine: str = "concat"
    salt: int = 0

    def __post_init__(self) -> None:
        errors.check_int("num_rows", self.num_rows, 1, 2**31 - 1)
        errors.check_int("hashes", self.hashes, 1, _MOST_HASHES)
        errors.check_int("salt", self.salt, 0, _MAX_SEED)
        if self.combine not in COMBINES:
            raise errors.argument_value("combine", self.combine, f"one of {COMBINES}")

    def width(self, dim: int) -> int:
        """Returns the number of columns of a table whose ids have `dim` values.

        Raises:
          ValueError: If rows are put side by side and `hashes` does not divide `dim`.
        """
        if self.combine == "sum":
            return dim
        if dim % self.hashes:
            raise ValueError(
                f"The dim {dim} is not a multiple of {self.hashes}, the number of rows "
                f"that {self} concatenates for each id. Change dim or `hashes`, or set "
                'combine="sum".'
            )
        return dim // self.hashes


@dataclasses.dataclass(frozen=True)
class RowHash:
    """One hash function of a `Hashing`, the one with the number `k`."""

    hashing: Hashing
    k: int

    @property
    def key(self) -> int:
        """The word that is combined with the bits of an id before they are mixed."""
        salt = np.array([self.hashing.salt], np.uint64)
        return int(mix_bits(mix_bits(salt) + np.uint64(self.k))[0])

    @property
    def key_bits(self) -> int:
        """The bits of `key` as an int64."""
        return int(np.uint64(self.key).view(np.int64))


def mix_bits(words: np.ndarray) -> np.ndarray:
    """Mixes the bits of each uint64 word, as MixBits of core/id_map.h does."""
    for _ in range(2):
        words = (words ^ (words >> np.uint64(32))) * np.uint64(MIXING)
    return words ^ (words >> np.uint64(32))


class VocabularyContents(NamedTuple):
    """Holds the ids of a growing vocabulary, and what is known of each.

    Attributes:
      ids: The ids that have a row, int64 [n], ascending.
      rows: The row of each id in the table, int64 [n].
      hits: How often each id occurred in updates, int64 [n]; 0 without `eviction`.
      last_updates: The number, from 1, of the last update with each id, int64 [n]; 0
        without `eviction`. With a clock, the clock of that update.
      unknown: How many ids without a row occurred, each counted once per update.
      admitted: How many of those ids got a row.
      refused: How many of those ids did not get a row.
      evicted: How many rows were evicted.
    """

    ids: np.ndarray
    rows: np.ndarray
    hits: np.ndarray
    last_updates: np.ndarray
    unknown: int
    admitted: int
    refused: int
    evicted: int

    def rows_of(self, ids: Any) -> np.ndarray:
        """Returns the row of each id, int64 of the shape of `ids`; -1 without one."""
        ids = np.asarray(ids, np.int64)
        if not len(self.ids):
            return np.full(ids.shape, -1)
        places = np.searchsorted(self.ids, ids).clip(max=len(self.ids) - 1)
        return np.where(self.ids[places] == ids, self.rows[places], -1)
