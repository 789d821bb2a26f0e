"""The SparseCore engine: TensorFlow's XLA ops, on a TPU or in software."""

from tpu_embedding.engines.sparse_core.engine import SparseCoreEngine

__all__ = ["SparseCoreEngine"]
