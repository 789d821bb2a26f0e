"""Which optimizer of this library each *Parameters class stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpu_embedding import optimizers
from tpu_embedding.interop import errors
from tpu_embedding.interop import parameters as v1

# Our argument <- attribute of the Parameters, for each that is called otherwise or
# that only this class has. Those of `_COMMON` go without saying.
_COMMON = (
    "learning_rate",
    "use_gradient_accumulation",
    "clip_weight_min",
    "clip_weight_max",
    "weight_decay_factor",
    "multiply_weight_decay_factor_by_learning_rate",
)
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
}


def to_optimizer(
    where: str, parameters: v1.OptimizationParameters, clipping_limit: float | None
) -> optimizers.Optimizer:
    """The optimizer of the same rule.

    Args:
      where: Whose parameters they are, for messages.
      parameters: One of the *Parameters.
      clipping_limit: That of the spec, or None.

    Raises:
      NotImplementedError: If no optimizer has the rule.
      ValueError: If `clipping_limit` does not go with the parameters.
    """
    cls = type(parameters)
    if cls not in _CARRIED:
        raise errors.parameters_without_rule(where, cls.__name__)
    make, renamed = _CARRIED[cls]
    arguments: dict[str, Any] = {name: getattr(parameters, name) for name in _COMMON}
    arguments |= {ours: getattr(parameters, theirs) for ours, theirs in renamed.items()}
    # Upstream took an accumulator of 0 for FTRL as it was.
    if arguments.get("allow_zero_accumulator") is False:
        zero = arguments["initial_accumulator_value"] == 0
        arguments["allow_zero_accumulator"] = zero
    return make(clipvalue=_clipvalue(where, parameters, clipping_limit), **arguments)


def _clipvalue(
    where: str, parameters: v1.OptimizationParameters, limit: float | None
) -> optimizers.ClipValue | None:
    lower, upper = parameters.clip_gradient_min, parameters.clip_gradient_max
    own = None if lower is None and upper is None else (lower, upper)
    if limit is None:
        return own
    if own is not None:
        raise errors.clipping_limit_conflict(where)
    if not parameters.use_gradient_accumulation:
        raise errors.clipping_limit_without_accumulation(where)
    return limit
