"""Private: tables and slots: rows, first values, memory, variables in checkpoints."""

__all__: list[str] = []
