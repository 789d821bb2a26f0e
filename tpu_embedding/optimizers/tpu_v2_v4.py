"""The update rules that TPU v2-v4 have beyond tf.tpu.experimental.embedding's five.

The host and the portable engine apply them too; SparseCores have no op for them.
TensorFlow 2 has no such classes: the arguments are those of the *Parameters classes of
TensorFlow 1, with betas spelt as in `Adam`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from tpu_embedding import errors
from tpu_embedding.optimizers import base


@dataclasses.dataclass(frozen=True)
class Momentum(base.KeywordOptimizer):
    """Updates rows with momentum, as in TensorFlow's op ResourceSparseApplyMomentum.

      m = momentum * m + G;  T -= lr * (momentum * m + G if use_nesterov else m)

    Sutskever et al., 2013, https://proceedings.mlr.press/v28/sutskever13.html.
    `optimizers.base.Optimizer` describes the other attributes. The order of
    `learning_rate`, `momentum` and `use_nesterov` is that of TensorFlow 1's
    MomentumParameters.

    Attributes:
      momentum: The share of m that is kept, in [0, 1].
      use_nesterov: Use Nesterov momentum.
    """

    rule: ClassVar[str] = "momentum"
    hyperparameter_names: ClassVar[tuple[str, ...]] = ("momentum", "use_nesterov")
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule("Momentum", "momentum")

    learning_rate: base.Rate = 0.001
    momentum: float = 0.9
    use_nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        base.check_share("momentum", self.momentum, closed=True)
        errors.check_flag("use_nesterov", self.use_nesterov)

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("momenta", 0.0),)

    def update(self, ops, gradient, row, slots, rate):
        del ops
        momentum = self.momentum * slots[0] + gradient
        direction = momentum
        if self.use_nesterov:
            direction = self.momentum * momentum + gradient
        return row - rate * direction, momentum


@dataclasses.dataclass(frozen=True)
class RMSPropOptions(base.KeywordOptimizer):
    """The arguments of both RMSProps, in the order of RMSPropParameters."""

    hyperparameter_names: ClassVar[tuple[str, ...]] = ("rho", "momentum", "epsilon")

    learning_rate: base.Rate = 0.001
    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-07

    def __post_init__(self) -> None:
        super().__post_init__()
        base.check_share("rho", self.rho)
        base.check_share("momentum", self.momentum, closed=True)
        base.check_epsilon("epsilon", self.epsilon)


@dataclasses.dataclass(frozen=True)
class RMSProp(RMSPropOptions):
    """Updates rows by RMSProp with momentum, as in ResourceSparseApplyRMSProp.

      ms = rho * ms + (1 - rho) * G^2
      mom = momentum * mom + lr * G / sqrt(ms + epsilon);  T -= mom

    Hinton, https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf.
    Both slots start at 0, as on TPUs; in TensorFlow 1's RMSPropOptimizer ms starts
    at 1. `optimizers.base.Optimizer` describes the other attributes.

    Attributes:
      rho: The share of the mean square that is kept, in [0, 1).
      momentum: The share of the previous step that is kept, in [0, 1].
      epsilon: Added to the mean square, positive.
    """

    rule: ClassVar[str] = "rms_prop"
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule("RMSProp", "rms_prop")

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("ms", 0.0), base.Slot("mom", 0.0))

    def update(self, ops, gradient, row, slots, rate):
        mean_square = _average(self.rho, slots[0], gradient * gradient)
        step = rate * gradient / ops.sqrt(mean_square + self.epsilon)
        momentum = self.momentum * slots[1] + step
        return row - momentum, mean_square, momentum


@dataclasses.dataclass(frozen=True)
class CenteredRMSProp(RMSPropOptions):
    """Updates rows by centered RMSProp, as in ResourceSparseApplyCenteredRMSProp.

      ms = rho * ms + (1 - rho) * G^2;  mg = rho * mg + (1 - rho) * G
      mom = momentum * mom + lr * G / sqrt(ms - mg^2 + epsilon);  T -= mom

    A variance ms - mg^2 that rounding makes negative counts as 0; the op returns NaN.
    All slots start at 0. The attributes are those of RMSProp.
    """

    rule: ClassVar[str] = "centered_rms_prop"
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(
        "CenteredRMSProp", "centered_rms_prop"
    )

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("ms", 0.0), base.Slot("mom", 0.0), base.Slot("mg", 0.0))

    def update(self, ops, gradient, row, slots, rate):
        mean_square = _average(self.rho, slots[0], gradient * gradient)
        mean = _average(self.rho, slots[2], gradient)
        variance = mean_square - mean * mean
        # This is `where`, not `maximum`, so that NaN propagates into the step.
        variance = ops.where(variance < 0.0, 0.0, variance)
        step = rate * gradient / ops.sqrt(variance + self.epsilon)
        momentum = self.momentum * slots[1] + step
        return row - momentum, mean_square, momentum, mean


@dataclasses.dataclass(frozen=True)
class Adadelta(base.KeywordOptimizer):
    """Updates rows by Adadelta, as in TensorFlow's op ResourceSparseApplyAdadelta.

      a = rho * a + (1 - rho) * G^2
      step = G * sqrt(u + epsilon) / sqrt(a + epsilon)
      u = rho * u + (1 - rho) * step^2;  T -= lr * step

    Zeiler, 2012, https://arxiv.org/abs/1212.5701. The defaults are those of Keras.
    `optimizers.base.Optimizer` describes the other attributes.

    Attributes:
      rho: The share of both averages that is kept, in [0, 1).
      epsilon: Added to both averages, positive.
    """

    rule: ClassVar[str] = "adadelta"
    hyperparameter_names: ClassVar[tuple[str, ...]] = ("rho", "epsilon")
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule("Adadelta", "adadelta")

    learning_rate: base.Rate = 0.001
    rho: float = 0.95
    epsilon: float = 1e-07

    def __post_init__(self) -> None:
        super().__post_init__()
        base.check_share("rho", self.rho)
        base.check_epsilon("epsilon", self.epsilon)

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("accumulators", 0.0), base.Slot("updates", 0.0))

    def update(self, ops, gradient, row, slots, rate):
        accumulator = _average(self.rho, slots[0], gradient * gradient)
        scale = ops.sqrt(slots[1] + self.epsilon) / ops.sqrt(accumulator + self.epsilon)
        step = gradient * scale
        new = _average(self.rho, slots[1], step * step)
        return row - rate * step, accumulator, new


@dataclasses.dataclass(frozen=True)
class ProximalAdagrad(base.KeywordOptimizer):
    """Updates rows by ProximalAdagrad, as in ResourceSparseApplyProximalAdagrad.

      a += G^2;  c = lr / sqrt(a);  z = T - c * G
      T = sign(z) * max(|z| - c * l1, 0) / (1 + c * l2)

    Duchi and Singer, 2009, https://jmlr.org/papers/v10/duchi09a.html. If a stays 0, T
    does not change. `optimizers.base.Optimizer` describes the other attributes. The
    order of the arguments is that of TensorFlow 1's ProximalAdagradParameters.

    Attributes:
      initial_accumulator_value: Initial value of a, positive.
      l1_regularization_strength: l1, at least 0.
      l2_regularization_strength: l2, at least 0.
    """

    rule: ClassVar[str] = "proximal_adagrad"
    hyperparameter_names: ClassVar[tuple[str, ...]] = (
        "l1_regularization_strength",
        "l2_regularization_strength",
    )
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(
        "ProximalAdagrad", "proximal_adagrad"
    )

    learning_rate: base.Rate = 0.001
    initial_accumulator_value: float = 0.1
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        base.check_positive("initial_accumulator_value", self.initial_accumulator_value)
        for argument in self.hyperparameter_names:
            base.check_not_negative(argument, getattr(self, argument))

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("accumulators", self.initial_accumulator_value),)

    def update(self, ops, gradient, row, slots, rate):
        accumulator = slots[0] + gradient * gradient
        zero = accumulator <= 0.0
        step = rate / ops.sqrt(ops.where(zero, 1.0, accumulator))
        new = _proximal(self, ops, row - step * gradient, step)
        return ops.where(zero, row, new), accumulator


@dataclasses.dataclass(frozen=True)
class ProximalYogi(base.KeywordOptimizer):
    """Updates rows by Yogi with a proximal step for l1 and l2.

      m = beta_1 * m + (1 - beta_1) * G
      v -= (1 - beta_2) * sign(v - G^2) * G^2
      c = lr / (sqrt(v) + epsilon);  z = T - c * m
      T = sign(z) * max(|z| - c * l1, 0) / (1 + c * l2)

    The first three lines are algorithm 2 of Zaheer et al., 2018,
    https://papers.nips.cc/paper/8186-adaptive-methods-for-nonconvex-optimization.
    There is no bias correction, as in `Adam`; a callable learning rate can apply it.
    Google has not published how TPUs compute this rule in detail.
    `optimizers.base.Optimizer` describes the other attributes. The order and defaults
    of the arguments are those of TensorFlow 1's ProximalYogiParameters.

    Attributes:
      beta_1: The share of m that is kept, in [0, 1).
      beta_2: The closer to 1, the slower v follows G^2; in [0, 1).
      epsilon: Keeps the divisor above 0, positive.
      l1_regularization_strength: l1, at least 0.
      l2_regularization_strength: l2, at least 0.
      initial_accumulator_value: Initial value of v, at least 0.
    """

    rule: ClassVar[str] = "proximal_yogi"
    hyperparameter_names: ClassVar[tuple[str, ...]] = (
        "beta_1",
        "beta_2",
        "epsilon",
        "l1_regularization_strength",
        "l2_regularization_strength",
    )
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule("ProximalYogi", "proximal_yogi")

    learning_rate: base.Rate = 0.01
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-3
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    initial_accumulator_value: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        base.check_share("beta_1", self.beta_1)
        base.check_share("beta_2", self.beta_2)
        base.check_epsilon("epsilon", self.epsilon)
        for argument in (
            "l1_regularization_strength",
            "l2_regularization_strength",
            "initial_accumulator_value",
        ):
            base.check_not_negative(argument, getattr(self, argument))

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("v", self.initial_accumulator_value), base.Slot("m", 0.0))

    def update(self, ops, gradient, row, slots, rate):
        velocity, momentum = slots
        square = gradient * gradient
        momentum = _average(self.beta_1, momentum, gradient)
        toward = ops.sign(velocity - square)
        velocity = velocity - base.one_minus(self.beta_2) * square * toward
        step = rate / (ops.sqrt(velocity) + self.epsilon)
        new = _proximal(self, ops, row - step * momentum, step)
        return new, velocity, momentum


def updates_so_far(updates: Any) -> Any:
    """Returns the number of updates already applied, as a learning rate."""
    return updates


@dataclasses.dataclass(frozen=True)
class FrequencyEstimator(base.KeywordOptimizer):
    """Estimates the average number of steps between two steps that touch a row.

      delta = min(step - last_hit_step, max_delta)
      T = delta if delta >= outlier_threshold * T else (1 - tau) * T + tau * delta
      last_hit_step = step

    The table has dim 1; initialize it with `max_delta`. The gradient is not used, and
    `learning_rate` is the step. TensorFlow's optimization_parameters.proto documents
    these three lines, but not where `weight_exponent` acts: only TPUs accept another
    value than 0. `optimizers.base.Optimizer` describes the other attributes.

    Attributes:
      learning_rate: A callable that returns the global step; the default returns the
        number of updates already applied to the table.
      tau: How fast T follows delta, between 0 and 1.
      max_delta: The upper limit of delta, positive.
      outlier_threshold: From this multiple of T on, delta replaces T.
      weight_exponent: Exponent of the weight (delta / max_delta) ^ weight_exponent.
    """

    rule: ClassVar[str] = "frequency_estimator"
    hyperparameter_names: ClassVar[tuple[str, ...]] = (
        "tau",
        "max_delta",
        "outlier_threshold",
    )
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(
        "FrequencyEstimator",
        "frequency_estimator",
        {"weight_exponent": "weight_exponent"},
    )
    own_options: ClassVar[tuple[base.Option, ...]] = (
        base.Option("weight_exponent", 0.0, base.TPU_V2_V4_ONLY),
    )
    table_dim: ClassVar[int | None] = 1

    learning_rate: base.Rate = updates_so_far
    tau: float = 0.1
    max_delta: float = 1000.0
    outlier_threshold: float = 10.0
    weight_exponent: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        rate = self.learning_rate
        if not callable(rate):
            raise ValueError(
                "FrequencyEstimator uses the global step as its `learning_rate`, which "
                f"must be a callable. Received: {rate!r} of type "
                f"{errors.type_name(rate)}. Leave it out to count the updates of the "
                "table, or pass `lambda: tf.cast(step, tf.float32)`."
            )
        base.check_epsilon("tau", self.tau)
        base.check_share("tau", self.tau)
        base.check_positive("max_delta", self.max_delta)
        base.check_positive("outlier_threshold", self.outlier_threshold)
        base.check_number("weight_exponent", self.weight_exponent)

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("last_hit_step", 0.0),)

    def update(self, ops, gradient, row, slots, rate):
        del gradient
        delta = ops.minimum(rate - slots[0], self.max_delta)
        outlier = delta >= self.outlier_threshold * row
        blend = base.one_minus(self.tau) * row + self.tau * delta
        return ops.where(outlier, delta, blend), 0.0 * slots[0] + rate


def _average(keep: float, old: Any, new: Any) -> Any:
    return keep * old + base.one_minus(keep) * new


def _proximal(
    optimizer: ProximalAdagrad | ProximalYogi, ops: base.ArrayOps, z: Any, step: Any
) -> Any:
    """Returns the w that minimizes (w - z)^2 / 2 + step * (l1 * |w| + l2 * w^2 / 2).

    This is sign(z) * max(|z| - step * l1, 0) / (1 + step * l2). NaN propagates.
    """
    l1 = step * optimizer.l1_regularization_strength
    l2 = step * optimizer.l2_regularization_strength
    size = ops.abs(z)
    left = ops.where(size <= l1, 0.0, size - l1)
    return ops.sign(z) * left / (1.0 + l2)
