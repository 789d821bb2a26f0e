"""The *Parameters, TableConfig and FeatureConfig of TensorFlow 1."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from tpu_embedding import interop
from tpu_embedding.compat.interop.parameters import PARAMETERS

COMMON = (
    "use_gradient_accumulation=True, clip_weight_min=None, clip_weight_max=None, "
    "weight_decay_factor=None, multiply_weight_decay_factor_by_learning_rate=None"
)
CLIP = "clip_gradient_min=None, clip_gradient_max=None"
L1_L2 = "l1_regularization_strength=0.0, l2_regularization_strength=0.0"
# What TensorFlow 2.15 has.
SIGNATURES = {
    "AdagradParameters": f"learning_rate, initial_accumulator=0.1, {COMMON}, {CLIP}",
    "AdagradMomentumParameters": "learning_rate, momentum, use_nesterov=False, "
    f"exponent=2, beta2=1, epsilon=1e-10, {COMMON}, {CLIP}",
    "ProximalAdagradParameters": f"learning_rate, initial_accumulator=0.1, {L1_L2}, "
    f"{COMMON}, {CLIP}",
    "AdamParameters": "learning_rate, beta1=0.9, beta2=0.999, epsilon=1e-08, "
    f"lazy_adam=True, sum_inside_sqrt=True, {COMMON}, {CLIP}",
    "FtrlParameters": "learning_rate, learning_rate_power=-0.5, "
    f"initial_accumulator_value=0.1, {L1_L2}, {COMMON}, "
    "multiply_linear_by_learning_rate=False, beta=0, allow_zero_accumulator=False, "
    f"{CLIP}",
    "ProximalYogiParameters": "learning_rate=0.01, beta1=0.9, beta2=0.999, "
    f"epsilon=0.001, {L1_L2}, initial_accumulator_value=1e-06, {COMMON}, {CLIP}",
    "MomentumParameters": "learning_rate, momentum, use_nesterov=False, "
    f"{COMMON}, {CLIP}",
    "RMSPropParameters": f"learning_rate, rho, momentum, epsilon, {COMMON}, {CLIP}",
    "StochasticGradientDescentParameters": f"learning_rate, {COMMON}, {CLIP}",
    "FrequencyEstimatorParameters": "tau, max_delta, outlier_threshold, "
    "weight_exponent",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str):
    signature = inspect.signature(getattr(interop, name))
    words = [str(p).split(":")[0] for p in signature.parameters.values()]
    defaults = [p.default for p in signature.parameters.values()]
    shown = [
        word.split("=")[0]
        if default is inspect.Parameter.empty
        else f"{word}={default}"
        for word, default in zip(words, defaults, strict=True)
    ]
    assert ", ".join(shown) == SIGNATURES[name]


def make(cls: type) -> Any:
    required = [
        p
        for p in inspect.signature(cls).parameters.values()
        if p.default is inspect.Parameter.empty
    ]
    return cls(*[0.5] * len(required))


@pytest.mark.parametrize("cls", PARAMETERS)
def test_they_are_values(cls: type):
    one = make(cls)
    for twin in (make(cls), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert twin == one
        assert repr(twin) == repr(one)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.learning_rate = 1.0


I = interop  # noqa: E741 - short, for the table.
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "clip": (
        lambda: I.AdamParameters(
            0.1, use_gradient_accumulation=False, clip_gradient_max=1.0
        ),
        "AdamParameters: `clip_gradient_min` and `clip_gradient_max` limit",
    ),
    "adagrad": (
        lambda: I.AdagradParameters(0.1, 0),
        "Argument `initial_accumulator` must be positive. Received: 0.",
    ),
    "beta1": (lambda: I.AdamParameters(0.1, 1), "`beta1` must be >= 0 and < 1"),
    "beta2": (lambda: I.AdamParameters(0.1, 0, -1), "`beta2` must be >= 0 and < 1"),
    "epsilon": (lambda: I.AdamParameters(0.1, epsilon=0), "`epsilon` must be positive"),
    "dense adam": (
        lambda: I.AdamParameters(0.1, lazy_adam=False, use_gradient_accumulation=False),
        "AdamParameters: `lazy_adam=False` updates every row",
    ),
    "power": (lambda: I.FtrlParameters(0.1, 0.5), "`learning_rate_power` must be <= 0"),
    "ftrl": (
        lambda: I.FtrlParameters(0.1, initial_accumulator_value=-1),
        "`initial_accumulator_value` must be >= 0",
    ),
    "l1": (
        lambda: I.FtrlParameters(0.1, l1_regularization_strength=-1),
        "`l1_regularization_strength` must be >= 0",
    ),
    "l2": (
        lambda: I.ProximalAdagradParameters(0.1, l2_regularization_strength=-1),
        "`l2_regularization_strength` must be >= 0",
    ),
    "proximal adagrad": (
        lambda: I.ProximalAdagradParameters(0.1, -1),
        "`initial_accumulator` must be positive",
    ),
    "adagrad momentum": (
        lambda: I.AdagradMomentumParameters(0.1, 0.9, exponent=0),
        "`exponent` must be positive",
    ),
    "adagrad momentum epsilon": (
        lambda: I.AdagradMomentumParameters(0.1, 0.9, epsilon=0),
        "`epsilon` must be positive",
    ),
    "yogi": (lambda: I.ProximalYogiParameters(beta1=1), "`beta1` must be"),
    "yogi epsilon": (lambda: I.ProximalYogiParameters(epsilon=0), "`epsilon` must be"),
    "yogi l1": (
        lambda: I.ProximalYogiParameters(l1_regularization_strength=-1),
        "`l1_regularization_strength` must be >= 0",
    ),
    "vocabulary": (
        lambda: I.TableConfig(0, 2),
        "Argument `vocabulary_size` must be an int >= 1. Received: 0.",
    ),
    "vocabulary type": (lambda: I.TableConfig(8.0, 2), "Received: 8.0 of type float."),
    "dimension": (lambda: I.TableConfig(8, -1), "`dimension` must be an int >= 1"),
    "initializer": (lambda: I.TableConfig(8, 2, 1.0), "`initializer` must be None or"),
    "combiner": (lambda: I.TableConfig(8, 2, combiner="max"), "`combiner` must be"),
    "two rates": (
        lambda: I.TableConfig(8, 2, learning_rate=0.0, learning_rate_fn=abs),
        "Pass `learning_rate` or `learning_rate_fn`, not both.",
    ),
    "table parameters": (
        lambda: I.TableConfig(8, 2, optimization_parameters="sgd"),
        "`optimization_parameters` must be one of",
    ),
    "frequency": (
        lambda: I.TableConfig(
            8, 2, optimization_parameters=I.FrequencyEstimatorParameters(0.1, 1, 1, 1)
        ),
        "so the table's `dimension` must be 1. Received: 2.",
    ),
    "length": (
        lambda: I.FeatureConfig("t", -1),
        "Argument `max_sequence_length` must be an int >= 0. Received: -1.",
    ),
    "length type": (
        lambda: I.FeatureConfig("t", None),
        "Received: None of type NoneType.",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str):
    call, text = BAD[case]
    with pytest.raises(ValueError, match=re.escape(text)):
        call()


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: I.AdagradParameters(0.1, "a"), "initial_accumulator"),  # pyright: ignore[reportArgumentType]
        (lambda: I.AdamParameters(0.1, None), "beta1"),  # pyright: ignore[reportArgumentType]
        (lambda: I.FtrlParameters(0.1, "a"), "learning_rate_power"),  # pyright: ignore[reportArgumentType]
        (lambda: I.FtrlParameters(0.1, 0, [1]), "initial_accumulator_value"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_is_no_number_is_named(call: Callable[[], Any], argument: str):
    with pytest.raises(TypeError, match=f"`{argument}` must be a number. Received: "):
        call()


def test_accepted_edges():
    assert I.FtrlParameters(0.1, initial_accumulator_value=0)
    assert I.TableConfig(1, 1, combiner=None, learning_rate=0.0).learning_rate == 0.0
    assert I.FrequencyEstimatorParameters(0.1, 1, 1, 1).learning_rate == 1.0


def test_the_default_initializer_has_the_documented_spread():
    table = I.TableConfig(4000, 4)
    assert table.initializer is not None
    values = table.initializer((4000, 4)).numpy()
    # Truncated at two standard deviations; 16,000 draws, so 0.02 is 2.5 sigma or more.
    assert abs(values).max() <= 1.0
    assert abs(values.std() - 0.5 * 0.8796) < 0.02
