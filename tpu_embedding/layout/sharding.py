"""Where a row of a table is stored: in which shard, and in which row there.

Tables are cut by row, modulo the number of SparseCores of all devices (the *shards*),
and rotated so that the first rows of stacked tables are not all on one SparseCore.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class ModSharding:
    """One table in shards: id i is row `row_offset + i // num_shards` of one shard.

      shard = (i + rotation) mod num_shards

    All methods take an int, an integer array or an integer tensor, and give the same.

    >>> sharding = ModSharding(num_shards=8, rotation=5)
    >>> sharding.shard_of(12), sharding.local_row(12)
    (1, 1)
    >>> sharding.stack_row(12, rows_per_shard=10)
    11

    Attributes:
      num_shards: SparseCores of all devices.
      rotation: By how many shards id 0 is moved.
      row_offset: Rows of other tables that come first in each shard.
    """

    num_shards: int
    rotation: int = 0
    row_offset: int = 0

    def shard_of(self, id_: Any) -> Any:
        """The shard, numbered through all devices."""
        return (id_ + self.rotation) % self.num_shards

    def local_row(self, id_: Any) -> Any:
        """The row within the shard."""
        return self.row_offset + id_ // self.num_shards

    def stack_row(self, id_: Any, rows_per_shard: int) -> Any:
        """The row of the stack, whose shards lie one after another.

        Args:
          id_: The id.
          rows_per_shard: Rows of each shard, those of other tables included.
        """
        return self.shard_of(id_) * rows_per_shard + self.local_row(id_)
