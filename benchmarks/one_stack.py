"""A scenario's tables in one stack, cut over the SparseCores of some devices."""

from __future__ import annotations

import dataclasses

from benchmarks.scenarios import Scenario

TPU = "v5p"
CORES = 4  # SparseCores of a device
DEVICES = {"one_device": 1, "eight_devices": 8}  # by name of the function
IDS_PER_SAMPLE = 64  # the id buffer, times the samples of the stack
NO_LIMIT = 1 << 30
_ROW_MULTIPLE = 8  # rows of a table on one SparseCore


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of one feature and its table.

    Attributes:
      sample_offset: The feature's first sample in the stack.
      row_offset: The table's first row.
      shift: By how many SparseCores the table is rotated.
    """

    sample_offset: int
    row_offset: int
    shift: int


@dataclasses.dataclass(frozen=True)
class Stack:
    """All tables of a scenario.

    Attributes:
      devices: The number of devices that share them.
      places: The place of each feature.
      rows: The number of rows, with padding.
      samples: The number of samples in one device's batch.
    """

    devices: int
    places: tuple[Place, ...]
    rows: int
    samples: int

    @property
    def shards(self) -> int:
        """SparseCores of all devices."""
        return self.devices * CORES

    @classmethod
    def of(cls, scenario: Scenario, devices: int) -> Stack:
        """Stacks the tables in order, each rotated by one more device than the last."""
        shards = devices * CORES
        block = shards * _ROW_MULTIPLE
        places, row = [], 0
        for index, rows in enumerate(scenario.rows):
            places.append(
                Place(index * scenario.batch_size, row, index * CORES % shards)
            )
            row += -(-rows // block) * block
        samples = len(places) * scenario.batch_size
        return cls(devices, tuple(places), row, samples)
