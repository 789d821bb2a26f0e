"""Tables as one variable each, whatever the form in which an engine stores them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tpu_embedding.engines.base import Engine
from tpu_embedding.layout.plan import UPDATES
from tpu_embedding.tables.rows import MutableTableRows, by_checkpoint_name
from tpu_embedding.tables.trackable import LogicalVariable, copied_counter


def full_variables(engine: Engine) -> dict[str, Any]:
    """Each table and slot, and the number of updates, by their names in checkpoints.

    Returns:
      A tf.Variable [V, ...] where one variable is the array, else a `LogicalVariable`.
    """
    arrays = {name: table.rows for name, table in engine.tables().items()}
    found: dict[str, Any] = {
        name: rows.variable
        if rows.variable is not None
        else _variable(engine, name, rows)
        for name, rows in by_checkpoint_name(arrays).items()
    }
    updates: Any = engine.updates()
    if updates is not None:
        copies = getattr(updates, "values", None)  # One for each replica, all equal.
        found[UPDATES] = updates if copies is None else copied_counter(copies)
    return found


def _variable(engine: Engine, name: str, rows: MutableTableRows) -> LogicalVariable:
    def read() -> np.ndarray:
        engine.retrieve()
        return rows.numpy()

    def write(value: np.ndarray) -> None:
        engine.retrieve()  # The written array is loaded together with the others.
        rows.write(0, value)
        engine.load()

    return LogicalVariable(name, rows.shape, rows.dtype, read, write)
