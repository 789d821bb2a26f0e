"""Private: what `python -m tpu_embedding` does, a module for each command."""

__all__: list[str] = []
