"""TPU generations: what their embedding hardware is. No such number elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Literal

from tpu_embedding import errors

EmbeddingHardware = Literal["v1", "sparse_core", "none"]


@dataclasses.dataclass(frozen=True)
class Generation:
    """One TPU generation.

    Attributes:
      name: As Google Cloud writes it, e.g. "v5p".
      embedding: "v1" (the TPUEmbedding engine that is configured once per
        system), "sparse_core", or "none".
      sparse_cores_per_chip: SparseCores that programs can address; 0 where
        `embedding` is not "sparse_core".
      lane_width: Float32 values that a SparseCore handles at once: the width of
        a stored row is a multiple of it. 0 where there is no SparseCore.
    """

    name: str
    embedding: EmbeddingHardware
    sparse_cores_per_chip: int
    lane_width: int


# v4 has SparseCores too, but they are reached through the "v1" engine only. A
# TPU 7x chip shows itself as two devices with two SparseCores each.
GENERATIONS: dict[str, Generation] = {
    generation.name: generation
    for generation in (
        Generation("v2", "v1", sparse_cores_per_chip=0, lane_width=0),
        Generation("v3", "v1", sparse_cores_per_chip=0, lane_width=0),
        Generation("v4", "v1", sparse_cores_per_chip=0, lane_width=0),
        Generation("v5e", "none", sparse_cores_per_chip=0, lane_width=0),
        Generation("v5p", "sparse_core", sparse_cores_per_chip=4, lane_width=8),
        Generation("v6e", "sparse_core", sparse_cores_per_chip=2, lane_width=8),
        Generation("7x", "sparse_core", sparse_cores_per_chip=4, lane_width=8),
    )
}


def generation(name: str) -> Generation:
    """Returns the generation called `name`.

    >>> generation("v5p").sparse_cores_per_chip
    4

    Args:
      name: A key of `GENERATIONS`.

    Raises:
      ValueError: If there is no such generation; the text lists the known ones.
    """
    found = GENERATIONS.get(name)
    if found is None:
        raise errors.unknown_generation(name, GENERATIONS)
    return found
