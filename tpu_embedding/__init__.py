"""Embedding tables for TensorFlow, with the API of tf.tpu.experimental.embedding.

The names in `__all__` are public, and so are those in the `__all__` of the public
packages: checkpoint, estimator, interop, keras, planning, serving and testing, which
are imported when they are first used. All other modules are private and may change
without notice.
"""

import importlib as _importlib
import typing as _typing

from tpu_embedding import cluster_config as _cluster_config
from tpu_embedding import optimizers as _optimizers
from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.config import (
    DistributedOptions,
    FeatureConfig,
    QuantizationConfig,
    SparseCoreEmbeddingConfig,
    TableConfig,
)
from tpu_embedding.layout.csr import PartitionedCsrFormatTensor
from tpu_embedding.optimizers import *  # noqa: F403 - their `__all__` is public.
from tpu_embedding.vocabulary import GrowingVocabulary, Hashing, VocabularyContents

if _typing.TYPE_CHECKING:
    from tpu_embedding import (
        checkpoint,
        estimator,
        interop,
        keras,
        planning,
        serving,
        testing,
    )
    from tpu_embedding.compat.drop_in import install, uninstall
    from tpu_embedding.embedding import TPUEmbedding
    from tpu_embedding.embedding_v0 import TPUEmbeddingV0
    from tpu_embedding.embedding_v2 import TPUEmbeddingV2
    from tpu_embedding.initializers import RowIdInitializer
    from tpu_embedding.packing import PackedFeatures, pack
    from tpu_embedding.parameter_server import ClusterCoordinator
    from tpu_embedding.planning import plan
    from tpu_embedding.serving.embedding import (
        TPUEmbeddingForServing,
        serving_embedding_lookup,
    )
    from tpu_embedding.tables.growing import FrozenTable
    from tpu_embedding.telemetry import Figure, Telemetry

# Imported when they are first used: TensorFlow takes seconds, and a command line that
# only prints its help does not need it.
_MODULES = {
    "ClusterCoordinator": "parameter_server",
    "Figure": "telemetry",
    "FrozenTable": "tables.growing",
    "PackedFeatures": "packing",
    "RowIdInitializer": "initializers",
    "TPUEmbedding": "embedding",
    "TPUEmbeddingForServing": "serving.embedding",
    "TPUEmbeddingV0": "embedding_v0",
    "TPUEmbeddingV2": "embedding_v2",
    "Telemetry": "telemetry",
    "install": "compat.drop_in",
    "pack": "packing",
    "plan": "planning",
    "serving_embedding_lookup": "serving.embedding",
    "uninstall": "compat.drop_in",
}
_PACKAGES = [
    "checkpoint",
    "estimator",
    "interop",
    "keras",
    "planning",
    "serving",
    "testing",
]

__all__ = [
    "ClusterCoordinator",
    "CustomCombiner",
    "DistributedOptions",
    "FeatureConfig",
    "Figure",
    "FrozenTable",
    "GrowingVocabulary",
    "Hashing",
    "PackedFeatures",
    "PartitionedCsrFormatTensor",
    "QuantizationConfig",
    "RowIdInitializer",
    "SparseCoreEmbeddingConfig",
    "TPUEmbedding",
    "TPUEmbeddingForServing",
    "TPUEmbeddingV0",
    "TPUEmbeddingV2",
    "TableConfig",
    "Telemetry",
    "VocabularyContents",
    "checkpoint",
    "estimator",
    "install",
    "interop",
    "keras",
    "pack",
    "plan",
    "planning",
    "serving",
    "serving_embedding_lookup",
    "testing",
    "uninstall",
]
__all__ += _optimizers.__all__

_cluster_config.warn()


def __getattr__(name: str) -> _typing.Any:
    if name in _PACKAGES:
        return _importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted(__all__)
