"""TPU generations and their embedding hardware; no other module has such numbers.

The limits of SparseCores are those of libtpu 0.0.30, found by compiling programs near
them (docs/libtpu_limits.md has the programs): SPMEM and HBM, the size of a tensor of
SparseCores, and the SPMEM that a lookup needs, which depends on its number of ids.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, Literal

EmbeddingHardware = Literal["v1", "sparse_core", "none"]

# Attribute of ops of TPU v2 to v4: the name under which the user enqueued, dequeued or
# applied gradients. The compiler of a program pairs the ops by it.
NAME_ATTRIBUTE = "_tpu_embedding_layer"

GIB = 2**30
# "SparseCore only supports 16 GiB of HBM per tensor": a table or slot on one device.
SPARSE_CORE_TENSOR_BYTES = 16 * GIB
# Outside of SparseCores, rows of float32 are padded to a multiple of this many columns.
TENSOR_CORE_LANES = 128
# libtpu limits the partitions of a CustomOptimizer's update and of a CustomCombiner,
# whose ops have no attributes for limits, to this many ids for each sample of a
# SparseCore.
CUSTOM_IDS_PER_SAMPLE = 4
# libtpu compiles CustomCombiners only for multiples of this many ids per sample.
VALENCY_MULTIPLE = 8
# They also need a multiple of this many samples per SparseCore (7x also takes 8).
COMBINER_MULTIPLE = 16


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
      hbm_bytes: Bytes of a device's memory that programs can use.
      spmem_bytes: Bytes of SPMEM for the ids of a partition; 0 without SparseCores.
      spmem_reserved_bytes: The part of these that the compiler takes for any limits.
      combiner_values: The largest number of values of a CustomCombiner's input that a
        SparseCore holds at a time for a sample; 0 if there is none or it is not known.
      max_width: Most columns of a stack whose update compiles; 0 if not known.
      id_multiple: The compiler rounds limits of ids up to a multiple of it. Where it
        is 16, a limit of distinct ids that rounds up to an odd multiple of 8 makes
        the compiler fail with an internal error.
      devices_per_chip: The number of devices of a chip; each is a replica.
      max_chips: Chips of the largest topology, a pod, according to Google Cloud.
      topologies: Common topologies as chips by axis, the smallest first.
    """

    name: str
    embedding: EmbeddingHardware
    sparse_cores_per_device: int = 0
    lane_width: int = 0
    row_multiple: int = 0
    hbm_bytes: int = 0
    spmem_bytes: int = 0
    spmem_reserved_bytes: int = 0
    combiner_values: int = 0
    max_width: int = 0
    id_multiple: int = 8
    devices_per_chip: int = 1
    max_chips: int = 0
    topologies: tuple[str, ...] = ()

    def partition_bytes(
        self, max_ids: int, max_unique_ids: int, num_sparse_cores: int
    ) -> int:
        """Returns the bytes of SPMEM that a lookup needs with these partition limits.

        >>> GENERATIONS["v6e"].partition_bytes(256, 256, num_sparse_cores=8)
        10738
        """
        ids, unique = (
            -(-count // self.id_multiple) * self.id_multiple
            for count in (max_ids, max_unique_ids)
        )
        of_ids = math.ceil(_SPMEM_BYTES_OF_IDS * math.sqrt(num_sparse_cores * ids))
        return self.spmem_reserved_bytes + unique * _SPMEM_BYTES_PER_UNIQUE_ID + of_ids

    def max_unique_ids(self, num_sparse_cores: int, max_ids: int | None = None) -> int:
        """Returns the largest limit of distinct ids of a partition that compiles.

        Without `max_ids` the limit of ids is equal to that of distinct ids.

        >>> v6e = generation("v6e")
        >>> v6e.max_unique_ids(8), v6e.max_unique_ids(8, max_ids=99456)
        (7176, 6976)
        """
        return self._most(
            lambda unique: self.partition_bytes(
                unique if max_ids is None else max_ids, unique, num_sparse_cores
            )
        )

    def max_valency(self, width: int) -> int:
        """Returns the largest valency of a CustomCombiner that compiles, 0 if none.

        >>> v6e = generation("v6e")
        >>> v6e.max_valency(64), v6e.max_valency(248), v6e.max_valency(256)
        (48, 8, 0)

        Args:
          width: Columns of the stack.
        """
        # The rows of a sample, 8 more, and the number of each row.
        most = (self.combiner_values - 8 * width) // (width + 1)
        return max(most // VALENCY_MULTIPLE * VALENCY_MULTIPLE, 0)

    def compiles_multiple(self, max_unique_ids: int) -> bool:
        """Returns whether the compiler can round a limit of distinct ids.

        >>> [GENERATIONS["7x"].compiles_multiple(count) for count in (250, 264, 272)]
        [True, False, True]
        """
        return -(-max_unique_ids // 8) * 8 % self.id_multiple == 0

    def max_ids(self, num_sparse_cores: int, max_unique_ids: int) -> int:
        """Returns the largest limit of ids of a partition that compiles.

        >>> GENERATIONS["v6e"].max_ids(8, max_unique_ids=7000)
        85920
        """
        return self._most(
            lambda ids: self.partition_bytes(ids, max_unique_ids, num_sparse_cores)
        )

    def _most(self, needed: Callable[[int], int]) -> int:
        """Returns the largest limit whose bytes fit the SPMEM."""
        limits = range(0, _MAX_LIMIT + 1, self.id_multiple)
        count = bisect.bisect_right(limits, self.spmem_bytes, key=needed)
        return limits[max(count - 1, 0)]


def _sparse_core(
    name: str,
    sparse_cores_per_device: int,
    hbm_bytes: int,
    spmem_bytes: int,
    **others: Any,
) -> Generation:
    return Generation(
        name,
        "sparse_core",
        sparse_cores_per_device,
        lane_width=8,
        row_multiple=8,
        hbm_bytes=hbm_bytes,
        spmem_bytes=spmem_bytes,
        **{"spmem_reserved_bytes": 1024, "combiner_values": 4096, **others},
    )


# libtpu's error E3001 names a "fixed_size_allocation" of 36 bytes for each distinct id
# and some more, and a "row_dependent_size_allocation" of 12 for each id, which it
# divides by a number of replicas that itself needs SPMEM. The sum is least if both are
# equal, and grows with the square root of ids and SparseCores. Programs near the limit
# needed 7.4 to 10.8 times the root (docs/libtpu_limits.md).
_SPMEM_BYTES_PER_UNIQUE_ID = 36
_SPMEM_BYTES_OF_IDS = 11
_MAX_LIMIT = 2**31 - 1

# The code of a step takes 0.5 to 0.7 MiB of HBM for each stack.
PROGRAM_BYTES_PER_STACK = 2**20

_SQUARES = ("2x2", "4x4", "8x8", "16x16")
_RECTANGLES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBOIDS = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")

# v4 also has SparseCores, but programs reach them only through the "v1" engine. A v5p
# chip and a v6e chip are one device each; a 7x chip is two devices, each with two of
# its four SparseCores. The memory of v2 to v5e is that of Google Cloud's pages.
GENERATIONS: dict[str, Generation] = {
    generation.name: generation
    for generation in (
        Generation(
            "v2",
            "v1",
            hbm_bytes=8 * GIB,
            devices_per_chip=2,
            max_chips=256,
            topologies=_SQUARES,
        ),
        Generation(
            "v3",
            "v1",
            hbm_bytes=16 * GIB,
            devices_per_chip=2,
            max_chips=1024,
            topologies=_SQUARES,
        ),
        Generation("v4", "v1", hbm_bytes=32 * GIB, max_chips=4096, topologies=_CUBOIDS),
        Generation(
            "v5e", "none", hbm_bytes=16 * GIB, max_chips=256, topologies=_RECTANGLES
        ),
        _sparse_core(
            "v5p",
            4,
            int(95.74 * GIB),
            524288,
            combiner_values=8192,
            max_width=3328,
            max_chips=8960,
            topologies=_CUBOIDS,
        ),
        _sparse_core(
            "v6e",
            2,
            int(31.25 * GIB),
            262144,
            max_width=1664,
            max_chips=256,
            topologies=_RECTANGLES,
        ),
        _sparse_core(
            "7x",
            2,
            int(94.75 * GIB),
            524288,
            spmem_reserved_bytes=15872,
            max_width=1856,
            id_multiple=16,
            devices_per_chip=2,
            max_chips=9216,
            topologies=_CUBOIDS,
        ),
    )
}


def generation(name: str) -> Generation:
    """Returns the generation called `name`, a key of `GENERATIONS`.

    >>> generation("v5p").sparse_cores_per_device
    4
    """
    found = GENERATIONS.get(name)
    if found is None:
        known = ", ".join(GENERATIONS)
        raise ValueError(f"Unknown TPU generation {name!r}. Use one of {known}.")
    return found


_TOPOLOGY = re.compile(r"(?:tpu)?(v?\d+[a-z]*):(\d+(?:x\d+)*)")


def topology(name: str) -> tuple[Generation, int]:
    """Returns the generation and the number of devices of the topology of that name.

    >>> generation, devices = topology("tpu7x:2x2x1")
    >>> generation.name, devices
    ('7x', 8)
    """
    match = _TOPOLOGY.fullmatch(name)
    chips = math.prod(int(axis) for axis in match[2].split("x")) if match else 0
    if match is None or not chips:
        raise ValueError(
            "A topology is a TPU generation and the number of chips on each axis, for "
            f"example 'v5p:2x2x1' or 'v6e:2x2'. Received: {name!r}."
        )
    found = generation(match[1])
    if chips > found.max_chips:
        raise ValueError(
            f"{name} has {chips} chips, but the largest {found.name} topology has "
            f"{found.max_chips}. Use a smaller one."
        )
    return found, chips * found.devices_per_chip


def libtpu_name(topology: str) -> str:
    """Returns the name by which libtpu knows a topology.

    >>> libtpu_name("7x:2x2x1"), libtpu_name("tpuv6e:2x2")
    ('tpu7x:2x2x1', 'v6e:2x2')
    """
    bare = topology.removeprefix("tpu")
    return bare if bare.startswith("v") else f"tpu{bare}"


def require_power_of_two(name: str, devices: int) -> None:
    """Refuses a number of devices for which libtpu cannot compile SparseCore lookups.

    >>> require_power_of_two("v6e:2x4", 8)
    """
    if devices & (devices - 1):
        raise NotImplementedError(
            f"{name} has {devices} devices, which is not a power of two: for such a "
            "number libtpu 0.0.30 fails with an internal error when it compiles a "
            "lookup on SparseCores. Newer versions were not tested. Use a topology of "
            f"{1 << (devices.bit_length() - 1)} or {1 << devices.bit_length()} devices."
        )


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


def embedding_feature(generation: Generation) -> str:
    """Returns the value of EmbeddingFeature that TPUs of a generation report.

    >>> embedding_feature(GENERATIONS["v6e"])
    'V2'
    """
    features = {hardware: feature for feature, hardware in _REPORTED.items()}
    return features[generation.embedding]


def reported(feature: str, sparse_cores_per_device: int) -> Generation:
    """Returns the generation that a TPU system reports.

    TensorFlow's `num_embedding_devices_per_chip` is per device, despite its name.

    >>> reported("V2", 4).sparse_cores_per_device
    4
    """
    embedding = _REPORTED[feature]
    # The system does not report its name, so the limits are the widest possible.
    possible = [
        known
        for known in GENERATIONS.values()
        if known.embedding == embedding
        and sparse_cores_per_device in (known.sparse_cores_per_device, 0)
    ]
    name = f"TPU with embedding feature {feature}"
    hbm_bytes = max((known.hbm_bytes for known in possible), default=0)
    if embedding == "sparse_core":
        return _sparse_core(
            name,
            sparse_cores_per_device,
            hbm_bytes,
            max((known.spmem_bytes for known in possible), default=0),
            spmem_reserved_bytes=min(
                (known.spmem_reserved_bytes for known in possible), default=0
            ),
            combiner_values=max(
                (known.combiner_values for known in possible), default=0
            ),
            max_width=max((known.max_width for known in possible), default=0),
        )
    return Generation(name, embedding, hbm_bytes=hbm_bytes)
