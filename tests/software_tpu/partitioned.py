"""A slow builder of partitioned CSR, and of tables cut over devices."""

from __future__ import annotations

import collections
import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

# What Google's ops fill the gaps between partitions with.
FILL_ID = 2**31 - 1
FILL_GAIN = 2.0**31
ALIGNMENT = 8

Entry = tuple[int, int, float]  # (sample of the replica, id, gain)


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _positions(entries: Sequence[Entry]) -> list[int]:
    """The number of each entry within its sample."""
    before: collections.Counter[int] = collections.Counter()
    positions = []
    for sample, *_ in entries:
        positions.append(before[sample])
        before[sample] += 1
    return positions


@dataclasses.dataclass(frozen=True)
class System:
    """The devices, and the samples that each replica brings."""

    num_devices: int
    sparse_cores: int
    num_samples: int
    num_rows: int
    num_minibatches: int = 1

    @property
    def num_targets(self) -> int:
        return self.num_devices * self.sparse_cores

    def cut(self, table: np.ndarray) -> list[np.ndarray]:
        """[num_rows, D] -> for each device its rows, SparseCore after SparseCore."""
        cores = [table[core :: self.num_targets] for core in range(self.num_targets)]
        return [
            np.concatenate(cores[first : first + self.sparse_cores])
            for first in range(0, self.num_targets, self.sparse_cores)
        ]

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The reverse of `cut`."""
        table = np.empty((self.num_rows, *parts[0].shape[1:]), parts[0].dtype)
        cores = [core for part in parts for core in np.split(part, self.sparse_cores)]
        for core, rows in enumerate(cores):
            table[core :: self.num_targets] = rows
        return table

    def csr(
        self, entries: Sequence[Entry], *, with_positions: bool = False
    ) -> dict[str, Any]:
        """The CSR inputs of one replica, by the names that the ops have for them.

        The ops with a custom combiner take positions instead of minibatches.
        """
        per_core = self.num_samples // self.sparse_cores
        pointers, samples, tokens, gains, places = [], [], [], [], []
        positions = _positions(entries)
        for core in range(self.sparse_cores):
            for minibatch in range(self.num_minibatches):
                for target in range(self.num_targets):
                    chosen = sorted(
                        (id_ // self.num_targets, sample % per_core, gain, position)
                        for (sample, id_, gain), position in zip(
                            entries, positions, strict=True
                        )
                        if sample // per_core == core
                        and id_ % self.num_targets == target
                        and self._minibatch(id_) == minibatch
                    )
                    pointers.append(len(samples) + len(chosen))
                    gap = _align(len(chosen)) - len(chosen)
                    tokens += [token for token, *_ in chosen] + [FILL_ID] * gap
                    samples += [sample for _, sample, *_ in chosen] + [FILL_ID] * gap
                    gains += [gain for *_, gain, _ in chosen] + [FILL_GAIN] * gap
                    places += [position for *_, position in chosen] + [FILL_ID] * gap
                padding = _align(self.num_targets) - self.num_targets
                pointers += [len(samples)] * padding
        if with_positions:
            last = {"sorted_pos_ids": np.array(places, np.int32)}
        else:
            last = {
                "num_minibatches_per_physical_sparse_core": np.int32(
                    self.num_minibatches
                )
            }
        return {
            "row_pointers": np.array(pointers, np.int32),
            "sorted_sample_ids": np.array(samples, np.int32),
            "sorted_token_ids": np.array(tokens, np.int32),
            "sorted_gains": np.array(gains, np.float32),
            **last,
        }

    def _minibatch(self, id_: int) -> int:
        # By any hash of the id alone: all entries of a row share a minibatch.
        return zlib.crc32(str(id_).encode()) % self.num_minibatches
