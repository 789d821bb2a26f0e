"""Bad arguments of optimizers: the types of the errors; texts are in test_errors."""

from __future__ import annotations

import dataclasses
import fractions
import operator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cpu_engines import EACH_ENGINE
from optimizer_cases import Case, each_case

import tpu_embedding as te
from tpu_embedding import optimizers
from tpu_embedding.optimizers import base
from tpu_embedding.testing import SoftwareTPUStrategy

stock = tf.tpu.experimental.embedding


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adagrad", {"initial_accumulator_value": 0.0}),
        ("Adagrad", {"initial_accumulator_value": -1.0}),
        ("Adagrad", {"initial_accumulator_value": "1"}),
        ("FTRL", {"initial_accumulator_value": 0.0}),
        ("FTRL", {"initial_accumulator_value": -1, "allow_zero_accumulator": True}),
        ("AdagradMomentum", {"epsilon": 0.0}),
        ("AdagradMomentum", {"exponent": 0}),
        ("AdagradMomentum", {"exponent": -2}),
        ("Adam", {"beta_1": 1.0}),
        ("Adam", {"beta_1": -0.1}),
        ("Adam", {"beta_2": 1.0}),
        ("Adam", {"epsilon": 0.0}),
        ("Adam", {"lazy_adam": False, "use_gradient_accumulation": False}),
        ("SGD", {"clipvalue": 1.0, "use_gradient_accumulation": False}),
        ("SGD", {"clipvalue": (1.0,)}),
        ("SGD", {"clipvalue": [-1.0, 1.0]}),
        ("SGD", {"clipvalue": "1"}),
        ("Adam", {"slot_variable_creation_fn": "zeros"}),
    ],
    ids=str,
)
def test_bad_arguments_raise_as_in_tensorflow(
    name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(Exception) as expected:  # noqa: PT011 - compared below.
        getattr(stock, name)(**options)
    with pytest.raises(expected.type, match="|".join(options)):
        getattr(optimizers, name)(**options)


NAN = float("nan")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"learning_rate": "0.1"}, TypeError),
        ({"learning_rate": None}, TypeError),
        ({"learning_rate": True}, TypeError),
        ({"learning_rate": NAN}, ValueError),
        ({"learning_rate": tf.constant(0.1)}, TypeError),
        ({"learning_rate": operator.add}, TypeError),
        ({"use_gradient_accumulation": 1}, TypeError),
        ({"clip_weight_min": NAN}, ValueError),
        ({"clip_weight_max": "1"}, TypeError),
        ({"clip_weight_max": True}, TypeError),
        ({"clip_weight_min": 1.0, "clip_weight_max": 0.0}, ValueError),
        ({"weight_decay_factor": NAN}, ValueError),
        ({"weight_decay_factor": "0"}, TypeError),
        ({"multiply_weight_decay_factor_by_learning_rate": 1}, TypeError),
        ({"clipnorm": 0.0}, ValueError),
        ({"clipnorm": 1e-46}, ValueError),
        ({"clipnorm": NAN}, ValueError),
        ({"clipnorm": "1"}, TypeError),
        ({"clipnorm": 1.0, "use_gradient_accumulation": False}, ValueError),
        ({"clipvalue": -1.0}, ValueError),
        ({"clipvalue": NAN}, ValueError),
        ({"clipvalue": (NAN, None)}, ValueError),
        ({"clipvalue": ("a", None)}, TypeError),
        ({"clipvalue": (1.0, -1.0)}, ValueError),
        ({"clipvalue": True}, TypeError),
        ({"low_dimensional_packing_status": 1}, TypeError),
        # No float holds it, and TensorFlow has no fractions.
        *(
            ({argument: 10**400}, ValueError)
            for argument in ("learning_rate", "clipvalue", "clip_weight_max")
        ),
        *(
            ({argument: fractions.Fraction(1, 3)}, TypeError)
            for argument in ("learning_rate", "clipvalue", "weight_decay_factor")
        ),
    ],
    ids=str,
)
@each_case
def test_bad_common_arguments(
    case: Case, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=next(iter(options))):
        case.cls(**options)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("FTRL", {"learning_rate_power": 0.5}, ValueError),
        ("FTRL", {"l1_regularization_strength": -0.1}, ValueError),
        ("FTRL", {"l2_regularization_strength": -0.1}, ValueError),
        *(
            (name, {"momentum": momentum}, ValueError)
            for name in ("Momentum", "RMSProp", "CenteredRMSProp", "AdagradMomentum")
            for momentum in (-0.5, 1.5)
        ),
        ("AdagradMomentum", {"beta2": 1.5}, ValueError),
        ("AdagradMomentum", {"beta2": -0.5}, ValueError),
        ("FTRL", {"beta": -0.1}, ValueError),
        ("SGD", {"weight_decay_factor": -0.1}, ValueError),
        ("SGD", {"learning_rate": 1e39}, ValueError),
        # float32 rounds these to 1, or to a number that counts as 0.
        ("Adam", {"beta_2": 1 - 1e-9}, ValueError),
        ("Adadelta", {"rho": 1 - 1e-9}, ValueError),
        ("Adam", {"epsilon": 1e-19}, ValueError),
        ("Adam", {"epsilon": 1e-39, "sum_inside_sqrt": False}, ValueError),
        ("AdagradMomentum", {"epsilon": 1e-39}, ValueError),
        ("RMSProp", {"epsilon": 1e-39}, ValueError),
        ("ProximalYogi", {"epsilon": 1e-39}, ValueError),
        ("RMSProp", {"rho": 1.0}, ValueError),
        ("FTRL", {"initial_accumulator_value": 1e-40}, ValueError),
        ("AdagradMomentum", {"exponent": 0.25}, ValueError),
        ("AdagradMomentum", {"exponent": 0.9, "epsilon": 1.2e-38}, ValueError),
        ("FrequencyEstimator", {"tau": 1e-46}, ValueError),
        ("FrequencyEstimator", {"tau": 1 - 1e-12}, ValueError),
        ("CenteredRMSProp", {"epsilon": 0.0}, ValueError),
        ("Adadelta", {"rho": -0.1}, ValueError),
        ("Adadelta", {"epsilon": 0}, ValueError),
        ("ProximalAdagrad", {"initial_accumulator_value": 0.0}, ValueError),
        ("ProximalAdagrad", {"l1_regularization_strength": -0.1}, ValueError),
        ("ProximalYogi", {"beta_1": 1}, ValueError),
        ("ProximalYogi", {"epsilon": -1.0}, ValueError),
        ("ProximalYogi", {"initial_accumulator_value": -1e-6}, ValueError),
        ("ProximalYogi", {"l2_regularization_strength": -1}, ValueError),
        ("FrequencyEstimator", {"learning_rate": 1.0}, ValueError),
        ("FrequencyEstimator", {"tau": 1}, ValueError),
        ("FrequencyEstimator", {"max_delta": 0}, ValueError),
        ("FrequencyEstimator", {"outlier_threshold": 0}, ValueError),
    ],
    ids=str,
)
def test_bad_own_arguments(
    name: str, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=next(iter(options))):
        getattr(optimizers, name)(**options)


