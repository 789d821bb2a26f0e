"""A slow reference for growing tables: which id has which row."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

MASK = 2**64 - 1
SHARED_ID = 0x7465647261687365


class FullError(ValueError):
    """An update needs more rows than are available."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of te.GrowingVocabulary, with all numbers given."""

    max_rows: int
    min_count: int = 1
    max_candidates: int = 1
    eviction: str | None = None
    max_age: int = 0
    min_rows: int = 0
    unknown: str = "zeros"
    when_full: str = "error"


@dataclasses.dataclass
class Row:
    """A row that has an id: its hits, and the number of the last update of it."""

    id: int
    hits: int
    last: int


@dataclasses.dataclass
class Lookup:
    """A lookup of a training step or of an evaluation.

    Attributes:
      ids: The ids of all entries, in order.
      given: What each id without a row read: "zeros", its "first" values, or the
        "shared" row.
    """

    ids: list[int]
    given: dict[int, str]


@dataclasses.dataclass
class Update:
    """What one update does.

    Attributes:
      created: In order, each (row, id) where the row gets the id's first values.
      rows: For each lookup the row that each entry trains, or None if its gradients
        are dropped.
    """

    created: list[tuple[int, int]]
    rows: list[list[int | None]]


class Vocabulary:
    """The ids of one table.

    Attributes:
      rows: The rows that have an id, by their numbers.
      num_rows: How many rows were ever used.
      counts: unknown, admitted, refused, evicted.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rows: dict[int, Row] = {}
        self.num_rows = 0
        self.counts = collections.Counter[str]()
        self._free: list[int] = []
        self._updates = 0
        # [id or None, hits] of ids without a row, in the order in which they came.
        self._candidates: collections.deque[list] = collections.deque(
            maxlen=options.max_candidates
        )
        self._cursor = 0  # Where the search for old rows continues.

    @property
    def _has_shared(self) -> bool:
        return self.options.unknown == "shared_row"

    @property
    def _room(self) -> int:
        return self.options.max_rows - self._has_shared - len(self.rows)

    def row_of(self, id_: int) -> int | None:
        """The row of an id, or None."""
        return next((number for number, r in self.rows.items() if r.id == id_), None)

    def look_up(
        self, ids: Sequence[int], *, training: bool, awaited: Sequence[Lookup] = ()
    ) -> Lookup:
        """Looks up ids in order; the updates of `awaited` lookups are still to come."""
        opts = self.options
        unknown = [i for i in dict.fromkeys(ids) if self.row_of(i) is None]
        declared = {"initializer": "first", "shared_row": "shared"}.get(
            opts.unknown, "zeros"
        )
        if not training or opts.min_count > 1:
            return Lookup([*ids], dict.fromkeys(unknown, declared))
        given = dict.fromkeys(unknown, "first")
        if opts.when_full == "shared_row":
            promised = self._promised(awaited)
            free = max(0, self._room - len(promised))
            new = [i for i in unknown if i not in promised]
            given.update(dict.fromkeys(new[free:], "shared"))
        return Lookup([*ids], given)

    def read(self, lookup: Lookup, id_: int) -> int | str:
        """Returns what an entry of a lookup reads now: a row, or as in `Lookup.given`.

        "shared": the first values of the shared row, which does not exist yet.
        """
        given = lookup.given.get(id_)
        if given == "shared" and self.num_rows:
            return 0
        if given is not None:
            return given
        row = self.row_of(id_)
        assert row is not None
        return row

    def _promised(self, lookups: Iterable[Lookup]) -> set[int]:
        """Returns the ids that have no row and get one in updates of these lookups."""
        if self.options.when_full == "error" or self.options.min_count > 1:
            return set()
        return {
            i
            for lookup in lookups
            for i, given in lookup.given.items()
            if given == "first" and self.row_of(i) is None
        }

    def update(
        self, lookups: Sequence[Lookup], awaited: Sequence[Lookup] = ()
    ) -> Update:
        """Counts the entries of an update, admits and evicts.

        Args:
          lookups: The lookups whose gradients it applies, in the order of replicas.
          awaited: Other lookups whose updates will come.

        Raises:
          FullError: If the table is full; then nothing has changed.
        """
        opts = self.options
        ids = [i for lookup in lookups for i in lookup.ids]
        hits = collections.Counter(ids)
        others = [i for lookup in awaited for i in lookup.ids]
        held = {self.row_of(i) for i in (*hits, *others)}
        unknown = [i for i in dict.fromkeys(ids) if self.row_of(i) is None]
        before = {i: self._hits_before(i) for i in unknown}
        admitted = [i for i in unknown if before[i] + hits[i] >= opts.min_count]
        promised = self._promised([*lookups, *awaited])
        left = len(promised.difference(unknown))
        self._updates += 1
        most = self._room - left
        if len(admitted) > most and opts.eviction is not None:
            old = sum(self._is_evictable(n, held) for n in self.rows)
            most += max(0, min(old, len(self.rows) - opts.min_rows))
        if len(admitted) > most:
            if opts.when_full == "error":
                self._updates -= 1
                raise FullError
            first = [i for i in admitted if i in promised]
            rest = [i for i in admitted if i not in promised][: most - len(first)]
            admitted = [i for i in admitted if i in first or i in rest]
        created: list[tuple[int, int]] = []
        if self._has_shared and self.num_rows == 0:
            self.num_rows = 1
            created.append((0, SHARED_ID))
        self._make_room(len(admitted), left, held)
        for id_ in unknown:
            if id_ not in admitted:
                self._remember(id_, hits[id_])
                continue
            number = self._new_row()
            self.rows[number] = Row(id_, before[id_], self._updates)
            self._forget(id_)
            created.append((number, id_))
        for id_, count in hits.items():
            number = self.row_of(id_)
            if number is not None:
                self.rows[number].hits += count
                self.rows[number].last = self._updates
        self.counts["unknown"] += len(unknown)
        self.counts["admitted"] += len(admitted)
        self.counts["refused"] += len(unknown) - len(admitted)
        return Update(created, [self._trained(lookup) for lookup in lookups])

    def _trained(self, lookup: Lookup) -> list[int | None]:
        """Returns the row that each entry trains, which is the row that it read."""
        rows: list[int | None] = []
        for id_ in lookup.ids:
            given = lookup.given.get(id_, "first")
            row = self.row_of(id_) if given == "first" else None
            if row is None and self._has_shared:
                row = 0
            rows.append(row)
        return rows

    def _hits_before(self, id_: int) -> int:
        return sum(hits for known, hits in self._candidates if known == id_)

    def _remember(self, id_: int, hits: int) -> None:
        if self.options.min_count == 1:
            return  # Refused, as the table is full.
        for candidate in self._candidates:
            if candidate[0] == id_:
                candidate[1] += hits
                return
        self._candidates.append([id_, hits])

    def _forget(self, id_: int) -> None:
        for candidate in self._candidates:
            if candidate[0] == id_:
                candidate[:] = [None, 0]

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop(self._free.index(min(self._free)))
        self.num_rows += 1
        return self.num_rows - 1

    def _is_evictable(self, number: int, held: set[int | None]) -> bool:
        if number in held:
            return False
        age = self._updates - self.rows[number].last
        return self.options.eviction != "age" or age > self.options.max_age

    def _make_room(self, needed: int, left: int, held: set[int | None]) -> None:
        """Evicts for `needed` rows now; `left` other ones are promised."""
        opts = self.options
        capacity = opts.max_rows - self._has_shared
        early = needed + (capacity - opts.min_rows) // 2
        if opts.eviction == "age":
            self._search(self._cursor, held)
            if self._room < needed + left:
                self._search(self._cursor, held)
        elif opts.eviction is not None and self._room < max(early, needed + left):
            self._evict_first(held)

    def evict(self, awaited: Iterable[int] = ()) -> int:
        """Evicts at once, but no `awaited` ids; returns the number of evicted rows."""
        before, held = len(self.rows), {self.row_of(i) for i in awaited}
        if self.options.eviction == "age":
            self._search(0, held)
        elif self.options.eviction is not None:
            self._evict_first(held)
        return before - len(self.rows)

    def _evict_first(self, held: set[int | None]) -> None:
        """Evicts the rows that come first, while more than `min_rows` are left."""
        field = "hits" if self.options.eviction == "lfu" else "last"
        old = [n for n in self.rows if self._is_evictable(n, held)]
        old.sort(key=lambda n: (getattr(self.rows[n], field), n))
        for number in old[: max(0, len(self.rows) - self.options.min_rows)]:
            self._evict(number)

    def _search(self, start: int, held: set[int | None]) -> None:
        """Evicts old rows from `start` on, while more than `min_rows` are left."""
        if len(self.rows) <= self.options.min_rows:
            return
        for number in range(start, self.num_rows):
            if number not in self.rows or not self._is_evictable(number, held):
                continue
            if len(self.rows) <= self.options.min_rows:
                self._cursor = number
                return
            self._evict(number)
        self._cursor = 0

    def _evict(self, number: int) -> None:
        del self.rows[number]
        self._free.append(number)
        self.counts["evicted"] += 1


def _mix(word: int) -> int:
    for _ in range(2):
        word = (word ^ word >> 32) * 0xD6E8FEB86659FD93 & MASK
    return word ^ word >> 32


def uniforms(seed: int, id_: int, dim: int) -> list[float]:
    """Returns the numbers in (0, 1) from which the first values of an id are made."""
    row = _mix(_mix(seed) ^ id_ & MASK)
    words = [_mix(row + d * 0x9E3779B97F4A7C15 & MASK) for d in range(dim)]
    return [((word >> 11) + 0.5) / 2**53 for word in words]
