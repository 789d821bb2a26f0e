"""The rules of Keras's optimizers, for the rows that a gradient names, in float64.

Written from the papers and the documentation of Keras. A rule takes a row, its slots,
the summed gradient, the learning rate, the number of the step (from 1) and the options,
and returns the row; it changes the slots, arrays of the row's shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Slots = dict[str, Any]


def sgd(row: Any, slots: Slots, g: Any, lr: float, t: int, o: Any) -> Any:
    if not o.momentum:
        return row - lr * g
    slots["m"] = o.momentum * slots["m"] - lr * g
    return row + (o.momentum * slots["m"] - lr * g if o.nesterov else slots["m"])


def adagrad(row: Any, slots: Slots, g: Any, lr: float, t: int, o: Any) -> Any:
    slots["a"] = slots["a"] + g**2
    return row - lr * g / np.sqrt(slots["a"] + o.epsilon)


def adam(row: Any, slots: Slots, g: Any, lr: float, t: int, o: Any) -> Any:
    slots["m"] = o.beta_1 * slots["m"] + (1 - o.beta_1) * g
    slots["v"] = o.beta_2 * slots["v"] + (1 - o.beta_2) * g**2
    slots["hat"] = np.maximum(slots["hat"], slots["v"])
    v = slots["hat"] if o.amsgrad else slots["v"]
    rate = lr * np.sqrt(1 - o.beta_2**t) / (1 - o.beta_1**t)
    return row - rate * slots["m"] / (np.sqrt(v) + o.epsilon)


def nadam(row: Any, slots: Slots, g: Any, lr: float, t: int, o: Any) -> Any:
    def u(step: int) -> float:
        return o.beta_1 * (1 - 0.5 * 0.96**step)

    product = np.prod([u(step) for step in range(1, t + 1)])
    slots["m"] = o.beta_1 * slots["m"] + (1 - o.beta_1) * g
    slots["v"] = o.beta_2 * slots["v"] + (1 - o.beta_2) * g**2
    ahead = u(t + 1) * slots["m"] / (1 - product * u(t + 1))
    m = ahead + (1 - u(t)) * g / (1 - product)
    return row - lr * m / (np.sqrt(slots["v"] / (1 - o.beta_2**t)) + o.epsilon)


def rmsprop(row: Any, slots: Slots, g: Any, lr: float, t: int, o: Any) -> Any:
    slots["v"] = o.rho * slots["v"] + (1 - o.rho) * g**2
    slots["mean"] = o.rho * slots["mean"] + (1 - o.rho) * g
    variance = slots["v"] - (slots["mean"] ** 2 if o.centered else 0)
    slots["m"] = o.momentum * slots["m"] + lr * g / np.sqrt(variance + o.epsilon)
    return row - slots["m"]


def adadelta(row: Any, slots: Slots, g: Any, lr: float, t: int, o: Any) -> Any:
    slots["g"] = o.rho * slots["g"] + (1 - o.rho) * g**2
    delta = -np.sqrt(slots["d"] + o.epsilon) / np.sqrt(slots["g"] + o.epsilon) * g
    slots["d"] = o.rho * slots["d"] + (1 - o.rho) * delta**2
    return row + lr * delta


def ftrl(row: Any, slots: Slots, g: Any, lr: float, t: int, o: Any) -> Any:
    power = -o.learning_rate_power
    l1, l2 = o.l1_regularization_strength, o.l2_regularization_strength
    before, after = slots["a"] ** power, (slots["a"] + g**2) ** power
    shrunk = g + 2 * o.l2_shrinkage_regularization_strength * row
    slots["linear"] = slots["linear"] + shrunk - (after - before) / lr * row
    slots["a"] = slots["a"] + g**2
    quadratic = after / lr + 2 * l2 + o.beta / lr
    linear = slots["linear"]
    return (np.clip(linear, -l1, l1) - linear) / quadratic


def lion(row: Any, slots: Slots, g: Any, lr: float, t: int, o: Any) -> Any:
    sign = np.sign(o.beta_1 * slots["m"] + (1 - o.beta_1) * g)
    slots["m"] = o.beta_2 * slots["m"] + (1 - o.beta_2) * g
    return row - lr * sign


RULES: dict[str, Callable[..., Any]] = {
    "Adadelta": adadelta,
    "Adagrad": adagrad,
    "Adam": adam,
    "AdamW": adam,
    "Ftrl": ftrl,
    "Lion": lion,
    "Nadam": nadam,
    "RMSprop": rmsprop,
    "SGD": sgd,
}
_SLOTS = ("m", "v", "hat", "mean", "g", "d", "linear")


class Trained:
    """A table that a rule trains, row by row."""

    def __init__(self, table: Any, optimizer: Any) -> None:
        self.rows = [np.asarray(row, np.float64) for row in table]
        self._options, self._steps = optimizer, 0
        self._rule = RULES[optimizer.__class__.__name__]
        first = getattr(optimizer, "initial_accumulator_value", 0.0)
        self._slots = [
            {"a": np.full_like(row, first), **{n: np.zeros_like(row) for n in _SLOTS}}
            for row in self.rows
        ]

    def step(self, ids: Any, gradients: Any, rate: float, every: bool = False) -> None:
        """Applies the sum of the gradients of each id once.

        With `every` the other rows take the step, too, with a gradient of zeros.
        """
        self._steps += 1
        sums: dict[int, Any] = {}
        for row, gradient in zip(ids, gradients, strict=True):
            sums[row] = sums.get(row, 0.0) + np.asarray(gradient, np.float64)
        for row in range(len(self.rows)) if every else ():
            sums.setdefault(row, np.zeros_like(self.rows[row]))
        for row, gradient in sums.items():
            decay = (self._options.weight_decay or 0.0) * rate
            self.rows[row] = self._rule(
                *(self.rows[row] * (1 - decay), self._slots[row], gradient),
                *(rate, self._steps, self._options),
            )
