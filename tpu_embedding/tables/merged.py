"""The entries of the parts of a growing table in the order of files, by blocks.

A part has a hash's choice of the ids, so a block of a file has entries of all parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpu_embedding.tables.reach import Reach
from tpu_embedding.tables.rows import ProcessGroup, TableRows

_LEAST, _MOST = -(2**63), 2**63 - 1


class MergedOrder:
    """The order of the entries of all parts: by ascending keys.

    Attributes:
      keys: Of each part that this process reaches.
      reach: Where the parts are.
      call: What is read.
      length: How many entries there are.
    """

    def __init__(self, keys: Sequence[np.ndarray], reach: Reach, call: str) -> None:
        """Takes keys int64, ascending, of which no two are equal; a collective call."""
        self.keys, self.reach, self.call = keys, reach, call
        ends = [len(own) for own in keys]
        self.length = int(self._everywhere([sum(ends)])[0])
        self._cuts = {self.length: ends, 0: [0] * len(ends)}

    def _everywhere(self, counts: Any) -> np.ndarray:
        """The sums of the counts of all processes."""
        own = np.array(counts, np.int64)
        return np.sum(self.reach.gather(own, f"{self.call}, counted"), axis=0)

    def cuts(self, places: Sequence[int], step: int) -> list[list[int]]:
        """By place how many entries of each part come before it.

        A call of all processes, as that of a multiple of `step` that is the first one;
        it finds those of all.
        """
        if not self._cuts.keys() >= {*places}:
            wanted = {*places, *range(0, self.length, step)} - self._cuts.keys()
            self._find(np.array(sorted(wanted)))
        return [self._cuts[place] for place in places]

    def _find(self, places: np.ndarray) -> None:
        """Finds the keys at places by bisection, and with them the cuts."""
        least, most = np.full_like(places, _LEAST), np.full_like(places, _MOST)
        while (least < most).any():
            middle = (least & most) + ((least ^ most) >> 1)
            counts = [np.searchsorted(own, middle, "right") for own in self.keys]
            reached = self._everywhere(np.sum(counts, axis=0)) > places
            least = np.where(reached, least, middle + 1)
            most = np.where(reached, middle, most)
        cuts = np.transpose([np.searchsorted(own, least) for own in self.keys])
        self._cuts |= zip(places.tolist(), cuts.tolist(), strict=True)


class MergedRows(TableRows):
    """A matrix, or a vector in files, of the entries of all parts.

    A read is a call of all processes with the same range.
    """

    def __init__(
        self,
        order: MergedOrder,
        name: str,
        like: np.ndarray,
        read: Callable[[int, slice], np.ndarray],
    ) -> None:
        """Takes the order of the entries.

        Args:
          order: That of the rows.
          name: Its name in the table.
          like: A part of it without rows.
          read: Returns rows of a part that this process reaches, of its number.
        """
        super().__init__((order.length, math.prod(like.shape[1:])), like.dtype)
        self.file_shape = (order.length, *like.shape[1:])
        self._order, self._name, self._read_part = order, name, read

    @property
    def group(self) -> ProcessGroup | None:
        return self._order.reach.group

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._read(start, stop, None)

    def read_in(self, process: int, start: int, stop: int) -> np.ndarray:
        return self._read(start, stop, process)

    def numpy(self) -> np.ndarray:
        values = np.empty(self.shape, self.dtype)
        for start, stop in self.slices():
            values[start:stop] = self.read(start, stop)
        return values

    def _read(self, start: int, stop: int, receiver: int | None) -> np.ndarray:
        order = self._order
        call = f"{order.call}, {self._name}, rows {start} to {stop}"
        cuts = [
            slice(*cut)
            for cut in zip(*order.cuts((start, stop), self.slice_rows), strict=True)
        ]
        keys = [k[cut] for k, cut in zip(order.keys, cuts, strict=True)]
        values = order.reach.call(
            lambda: [self._read_part(k, cut) for k, cut in enumerate(cuts)]
        )
        keys, values = (
            np.concatenate(order.reach.gather(np.concatenate(local), call, receiver))
            for local in (keys, values)
        )
        return values[np.argsort(keys)].reshape(-1, self.shape[1])
