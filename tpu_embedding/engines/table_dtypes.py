"""What tables may be stored as, and who has only float32."""

from __future__ import annotations

from tpu_embedding.engines import table_errors
from tpu_embedding.layout.plan import Plan


def require_dtypes(plan: Plan, allowed: tuple[str, ...], what: str) -> None:
    """Refuses tables that are stored as something else.

    Args:
      plan: The tables.
      allowed: Names of dtypes.
      what: Who stores them, for the message.

    Raises:
      NotImplementedError: It names table, dtype and the way out.
    """
    for table in plan.tables:
        if table.config.dtype not in allowed:
            raise table_errors.table_dtype(table.name, table.config.dtype, what)
