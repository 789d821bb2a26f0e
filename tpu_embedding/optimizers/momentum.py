"""Gradient descent with momentum (Sutskever et al., 2013).

https://proceedings.mlr.press/v28/sutskever13.html
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from tpu_embedding.optimizers import base


@dataclasses.dataclass(frozen=True)
class Momentum(base.Optimizer):
    """The rule of TensorFlow's op ResourceSparseApplyMomentum.

      m = momentum * m + G;  T -= lr * (momentum * m + G if use_nesterov else m)

    `base.Optimizer` describes the other attributes. TensorFlow 2 has no such class;
    arguments and their order are those of MomentumParameters of TensorFlow 1.

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
        base.check_number("momentum", self.momentum)
        base.check_flag("use_nesterov", self.use_nesterov)

    @property
    def touches_all_rows(self) -> bool:
        return False

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
