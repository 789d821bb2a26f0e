"""tpu_embedding: write TPUEmbedding once, train, test and serve it anywhere."""

from tpu_embedding.config import FeatureConfig, QuantizationConfig, TableConfig
from tpu_embedding.embedding import TPUEmbedding
from tpu_embedding.initializers import RowIdInitializer
from tpu_embedding.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    RowwiseAdagrad,
)
from tpu_embedding.serving.embedding import TPUEmbeddingForServing
from tpu_embedding.serving.lookup import serving_embedding_lookup

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "FeatureConfig",
    "QuantizationConfig",
    "RowIdInitializer",
    "RowwiseAdagrad",
    "TPUEmbedding",
    "TPUEmbeddingForServing",
    "TableConfig",
    "serving_embedding_lookup",
]
