"""Private: plans tables, features and the place of each row, without TensorFlow."""

__all__: list[str] = []
