"""The one logical form: each table `parameters` and slots by name, whole, unpadded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from tpu_embedding.layout.table_arrays import PARAMETERS, Rows, by_checkpoint_name


@dataclasses.dataclass(frozen=True, eq=False)
class LogicalTable:
    """One table.

    Attributes:
      name: Its name in the checkpoint.
      parameters: [V, D].
      slots: By name, [V, D] or [V, 1].
    """

    name: str
    parameters: Rows
    slots: Mapping[str, Rows]

    @property
    def arrays(self) -> dict[str, Rows]:
        """The parameters, then the slots."""
        return {PARAMETERS: self.parameters, **self.slots}


def without_slots(tables: Mapping[str, LogicalTable]) -> dict[str, LogicalTable]:
    """The same tables alone."""
    return {
        name: dataclasses.replace(table, slots={}) for name, table in tables.items()
    }


def named_matrices(tables: Mapping[str, LogicalTable]) -> dict[str, Rows]:
    """All matrices as `<table>` and `<table>/<slot>`."""
    return by_checkpoint_name({name: table.arrays for name, table in tables.items()})


class LogicalCheckpoint(Mapping[str, LogicalTable]):
    """All tables of a checkpoint by name; values are read when they are asked for.

    Attributes:
      path: Where it was found.
      format: What kind of checkpoint it is.
      updates: How many updates the tables have had, or None where nothing says so.
    """

    def __init__(
        self,
        path: str,
        format: str,  # noqa: A002 - the word for it.
        tables: Mapping[str, LogicalTable],
        updates: int | None = None,
    ) -> None:
        self.path = path
        self.format = format
        self.updates = updates
        self._tables = dict(tables)

    def __getitem__(self, name: str) -> LogicalTable:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def verify(self) -> None:
        """Reads everything once.

        Raises:
          tf.errors.DataLossError: If a file is truncated or damaged.
        """
        for table in self._tables.values():
            for rows in table.arrays.values():
                rows.verify()
