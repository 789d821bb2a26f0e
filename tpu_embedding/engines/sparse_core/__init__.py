"""The SparseCore engine: TensorFlow's XLA ops, on a TPU or in software."""

__all__: list[str] = []
