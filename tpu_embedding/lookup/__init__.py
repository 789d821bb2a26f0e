"""Private: looks up rows by TensorFlow's ops: checks, entries and combined rows.

The portable engine and serving use this package.
"""

__all__: list[str] = []
