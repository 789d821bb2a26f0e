"""Adagrad with momentum, a selectable exponent, and decay of old squares."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from tpu_embedding import errors
from tpu_embedding.optimizers import base


@dataclasses.dataclass(frozen=True)
class AdagradMomentum(base.Optimizer):
    """Updates rows by Adagrad with momentum over the preconditioned gradient.

      a = a + G^2 if beta2 == 1, else beta2 * a + (1 - beta2) * G^2
      p = G * (a + epsilon)^(-1 / exponent);  m = momentum * m + p
      T -= lr * (momentum * m + p if use_nesterov else m)

    `optimizers.base.Optimizer` describes the other attributes. Arguments, their order
    and defaults are those of tf.tpu.experimental.embedding.AdagradMomentum.

    Attributes:
      momentum: In [0, 1]; 0 gives Adagrad without momentum.
      use_nesterov: Use Nesterov momentum.
      exponent: The root of a that divides the gradient, positive, and so large that
        epsilon^(-1/exponent) is finite in float32; 2 is the square root.
      beta2: In [0, 1]; 1 sums all squares, a smaller value averages over recent ones.
      epsilon: Added to a, positive.
    """

    rule: ClassVar[str] = "adagrad_momentum"
    hyperparameter_names: ClassVar[tuple[str, ...]] = (
        "momentum",
        "use_nesterov",
        "exponent",
        "beta2",
        "epsilon",
    )
    sparse_core_op: ClassVar[base.SparseCoreOp | None] = base.SparseCoreOp(
        "AdagradMomentum", ("accumulator", "momenta"), {"momentum": "beta1"}
    )
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(
        "AdagradMomentum", "adagrad_momentum"
    )

    learning_rate: base.Rate = 0.001
    momentum: float = 0.0
    use_nesterov: bool = False
    exponent: float = 2
    beta2: float = 1
    epsilon: float = 1e-10
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
        base.check_share("momentum", self.momentum, closed=True)
        errors.check_flag("use_nesterov", self.use_nesterov)
        base.check_positive("exponent", self.exponent)
        base.check_share("beta2", self.beta2, closed=True)
        base.check_epsilon("epsilon", self.epsilon)
        # The gradient is multiplied by this power if a is 0.
        largest = float(np.finfo(np.float32).max)
        smallest = -math.log(self.epsilon) / math.log(largest)
        if self.exponent < smallest:
            raise errors.argument_value(
                "exponent",
                self.exponent,
                f"at least {smallest:.4g} where `epsilon` is {self.epsilon:.4g}: "
                "otherwise epsilon^(-1/exponent) is infinite in float32",
            )

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("accumulators", 0.0), base.Slot("momenta", 0.0))

    def update(self, ops, gradient, row, slots, rate):
        accumulator, momentum = slots
        # float32 decides, as in C++: the beta2 of 1 - 1e-9 sums all squares.
        take = base.one_minus(self.beta2) or 1.0
        accumulator = self.beta2 * accumulator + take * gradient * gradient
        scale = self._inverse_root(ops, accumulator + self.epsilon)
        preconditioned = gradient * scale
        momentum = self.momentum * momentum + preconditioned
        direction = momentum
        if self.use_nesterov:
            direction = self.momentum * momentum + preconditioned
        return row - rate * direction, accumulator, momentum

    def _inverse_root(self, ops: base.ArrayOps, x: Any) -> Any:
        if self.exponent == 2:  # The default, and much cheaper than a power.
            return 1.0 / ops.sqrt(x)
        return ops.pow(x, -1.0 / self.exponent)
