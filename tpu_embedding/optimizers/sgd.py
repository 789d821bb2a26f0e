"""Stochastic gradient descent."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tpu_embedding.optimizers import base


@dataclasses.dataclass(frozen=True)
class SGD(base.Optimizer):
    """Updates rows by gradient descent: T -= lr * G.

    `optimizers.base.Optimizer` describes the attributes. Arguments, their order and
    defaults are those of tf.tpu.experimental.embedding.SGD.
    """

    rule: ClassVar[str] = "sgd"
    sparse_core_op: ClassVar[base.SparseCoreOp | None] = base.SparseCoreOp("Sgd")
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(
        "StochasticGradientDescent", "stochastic_gradient_descent"
    )

    learning_rate: base.Rate = 0.01
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clipvalue: base.ClipValue | None = None
    low_dimensional_packing_status: bool = False

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return ()

    def update(self, ops, gradient, row, slots, rate):
        del ops, slots
        return (row - rate * gradient,)