@each_case
def test_every_option_of_a_rule_is_checked(case: Case) -> None:
    """Also those of an optimizer that no list here names."""
    for field in dataclasses.fields(case.cls):
        default = field.default
        if isinstance(default, bool):
            refused = [(1, TypeError), (None, TypeError)]
        elif isinstance(default, float):
            refused = [(NAN, ValueError), (10**400, ValueError)]
            wrong = ("1", True, None, fractions.Fraction(1, 3))
            refused += [(value, TypeError) for value in wrong]
        else:
            continue  # One of `test_bad_common_arguments`.
        for value, error in refused:
            with pytest.raises(error, match=field.name):
                case.cls(**{field.name: value})


# The outermost numbers that the classes accept.
AT_THE_LIMITS = [
    optimizers.Momentum(momentum=0.0),
    optimizers.Momentum(momentum=1.0),
    optimizers.RMSProp(rho=0.0, momentum=1.0, epsilon=1.2e-38),
    optimizers.CenteredRMSProp(rho=0.0, momentum=1.0, epsilon=1.2e-38),
    optimizers.AdagradMomentum(momentum=1.0, beta2=0.0, epsilon=1.2e-38),
    optimizers.AdagradMomentum(beta2=1.0),
    optimizers.AdagradMomentum(exponent=0.26),
    optimizers.FTRL(beta=0.0, learning_rate_power=0.0),
    optimizers.FTRL(initial_accumulator_value=1.2e-38),
    optimizers.FTRL(initial_accumulator_value=0.0, allow_zero_accumulator=True),
    optimizers.Adam(beta_1=0.0, beta_2=0.0, epsilon=1.1e-19),
    optimizers.Adam(epsilon=1.2e-38, sum_inside_sqrt=False),
    optimizers.Adadelta(rho=0.0, epsilon=1.2e-38),
    optimizers.ProximalYogi(
        beta_1=0.0, beta_2=0.0, epsilon=1.2e-38, initial_accumulator_value=0.0
    ),
    optimizers.SGD(weight_decay_factor=0.0),
]


@pytest.mark.parametrize("engine", [*EACH_ENGINE, "v4"])
def test_each_engine_accepts_the_limits(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classes are the one place that limits hyperparameters; rows stay finite."""
    strategy = tf.distribute.get_strategy()
    if engine == "v4":
        strategy = SoftwareTPUStrategy("v4", 1)
    else:
        monkeypatch.setenv("TPU_EMBEDDING_ENGINE", engine)
    with strategy.scope():
        tables = [te.TableConfig(4, 2, optimizer=one) for one in AT_THE_LIMITS]
        embedding = te.TPUEmbedding([te.FeatureConfig(table) for table in tables], None)
    for gradient in (0.0, 1e-30, 1e-30, 1.0):
        embedding.enqueue([tf.constant([1, 3])] * len(tables))

        def step(gradient: float = gradient) -> None:
            activations = embedding.dequeue()
            embedding.apply_gradients([tf.fill([2, 2], gradient) for _ in activations])

        strategy.run(step)
    for name, arrays in embedding.core.checkpoint_rows().items():
        for array, rows in arrays.items():
            assert np.isfinite(rows.numpy()).all(), (name, array)


def test_the_base_class_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        base.Optimizer()  # pyright: ignore[reportAbstractUsage]
