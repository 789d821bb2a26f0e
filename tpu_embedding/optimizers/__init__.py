"""The optimizers of embedding tables, as values."""

from tpu_embedding.optimizers.adadelta import Adadelta as Adadelta
from tpu_embedding.optimizers.adagrad import Adagrad as Adagrad
from tpu_embedding.optimizers.adagrad_momentum import (
    AdagradMomentum as AdagradMomentum,
)
from tpu_embedding.optimizers.adam import Adam as Adam
from tpu_embedding.optimizers.base import ArrayOps as ArrayOps
from tpu_embedding.optimizers.base import ClipValue as ClipValue
from tpu_embedding.optimizers.base import Optimizer as Optimizer
from tpu_embedding.optimizers.base import Rate as Rate
from tpu_embedding.optimizers.base import Slot as Slot
from tpu_embedding.optimizers.base import TpuRule as TpuRule
from tpu_embedding.optimizers.base import apply_rule as apply_rule
from tpu_embedding.optimizers.base import takes_step as takes_step
from tpu_embedding.optimizers.custom import CustomOptimizer as CustomOptimizer
from tpu_embedding.optimizers.frequency_estimator import (
    FrequencyEstimator as FrequencyEstimator,
)
from tpu_embedding.optimizers.ftrl import FTRL as FTRL
from tpu_embedding.optimizers.mdl_adagrad_light import (
    MDLAdagradLight as MDLAdagradLight,
)
from tpu_embedding.optimizers.momentum import Momentum as Momentum
from tpu_embedding.optimizers.proximal_adagrad import (
    ProximalAdagrad as ProximalAdagrad,
)
from tpu_embedding.optimizers.proximal_yogi import ProximalYogi as ProximalYogi
from tpu_embedding.optimizers.rms_prop import CenteredRMSProp as CenteredRMSProp
from tpu_embedding.optimizers.rms_prop import RMSProp as RMSProp
from tpu_embedding.optimizers.rowwise_adagrad import RowwiseAdagrad as RowwiseAdagrad
from tpu_embedding.optimizers.sgd import SGD as SGD

# By name; whoever needs all of them asks here. All that have a rule of their own.
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
        MDLAdagradLight,
    )
}
