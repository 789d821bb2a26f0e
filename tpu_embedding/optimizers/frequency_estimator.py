"""Estimates how rarely an id comes, into a table of one column."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from tpu_embedding import errors
from tpu_embedding.optimizers import base, checks
from tpu_embedding.optimizers.errors import step_as_rate


def updates_so_far(updates: Any) -> Any:
    """A learning rate that is the step itself."""
    return updates


@dataclasses.dataclass(frozen=True)
class FrequencyEstimator(base.KeywordOptimizer):
    """T of a row becomes the average number of steps between two that name it.

      delta = min(step - last_hit_step, max_delta)
      T = delta if delta >= outlier_threshold * T else (1 - tau) * T + tau * delta
      last_hit_step = step

    The sequence is that which TensorFlow's optimization_parameters.proto documents.
    The gradient plays no part, and `learning_rate` is the step. Start the table
    at `max_delta`. Where `weight_exponent` acts is not published, so only TPUs take
    another value than 0. `base.Optimizer` describes the other attributes.

    Attributes:
      learning_rate: A callable that gives the global step; the default gives the
        number of updates already applied to the table.
      tau: How fast T follows delta, between 0 and 1.
      max_delta: The largest delta that counts, positive.
      outlier_threshold: From this multiple of T on, delta replaces T.
      weight_exponent: Of the weight (delta / max_delta) ^ weight_exponent.
    """

    rule: ClassVar[str] = "frequency_estimator"
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(
        ops="FrequencyEstimator",
        message="frequency_estimator",
        fields={
            "tau": "tau",
            "max_delta": "max_delta",
            "outlier_threshold": "outlier_threshold",
            "weight_exponent": "weight_exponent",
        },
    )
    host_values: ClassVar[dict[str, Any] | None] = {
        **base.HOST_VALUES,
        "weight_exponent": 0.0,
    }
    table_dim: ClassVar[int | None] = 1

    learning_rate: base.Rate = updates_so_far
    tau: float = 0.1
    max_delta: float = 1000.0
    outlier_threshold: float = 10.0
    weight_exponent: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.learning_rate):
            raise step_as_rate(self.learning_rate)
        checks.check_number("tau", self.tau)
        if not 0 < self.tau < 1:
            raise errors.argument_value("tau", self.tau, "> 0 and < 1")
        checks.check_positive("max_delta", self.max_delta)
        checks.check_positive("outlier_threshold", self.outlier_threshold)
        checks.check_number("weight_exponent", self.weight_exponent)

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("last_hit_step", 0.0),)

    @property
    def hyperparameters(self) -> tuple[float, ...]:
        return (self.tau, 1 - self.tau, self.max_delta, self.outlier_threshold)

    def update(
        self,
        ops: base.ArrayOps,
        gradient: Any,
        row: Any,
        slots: Sequence[Any],
        rate: Any,
    ) -> tuple[Any, ...]:
        del gradient
        delta = ops.minimum(rate - slots[0], self.max_delta)
        outlier = delta >= self.outlier_threshold * row
        blend = (1 - self.tau) * row + self.tau * delta
        return ops.where(outlier, delta, blend), 0.0 * slots[0] + rate
