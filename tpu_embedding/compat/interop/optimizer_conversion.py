"""Converts *Parameters objects into optimizers of this library."""

from __future__ import annotations

import dataclasses
from typing import Any

from tpu_embedding import optimizers
from tpu_embedding.compat.interop import parameters as v1

_OPTIMIZERS: dict[type, type[optimizers.Optimizer]] = {
    v1.StochasticGradientDescentParameters: optimizers.SGD,
    v1.AdagradParameters: optimizers.Adagrad,
    v1.AdagradMomentumParameters: optimizers.AdagradMomentum,
    v1.AdamParameters: optimizers.Adam,
    v1.FtrlParameters: optimizers.FTRL,
    v1.MomentumParameters: optimizers.Momentum,
    v1.RMSPropParameters: optimizers.RMSProp,
    v1.ProximalAdagradParameters: optimizers.ProximalAdagrad,
    v1.ProximalYogiParameters: optimizers.ProximalYogi,
    v1.FrequencyEstimatorParameters: optimizers.FrequencyEstimator,
}
# Our arguments, by the names that they have in *Parameters where ours lack those.
_RENAMED = {
    "beta1": "beta_1",
    "beta2": "beta_2",
    "initial_accumulator": "initial_accumulator_value",
}


def to_optimizer(
    where: str, parameters: v1.OptimizationParameters, clipping_limit: float | None
) -> optimizers.Optimizer:
    """The optimizer of the same rule; errors name `where` its parameters are."""
    cls: Any = _OPTIMIZERS[type(parameters)]
    given: Any = parameters
    known = {field.name for field in dataclasses.fields(cls)}
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(given):
        # The rate that FrequencyEstimatorParameters has is unused: it is the step.
        if field.init and not field.name.startswith("clip_gradient_"):
            ours = field.name if field.name in known else _RENAMED[field.name]
            arguments[ours] = getattr(parameters, field.name)
    # TensorFlow 1 took an accumulator of 0 for FTRL as it was.
    if arguments.get("allow_zero_accumulator") is False:
        zero = arguments["initial_accumulator_value"] == 0
        arguments["allow_zero_accumulator"] = zero
    clipvalue = _clipvalue(where, parameters, clipping_limit)
    try:
        return cls(clipvalue=clipvalue, **arguments)
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
