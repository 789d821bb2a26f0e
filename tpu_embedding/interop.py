"""EmbeddingConfigSpec and its parts, which TensorFlow 2.16 removed.

`tpu_embedding.estimator` has the TPUEstimator that trains with them.
"""

from typing import Any as _Any

import tensorflow as _tf

from tpu_embedding.compat.interop.checkpoint_import import (
    ImportedTables,
    import_estimator_checkpoint,
)
from tpu_embedding.compat.interop.columns import (
    EmbeddingColumn,
    FeatureConfig,
    TableConfig,
    get_configs_from_feature_columns,
)
from tpu_embedding.compat.interop.embedding_config_spec import EmbeddingConfigSpec
from tpu_embedding.compat.interop.parameters import (
    AdagradMomentumParameters,
    AdagradParameters,
    AdamParameters,
    FrequencyEstimatorParameters,
    FtrlParameters,
    MomentumParameters,
    ProximalAdagradParameters,
    ProximalYogiParameters,
    RMSPropParameters,
    StochasticGradientDescentParameters,
)
from tpu_embedding.compat.interop.spec_conversion import AdaptedSpec

# TensorFlow still has these, under their old names.
embedding_column = _tf.compat.v1.tpu.experimental.embedding_column
shared_embedding_columns = _tf.compat.v1.tpu.experimental.shared_embedding_columns

__all__ = [
    "AdagradMomentumParameters",
    "AdagradParameters",
    "AdamParameters",
    "AdaptedSpec",
    "EmbeddingColumn",
    "EmbeddingConfigSpec",
    "FeatureConfig",
    "FrequencyEstimatorParameters",
    "FtrlParameters",
    "ImportedTables",
    "MomentumParameters",
    "ProximalAdagradParameters",
    "ProximalYogiParameters",
    "RMSPropParameters",
    "StochasticGradientDescentParameters",
    "TableConfig",
    "embedding_column",
    "get_configs_from_feature_columns",
    "import_estimator_checkpoint",
    "shared_embedding_columns",
]


def __getattr__(name: str) -> _Any:
    raise AttributeError(
        f"module 'tpu_embedding.interop' has no attribute {name!r}. TPUEstimator and "
        "what its model functions need are in `tpu_embedding.estimator`."
    )


def __dir__() -> list[str]:
    return sorted(__all__)
