"""Adam (Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from tpu_embedding import errors
from tpu_embedding.optimizers import base
from tpu_embedding.optimizers.idle import Idle


@dataclasses.dataclass(frozen=True)
class Adam(base.Optimizer):
    """Updates rows by Adam without bias correction, as TPU hardware does.

      m = beta_1 * m + (1 - beta_1) * G;  v = beta_2 * v + (1 - beta_2) * G^2
      T -= lr * m / sqrt(v + epsilon^2) if sum_inside_sqrt,
           lr * m / (sqrt(v) + epsilon) otherwise

    Kingma and Ba, 2014, https://arxiv.org/abs/1412.6980. A callable learning rate
    can apply the correction. `optimizers.base.Optimizer` describes the other
    attributes. Arguments, their order and defaults are those of
    tf.tpu.experimental.embedding.Adam.

    Attributes:
      beta_1: The share of m that is kept, in [0, 1).
      beta_2: The share of v that is kept, in [0, 1).
      epsilon: Keeps the divisor above 0. With `sum_inside_sqrt` at least 1.1e-19:
        the square of a smaller number is 0 in float32.
      lazy_adam: Update only the rows that entries name. With False each step
        updates all rows of the table; if possible, a row is caught up only when it is
        next read or updated (docs/semantics.md, section 3).
      sum_inside_sqrt: Selects the formula of the divisor.
    """

    rule: ClassVar[str] = "adam"
    hyperparameter_names: ClassVar[tuple[str, ...]] = (
        "beta_1",
        "beta_2",
        "epsilon",
        "sum_inside_sqrt",
    )
    sparse_core_op: ClassVar[base.SparseCoreOp | None] = base.SparseCoreOp(
        "Adam",
        ("momenta", "velocity"),
        {
            "beta_1": "beta1",
            "beta_2": "beta2",
            "sum_inside_sqrt": "use_sum_inside_sqrt",
        },
    )
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(
        "ADAM", "adam", {"use_non_lazy_adam": "touches_all_rows"}
    )
    own_options: ClassVar[tuple[base.Option, ...]] = (
        base.Option("lazy_adam", True, ("sparse_core",)),
    )

    learning_rate: base.Rate = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-07
    lazy_adam: bool = True
    sum_inside_sqrt: bool = True
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: base.SlotVariableCreationFn | None = None
    clipvalue: base.ClipValue | None = None
    low_dimensional_packing_status: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        base.check_share("beta_1", self.beta_1)
        base.check_share("beta_2", self.beta_2)
        errors.check_flag("lazy_adam", self.lazy_adam)
        errors.check_flag("sum_inside_sqrt", self.sum_inside_sqrt)
        base.check_epsilon("epsilon", self.epsilon, squared=self.sum_inside_sqrt)
        if not self.lazy_adam and not self.use_gradient_accumulation:
            raise ValueError(
                "`lazy_adam=False` updates every row once per step, so it cannot be "
                "used with `use_gradient_accumulation=False`. Leave "
                "`use_gradient_accumulation` at True or `lazy_adam` at True."
            )

    @property
    def touches_all_rows(self) -> bool:
        return not self.lazy_adam

    @property
    def idle(self) -> Idle | None:
        """See `Optimizer.idle`.

        It is None if steps clip the weights, or if the momenta fade so slowly compared
        with the velocities that no small number of nodes suffices.
        """
        clips = self.clip_weight_min is not None or self.clip_weight_max is not None
        if self.lazy_adam or clips:
            return None
        idle = Idle(
            (float(np.float32(self.beta_1)), float(np.float32(self.beta_2))),
            "root",
            square=1,
            epsilon=self.epsilon,
            epsilon_inside=self.sum_inside_sqrt,
        )
        try:
            _ = idle.quadrature
        except ValueError:
            return None
        return idle

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("momenta", 0.0), base.Slot("velocities", 0.0))

    def update(self, ops, gradient, row, slots, rate):
        momentum, velocity = slots
        momentum = self.beta_1 * momentum + base.one_minus(self.beta_1) * gradient
        take = base.one_minus(self.beta_2)
        velocity = self.beta_2 * velocity + take * gradient * gradient
        if self.sum_inside_sqrt:
            divisor = ops.sqrt(velocity + self.epsilon**2)
        else:
            divisor = ops.sqrt(velocity) + self.epsilon
        return row - rate * momentum / divisor, momentum, velocity
