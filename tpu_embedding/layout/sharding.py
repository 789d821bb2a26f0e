"""Where a row of a table is stored: on which device, SparseCore and row there.

Tables are cut by row, modulo the number of SparseCores of all devices (the *shards*),
and rotated so that the first rows of stacked tables are not all on one SparseCore.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tpu_embedding.layout import errors


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one row is stored, or arrays of such places.

    Attributes:
      device: The device, in [0, number of devices).
      sparse_core: The SparseCore of that device.
      row: The row among those of that SparseCore.
    """

    device: Any
    sparse_core: Any
    row: Any


@dataclasses.dataclass(frozen=True)
class ModSharding:
    """One table in shards: id i is row `row_offset + i // num_shards` of one shard.

      shard = (i + rotation) mod num_shards

    All methods take an int or an integer array, and give the same.

    >>> sharding = ModSharding(num_devices=2, sparse_cores_per_device=4, rotation=5)
    >>> sharding.place_of(12)
    Place(device=0, sparse_core=1, row=1)
    >>> sharding.id_of(sharding.place_of(12))
    12

    Attributes:
      num_devices: Devices that the table is cut over.
      sparse_cores_per_device: SparseCores of each.
      rotation: By how many shards id 0 is moved.
      row_offset: Rows of other tables that come first in each shard.
    """

    num_devices: int
    sparse_cores_per_device: int
    rotation: int = 0
    row_offset: int = 0

    @property
    def num_shards(self) -> int:
        """SparseCores of all devices."""
        return self.num_devices * self.sparse_cores_per_device

    def shard_of(self, id_: Any) -> Any:
        """The shard, numbered through all devices."""
        return (id_ + self.rotation) % self.num_shards

    def local_row(self, id_: Any) -> Any:
        """The row within the shard."""
        return self.row_offset + id_ // self.num_shards

    def place_of(self, id_: Any) -> Place:
        """Where id `id_` is stored."""
        shard = self.shard_of(id_)
        return Place(
            device=shard // self.sparse_cores_per_device,
            sparse_core=shard % self.sparse_cores_per_device,
            row=self.local_row(id_),
        )

    def id_of(self, place: Place) -> Any:
        """The id that is stored at `place`; the inverse of `place_of`."""
        shard = place.device * self.sparse_cores_per_device + place.sparse_core
        return (place.row - self.row_offset) * self.num_shards + (
            shard - self.rotation
        ) % self.num_shards

    def token_of(self, id_: Any) -> Any:
        """The row of the stack that SparseCores are asked for.

        Shard and row of a token t are t mod num_shards and t // num_shards.
        """
        return self.local_row(id_) * self.num_shards + self.shard_of(id_)


@dataclasses.dataclass(frozen=True)
class StackedTable:
    """What storage needs to know of one table of a stack.

    Attributes:
      name: The table's own name.
      shape: (V, D), without padding.
      sharding: Where its rows go.
    """

    name: str
    shape: tuple[int, int]
    sharding: ModSharding


@dataclasses.dataclass(frozen=True)
class Storage:
    """The shape of a stack in memory: one shard after another.

    Attributes:
      tables: The tables of the stack.
      rows_per_shard: Rows of each shard, padding included.
      width: Columns, padding included.
      num_devices: Devices that hold the shards.
      sparse_cores_per_device: Shards on each.
    """

    tables: tuple[StackedTable, ...]
    rows_per_shard: int
    width: int
    num_devices: int
    sparse_cores_per_device: int

    @property
    def rows(self) -> int:
        """Rows of the whole stack."""
        return self.rows_per_shard * self.num_devices * self.sparse_cores_per_device

    def rows_of(self, table: StackedTable) -> np.ndarray:
        """For each id of the table its row in the stack, int64 [V]."""
        ids = np.arange(table.shape[0])
        shards = table.sharding.shard_of(ids)
        return shards * self.rows_per_shard + table.sharding.local_row(ids)

    def stack(self, values: Mapping[str, np.ndarray], fill: float = 0.0) -> np.ndarray:
        """Tables, or one slot of each, as the stack that holds them.

        Args:
          values: By table name an array [V, D], or [V, 1] for a slot per row.
          fill: What padding holds.

        Returns:
          An array [rows, width], or [rows, 1], of the dtype of the first value.

        Raises:
          ValueError: If a table is missing or has another shape.
        """
        arrays = [self._checked(table, values) for table in self.tables]
        per_row = any(
            array.shape[1] != table.shape[1]
            for array, table in zip(arrays, self.tables, strict=True)
        )
        width = 1 if per_row else self.width
        stacked = np.full((self.rows, width), fill, arrays[0].dtype)
        for table, array in zip(self.tables, arrays, strict=True):
            stacked[self.rows_of(table), : array.shape[1]] = array
        return stacked

    def unstack(self, stacked: np.ndarray) -> dict[str, np.ndarray]:
        """The tables, or slots, by name and without padding; undoes `stack`.

        Raises:
          ValueError: If `stacked` has another shape.
        """
        per_row = stacked.ndim == 2 and stacked.shape[1] == 1
        width = 1 if per_row else self.width
        if stacked.shape != (self.rows, width):
            raise errors.stack_shape(self._names(), stacked.shape, self._shape())
        return {
            table.name: stacked[self.rows_of(table), : 1 if per_row else table.shape[1]]
            for table in self.tables
        }

    def shard(self, stacked: np.ndarray) -> list[np.ndarray]:
        """The part of each device, [rows / num_devices, ...]."""
        if stacked.shape[0] != self.rows:
            raise errors.stack_shape(self._names(), stacked.shape, self._shape())
        return np.split(stacked, self.num_devices)

    def unshard(self, shards: Sequence[np.ndarray]) -> np.ndarray:
        """The stack whose parts the devices hold; undoes `shard`."""
        stacked = np.concatenate(list(shards))
        if len(shards) != self.num_devices or stacked.shape[0] != self.rows:
            raise errors.stack_shape(self._names(), stacked.shape, self._shape())
        return stacked

    def _checked(
        self, table: StackedTable, values: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        if table.name not in values:
            raise errors.stack_without_table(self._names(), table.name)
        array = np.asarray(values[table.name])
        if array.shape not in (table.shape, (table.shape[0], 1)):
            raise errors.stacked_table_shape(table.name, array.shape, table.shape)
        return array

    def _names(self) -> list[str]:
        return [table.name for table in self.tables]

    def _shape(self) -> tuple[int, int]:
        return (self.rows, self.width)
