"""Private: the optimizers of embedding tables, as immutable values."""

from tpu_embedding.optimizers.adagrad import (
    FTRL,
    Adagrad,
    AdagradMomentum,
    RowwiseAdagrad,
)
from tpu_embedding.optimizers.adam import Adam
from tpu_embedding.optimizers.base import ArrayOps as ArrayOps
from tpu_embedding.optimizers.base import ClipValue as ClipValue
from tpu_embedding.optimizers.base import Optimizer as Optimizer
from tpu_embedding.optimizers.base import Rate as Rate
from tpu_embedding.optimizers.base import Slot as Slot
from tpu_embedding.optimizers.base import TpuRule as TpuRule
from tpu_embedding.optimizers.base import apply_rule as apply_rule
from tpu_embedding.optimizers.base import takes_step as takes_step
from tpu_embedding.optimizers.custom import CustomOptimizer
from tpu_embedding.optimizers.sgd import SGD
from tpu_embedding.optimizers.tpu_v2_v4 import (
    Adadelta,
    CenteredRMSProp,
    FrequencyEstimator,
    Momentum,
    ProximalAdagrad,
    ProximalYogi,
    RMSProp,
)

# The optimizers that users import from `tpu_embedding`.
__all__ = [
    "FTRL",
    "SGD",
    "Adadelta",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "CenteredRMSProp",
    "CustomOptimizer",
    "FrequencyEstimator",
    "Momentum",
    "ProximalAdagrad",
    "ProximalYogi",
    "RMSProp",
    "RowwiseAdagrad",
]

# The optimizers with a built-in update rule, by class name: the rule of a
# CustomOptimizer belongs to the user.
OPTIMIZERS: dict[str, type[Optimizer]] = {
    name: globals()[name] for name in __all__ if not globals()[name].is_custom
}
