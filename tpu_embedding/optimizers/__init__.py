"""Private: the optimizers of embedding tables, as immutable values."""

from tpu_embedding.optimizers.adagrad import Adagrad, RowwiseAdagrad
from tpu_embedding.optimizers.adagrad_momentum import AdagradMomentum
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
from tpu_embedding.optimizers.ftrl import FTRL
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

# The one list of the optimizers with a built-in update rule, by class name. The rule
# of a CustomOptimizer belongs to the user, so that class is not in the list.
OPTIMIZERS: dict[str, type[Optimizer]] = {
    cls.__name__: cls
    for cls in (
        SGD,
        Adagrad,
        AdagradMomentum,
        FTRL,
        Adam,
        RowwiseAdagrad,
        Momentum,
        RMSProp,
        CenteredRMSProp,
        Adadelta,
        ProximalAdagrad,
        ProximalYogi,
        FrequencyEstimator,
    )
}

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
