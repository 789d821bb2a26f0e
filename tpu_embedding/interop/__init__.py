"""What TensorFlow removed: EmbeddingConfigSpec, TPUEstimator, and what is around them.

The trainer's names are loaded when they are first used: they need private modules of
TensorFlow, and the others do not.
"""

import importlib as _importlib
import typing as _typing

import tensorflow as _tf

from tpu_embedding.interop.adapter import AdaptedSpec as AdaptedSpec
from tpu_embedding.interop.checkpoint_import import ImportedTables as ImportedTables
from tpu_embedding.interop.checkpoint_import import (
    import_estimator_checkpoint as import_estimator_checkpoint,
)
from tpu_embedding.interop.columns import EmbeddingColumn as EmbeddingColumn
from tpu_embedding.interop.columns import (
    get_configs_from_feature_columns as get_configs_from_feature_columns,
)
from tpu_embedding.interop.embedding_config_spec import (
    EmbeddingConfigSpec as EmbeddingConfigSpec,
)
from tpu_embedding.interop.parameters import (
    AdagradMomentumParameters as AdagradMomentumParameters,
)
from tpu_embedding.interop.parameters import AdagradParameters as AdagradParameters
from tpu_embedding.interop.parameters import AdamParameters as AdamParameters
from tpu_embedding.interop.parameters import (
    FrequencyEstimatorParameters as FrequencyEstimatorParameters,
)
from tpu_embedding.interop.parameters import FtrlParameters as FtrlParameters
from tpu_embedding.interop.parameters import MomentumParameters as MomentumParameters
from tpu_embedding.interop.parameters import (
    ProximalAdagradParameters as ProximalAdagradParameters,
)
from tpu_embedding.interop.parameters import (
    ProximalYogiParameters as ProximalYogiParameters,
)
from tpu_embedding.interop.parameters import RMSPropParameters as RMSPropParameters
from tpu_embedding.interop.parameters import (
    StochasticGradientDescentParameters as StochasticGradientDescentParameters,
)
from tpu_embedding.interop.profile import EmbeddingProfiler as EmbeddingProfiler
from tpu_embedding.interop.profile import ProfileOptions as ProfileOptions
from tpu_embedding.interop.profile import TableStatistics as TableStatistics
from tpu_embedding.interop.table_config import FeatureConfig as FeatureConfig
from tpu_embedding.interop.table_config import TableConfig as TableConfig

if _typing.TYPE_CHECKING:
    from tpu_embedding.interop.estimator import TPUEstimator as TPUEstimator
    from tpu_embedding.interop.estimator_spec import EstimatorSpec as EstimatorSpec
    from tpu_embedding.interop.estimator_spec import ModeKeys as ModeKeys
    from tpu_embedding.interop.estimator_spec import (
        TPUEstimatorSpec as TPUEstimatorSpec,
    )
    from tpu_embedding.interop.export import (
        ClassificationOutput as ClassificationOutput,
    )
    from tpu_embedding.interop.export import PredictOutput as PredictOutput
    from tpu_embedding.interop.export import RegressionOutput as RegressionOutput
    from tpu_embedding.interop.export import (
        ServingInputReceiver as ServingInputReceiver,
    )
    from tpu_embedding.interop.export import (
        build_parsing_serving_input_receiver_fn as build_parsing_serving_input_receiver_fn,  # noqa: E501 - an alias has no place to break.
    )
    from tpu_embedding.interop.export import (
        build_raw_serving_input_receiver_fn as build_raw_serving_input_receiver_fn,
    )
    from tpu_embedding.interop.feature_layers import dense_features as dense_features
    from tpu_embedding.interop.feature_layers import (
        sequence_features as sequence_features,
    )
    from tpu_embedding.interop.run_config import (
        InputPipelineConfig as InputPipelineConfig,
    )
    from tpu_embedding.interop.run_config import RunConfig as RunConfig
    from tpu_embedding.interop.run_config import TPUConfig as TPUConfig
    from tpu_embedding.interop.warm_start import WarmStartSettings as WarmStartSettings

_TRAINER = {
    "estimator": ["TPUEstimator"],
    "estimator_spec": ["EstimatorSpec", "ModeKeys", "TPUEstimatorSpec"],
    "export": [
        "ClassificationOutput",
        "PredictOutput",
        "RegressionOutput",
        "ServingInputReceiver",
        "build_parsing_serving_input_receiver_fn",
        "build_raw_serving_input_receiver_fn",
    ],
    "feature_layers": ["dense_features", "sequence_features"],
    "run_config": ["InputPipelineConfig", "RunConfig", "TPUConfig"],
    "warm_start": ["WarmStartSettings"],
}
_MODULES = {name: module for module, names in _TRAINER.items() for name in names}


def __getattr__(name: str) -> _typing.Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])


# TensorFlow still has these, under their old names.
embedding_column = _tf.compat.v1.tpu.experimental.embedding_column
shared_embedding_columns = _tf.compat.v1.tpu.experimental.shared_embedding_columns
