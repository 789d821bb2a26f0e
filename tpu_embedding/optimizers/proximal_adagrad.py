"""Adagrad with a proximal step (Duchi and Singer, 2009).

https://jmlr.org/papers/v10/duchi09a.html
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from tpu_embedding.optimizers import base, checks


@dataclasses.dataclass(frozen=True)
class ProximalAdagrad(base.KeywordOptimizer):
    """The rule of TensorFlow's op ResourceSparseApplyProximalAdagrad.

      a += G^2;  c = lr / sqrt(a);  z = T - c * G
      T = sign(z) * max(|z| - c * l1, 0) / (1 + c * l2)

    Where a stays 0, T stays as it is. `base.Optimizer` describes the other
    attributes. TensorFlow 2 has no such class; its own arguments and their order are
    those of ProximalAdagradParameters of TensorFlow 1.

    Attributes:
      initial_accumulator_value: What a starts at, positive.
      l1_regularization_strength: l1, at least 0.
      l2_regularization_strength: l2, at least 0.
    """

    rule: ClassVar[str] = "proximal_adagrad"
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(
        ops="ProximalAdagrad",
        message="proximal_adagrad",
        fields={
            "l1": "l1_regularization_strength",
            "l2": "l2_regularization_strength",
        },
    )

    learning_rate: base.Rate = 0.001
    initial_accumulator_value: float = 0.1
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_positive(
            "initial_accumulator_value", self.initial_accumulator_value
        )
        checks.check_not_negative(
            "l1_regularization_strength", self.l1_regularization_strength
        )
        checks.check_not_negative(
            "l2_regularization_strength", self.l2_regularization_strength
        )

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("accumulators", self.initial_accumulator_value),)

    @property
    def hyperparameters(self) -> tuple[float, ...]:
        return (self.l1_regularization_strength, self.l2_regularization_strength)

    def update(
        self,
        ops: base.ArrayOps,
        gradient: Any,
        row: Any,
        slots: Sequence[Any],
        rate: Any,
    ) -> tuple[Any, ...]:
        accumulator = slots[0] + gradient * gradient
        zero = accumulator <= 0.0
        step = rate / ops.sqrt(ops.where(zero, 1.0, accumulator))
        new = shrink(
            ops,
            row - step * gradient,
            step * self.l1_regularization_strength,
            step * self.l2_regularization_strength,
        )
        return ops.where(zero, row, new), accumulator


def shrink(ops: base.ArrayOps, z: Any, l1: Any, l2: Any) -> Any:
    """The w of least (w - z)^2 / 2 + l1 * |w| + l2 * w^2 / 2.

    That is sign(z) * max(|z| - l1, 0) / (1 + l2); a NaN stays.

    Args:
      ops: The array functions to use.
      z: float32 [n, D].
      l1: At least 0, of a shape that goes with `z`.
      l2: As `l1`.
    """
    size = ops.abs(z)
    left = ops.where(size <= l1, 0.0, size - l1)
    return ops.sign(z) * left / (1.0 + l2)
