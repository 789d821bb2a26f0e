"""Rules of Keras's optimizers that the kernels have, for variables of Keras."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

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


def _sgd(optimizer: Any, rate: base.Rate) -> base.Optimizer | None:
    return None if optimizer.momentum else rules.SGD(rate)


def _adagrad(optimizer: Any, rate: base.Rate) -> base.Optimizer:
    return KerasAdagrad(learning_rate=rate, epsilon=optimizer.epsilon)


def _adam(optimizer: Any, rate: base.Rate) -> base.Optimizer | None:
    if optimizer.amsgrad:
        return None
    return KerasAdam(
        learning_rate=BiasCorrectedRate(rate, optimizer.beta_1, optimizer.beta_2),
        take_1=1 - optimizer.beta_1,
        take_2=1 - optimizer.beta_2,
        epsilon=optimizer.epsilon,
    )


def _ftrl(optimizer: Any, rate: base.Rate) -> base.Optimizer | None:
    if optimizer.l2_shrinkage_regularization_strength:
        return None
    return rules.FTRL(
        rate,
        learning_rate_power=optimizer.learning_rate_power,
        l1_regularization_strength=optimizer.l1_regularization_strength,
        l2_regularization_strength=optimizer.l2_regularization_strength,
        beta=optimizer.beta,
    )


_RULES: dict[str, Callable[[Any, base.Rate], base.Optimizer | None]] = {
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "Adam": _adam,
    "Ftrl": _ftrl,
}


def rule_of(optimizer: Any, cls: type) -> base.Optimizer | None:
    """The rule of the `update_step` of a class of Keras, with an optimizer's options.

    Keras carries out what comes before and after it, such as clipping.

    Returns:
      A rule whose learning rate is a callable; None if the kernels do not have it.
    """
    make = _RULES.get(cls.__name__)
    if make is None or optimizer.weight_decay is not None:
        return None
    return make(optimizer, lambda: optimizer.learning_rate)
