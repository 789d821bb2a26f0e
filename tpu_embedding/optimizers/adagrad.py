"""Adagrad (Duchi et al., 2011, https://jmlr.org/papers/v12/duchi11a.html)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from tpu_embedding.optimizers import base


@dataclasses.dataclass(frozen=True)
class AdagradOptions(base.Optimizer):
    """The arguments of Adagrad and RowwiseAdagrad: those of TensorFlow's Adagrad."""

    learning_rate: base.Rate = 0.001
    initial_accumulator_value: float = 0.1
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
        base.check_positive("initial_accumulator_value", self.initial_accumulator_value)


@dataclasses.dataclass(frozen=True)
class Adagrad(AdagradOptions):
    """Updates rows by Adagrad: a += G^2; T -= lr * G / sqrt(a).

    Duchi, Hazan and Singer, 2011, https://jmlr.org/papers/v12/duchi11a.html.
    `optimizers.base.Optimizer` describes the other attributes. Arguments, their order
    and defaults are those of tf.tpu.experimental.embedding.Adagrad.

    Attributes:
      initial_accumulator_value: Initial value of a, positive.
    """

    rule: ClassVar[str] = "adagrad"
    sparse_core_op: ClassVar[base.SparseCoreOp | None] = base.SparseCoreOp(
        "Adagrad", ("accumulator",)
    )
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule("Adagrad", "adagrad")

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("accumulators", self.initial_accumulator_value),)

    def update(self, ops, gradient, row, slots, rate):
        accumulator = slots[0] + gradient * gradient
        return row - _step(ops, gradient, accumulator, rate), accumulator


@dataclasses.dataclass(frozen=True)
class RowwiseAdagrad(AdagradOptions):
    """Updates rows by Adagrad with one accumulator for each row.

    The rule is a += mean over D of G^2; T -= lr * G / sqrt(a), where a has the shape
    [V, 1]: 1/D of the slot memory of Adagrad. TensorFlow has no such class; the
    arguments are those of Adagrad. `optimizers.base.Optimizer` describes the other
    attributes.

    Attributes:
      initial_accumulator_value: Initial value of a, positive.
    """

    rule: ClassVar[str] = "rowwise_adagrad"

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (
            base.Slot("accumulators", self.initial_accumulator_value, per_row=True),
        )

    def update(self, ops, gradient, row, slots, rate):
        accumulator = slots[0] + ops.mean_last(gradient * gradient)
        return row - _step(ops, gradient, accumulator, rate), accumulator


def _step(ops: base.ArrayOps, gradient: Any, accumulator: Any, rate: Any) -> Any:
    """Returns the step lr * G / sqrt(a), or 0 where a is 0: G is 0 there, too."""
    # A restored accumulator may be 0, so 0 / 0 is avoided. NaN <= 0 is false: NaN
    # propagates into the step and becomes visible.
    zero = accumulator <= 0.0
    root = ops.sqrt(ops.where(zero, 1.0, accumulator))
    return ops.where(zero, 0.0, rate * gradient / root)
