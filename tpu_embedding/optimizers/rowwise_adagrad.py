"""Adagrad with one accumulator for each row: 1/D of Adagrad's slot memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from tpu_embedding.optimizers import adagrad, base


@dataclasses.dataclass(frozen=True)
class RowwiseAdagrad(adagrad.AdagradOptions):
    """a += mean over D of G^2; T -= lr * G / sqrt(a), a of shape [V, 1].

    TensorFlow has no such class; the arguments are those of Adagrad.
    """

    rule: ClassVar[str] = "rowwise_adagrad"

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (
            base.Slot("accumulators", self.initial_accumulator_value, per_row=True),
        )

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
