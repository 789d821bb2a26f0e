"""Keras layers over TPUEmbedding: `import tpu_embedding.keras`.

Not imported with the package: who needs no layer need not wait for Keras.
"""

from tpu_embedding.keras.layer import TPUEmbedding
from tpu_embedding.keras.optimizers import translate_keras_optimizer

__all__ = ["TPUEmbedding", "translate_keras_optimizer"]


def __dir__() -> list[str]:
    return sorted(__all__)
