"""Yogi (Zaheer et al., 2018) with a proximal step.

https://papers.nips.cc/paper/8186-adaptive-methods-for-nonconvex-optimization
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from tpu_embedding.optimizers import base, checks
from tpu_embedding.optimizers.proximal_adagrad import shrink


@dataclasses.dataclass(frozen=True)
class ProximalYogi(base.KeywordOptimizer):
    """Algorithm 2 of the paper, then the proximal step for l1 and l2.

      m = beta_1 * m + (1 - beta_1) * G
      v -= (1 - beta_2) * sign(v - G^2) * G^2
      c = lr / (sqrt(v) + epsilon);  z = T - c * m
      T = sign(z) * max(|z| - c * l1, 0) / (1 + c * l2)

    No bias is corrected, as for `Adam`; a callable learning rate can supply that.
    What a TPU computes beyond the paper is not published. `base.Optimizer`
    describes the other attributes. TensorFlow 2 has no such class; arguments, their
    order and defaults are those of ProximalYogiParameters of TensorFlow 1, with the
    betas spelt as in `Adam`.

    Attributes:
      beta_1: How much of m is kept, in [0, 1).
      beta_2: How slowly v follows G^2, in [0, 1).
      epsilon: Keeps the divisor from 0, positive.
      l1_regularization_strength: l1, at least 0.
      l2_regularization_strength: l2, at least 0.
      initial_accumulator_value: What v starts at, at least 0.
    """

    rule: ClassVar[str] = "proximal_yogi"
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(
        ops="ProximalYogi",
        message="proximal_yogi",
        fields={
            "l1": "l1_regularization_strength",
            "l2": "l2_regularization_strength",
            "beta1": "beta_1",
            "beta2": "beta_2",
            "epsilon": "epsilon",
        },
    )

    learning_rate: base.Rate = 0.01
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-3
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    initial_accumulator_value: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_share("beta_1", self.beta_1)
        checks.check_share("beta_2", self.beta_2)
        checks.check_positive("epsilon", self.epsilon)
        for argument in (
            "l1_regularization_strength",
            "l2_regularization_strength",
            "initial_accumulator_value",
        ):
            checks.check_not_negative(argument, getattr(self, argument))

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (
            base.Slot("v", self.initial_accumulator_value),
            base.Slot("m", 0.0),
        )

    @property
    def hyperparameters(self) -> tuple[float, ...]:
        return (
            self.beta_1,
            1 - self.beta_1,
            1 - self.beta_2,
            self.epsilon,
            self.l1_regularization_strength,
            self.l2_regularization_strength,
        )

    def update(
        self,
        ops: base.ArrayOps,
        gradient: Any,
        row: Any,
        slots: Sequence[Any],
        rate: Any,
    ) -> tuple[Any, ...]:
        velocity, momentum = slots
        square = gradient * gradient
        momentum = self.beta_1 * momentum + (1 - self.beta_1) * gradient
        toward = ops.sign(velocity - square)
        velocity = velocity - (1 - self.beta_2) * square * toward
        step = rate / (ops.sqrt(velocity) + self.epsilon)
        new = shrink(
            ops,
            row - step * momentum,
            step * self.l1_regularization_strength,
            step * self.l2_regularization_strength,
        )
        return new, velocity, momentum
