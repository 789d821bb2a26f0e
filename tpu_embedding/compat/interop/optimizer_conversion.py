"""Converts *Parameters objects into optimizers of this library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tpu_embedding import optimizers
from tpu_embedding.compat.interop import parameters as v1

# Our argument <- attribute of the Parameters, for each that is called otherwise or
# that only this class has. The fields of `_COMMON` are converted for every class.
_RATE = "learning_rate"
_COMMON = (
    _RATE,
    "use_gradient_accumulation",
    "clip_weight_min",
    "clip_weight_max",
    "weight_decay_factor",
    "multiply_weight_decay_factor_by_learning_rate",
)


def _frequency_estimator(**arguments: Any) -> optimizers.FrequencyEstimator:
    """The learning rate is the step counter; the 1 in the Parameters is unused."""
    del arguments[_RATE]
    return optimizers.FrequencyEstimator(**arguments)


_Carried = tuple[Callable[..., optimizers.Optimizer], dict[str, str]]
_CARRIED: dict[type, _Carried] = {
    v1.StochasticGradientDescentParameters: (optimizers.SGD, {}),
    v1.AdagradParameters: (
        optimizers.Adagrad,
        {"initial_accumulator_value": "initial_accumulator"},
    ),
    v1.AdagradMomentumParameters: (
        optimizers.AdagradMomentum,
        {
            "momentum": "momentum",
            "use_nesterov": "use_nesterov",
            "exponent": "exponent",
            "beta2": "beta2",
            "epsilon": "epsilon",
        },
    ),
    v1.AdamParameters: (
        optimizers.Adam,
        {
            "beta_1": "beta1",
            "beta_2": "beta2",
            "epsilon": "epsilon",
            "lazy_adam": "lazy_adam",
            "sum_inside_sqrt": "sum_inside_sqrt",
        },
    ),
    v1.FtrlParameters: (
        optimizers.FTRL,
        {
            "learning_rate_power": "learning_rate_power",
            "l1_regularization_strength": "l1_regularization_strength",
            "l2_regularization_strength": "l2_regularization_strength",
            "beta": "beta",
            "initial_accumulator_value": "initial_accumulator_value",
            "multiply_linear_by_learning_rate": "multiply_linear_by_learning_rate",
            "allow_zero_accumulator": "allow_zero_accumulator",
        },
    ),
    v1.MomentumParameters: (
        optimizers.Momentum,
        {"momentum": "momentum", "use_nesterov": "use_nesterov"},
    ),
    v1.RMSPropParameters: (
        optimizers.RMSProp,
        {"rho": "rho", "momentum": "momentum", "epsilon": "epsilon"},
    ),
    v1.ProximalAdagradParameters: (
        optimizers.ProximalAdagrad,
        {
            "initial_accumulator_value": "initial_accumulator",
            "l1_regularization_strength": "l1_regularization_strength",
            "l2_regularization_strength": "l2_regularization_strength",
        },
    ),
    v1.ProximalYogiParameters: (
        optimizers.ProximalYogi,
        {
            "beta_1": "beta1",
            "beta_2": "beta2",
            "epsilon": "epsilon",
            "l1_regularization_strength": "l1_regularization_strength",
            "l2_regularization_strength": "l2_regularization_strength",
            "initial_accumulator_value": "initial_accumulator_value",
        },
    ),
    v1.FrequencyEstimatorParameters: (
        _frequency_estimator,
        {
            "tau": "tau",
            "max_delta": "max_delta",
            "outlier_threshold": "outlier_threshold",
            "weight_exponent": "weight_exponent",
        },
    ),
}


def to_optimizer(
    where: str, parameters: v1.OptimizationParameters, clipping_limit: float | None
) -> optimizers.Optimizer:
    """The optimizer of the same rule; errors name `where` its parameters are."""
    make, renamed = _CARRIED[type(parameters)]
    arguments: dict[str, Any] = {name: getattr(parameters, name) for name in _COMMON}
    arguments |= {ours: getattr(parameters, theirs) for ours, theirs in renamed.items()}
    # TensorFlow 1 took an accumulator of 0 for FTRL as it was.
    if arguments.get("allow_zero_accumulator") is False:
        zero = arguments["initial_accumulator_value"] == 0
        arguments["allow_zero_accumulator"] = zero
    clipvalue = _clipvalue(where, parameters, clipping_limit)
    try:
        return make(clipvalue=clipvalue, **arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}, {type(parameters).__name__}: {error}") from error


def with_rate(
    where: str, optimizer: optimizers.Optimizer, rate: optimizers.Rate
) -> optimizers.Optimizer:
    """The optimizer at a table's own rate; errors say `where` it is."""
    try:
        return dataclasses.replace(optimizer, learning_rate=rate)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}, {type(optimizer).__name__}: {error}") from error


def _clipvalue(
    where: str, parameters: v1.OptimizationParameters, limit: float | None
) -> optimizers.ClipValue | None:
    lower, upper = parameters.clip_gradient_min, parameters.clip_gradient_max
    own = None if lower is None and upper is None else (lower, upper)
    if limit is None:
        return own
    if own is not None:
        raise ValueError(
            f"{where}: `clipping_limit` of the spec and clip_gradient_min/max of the "
            "optimization parameters limit the same gradient. Give one of them."
        )
    if not parameters.use_gradient_accumulation:
        raise ValueError(
            f"{where}: `clipping_limit` limits the summed gradient of a row, so it "
            "needs `use_gradient_accumulation=True` in the optimization parameters."
        )
    return limit
