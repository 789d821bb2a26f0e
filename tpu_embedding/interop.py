"""EmbeddingConfigSpec and its parts, which TensorFlow 2.16 removed.

`tpu_embedding.estimator` has the TPUEstimator that trains with them.
"""

from tpu_embedding.compat.interop import *  # noqa: F403 - its `__all__` is public.
from tpu_embedding.compat.interop import __all__, __dir__, __getattr__  # noqa: F401
