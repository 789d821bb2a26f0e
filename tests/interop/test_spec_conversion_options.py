"""From an EmbeddingConfigSpec: each option is carried, or refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tensorflow as tf
from error_tables import ErrorTable, check_error, each_error
from interop.spec_cases import dict_spec, embedding, spec

import tpu_embedding as te
from tpu_embedding import interop

COMMON = {
    "use_gradient_accumulation": False,
    "clip_weight_min": -3.0,
    "clip_weight_max": 4.0,
    "weight_decay_factor": 0.25,
    "multiply_weight_decay_factor_by_learning_rate": True,
}
CARRIED = [
    (interop.StochasticGradientDescentParameters(0.5), te.SGD(0.5)),
    (interop.StochasticGradientDescentParameters(0.5, **COMMON), te.SGD(0.5, **COMMON)),
    (
        interop.StochasticGradientDescentParameters(
            0.5, clip_gradient_min=-1.0, clip_gradient_max=2.0
        ),
        te.SGD(0.5, clipvalue=(-1.0, 2.0)),
    ),
    (interop.AdagradParameters(0.5), te.Adagrad(0.5)),
    (
        interop.AdagradParameters(0.5, 0.3, **COMMON),
        te.Adagrad(0.5, initial_accumulator_value=0.3, **COMMON),
    ),
    (
        interop.AdagradMomentumParameters(0.5, 0.9, True, 3, 0.8, 1e-3, **COMMON),
        te.AdagradMomentum(0.5, 0.9, True, 3, 0.8, 1e-3, **COMMON),
    ),
    (interop.AdamParameters(0.5), te.Adam(0.5, epsilon=1e-8)),
    (
        interop.AdamParameters(0.5, 0.1, 0.2, 0.3, False, False),
        te.Adam(0.5, 0.1, 0.2, 0.3, False, False),
    ),
    (interop.FtrlParameters(0.5), te.FTRL(0.5)),
    (
        interop.FtrlParameters(
            0.5,
            -0.4,
            0.2,
            0.3,
            0.6,
            multiply_linear_by_learning_rate=True,
            beta=0.7,
            allow_zero_accumulator=True,
        ),
        te.FTRL(
            0.5,
            -0.4,
            0.3,
            0.6,
            0.7,
            0.2,
            multiply_linear_by_learning_rate=True,
            allow_zero_accumulator=True,
        ),
    ),
    (
        interop.FtrlParameters(0.5, initial_accumulator_value=0),
        te.FTRL(0.5, initial_accumulator_value=0, allow_zero_accumulator=True),
    ),
    (
        interop.MomentumParameters(0.5, 0.8, True, **COMMON),
        te.Momentum(0.5, 0.8, True, **COMMON),
    ),
    (interop.MomentumParameters(0.5, 0.8), te.Momentum(0.5, 0.8)),
    (
        interop.RMSPropParameters(0.5, 0.8, 0.7, 1e-3, **COMMON),
        te.RMSProp(0.5, 0.8, 0.7, 1e-3, **COMMON),
    ),
    (
        interop.ProximalAdagradParameters(0.5, 0.3, 0.1, 0.2, **COMMON),
        te.ProximalAdagrad(0.5, 0.3, 0.1, 0.2, **COMMON),
    ),
    (interop.ProximalYogiParameters(), te.ProximalYogi()),
    (
        interop.ProximalYogiParameters(0.5, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, **COMMON),
        te.ProximalYogi(0.5, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, **COMMON),
    ),
    (
        interop.FrequencyEstimatorParameters(0.2, 9.0, 3.0, 0.5),
        te.FrequencyEstimator(
            tau=0.2, max_delta=9.0, outlier_threshold=3.0, weight_exponent=0.5
        ),
    ),
]
# What has no default.
REQUIRED: dict[type, tuple[float, ...]] = {
    interop.AdagradMomentumParameters: (0.5, 0.9),
    interop.MomentumParameters: (0.5, 0.9),
    interop.RMSPropParameters: (0.5, 0.9, 0.8, 0.1),
    interop.FrequencyEstimatorParameters: (0.2, 9.0, 3.0, 0.5),
}


@pytest.mark.parametrize(("parameters", "optimizer"), CARRIED)
def test_parameters_become_the_optimizer_of_the_same_rule(
    parameters: Any, optimizer: Any
):
    assert spec(parameters=parameters).adapt().optimizer == optimizer


@pytest.mark.parametrize(
    "cls", sorted({type(p) for p, _ in CARRIED}, key=lambda c: c.__name__)
)
def test_no_argument_of_the_parameters_is_dropped(cls: type):
    """Each argument, set to another value, gives another optimizer."""
    plain = cls(*REQUIRED.get(cls, (0.5,)))
    other = {bool: lambda v: not v, type(None): lambda v: 0.125}
    for field in dataclasses.fields(plain):
        if not field.init:
            continue
        value = getattr(plain, field.name)
        change = other.get(type(value), lambda v: v / 2 if v else 0.125)
        if field.name == "multiply_weight_decay_factor_by_learning_rate":
            changed = dataclasses.replace(plain, **{field.name: True})
        else:
            changed = dataclasses.replace(plain, **{field.name: change(value)})
        before = spec(parameters=plain).adapt().optimizer
        assert spec(parameters=changed).adapt().optimizer != before, field.name


ESTIMATOR = interop.FrequencyEstimatorParameters(0.2, 9.0, 3.0, 0.5)
REFUSED: ErrorTable = {
    ValueError: {
        "Table 't', SGD: Argument `learning_rate` must be finite. Received: nan.": (
            lambda: dict_spec(
                tables={"t": interop.TableConfig(8, 1, learning_rate=float("nan"))}
            )
        ),
        "AdagradParameters: Argument `learning_rate` must be finite. Received: nan.": (
            lambda: spec(parameters=interop.AdagradParameters(float("nan")))
        ),
        "EmbeddingConfigSpec, RMSPropParameters: Argument `epsilon` must be positive. "
        "Received: 0.": (
            lambda: spec(parameters=interop.RMSPropParameters(0.1, 0.9, 0.9, 0))
        ),
        "Table 't', FrequencyEstimator: FrequencyEstimator uses the global step": (
            lambda: dict_spec(
                tables={"t": interop.TableConfig(8, 1, learning_rate=0.5)},
                optimization_parameters=ESTIMATOR,
            )
        ),
        "Columns 'a_embedding' have embedding_lookup_device=\"cpu\"": (
            lambda: spec(embedding("a", embedding_lookup_device="cpu"))
        ),
        "No column of the EmbeddingConfigSpec has a TPU embedding table.": (
            lambda: spec(tf.feature_column.numeric_column("n"))
        ),
        "Table 'u' of `table_to_config_dict` is not used by any feature.": (
            lambda: dict_spec(
                tables={"t": interop.TableConfig(8, 2), "u": interop.TableConfig(8, 2)}
            )
        ),
        "Table 't' has no `optimization_parameters`": (
            lambda: dict_spec(optimization_parameters=None)
        ),
        "Argument `optimization_parameters` must be one of AdagradParameters,": (
            lambda: dict_spec(optimization_parameters="sgd")
        ),
        "`clipping_limit` of the spec and clip_gradient_min/max": (
            lambda: spec(
                parameters=interop.AdagradParameters(0.1, clip_gradient_max=1.0),
                clipping_limit=1.0,
            )
        ),
        "`clipping_limit` limits the summed gradient": (
            lambda: spec(
                parameters=interop.AdagradParameters(
                    0.1, use_gradient_accumulation=False
                ),
                clipping_limit=1.0,
            )
        ),
    },
    NotImplementedError: {
        "Columns 'n' have no TPU embedding table and cannot be converted": (
            lambda: spec(embedding("a"), tf.feature_column.numeric_column("n"))
        ),
        "Table 't': `weight_exponent=0.5` of its optimizer is not supported by": (
            lambda: dict_spec(
                tables={"t": interop.TableConfig(8, 1)},
                optimization_parameters=ESTIMATOR,
            )
        ),
        "columns 'a_embedding' have embedding_lookup_device": (
            lambda: spec(
                embedding(
                    "a",
                    embedding_lookup_device="tpu_tensor_core",
                    tensor_core_shape=[None, 3],
                )
            )
        ),
    },
    TypeError: {
        "must have keys that are str. Received: 1 of type int.": (
            lambda: dict_spec(
                features={
                    1: interop.FeatureConfig("t"),
                    "f": interop.FeatureConfig("t"),
                }
            )
        ),
        "EmbeddingConfigSpec, MomentumParameters: Argument `momentum` must be a": (
            lambda: spec(parameters=interop.MomentumParameters(0.1, "a"))  # pyright: ignore[reportArgumentType]
        ),
    },
}


@each_error(REFUSED)
def test_what_cannot_be_carried_is_refused_by_name(
    error: type[Exception], text: str, bad: Any
):
    check_error(error, text, bad().to_tpu_embedding)
