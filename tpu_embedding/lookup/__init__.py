"""Private: looks rows up by TensorFlow's ops: checks, entries and combined rows.

The portable engine and serving use them.
"""

__all__: list[str] = []
