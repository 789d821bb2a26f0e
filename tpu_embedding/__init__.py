"""tpu_embedding: write TPUEmbedding once, train, test and serve it anywhere."""

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.config import (
    FeatureConfig,
    QuantizationConfig,
    SparseCoreEmbeddingConfig,
    TableConfig,
)
from tpu_embedding.embedding import TPUEmbedding
from tpu_embedding.embedding_v0 import TPUEmbeddingV0
from tpu_embedding.embedding_v2 import TPUEmbeddingV2
from tpu_embedding.initializers import RowIdInitializer
from tpu_embedding.layout.csr import PartitionedCsrFormatTensor
from tpu_embedding.optimizers import (
    FTRL,
    SGD,
    Adadelta,
    Adagrad,
    AdagradMomentum,
    Adam,
    CenteredRMSProp,
    CustomOptimizer,
    FrequencyEstimator,
    MDLAdagradLight,
    Momentum,
    ProximalAdagrad,
    ProximalYogi,
    RMSProp,
    RowwiseAdagrad,
)
from tpu_embedding.serving.embedding import TPUEmbeddingForServing
from tpu_embedding.serving.lookup import serving_embedding_lookup

__all__ = [
    "FTRL",
    "SGD",
    "Adadelta",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "CenteredRMSProp",
    "CustomCombiner",
    "CustomOptimizer",
    "FeatureConfig",
    "FrequencyEstimator",
    "MDLAdagradLight",
    "Momentum",
    "PartitionedCsrFormatTensor",
    "ProximalAdagrad",
    "ProximalYogi",
    "QuantizationConfig",
    "RMSProp",
    "RowIdInitializer",
    "RowwiseAdagrad",
    "SparseCoreEmbeddingConfig",
    "TPUEmbedding",
    "TPUEmbeddingForServing",
    "TPUEmbeddingV0",
    "TPUEmbeddingV2",
    "TableConfig",
    "serving_embedding_lookup",
]
