"""The Keras layer of this package: `import tpu_embedding.keras`.

The package does not import it, to save the time that Keras takes to load.
"""

from tpu_embedding.keras.conversion import translate_keras_optimizer
from tpu_embedding.keras.layer import TPUEmbedding
from tpu_embedding.keras.rows.converting import convert, load_model, unconvert
from tpu_embedding.keras.rows.embedding import Embedding
from tpu_embedding.keras.rows.optimizer import RowSparseOptimizer
from tpu_embedding.keras.telemetry import TelemetryCallback

__all__ = [
    "Embedding",
    "RowSparseOptimizer",
    "TPUEmbedding",
    "TelemetryCallback",
    "convert",
    "load_model",
    "translate_keras_optimizer",
    "unconvert",
]


def __dir__() -> list[str]:
    return sorted(__all__)
