"""TPUEstimator, which TensorFlow 2.16 removed: trains TensorFlow 1 `model_fn`s.

Importing this module needs private modules of TensorFlow 2.21; the rest of
tpu_embedding, `tpu_embedding.interop` included, does not.
"""

from tpu_embedding.compat.estimator import *  # noqa: F403 - its `__all__` is public.
from tpu_embedding.compat.estimator import __all__, __dir__  # noqa: F401
