"""TPU generations and their embedding hardware; no other module has such numbers."""

from __future__ import annotations

import dataclasses
from typing import Literal

EmbeddingHardware = Literal["v1", "sparse_core", "none"]

# Attribute of ops of TPU v2 to v4: the name under which the user enqueued, dequeued or
# applied gradients. The compiler of a program pairs the ops by it.
NAME_ATTRIBUTE = "_tpu_embedding_layer"


@dataclasses.dataclass(frozen=True)
class Generation:
    """One TPU generation.

    Attributes:
      name: The name that Google Cloud uses, e.g. "v5p".
      embedding: "v1" (the embedding engine of v2 to v4, configured once per system),
        "sparse_core", or "none".
      sparse_cores_per_device: SparseCores of one device, which is one replica; 0
        unless `embedding` is "sparse_core".
      lane_width: Float32 values that a SparseCore processes at once; the width of a
        stored row is a multiple of it. 0 without SparseCores.
      row_multiple: The number of rows of a table on one SparseCore is a multiple of it.
    """

    name: str
    embedding: EmbeddingHardware
    sparse_cores_per_device: int = 0
    lane_width: int = 0
    row_multiple: int = 0


def _sparse_core(name: str, sparse_cores_per_device: int) -> Generation:
    return Generation(
        name, "sparse_core", sparse_cores_per_device, lane_width=8, row_multiple=8
    )


# v4 also has SparseCores, but programs reach them only through the "v1" engine. A v5p
# chip and a v6e chip are one device each; a 7x chip is two devices, each with two of
# its four SparseCores.
GENERATIONS: dict[str, Generation] = {
    generation.name: generation
    for generation in (
        Generation("v2", "v1"),
        Generation("v3", "v1"),
        Generation("v4", "v1"),
        Generation("v5e", "none"),
        _sparse_core("v5p", 4),
        _sparse_core("v6e", 2),
        _sparse_core("7x", 2),
    )
}


def generation(name: str) -> Generation:
    """Returns the generation called `name`.

    >>> generation("v5p").sparse_cores_per_device
    4

    Args:
      name: A key of `GENERATIONS`.

    Raises:
      ValueError: If the name is unknown.
    """
    found = GENERATIONS.get(name)
    if found is None:
        known = ", ".join(GENERATIONS)
        raise ValueError(f"Unknown TPU generation {name!r}. Known are {known}.")
    return found


_REPORTED: dict[str, EmbeddingHardware] = {
    "V1": "v1",
    "V2": "sparse_core",
    "UNSUPPORTED": "none",
}


def embedding_hardware(feature: str) -> EmbeddingHardware:
    """Returns the hardware that a value of EmbeddingFeature means.

    >>> embedding_hardware("V2")
    'sparse_core'
    """
    return _REPORTED[feature]


def reported(feature: str, sparse_cores_per_device: int) -> Generation:
    """Returns the generation that a TPU system reports.

    >>> reported("V2", 4).sparse_cores_per_device
    4

    Args:
      feature: The value of tf.tpu.experimental.HardwareFeature.EmbeddingFeature.
      sparse_cores_per_device: HardwareFeature.num_embedding_devices_per_chip, which
        is per device, despite its name.
    """
    name = f"TPU with embedding feature {feature}"
    embedding = _REPORTED[feature]
    if embedding == "sparse_core":
        return _sparse_core(name, sparse_cores_per_device)
    return Generation(name, embedding)
