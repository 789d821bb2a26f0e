"""The optimizers under test, and how one is run on NumPy and on TensorFlow.

A new optimizer is a line in OPTIMIZERS and inherits all tests over it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tpu_embedding import optimizers
from tpu_embedding.optimizers import base

stock = tf.tpu.experimental.embedding

V, D = 7, 5


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer under test; `stock` is TensorFlow's class with the same arguments.

    `options` has the arguments of each variant, `other` one that is not the default.
    """

    cls: type[Any]
    stock: type[Any] | None
    options: tuple[dict[str, Any], ...]
    other: tuple[str, Any] = ("learning_rate", 0.5)

    @property
    def name(self) -> str:
        return self.cls.__name__


OPTIMIZERS = [
    Case(optimizers.SGD, stock.SGD, ({},)),
    Case(
        optimizers.Adagrad,
        stock.Adagrad,
        ({}, {"initial_accumulator_value": 1e-3}),
        ("initial_accumulator_value", 0.3),
    ),
    Case(
        optimizers.RowwiseAdagrad,
        None,
        ({}, {"initial_accumulator_value": 1e-3}),
        ("initial_accumulator_value", 0.3),
    ),
    Case(
        optimizers.AdagradMomentum,
        stock.AdagradMomentum,
        (
            {},
            {"momentum": 0.9, "epsilon": 1e-3},
            {"momentum": 0.9, "use_nesterov": True, "epsilon": 1e-3},
            {"exponent": 3.0, "epsilon": 1e-3},
            {"beta2": 0.99, "epsilon": 1e-3, "momentum": 0.5},
        ),
        ("momentum", 0.5),
    ),
    Case(
        optimizers.FTRL,
        stock.FTRL,
        (
            {},
            {"l1_regularization_strength": 0.2},
            {"l2_regularization_strength": 0.3, "beta": 0.4},
            {"learning_rate_power": -0.7},
            {"learning_rate_power": 0.0},
            {"initial_accumulator_value": 0.0, "allow_zero_accumulator": True},
            {
                "multiply_linear_by_learning_rate": True,
                "l1_regularization_strength": 0.2,
                "l2_regularization_strength": 0.3,
                "beta": 0.4,
            },
        ),
        ("l1_regularization_strength", 0.5),
    ),
    Case(
        optimizers.Adam,
        stock.Adam,
        (
            {},
            {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-2},
            {"sum_inside_sqrt": False, "epsilon": 1e-2},
            {"lazy_adam": False},
        ),
        ("beta_1", 0.5),
    ),
    Case(
        optimizers.Momentum,
        None,
        ({}, {"momentum": 0.5, "use_nesterov": True}),
        ("momentum", 0.5),
    ),
    Case(
        optimizers.RMSProp,
        None,
        ({}, {"rho": 0.5, "momentum": 0.9, "epsilon": 1e-3}),
        ("rho", 0.5),
    ),
    Case(
        optimizers.CenteredRMSProp,
        None,
        ({}, {"rho": 0.5, "momentum": 0.9, "epsilon": 1e-3}),
        ("momentum", 0.5),
    ),
    Case(optimizers.Adadelta, None, ({}, {"rho": 0.5, "epsilon": 0.25}), ("rho", 0.5)),
    Case(
        optimizers.ProximalAdagrad,
        None,
        (
            {},
            {
                "initial_accumulator_value": 0.5,
                "l1_regularization_strength": 0.2,
                "l2_regularization_strength": 0.3,
            },
        ),
        ("initial_accumulator_value", 0.5),
    ),
    Case(
        optimizers.ProximalYogi,
        None,
        (
            {"initial_accumulator_value": 0.0},
            {"beta_1": 0.5, "beta_2": 0.75, "initial_accumulator_value": 0.5},
            {"l1_regularization_strength": 0.2, "l2_regularization_strength": 0.3},
        ),
        ("epsilon", 0.5),
    ),
]
# Optimizers that do not run on every table or engine; tests of values include them.
SPECIAL = [Case(optimizers.FrequencyEstimator, None, ({},), ("tau", 0.5))]
STOCK = [case for case in OPTIMIZERS if case.stock]

each_case = pytest.mark.parametrize(
    "case", [*OPTIMIZERS, *SPECIAL], ids=lambda case: case.name
)
each_stock_case = pytest.mark.parametrize("case", STOCK, ids=lambda case: case.name)
each_variant = pytest.mark.parametrize(
    ("case", "options"),
    [(case, options) for case in OPTIMIZERS for options in case.options],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)

# The options that `apply_rule` adds to every rule, alone and together.
COMMON_OPTIONS: list[dict[str, Any]] = [
    {},
    {"clipnorm": 0.4},
    {"clipvalue": 0.3},
    {"clipvalue": (-0.1, 0.7)},
    {"clipvalue": (None, 0.2)},
    {"clipvalue": (-0.2, None)},
    {"weight_decay_factor": 0.2},
    {"weight_decay_factor": 0.2, "multiply_weight_decay_factor_by_learning_rate": True},
    {"clip_weight_min": -0.5, "clip_weight_max": 0.25},
    {"clip_weight_max": float("inf"), "clip_weight_min": 0.1},
    {
        "clipnorm": 0.2,
        "clipvalue": 0.05,
        "weight_decay_factor": 0.1,
        "clip_weight_min": -0.8,
        "clip_weight_max": 1.0,
    },
]
ALL_OPTIONS = COMMON_OPTIONS[-1]
# Of each option a value that is not off; the first ones are options of one rule, or
# change no number.
OPTION_VALUES: dict[str, Any] = {
    "allow_zero_accumulator": True,
    "lazy_adam": False,
    "low_dimensional_packing_status": True,
    "slot_variable_creation_fn": dict,
    "weight_exponent": 0.5,
    **{name: value for common in COMMON_OPTIONS for name, value in common.items()},
}


class NumpyOps:
    """base.ArrayOps over NumPy."""

    sqrt = staticmethod(np.sqrt)
    pow = staticmethod(np.power)
    abs = staticmethod(np.abs)
    sign = staticmethod(np.sign)
    where = staticmethod(np.where)
    maximum = staticmethod(np.maximum)
    minimum = staticmethod(np.minimum)

    @staticmethod
    def mean_last(x: Any, /) -> Any:
        return np.mean(x, axis=-1, keepdims=True)


NUMPY_OPS = NumpyOps()


def initial_slots(optimizer: base.Optimizer) -> list[np.ndarray]:
    return [
        np.full((V, 1 if slot.per_row else D), slot.initial_value, np.float32)
        for slot in optimizer.slots
    ]


def apply(
    optimizer: base.Optimizer,
    state: list[np.ndarray],
    gradients: dict[int, np.ndarray],
    rate: float,
    ops: base.ArrayOps = NUMPY_OPS,
) -> list[np.ndarray]:
    """One update of [table, *slots] through our rule, float32."""
    rows = sorted(range(V) if optimizer.touches_all_rows else gradients)
    gradient = np.stack([gradients.get(r, np.zeros(D, np.float32)) for r in rows])
    table, *slots = [values[rows] for values in state]
    new = base.apply_rule(optimizer, ops, gradient, table, slots, np.float32(rate))
    state = [values.copy() for values in state]
    for values, updated in zip(state, new, strict=True):
        assert np.asarray(updated).dtype == np.float32
        assert updated.shape == (len(rows), values.shape[1])
        values[rows] = updated
    return state
