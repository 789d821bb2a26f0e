"""Private: lookups made of TensorFlow's ops: checks, entries and combined rows.

The portable engine and serving use them.
"""

__all__: list[str] = []
