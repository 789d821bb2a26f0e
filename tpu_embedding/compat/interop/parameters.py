"""The optimizers of TensorFlow 1's TPU embedding, as the *Parameters classes.

Names, positional order and defaults are those of
tf.compat.v1.tpu.experimental.*Parameters up to TensorFlow 2.15; six more classes were
never public. Instances are values: they compare by their arguments and can be copied
and pickled. `tpu_embedding.optimizers` has the rule of each class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tpu_embedding import errors
from tpu_embedding.optimizers.base import is_number


class OptimizationParameters:
    """The arguments that all *Parameters classes share.

    Attributes:
      learning_rate: A number; a table's own rate takes precedence.
      use_gradient_accumulation: Whether to sum a row's gradients before the rule.
      clip_weight_min: Lower limit of the weights after the update, or None.
      clip_weight_max: Upper limit of the weights after the update, or None.
      weight_decay_factor: f in T <- T - f * T, or None.
      multiply_weight_decay_factor_by_learning_rate: Whether the rate multiplies f.
      clip_gradient_min: Lower limit of the summed gradient, or None.
      clip_gradient_max: Upper limit of the summed gradient, or None.
    """

    learning_rate: float
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clip_gradient_min: float | None = None
    clip_gradient_max: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for gradient limits without gradient accumulation."""
        limits = (self.clip_gradient_min, self.clip_gradient_max)
        if not self.use_gradient_accumulation and limits != (None, None):
            raise ValueError(
                f"{type(self).__name__}: `clip_gradient_min` and `clip_gradient_max` "
                "limit the summed gradient of a row, so they need "
                "`use_gradient_accumulation=True`."
            )

    def _require_positive(self, *arguments: str) -> None:
        for argument, value in self._numbers(*arguments):
            if value <= 0:
                raise errors.argument_value(argument, value, "positive")

    def _require_not_negative(self, *arguments: str) -> None:
        for argument, value in self._numbers(*arguments):
            if value < 0:
                raise errors.argument_value(argument, value, ">= 0")

    def _require_betas(self) -> None:
        for argument, beta in self._numbers("beta1", "beta2"):
            if not 0 <= beta < 1:
                raise errors.argument_value(argument, beta, ">= 0 and < 1")

    def _numbers(self, *arguments: str) -> Iterator[tuple[str, float]]:
        """Yields names and values of arguments, each checked to be a number."""
        for argument in arguments:
            value: Any = getattr(self, argument)
            if not is_number(value):
                raise errors.argument_type(argument, value, "a number")
            yield argument, value


@dataclasses.dataclass(frozen=True)
class AdagradParameters(OptimizationParameters):
    """Configures Adagrad; see `OptimizationParameters` for the shared arguments.

    Attributes:
      initial_accumulator: What the accumulator starts at, positive.
    """

    learning_rate: float
    initial_accumulator: float = 0.1
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clip_gradient_min: float | None = None
    clip_gradient_max: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("initial_accumulator")


@dataclasses.dataclass(frozen=True)
class AdagradMomentumParameters(OptimizationParameters):
    """Configures Adagrad with momentum; see `tpu_embedding.AdagradMomentum`."""

    learning_rate: float
    momentum: float
    use_nesterov: bool = False
    exponent: float = 2
    beta2: float = 1
    epsilon: float = 1e-10
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clip_gradient_min: float | None = None
    clip_gradient_max: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("epsilon", "exponent")


@dataclasses.dataclass(frozen=True)
class ProximalAdagradParameters(OptimizationParameters):
    """Configures Adagrad with a proximal step for l1 and l2.

    Attributes:
      initial_accumulator: The initial value of the accumulator, positive.
      l1_regularization_strength: The factor of the l1 norm, at least 0.
      l2_regularization_strength: The factor of the l2 norm, at least 0.
    """

    learning_rate: float
    initial_accumulator: float = 0.1
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clip_gradient_min: float | None = None
    clip_gradient_max: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("initial_accumulator")
        self._require_not_negative(
            "l1_regularization_strength", "l2_regularization_strength"
        )


