"""Rules with sums of squared gradients: Adagrad, its variants and FTRL-Proximal."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from tpu_embedding import errors
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


@dataclasses.dataclass(frozen=True)
class AdagradMomentum(base.Optimizer):
    """Updates rows by Adagrad with momentum over the preconditioned gradient.

      a = a + G^2 if beta2 == 1, else beta2 * a + (1 - beta2) * G^2
      p = G * (a + epsilon)^(-1 / exponent);  m = momentum * m + p
      T -= lr * (momentum * m + p if use_nesterov else m)

    `optimizers.base.Optimizer` describes the other attributes. Arguments, their order
    and defaults are those of tf.tpu.experimental.embedding.AdagradMomentum.

    Attributes:
      momentum: In [0, 1]; 0 gives Adagrad without momentum.
      use_nesterov: Use Nesterov momentum.
      exponent: The root of a that divides the gradient, positive, and so large that
        epsilon^(-1/exponent) is finite in float32; 2 is the square root.
      beta2: In [0, 1]; 1 sums all squares, a smaller value averages over recent ones.
      epsilon: Added to a, positive.
    """

    rule: ClassVar[str] = "adagrad_momentum"
    hyperparameter_names: ClassVar[tuple[str, ...]] = (
        "momentum",
        "use_nesterov",
        "exponent",
        "beta2",
        "epsilon",
    )
    sparse_core_op: ClassVar[base.SparseCoreOp | None] = base.SparseCoreOp(
        "AdagradMomentum", ("accumulator", "momenta"), {"momentum": "beta1"}
    )
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(
        "AdagradMomentum", "adagrad_momentum"
    )

    learning_rate: base.Rate = 0.001
    momentum: float = 0.0
    use_nesterov: bool = False
    exponent: float = 2
    beta2: float = 1
    epsilon: float = 1e-10
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
        base.check_share("momentum", self.momentum, closed=True)
        errors.check_flag("use_nesterov", self.use_nesterov)
        base.check_positive("exponent", self.exponent)
        base.check_share("beta2", self.beta2, closed=True)
        base.check_epsilon("epsilon", self.epsilon)
        # The gradient is multiplied by this power if a is 0.
        largest = float(np.finfo(np.float32).max)
        smallest = -math.log(self.epsilon) / math.log(largest)
        if self.exponent < smallest:
            raise errors.argument_value(
                "exponent",
                self.exponent,
                f"at least {smallest:.4g} where `epsilon` is {self.epsilon:.4g}: "
                "otherwise epsilon^(-1/exponent) is infinite in float32",
            )

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("accumulators", 0.0), base.Slot("momenta", 0.0))

    def update(self, ops, gradient, row, slots, rate):
        accumulator, momentum = slots
        # float32 decides, as in C++: a beta2 of 1 - 1e-9 is 1 and sums all squares.
        take = base.one_minus(self.beta2) or 1.0
        accumulator = self.beta2 * accumulator + take * gradient * gradient
        scale = self._inverse_root(ops, accumulator + self.epsilon)
        preconditioned = gradient * scale
        momentum = self.momentum * momentum + preconditioned
        direction = momentum
        if self.use_nesterov:
            direction = self.momentum * momentum + preconditioned
        return row - rate * direction, accumulator, momentum

    def _inverse_root(self, ops: base.ArrayOps, x: Any) -> Any:
        if self.exponent == 2:  # The default, and much cheaper than a power.
            return 1.0 / ops.sqrt(x)
        return ops.pow(x, -1.0 / self.exponent)


@dataclasses.dataclass(frozen=True)
class FTRL(base.Optimizer):
    """Updates rows by FTRL-Proximal, "follow the regularized leader".

      q = -learning_rate_power;  a' = a + G^2
      linear += G - (a'^q - a^q) / lr * T
      quadratic = a'^q / lr + 2 * l2 + beta / lr
      T = 0 if |linear| <= l1 or quadratic == 0, else
        (sign(linear) * l1 - linear) / quadratic;  a = a'

    McMahan et al., 2013, "Ad click prediction: a view from the trenches"
    (https://doi.org/10.1145/2487575.2488200).
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
