"""The optimizers of embedding tables, as values."""

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
from tpu_embedding.optimizers.ftrl import FTRL as FTRL
from tpu_embedding.optimizers.rowwise_adagrad import RowwiseAdagrad as RowwiseAdagrad
from tpu_embedding.optimizers.sgd import SGD as SGD
