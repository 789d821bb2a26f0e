"""Rules of Keras's optimizers that the kernels have, for variables of Keras."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from tpu_embedding import optimizers as rules
from tpu_embedding.keras.optimizers import BiasCorrectedRate
from tpu_embedding.optimizers import base


@dataclasses.dataclass(frozen=True, kw_only=True)
class KerasAdagrad(base.KeywordOptimizer):
    """a += G^2; T -= lr * G / sqrt(a + epsilon)."""

    rule: ClassVar[str] = "keras_adagrad"
    hyperparameter_names: ClassVar[tuple[str, ...]] = ("epsilon",)

    learning_rate: base.Rate
    epsilon: float

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("accumulators", 0.1),)

    def update(self, ops, gradient, row, slots, rate):
        accumulator = slots[0] + gradient * gradient
        root = ops.sqrt(accumulator + self.epsilon)
        return row - rate * gradient / root, accumulator


@dataclasses.dataclass(frozen=True, kw_only=True)
class KerasAdam(base.KeywordOptimizer):
    """m += (G - m) * take_1; v += (G^2 - v) * take_2; T -= lr * m / (sqrt(v) + eps).

    Attributes:
      learning_rate: With the bias correction.
      take_1: 1 - beta_1 in double precision, as Keras forms it.
      take_2: 1 - beta_2.
      epsilon: Of Keras.
    """

    rule: ClassVar[str] = "keras_adam"
    hyperparameter_names: ClassVar[tuple[str, ...]] = ("take_1", "take_2", "epsilon")

    learning_rate: base.Rate
    take_1: float
    take_2: float
    epsilon: float

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("momenta", 0.0), base.Slot("velocities", 0.0))

    def update(self, ops, gradient, row, slots, rate):
        momentum, velocity = slots
        momentum = momentum + (gradient - momentum) * self.take_1
        velocity = velocity + (gradient * gradient - velocity) * self.take_2
        divisor = ops.sqrt(velocity) + self.epsilon
        return row - rate * momentum / divisor, momentum, velocity


def _adagrad(rate: base.Rate, epsilon: float) -> base.Optimizer:
    return KerasAdagrad(learning_rate=rate, epsilon=epsilon)


def _adam(
    rate: base.Rate, beta_1: float, beta_2: float, epsilon: float
) -> base.Optimizer:
    return KerasAdam(
        learning_rate=BiasCorrectedRate(rate, beta_1, beta_2),
        take_1=1 - beta_1,
        take_2=1 - beta_2,
        epsilon=epsilon,
    )


def _ftrl(
    rate: base.Rate, initial_accumulator_value: float, beta: float, **options: Any
) -> base.Optimizer | None:
    if initial_accumulator_value <= 0 or beta < 0:
        return None  # Keras divides 0 by 0.
    return rules.FTRL(rate, beta=beta, **options)


class _Rule(NamedTuple):
    """How to make the rule of a class of Keras.

    Attributes:
      make: Takes a callable learning rate, and `options` by name.
      options: Options of the class that are numbers.
      unset: Options that the kernels do not have.
    """

    make: Callable[..., base.Optimizer | None]
    options: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()


_RULES: dict[str, _Rule] = {
    "SGD": _Rule(rules.SGD, unset=("momentum",)),
    "Adagrad": _Rule(_adagrad, ("epsilon",)),
    "Adam": _Rule(_adam, ("beta_1", "beta_2", "epsilon"), unset=("amsgrad",)),
    "Ftrl": _Rule(
        _ftrl,
        (
            "initial_accumulator_value",
            "beta",
            "learning_rate_power",
            "l1_regularization_strength",
            "l2_regularization_strength",
        ),
        unset=("l2_shrinkage_regularization_strength",),
    ),
}


def rule_of(optimizer: Any, cls: type, rate: Any) -> base.Optimizer | None:
    """The rule of the `update_step` of a class of Keras, with an optimizer's options.

    Keras carries out what comes before and after it, such as clipping.

    Args:
      optimizer: Has the options.
      cls: Has the rule.
      rate: The learning rate of this step, as Keras has evaluated it.

    Returns:
      A rule whose learning rate is a callable; None if the kernels do not have it.
    """
    rule = _RULES.get(cls.__name__)
    if rule is None or optimizer.weight_decay is not None:
        return None
    if any(getattr(optimizer, name) for name in rule.unset):
        return None
    options = {name: getattr(optimizer, name) for name in rule.options}
    if not all(isinstance(value, numbers.Real) for value in options.values()):
        return None  # Such as a tensor.
    return rule.make(lambda: rate, **options)
