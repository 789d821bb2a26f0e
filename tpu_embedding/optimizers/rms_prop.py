"""RMSProp with momentum (Hinton, Neural networks for machine learning, lecture 6a).

https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from tpu_embedding.optimizers import base, checks


@dataclasses.dataclass(frozen=True)
class RMSPropOptions(base.KeywordOptimizer):
    """What RMSProp and CenteredRMSProp take.

    `base.Optimizer` describes the other attributes. TensorFlow 2 has no such class;
    its own arguments and their order are those of RMSPropParameters of TensorFlow 1.

    Attributes:
      rho: How much of the mean square is kept, in [0, 1).
      momentum: How much of the former step is kept.
      epsilon: Added to the mean square, positive.
    """

    learning_rate: base.Rate = 0.001
    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-07

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_share("rho", self.rho)
        checks.check_number("momentum", self.momentum)
        checks.check_positive("epsilon", self.epsilon)

    @property
    def hyperparameters(self) -> tuple[float, ...]:
        return (self.rho, 1 - self.rho, self.momentum, self.epsilon)

    def _mean(self, old: Any, new: Any) -> Any:
        return self.rho * old + (1 - self.rho) * new


@dataclasses.dataclass(frozen=True)
class RMSProp(RMSPropOptions):
    """The rule of TensorFlow's op ResourceSparseApplyRMSProp.

      ms = rho * ms + (1 - rho) * G^2
      mom = momentum * mom + lr * G / sqrt(ms + epsilon);  T -= mom

    Both slots start at 0, as on TPUs; in TensorFlow 1's RMSPropOptimizer ms starts
    at 1.
    """

    rule: ClassVar[str] = "rms_prop"
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(
        ops="RMSProp",
        message="rms_prop",
        fields={"rho": "rho", "momentum": "momentum", "epsilon": "epsilon"},
    )

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("ms", 0.0), base.Slot("mom", 0.0))

    def update(
        self,
        ops: base.ArrayOps,
        gradient: Any,
        row: Any,
        slots: Sequence[Any],
        rate: Any,
    ) -> tuple[Any, ...]:
        mean_square = self._mean(slots[0], gradient * gradient)
        step = rate * gradient / ops.sqrt(mean_square + self.epsilon)
        momentum = self.momentum * slots[1] + step
        return row - momentum, mean_square, momentum


@dataclasses.dataclass(frozen=True)
class CenteredRMSProp(RMSPropOptions):
    """The rule of TensorFlow's op ResourceSparseApplyCenteredRMSProp.

      ms = rho * ms + (1 - rho) * G^2;  mg = rho * mg + (1 - rho) * G
      mom = momentum * mom + lr * G / sqrt(ms - mg^2 + epsilon);  T -= mom

    A variance ms - mg^2 below 0, as rounding may leave it, counts as 0, where the
    op makes NaN of it. All slots start at 0.
    """

    rule: ClassVar[str] = "centered_rms_prop"
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(
        ops="CenteredRMSProp",
        message="centered_rms_prop",
        fields={"rho": "rho", "momentum": "momentum", "epsilon": "epsilon"},
    )

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("ms", 0.0), base.Slot("mom", 0.0), base.Slot("mg", 0.0))

    def update(
        self,
        ops: base.ArrayOps,
        gradient: Any,
        row: Any,
        slots: Sequence[Any],
        rate: Any,
    ) -> tuple[Any, ...]:
        mean_square = self._mean(slots[0], gradient * gradient)
        mean = self._mean(slots[2], gradient)
        variance = mean_square - mean * mean
        # Not `maximum`: a NaN is not < 0 and goes on into the step.
        variance = ops.where(variance < 0.0, 0.0, variance)
        step = rate * gradient / ops.sqrt(variance + self.epsilon)
        momentum = self.momentum * slots[1] + step
        return row - momentum, mean_square, momentum, mean