@dataclasses.dataclass(frozen=True)
class AdamParameters(OptimizationParameters):
    """Configures Adam without bias correction; see `tpu_embedding.Adam`.

    Attributes:
      beta1: How much of the first moment is kept, in [0, 1).
      beta2: How much of the second moment is kept, in [0, 1).
      epsilon: Positive; the default is 1e-8, and in later classes 1e-7.
      lazy_adam: Whether to update only the rows that entries of the batch name.
      sum_inside_sqrt: Whether to divide by sqrt(v + epsilon^2), not sqrt(v) + epsilon.
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-08
    lazy_adam: bool = True
    sum_inside_sqrt: bool = True
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clip_gradient_min: float | None = None
    clip_gradient_max: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_betas()
        self._require_positive("epsilon")
        if not self.use_gradient_accumulation and not self.lazy_adam:
            raise ValueError(
                "AdamParameters: `lazy_adam=False` updates every row once per step, "
                "so it needs `use_gradient_accumulation=True`."
            )


@dataclasses.dataclass(frozen=True)
class FtrlParameters(OptimizationParameters):
    """Configures FTRL; see `tpu_embedding.FTRL` for the other attributes.

    Attributes:
      learning_rate_power: The power of the learning rate's decay, at most 0.
      initial_accumulator_value: The initial value of the accumulator, at least 0.
    """

    learning_rate: float
    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    multiply_linear_by_learning_rate: bool = False
    beta: float = 0
    allow_zero_accumulator: bool = False
    clip_gradient_min: float | None = None
    clip_gradient_max: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for argument, power in self._numbers("learning_rate_power"):
            if power > 0:
                raise errors.argument_value(argument, power, "<= 0")
        self._require_not_negative(
            "initial_accumulator_value",
            "l1_regularization_strength",
            "l2_regularization_strength",
        )


@dataclasses.dataclass(frozen=True)
class ProximalYogiParameters(OptimizationParameters):
    """Configures Yogi with a proximal step for l1 and l2.

    Attributes:
      beta1: How much of the first moment is kept, in [0, 1).
      beta2: How much of the second moment is kept, in [0, 1).
      epsilon: Positive.
      initial_accumulator_value: The initial value of the second moment.
    """

    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-3
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    initial_accumulator_value: float = 1e-6
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clip_gradient_min: float | None = None
    clip_gradient_max: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_betas()
        self._require_positive("epsilon")
        self._require_not_negative(
            "l1_regularization_strength", "l2_regularization_strength"
        )


@dataclasses.dataclass(frozen=True)
class MomentumParameters(OptimizationParameters):
    """Configures gradient descent with momentum.

    Attributes:
      momentum: How much of the former step is kept.
      use_nesterov: Look one step of the momentum ahead.
    """

    learning_rate: float
    momentum: float
    use_nesterov: bool = False
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clip_gradient_min: float | None = None
    clip_gradient_max: float | None = None


@dataclasses.dataclass(frozen=True)
class RMSPropParameters(OptimizationParameters):
    """Configures RMSProp with momentum.

    Attributes:
      rho: How much of the mean square is kept.
      momentum: How much of the former step is kept.
      epsilon: Keeps the divisor from 0.
    """

    learning_rate: float
    rho: float
    momentum: float
    epsilon: float
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clip_gradient_min: float | None = None
    clip_gradient_max: float | None = None


@dataclasses.dataclass(frozen=True)
class StochasticGradientDescentParameters(OptimizationParameters):
    """Configures gradient descent: T -= learning rate * G."""

    learning_rate: float
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clip_gradient_min: float | None = None
    clip_gradient_max: float | None = None


@dataclasses.dataclass(frozen=True)
class FrequencyEstimatorParameters(OptimizationParameters):
    """Estimates how often ids occur, and stores it in a table of one column.

    Attributes:
      tau: The learning rate of the estimate, between 0 and 1.
      max_delta: Largest gap between two hits that counts.
      outlier_threshold: Gaps beyond it are outliers.
      weight_exponent: Exponent of the weight for outliers.
    """

    tau: float
    max_delta: float
    outlier_threshold: float
    weight_exponent: float
    learning_rate: float = dataclasses.field(default=1.0, init=False)


@dataclasses.dataclass(frozen=True)
class SlotSource:
    """The names of one slot in checkpoints.

    Attributes:
      name: The name in this library and on the TPU.
      spellings: Names of the slot below the table's name in a checkpoint: first that
        of TPU runs, then that of CPU runs if it differs.
    """

    name: str
    spellings: tuple[str, ...]


_SLOTS: dict[type, tuple[SlotSource, ...]] = {
    AdagradParameters: (SlotSource("accumulators", ("Adagrad",)),),
    AdagradMomentumParameters: (
        SlotSource("accumulators", ("AdagradMomentum/Accumulator",)),
        SlotSource("momenta", ("AdagradMomentum/Momentum",)),
    ),
    AdamParameters: (
        SlotSource("momenta", ("Adam/m", "Adam")),
        SlotSource("velocities", ("Adam/v", "Adam_1")),
    ),
    FrequencyEstimatorParameters: (
        SlotSource("last_hit_step", ("FrequencyEstimator",)),
    ),
    FtrlParameters: (
        SlotSource("accumulators", ("Ftrl",)),
        SlotSource("linears", ("Ftrl_1",)),
    ),
    MomentumParameters: (SlotSource("momenta", ("Momentum",)),),
    ProximalAdagradParameters: (SlotSource("accumulators", ("ProximalAdagrad",)),),
    ProximalYogiParameters: (
        SlotSource("v", ("ProximalYogi",)),
        SlotSource("m", ("ProximalYogi_1",)),
    ),
    RMSPropParameters: (
        SlotSource("ms", ("RMSProp/ms", "RMSProp")),
        SlotSource("mom", ("RMSProp/mom", "RMSProp_1")),
    ),
    StochasticGradientDescentParameters: (),
}
PARAMETERS = tuple(_SLOTS)


def check_parameters(value: object) -> None:
    """Raises ValueError unless `value` is one of the *Parameters."""
    if not isinstance(value, PARAMETERS):
        names = [cls.__name__ for cls in PARAMETERS]
        raise ValueError(
            f"Argument `optimization_parameters` must be one of {', '.join(names)}. "
            f"Received: {value!r} of type {errors.type_name(value)}."
        )


def slot_sources(parameters: Any) -> tuple[SlotSource, ...]:
    """Returns the slots of one of the *Parameters; none for None."""
    if parameters is None:
        return ()
    check_parameters(parameters)
    return _SLOTS[type(parameters)]
