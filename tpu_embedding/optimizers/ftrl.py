"""FTRL-Proximal (McMahan et al., 2013, https://doi.org/10.1145/2487575.2488200)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from tpu_embedding import errors
from tpu_embedding.optimizers import base


@dataclasses.dataclass(frozen=True)
class FTRL(base.Optimizer):
    """Updates rows by FTRL-Proximal, "follow the regularized leader".

      q = -learning_rate_power;  a' = a + G^2
      linear += G - (a'^q - a^q) / lr * T
      quadratic = a'^q / lr + 2 * l2 + beta / lr
      T = 0 if |linear| <= l1 or quadratic == 0, else
        (sign(linear) * l1 - linear) / quadratic;  a = a'

    McMahan et al., 2013, "Ad click prediction: a view from the trenches".
    `optimizers.base.Optimizer` describes the other attributes. Arguments, their order
    and defaults are those of tf.tpu.experimental.embedding.FTRL.

    Attributes:
      learning_rate_power: At most 0; with 0 the learning rate does not decay.
      l1_regularization_strength: l1, at least 0.
      l2_regularization_strength: l2, at least 0.
      beta: The paper's beta, at least 0.
      initial_accumulator_value: Initial value of a: positive, or 0 with
        `allow_zero_accumulator` (TensorFlow documents this but raises ValueError).
      multiply_linear_by_learning_rate: The slot holds linear * lr, and each term
        above is multiplied by lr, so a learning rate of 0 gives no NaN.
      allow_zero_accumulator: Allow a to be 0.
    """

    rule: ClassVar[str] = "ftrl"
    hyperparameter_names: ClassVar[tuple[str, ...]] = (
        "learning_rate_power",
        "l1_regularization_strength",
        "l2_regularization_strength",
        "beta",
        "multiply_linear_by_learning_rate",
    )
    sparse_core_op: ClassVar[base.SparseCoreOp | None] = base.SparseCoreOp(
        "Ftrl", ("accumulator", "linear")
    )
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(
        "FTRL", "ftrl", {"allow_zero_accumulator": "allow_zero_accumulator"}
    )
    own_options: ClassVar[tuple[base.Option, ...]] = (
        base.Option("allow_zero_accumulator", False, ("sparse_core",)),
    )

    learning_rate: base.Rate = 0.001
    learning_rate_power: float = -0.5
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    beta: float = 0.0
    initial_accumulator_value: float = 0.1
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: base.SlotVariableCreationFn | None = None
    clipvalue: base.ClipValue | None = None
    multiply_linear_by_learning_rate: bool = False
    allow_zero_accumulator: bool = False
    low_dimensional_packing_status: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        base.check_number("learning_rate_power", self.learning_rate_power)
        if self.learning_rate_power > 0:
            raise errors.argument_value(
                "learning_rate_power", self.learning_rate_power, "<= 0"
            )
        for argument in (
            "l1_regularization_strength",
            "l2_regularization_strength",
            "beta",  # The paper divides by beta + sqrt(a).
        ):
            base.check_not_negative(argument, getattr(self, argument))
        errors.check_flag(
            "multiply_linear_by_learning_rate", self.multiply_linear_by_learning_rate
        )
        errors.check_flag("allow_zero_accumulator", self.allow_zero_accumulator)
        check_initial = (
            base.check_not_negative
            if self.allow_zero_accumulator
            else base.check_epsilon
        )
        check_initial("initial_accumulator_value", self.initial_accumulator_value)

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (
            base.Slot("accumulators", self.initial_accumulator_value),
            base.Slot("linears", 0.0),
        )

    def update(self, ops, gradient, row, slots, rate):
        old, linear = slots
        # `scale` multiplies the terms without lr; `divisor` divides the other terms.
        multiply = self.multiply_linear_by_learning_rate
        scale, divisor = (rate, 1.0) if multiply else (1.0, rate)
        l1 = scale * self.l1_regularization_strength
        l2 = scale * self.l2_regularization_strength

        new = old + gradient * gradient
        root = self._root(ops, new)
        sigma = (root - self._root(ops, old)) / divisor
        linear = linear + scale * gradient - sigma * row
        quadratic = (root + self.beta) / divisor + 2.0 * l2
        # `quadratic` is 0 where no gradient, or only squares that are 0 in float32,
        # have reached an accumulator of 0.
        zero = (ops.abs(linear) <= l1) | (ops.abs(quadratic) <= 0.0)
        solution = (ops.sign(linear) * l1 - linear) / ops.where(zero, 1.0, quadratic)
        return ops.where(zero, 0.0, solution), new, linear

    def _root(self, ops: base.ArrayOps, x: Any) -> Any:
        if self.learning_rate_power == -0.5:  # The default, and cheaper than a power.
            return ops.sqrt(x)
        return ops.pow(x, -self.learning_rate_power)
