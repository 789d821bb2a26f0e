"""Tables of the host engine whose rows wait for their gradients.

An optimizer that moves all rows in each step, `te.Adam(lazy_adam=False)`, writes
only the rows of a batch if `idle_of` finds what a step does to the other rows
(`optimizers/idle.py`). Each part of the tables counts the updates that it applies, in
its step queue. A lookup returns caught-up rows and writes nothing; an update first
catches up the rows that it changes. `TableStore.flush` and each read of a whole
variable first catch up all rows, by `TablePart.catch_up`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops

from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.ops.library import idle_record
from tpu_embedding.optimizers.idle import Idle
from tpu_embedding.tables.waiting import EngineVariable, Waits, instead, make_waiting

if TYPE_CHECKING:
    from tpu_embedding.engines.host.part import TablePart


def idle_of(spec: TableSpec) -> Idle | None:
    """Returns how rows of a table wait, or None if each step updates all rows.

    Rows wait in tables whose slots this package makes, but not in int8 tables.
    """
    config, optimizer = spec.config, spec.optimizer
    if optimizer is None or optimizer.slot_variable_creation_fn is not None:
        return None
    if config.storage.is_coded:  # A catch-up would be rounded to another grid.
        return None
    return optimizer.idle


def waiting_records(spec: TableSpec) -> dict[str, Any]:
    """Returns the fields of a table's record that say how its rows wait."""
    idle = idle_of(spec)
    if idle is None:
        return {"idle": [], "history": 0}
    assert spec.optimizer is not None
    decays = bool(spec.optimizer.weight_decay_factor)
    return {
        "idle": [idle_record(idle, name=spec.name, decays=decays)],
        "history": idle.history_length(spec.config.max_rows),
    }


def waiting_bytes(spec: TableSpec, rows: int) -> int:
    """Returns the bytes that a process with `rows` rows keeps to catch them up."""
    idle = idle_of(spec)
    if idle is None:
        return 0
    history = idle.history_length(spec.config.max_rows)
    return 4 * rows + 8 * history * (2 + idle.num_terms)


class PartWaits(Waits):
    """The steps that rows of a part's table wait for; see `tables.waiting.Waits`."""

    def __init__(self, part: TablePart, table: int) -> None:
        """Makes reads of the table's variables catch rows up."""
        self._part, self._table = part, table
        self.variables = list(part.variables[table].arrays.values())
        for variable in self.variables:
            assert make_waiting(variable, EngineVariable), variable
            variable.waiting = self

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        """See `Waits.read`."""
        table, read = self.variables[0], resource_variable_ops.ResourceVariable
        stored: Any = read.sparse_read(table, rows)
        with record.stop_recording():
            caught_up = self._part.read_rows(self._table, rows)
        return instead(stored, tf.cast(caught_up, stored.dtype))

    def flush(self) -> None:
        """See `Waits.flush`."""
        with record.stop_recording():
            self._part.catch_up()

    def is_quiet(self) -> bool:
        """See `Waits.is_quiet`."""
        return False
