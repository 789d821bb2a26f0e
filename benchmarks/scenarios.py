"""Scenarios: tables, features and batches."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np

# MLPerf DLRM-DCNv2: ids per sample, and the row counts of the Criteo data set.
_MULTI_HOT = (
    *(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1),
    *(6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
)
_CRITEO_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63),
    *(40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938, 155, 4, 976),
    *(14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
_MAX_ROWS = 1_000_000
_ZIPF_EXPONENT = 1.05
FORMS = ("int32", "int64", "ragged", "sparse")
"""Forms of batches: dense ids of a dtype, or int32 ids in another kind of tensor."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One workload; every feature has a table of its own, combined by `sum`.

    Attributes:
      name: The name on the command line.
      batch_size: Samples in a step.
      dim: Columns of every table.
      rows: The rows of each feature's table.
      ids_per_sample: The ids of each feature; their mean if the sizes of bags vary.
      most_ids: The sizes of bags vary from 0 to this; 0 if all have one size.
      weighted: Whether ids have weights.
    """

    name: str
    batch_size: int
    dim: int
    rows: tuple[int, ...]
    ids_per_sample: tuple[int, ...]
    most_ids: int = 0
    weighted: bool = False

    @property
    def ids_per_step(self) -> int:
        """The mean number of ids of all features in a batch."""
        return self.batch_size * sum(self.ids_per_sample)

    def bytes_per_step(self, slots: int) -> int:
        """Returns the bytes of floats that a training step moves, a mean over batches.

        The rows that ids name and the gradients of their samples are read once for
        each id, activations are written, and each distinct row and its slots are
        read and written.
        """
        samples = self.batch_size * len(self.rows)
        vectors = 2 * self.ids_per_step + samples
        vectors += 2 * (1 + slots) * self.distinct_rows()
        return int(4 * self.dim * vectors)

    def distinct_rows(self) -> float:
        """Returns the number of rows that a batch touches, a mean over batches."""
        return statistics.mean(
            sum(len(np.unique(ids[ids >= 0])) for ids in batch)
            for batch in self.batches(4, with_weights=True)
        )

    def batches(
        self, count: int, seed: int = 0, *, with_weights: bool = False
    ) -> list[list[np.ndarray]]:
        """Draws Zipf-distributed ids: for each batch, by feature, int32 [batch, ids].

        If the sizes of bags vary, -1 fills the places after the ids of a sample.

        Args:
          count: Number of batches.
          seed: The seed of the ids.
          with_weights: Whether the caller also uses weights, as `weights` gives them.
        """
        if self.weighted and not with_weights:
            raise NotImplementedError("This peer is not given weights here.")
        generator = np.random.default_rng(seed)
        return [
            [
                self._ids(generator, rows, ids)
                for rows, ids in zip(self.rows, self.ids_per_sample, strict=True)
            ]
            for _ in range(count)
        ]

    def _ids(self, generator: np.random.Generator, rows: int, mean: int) -> np.ndarray:
        if not self.most_ids:
            return _zipf(generator, rows, (self.batch_size, mean))
        ids = _zipf(generator, rows, (self.batch_size, self.most_ids))
        kept = generator.geometric(1 / (mean + 1), (self.batch_size, 1)) - 1
        ids[np.arange(self.most_ids) >= kept] = -1
        return ids


def jagged(batch: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Joins all ids of a batch in one array, with the first position of each sample."""
    lengths = np.concatenate([(ids >= 0).sum(axis=1) for ids in batch])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return np.concatenate([ids[ids >= 0] for ids in batch]), offsets


def weights(ids: np.ndarray) -> np.ndarray:
    """Returns a weight for each id, float32 in the shape of the ids."""
    return 0.5 + (ids % 16).astype(np.float32) / 16


def _zipf(
    generator: np.random.Generator, rows: int, shape: tuple[int, int]
) -> np.ndarray:
    """Ranks by inverse transform of the continuous law, scattered over the rows."""
    power = 1.0 - _ZIPF_EXPONENT
    u = generator.random(shape)
    ranks = (1.0 + u * ((rows + 1.0) ** power - 1.0)) ** (1.0 / power)
    ranks = np.minimum(ranks.astype(np.int64) - 1, rows - 1)
    # Hot rows do not lie side by side in a real table: an odd step spreads them.
    return (ranks * 2_654_435_761 % rows).astype(np.int32)


_CAPPED = tuple(min(rows, _MAX_ROWS) for rows in _CRITEO_ROWS)
_ONE_HOT = (1,) * len(_CAPPED)
# Sizes of one table for all ids of dlrm; the largest and its slot take 13 GB.
VOCABULARIES = (10_000, 100_000, 1_000_000, 2_500_000, 10_000_000, 25_000_000)
POSITIONS = 50  # of a sequence
# Rows of 4 KiB: dlrm's tables and slots would take 50 GB.
_WIDE_DIM, _MAX_WIDE_ROWS = 1024, 10_000

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("dlrm", 2048, 64, _CAPPED, _MULTI_HOT),
        Scenario("one_hot", 2048, 64, _CAPPED, _ONE_HOT),
        Scenario("small_batch", 32, 64, _CAPPED, _ONE_HOT),
        Scenario("small_bags", 32, 64, _CAPPED, _MULTI_HOT),
        Scenario("growing", 2048, 64, (80_000,) * 26, (10,) * 26),
        # Bags of 0 to 100 ids.
        Scenario("bags", 2048, 64, _CAPPED, (10,) * 26, most_ids=100),
        Scenario("weights", 2048, 64, _CAPPED, (10,) * 26, 100, weighted=True),
        Scenario("one_huge_table", 2048, 64, (10_000_000,), (20,)),
        # Every position of a sequence is a sample of one id, for ours and all peers.
        Scenario("sequence", 2048 * POSITIONS, 64, (1_000_000,), (1,)),
        # The tables of whole models (benchmarks.models).
        Scenario("model_dlrm", 2048, 64, _CAPPED, _MULTI_HOT),
        Scenario("model_one_hot", 2048, 64, _CAPPED, _ONE_HOT),
        Scenario("model_two_tower", 2048, 64, (1_000_000, 1_000_000), (1, 1)),
        Scenario("model_sequence", 256 * POSITIONS, 64, (1_000_000,), (1,)),
        Scenario("small_tables", 32, 64, (1000,) * len(_ONE_HOT), _ONE_HOT),
        Scenario(
            "wide",
            512,
            _WIDE_DIM,
            tuple(min(rows, _MAX_WIDE_ROWS) for rows in _CRITEO_ROWS),
            _ONE_HOT,
        ),
        Scenario("tiny", 64, 16, (1000, 50), (3, 1)),
        # The shape of FBGEMM's own benchmark of CPUs.
        Scenario("two_tables", 32, 64, (1000, 1000), (10, 10)),
        *(
            Scenario(f"batch_{size}", size, 64, _CAPPED, _MULTI_HOT)
            for size in (1, 256, 16_384)
        ),
        *(
            Scenario(f"vocabulary_{rows}", 2048, 64, (rows,), (sum(_MULTI_HOT),))
            for rows in VOCABULARIES
        ),
    )
}
