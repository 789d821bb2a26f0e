"""Gradient descent with momentum (Sutskever et al., 2013).

https://proceedings.mlr.press/v28/sutskever13.html
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from tpu_embedding.optimizers import base, checks


@dataclasses.dataclass(frozen=True)
class Momentum(base.KeywordOptimizer):
    """The rule of TensorFlow's op ResourceSparseApplyMomentum.

      m = momentum * m + G;  T -= lr * (momentum * m + G if use_nesterov else m)

    `base.Optimizer` describes the other attributes. TensorFlow 2 has no such class;
    its own arguments and their order are those of MomentumParameters of TensorFlow 1.

    Attributes:
      momentum: How much of m is kept.
      use_nesterov: Look one step of the momentum ahead.
    """

    rule: ClassVar[str] = "momentum"
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(
        ops="Momentum",
        message="momentum",
        fields={"momentum": "momentum", "use_nesterov": "use_nesterov"},
    )

    learning_rate: base.Rate = 0.001
    momentum: float = 0.9
    use_nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_number("momentum", self.momentum)
        checks.check_flag("use_nesterov", self.use_nesterov)

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("momenta", 0.0),)

    @property
    def hyperparameters(self) -> tuple[float, ...]:
        return (self.momentum, float(self.use_nesterov))

    def update(
        self,
        ops: base.ArrayOps,
        gradient: Any,
        row: Any,
        slots: Sequence[Any],
        rate: Any,
    ) -> tuple[Any, ...]:
        del ops
        momentum = self.momentum * slots[0] + gradient
        direction = momentum
        if self.use_nesterov:
            direction = self.momentum * momentum + gradient
        return row - rate * direction, momentum
