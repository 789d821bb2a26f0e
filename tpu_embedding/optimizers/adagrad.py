"""Adagrad (Duchi et al., 2011, https://jmlr.org/papers/v12/duchi11a.html)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from tpu_embedding.optimizers import base, checks


@dataclasses.dataclass(frozen=True)
class AdagradOptions(base.Optimizer):
    """What Adagrad and RowwiseAdagrad take: the arguments of TensorFlow's Adagrad.

    `base.Optimizer` describes the other attributes.

    Attributes:
      initial_accumulator_value: What a starts at, positive.
    """

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
        checks.check_positive(
            "initial_accumulator_value", self.initial_accumulator_value
        )

    @property
    def hyperparameters(self) -> tuple[float, ...]:
        return ()


@dataclasses.dataclass(frozen=True)
class Adagrad(AdagradOptions):
    """a += G^2; T -= lr * G / sqrt(a).

    Arguments, their order and defaults are those of
    tf.tpu.experimental.embedding.Adagrad.
    """

    rule: ClassVar[str] = "adagrad"
    sparse_core_op: ClassVar[base.SparseCoreOp | None] = base.SparseCoreOp(
        "Adagrad", ("accumulator",)
    )
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(ops="Adagrad", message="adagrad")

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("accumulators", self.initial_accumulator_value),)

    def update(
        self,
        ops: base.ArrayOps,
        gradient: Any,
        row: Any,
        slots: Sequence[Any],
        rate: Any,
    ) -> tuple[Any, ...]:
        accumulator = slots[0] + gradient * gradient
        return row - step(ops, gradient, accumulator, rate), accumulator


def step(ops: base.ArrayOps, gradient: Any, accumulator: Any, rate: Any) -> Any:
    """The step lr * G / sqrt(a); 0 where a is 0, since G is 0 there too."""
    # A slot of zeros may be restored, so 0 / 0 is avoided. NaN is not <= 0: it
    # goes on into the step and shows itself.
    zero = accumulator <= 0.0
    root = ops.sqrt(ops.where(zero, 1.0, accumulator))
    return ops.where(zero, 0.0, rate * gradient / root)
