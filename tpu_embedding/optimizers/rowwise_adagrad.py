"""Adagrad with one accumulator for each row: 1/D of Adagrad's slot memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from tpu_embedding.optimizers import adagrad, base


@dataclasses.dataclass(frozen=True)
class RowwiseAdagrad(base.Optimizer):
    """a += mean over D of G^2; T -= lr * G / sqrt(a), a of shape [V, 1].

    TensorFlow has no such class; the arguments are those of Adagrad.
    `base.Optimizer` describes the other attributes.

    Attributes:
      initial_accumulator_value: What a starts at, positive.
    """

    rule: ClassVar[str] = "rowwise_adagrad"

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

    @property
    def touches_all_rows(self) -> bool:
        return False

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (
            base.Slot("accumulators", self.initial_accumulator_value, per_row=True),
        )

    @property
    def hyperparameters(self) -> tuple[float, ...]:
        return ()

    def update(
        self,
        ops: base.ArrayOps,
        gradient: Any,
        row: Any,
        slots: Sequence[Any],
        rate: Any,
    ) -> tuple[Any, ...]:
        accumulator = slots[0] + ops.mean_last(gradient * gradient)
        return row - adagrad.step(ops, gradient, accumulator, rate), accumulator
