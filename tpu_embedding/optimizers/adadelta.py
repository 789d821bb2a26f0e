"""Adadelta (Zeiler, 2012, https://arxiv.org/abs/1212.5701)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from tpu_embedding.optimizers import base, checks


@dataclasses.dataclass(frozen=True)
class Adadelta(base.KeywordOptimizer):
    """The rule of TensorFlow's op ResourceSparseApplyAdadelta.

      a = rho * a + (1 - rho) * G^2
      step = G * sqrt(u + epsilon) / sqrt(a + epsilon)
      u = rho * u + (1 - rho) * step^2;  T -= lr * step

    `base.Optimizer` describes the other attributes. The defaults are those of Keras.

    Attributes:
      rho: How much of both means is kept, in [0, 1).
      epsilon: Added to both means, positive.
    """

    rule: ClassVar[str] = "adadelta"
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(
        ops="Adadelta",
        message="adadelta",
        fields={"rho": "rho", "epsilon": "epsilon"},
    )

    learning_rate: base.Rate = 0.001
    rho: float = 0.95
    epsilon: float = 1e-07

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_share("rho", self.rho)
        checks.check_positive("epsilon", self.epsilon)

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("accumulators", 0.0), base.Slot("updates", 0.0))

    @property
    def hyperparameters(self) -> tuple[float, ...]:
        return (self.rho, 1 - self.rho, self.epsilon)

    def update(
        self,
        ops: base.ArrayOps,
        gradient: Any,
        row: Any,
        slots: Sequence[Any],
        rate: Any,
    ) -> tuple[Any, ...]:
        accumulator = self._mean(slots[0], gradient * gradient)
        scale = ops.sqrt(slots[1] + self.epsilon) / ops.sqrt(accumulator + self.epsilon)
        step = gradient * scale
        return row - rate * step, accumulator, self._mean(slots[1], step * step)

    def _mean(self, old: Any, new: Any) -> Any:
        return self.rho * old + (1 - self.rho) * new
