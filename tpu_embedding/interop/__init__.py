"""What TensorFlow removed: EmbeddingConfigSpec and the classes around it."""

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
from tpu_embedding.interop.table_config import FeatureConfig as FeatureConfig
from tpu_embedding.interop.table_config import TableConfig as TableConfig

# TensorFlow still has these, under their old names.
embedding_column = _tf.compat.v1.tpu.experimental.embedding_column
shared_embedding_columns = _tf.compat.v1.tpu.experimental.shared_embedding_columns
