"""TPUEstimator, which TensorFlow 2.16 removed: trains TensorFlow 1 `model_fn`s.

Importing this module needs private modules of TensorFlow 2.21; the rest of
tpu_embedding, `tpu_embedding.interop` included, does not.
"""

from tpu_embedding.compat.estimator.arguments import (
    EstimatorSpec,
    InputPipelineConfig,
    ModeKeys,
    RunConfig,
    TPUConfig,
    TPUEstimatorSpec,
    WarmStartSettings,
)
from tpu_embedding.compat.estimator.estimator import TPUEstimator
from tpu_embedding.compat.estimator.export import (
    ClassificationOutput,
    PredictOutput,
    RegressionOutput,
    ServingInputReceiver,
    build_parsing_serving_input_receiver_fn,
    build_raw_serving_input_receiver_fn,
)
from tpu_embedding.compat.estimator.feature_layers import (
    dense_features,
    sequence_features,
)
from tpu_embedding.compat.estimator.profile import (
    EmbeddingProfiler,
    ProfileOptions,
    TableStatistics,
)

__all__ = [
    "ClassificationOutput",
    "EmbeddingProfiler",
    "EstimatorSpec",
    "InputPipelineConfig",
    "ModeKeys",
    "PredictOutput",
    "ProfileOptions",
    "RegressionOutput",
    "RunConfig",
    "ServingInputReceiver",
    "TPUConfig",
    "TPUEstimator",
    "TPUEstimatorSpec",
    "TableStatistics",
    "WarmStartSettings",
    "build_parsing_serving_input_receiver_fn",
    "build_raw_serving_input_receiver_fn",
    "dense_features",
    "sequence_features",
]


def __dir__() -> list[str]:
    return sorted(__all__)
