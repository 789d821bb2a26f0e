"""The engine for SparseCores: TensorFlow's own XLA ops, on a TPU or in software."""

from tpu_embedding.engines.sparse_core.engine import (
    SparseCoreEngine as SparseCoreEngine,
)
