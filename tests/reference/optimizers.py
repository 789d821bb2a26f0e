"""Section 4: the optimizers, one element at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

# The arguments of each optimizer and their defaults, without those that change no
# number. A learning rate is given for each step.
_COMMON: dict[str, Any] = {
    "clip_weight_min": None,
    "clip_weight_max": None,
    "weight_decay_factor": None,
    "multiply_weight_decay_factor_by_learning_rate": None,
    "clipnorm": None,
    "clipvalue": None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "AdagradMomentum": {
        "momentum": 0.0,
        "use_nesterov": False,
        "exponent": 2,
        "beta2": 1,
        "epsilon": 1e-10,
    },
    "FTRL": {
        "learning_rate_power": -0.5,
        "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0,
        "beta": 0.0,
        "initial_accumulator_value": 0.1,
        "multiply_linear_by_learning_rate": False,
        "allow_zero_accumulator": False,
    },
    "Adam": {
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-7,
        "lazy_adam": True,
        "sum_inside_sqrt": True,
    },
    "RowwiseAdagrad": {"initial_accumulator_value": 0.1},
    "Momentum": {"momentum": 0.9, "use_nesterov": False},
    "RMSProp": {"rho": 0.9, "momentum": 0.0, "epsilon": 1e-7},
    "CenteredRMSProp": {"rho": 0.9, "momentum": 0.0, "epsilon": 1e-7},
    "Adadelta": {"rho": 0.95, "epsilon": 1e-7},
    "ProximalAdagrad": {
        "initial_accumulator_value": 0.1,
        "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0,
    },
    "ProximalYogi": {
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-3,
        "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0,
        "initial_accumulator_value": 1e-6,
    },
    "FrequencyEstimator": {
        "tau": 0.1,
        "max_delta": 1000.0,
        "outlier_threshold": 10.0,
        "weight_exponent": 0.0,
    },
}


def complete(name: str, hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Completes an optimizer's arguments, with numbers rounded to float32.

    A `learning_rate` among them is left as it is; arguments that change no number
    here are left out.
    """
    neutral = {
        "learning_rate",
        "use_gradient_accumulation",
        "slot_variable_creation_fn",
        "low_dimensional_packing_status",
    }
    merged = {**_COMMON, **DEFAULTS[name]}
    for key, value in hyper.items():
        if key in neutral:
            continue
        if key not in merged:
            raise KeyError(f"{name} has no argument {key}")
        merged[key] = value
    return merged


def initial_slots(
    name: str, hyper: Mapping[str, Any], shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Returns the slots of a new table of `shape`, float64."""
    arguments = complete(name, hyper)
    if name == "RowwiseAdagrad":
        shape = (shape[0], 1)
    return {
        slot: np.full(shape, arguments[v] if isinstance(v, str) else v, np.float64)
        for slot, v in _RULES[name][1].items()
    }


def apply(
    name: str,
    hyper: Mapping[str, Any],
    table: np.ndarray,
    slots: Mapping[str, np.ndarray],
    gradient_rows: Mapping[int, np.ndarray],
    rate: float,
    dtype: type[np.floating] = np.float64,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Applies one update: clip, decay, rule, clip, for each touched row.

    Args:
      name: The class of the optimizer.
      hyper: Its constructor arguments; the others have their defaults.
      table: [V, D].
      slots: By name, [V, D], or [V, 1] for RowwiseAdagrad.
      gradient_rows: For each touched row its summed gradient [D].
      rate: The learning rate.
      dtype: The dtype of the arithmetic; float32 overflows where the engines do.

    Returns:
      The new table and the new slots.
    """
    arguments, (rule, _) = complete(name, hyper), _RULES[name]
    table = np.array(table, dtype)
    slots = {slot: np.array(values, dtype) for slot, values in slots.items()}
    rate = float(np.float32(rate))  # With arrays of float32 it computes in float32.
    touched = set(gradient_rows)
    if name == "Adam" and not arguments["lazy_adam"]:
        touched = set(range(len(table)))
    for row in sorted(touched):
        gradient = np.array(gradient_rows.get(row, np.zeros(table.shape[1])))
        gradient = _scale(gradient.astype(dtype), arguments["clipnorm"])
        gradient = _clip(gradient, *_limits(arguments["clipvalue"]))
        table[row] = _decay(arguments, table[row], rate)
        row_slots = [values[row] for values in slots.values()]  # views
        with np.errstate(divide="ignore", invalid="ignore"):
            rule(arguments, gradient, table[row], row_slots, rate)
        table[row] = _clip(
            table[row], arguments["clip_weight_min"], arguments["clip_weight_max"]
        )
    return table, slots


def _scale(gradient: np.ndarray, clipnorm: float | None) -> np.ndarray:
    norm = np.sqrt(np.sum(gradient**2))
    if clipnorm is None or norm <= clipnorm:
        return gradient
    return gradient / norm * clipnorm


def _limits(clipvalue: Any) -> tuple[Any, Any]:
    if clipvalue is None:
        return None, None
    return clipvalue if isinstance(clipvalue, tuple) else (-clipvalue, clipvalue)


def _clip(x: np.ndarray, lower: float | None, upper: float | None) -> np.ndarray:
    if lower is not None:
        x = np.where(x < lower, lower, x)
    if upper is not None:
        x = np.where(x > upper, upper, x)
    return x


def _decay(arguments: dict[str, Any], row: np.ndarray, rate: float) -> np.ndarray:
    factor = arguments["weight_decay_factor"]
    if factor is None:
        return row
    if arguments["multiply_weight_decay_factor_by_learning_rate"]:
        factor = factor * rate
    return row - factor * row


# Each rule writes to the row T [D] and to the row's slots.


def _one_minus(share: float) -> float:
    """Computes 1 - share in float32 from a float32 share, as section 4 says."""
    return float(np.float32(1) - np.float32(share))


def _sgd(h: dict, g: np.ndarray, t: np.ndarray, slots: list, lr: float) -> None:
    for d in range(len(t)):
        t[d] -= lr * g[d]


def _adagrad(h: dict, g: np.ndarray, t: np.ndarray, slots: list, lr: float) -> None:
    (a,) = slots
    for d in range(len(t)):
        a[d] += g[d] ** 2
        if a[d] != 0:
            t[d] -= lr * g[d] / np.sqrt(a[d])


def _rowwise(h: dict, g: np.ndarray, t: np.ndarray, slots: list, lr: float) -> None:
    (a,) = slots
    a[0] += sum(x**2 for x in g) / len(g)
    if a[0] == 0:
        return
    for d in range(len(t)):
        t[d] -= lr * g[d] / np.sqrt(a[0])


def _adagrad_momentum(
    h: dict, g: np.ndarray, t: np.ndarray, slots: list, lr: float
) -> None:
    a, m = slots
    k, b2, e, mu = h["exponent"], h["beta2"], h["epsilon"], h["momentum"]
    for d in range(len(t)):
        a[d] = a[d] + g[d] ** 2 if b2 == 1 else b2 * a[d] + _one_minus(b2) * g[d] ** 2
        p = g[d] * (a[d] + e) ** (-1 / k)
        m[d] = mu * m[d] + p
        u = mu * m[d] + p if h["use_nesterov"] else m[d]
        t[d] -= lr * u


def _ftrl(h: dict, g: np.ndarray, t: np.ndarray, slots: list, lr: float) -> None:
    step = (
        _ftrl_step_times_rate if h["multiply_linear_by_learning_rate"] else _ftrl_step
    )
    a, linear = slots
    for d in range(len(t)):
        t[d], a[d], linear[d] = step(h, g[d], (t[d], a[d], linear[d]), lr)


def _ftrl_step(h: dict, g: float, state: tuple, lr: float) -> tuple:
    t, a, linear = state
    q = -h["learning_rate_power"]
    l1, l2 = h["l1_regularization_strength"], h["l2_regularization_strength"]
    new = a + g**2
    sigma = (new**q - a**q) / lr
    linear += g - sigma * t
    quadratic = new**q / lr + 2 * l2 + h["beta"] / lr
    zero = abs(linear) <= l1 or quadratic == 0
    t = 0.0 if zero else (np.sign(linear) * l1 - linear) / quadratic
    return t, new, linear


def _ftrl_step_times_rate(h: dict, g: float, state: tuple, lr: float) -> tuple:
    """Does `_ftrl_step` with linear, and every term that goes into it, times lr."""
    t, a, linear = state
    q = -h["learning_rate_power"]
    l1, l2 = h["l1_regularization_strength"], h["l2_regularization_strength"]
    new = a + g**2
    linear += lr * g - (new**q - a**q) * t
    quadratic = new**q + 2 * lr * l2 + h["beta"]
    zero = abs(linear) <= lr * l1 or quadratic == 0
    t = 0.0 if zero else (np.sign(linear) * lr * l1 - linear) / quadratic
    return t, new, linear


def _adam(h: dict, g: np.ndarray, t: np.ndarray, slots: list, lr: float) -> None:
    m, v = slots
    b1, b2, eps = h["beta_1"], h["beta_2"], h["epsilon"]
    for d in range(len(t)):
        m[d] = b1 * m[d] + _one_minus(b1) * g[d]
        v[d] = b2 * v[d] + _one_minus(b2) * g[d] ** 2
        if h["sum_inside_sqrt"]:
            t[d] -= lr * m[d] / np.sqrt(v[d] + eps**2)
        else:
            t[d] -= lr * m[d] / (np.sqrt(v[d]) + eps)


def _momentum(h: dict, g: np.ndarray, t: np.ndarray, slots: list, lr: float) -> None:
    (m,) = slots
    mu = h["momentum"]
    for d in range(len(t)):
        m[d] = mu * m[d] + g[d]
        t[d] -= lr * (mu * m[d] + g[d] if h["use_nesterov"] else m[d])


def _rms_prop(h: dict, g: np.ndarray, t: np.ndarray, slots: list, lr: float) -> None:
    ms, mom = slots
    rho = h["rho"]
    for d in range(len(t)):
        ms[d] = rho * ms[d] + _one_minus(rho) * g[d] ** 2
        mom[d] = h["momentum"] * mom[d] + lr * g[d] / np.sqrt(ms[d] + h["epsilon"])
        t[d] -= mom[d]


def _centered_rms_prop(
    h: dict, g: np.ndarray, t: np.ndarray, slots: list, lr: float
) -> None:
    ms, mom, mg = slots
    rho = h["rho"]
    for d in range(len(t)):
        ms[d] = rho * ms[d] + _one_minus(rho) * g[d] ** 2
        mg[d] = rho * mg[d] + _one_minus(rho) * g[d]
        variance = ms[d] - mg[d] ** 2
        mom[d] = h["momentum"] * mom[d] + lr * g[d] / np.sqrt(variance + h["epsilon"])
        t[d] -= mom[d]


def _adadelta(h: dict, g: np.ndarray, t: np.ndarray, slots: list, lr: float) -> None:
    a, u = slots
    rho, eps = h["rho"], h["epsilon"]
    for d in range(len(t)):
        a[d] = rho * a[d] + _one_minus(rho) * g[d] ** 2
        step = np.sqrt((u[d] + eps) / (a[d] + eps)) * g[d]
        u[d] = rho * u[d] + _one_minus(rho) * step**2
        t[d] -= lr * step


def _nearest(h: dict, z: float, c: float) -> float:
    """The proximal step: the w of least (w - z)^2 / 2 + c * (l1 |w| + l2 w^2 / 2)."""
    l1, l2 = h["l1_regularization_strength"], h["l2_regularization_strength"]
    return np.sign(z) * max(abs(z) - c * l1, 0.0) / (1 + c * l2)


def _proximal_adagrad(
    h: dict, g: np.ndarray, t: np.ndarray, slots: list, lr: float
) -> None:
    (a,) = slots
    for d in range(len(t)):
        a[d] += g[d] ** 2
        if a[d] != 0:
            c = lr / np.sqrt(a[d])
            t[d] = _nearest(h, t[d] - c * g[d], c)


def _proximal_yogi(
    h: dict, g: np.ndarray, t: np.ndarray, slots: list, lr: float
) -> None:
    v, m = slots
    b1, b2 = h["beta_1"], h["beta_2"]
    for d in range(len(t)):
        m[d] = b1 * m[d] + _one_minus(b1) * g[d]
        v[d] -= _one_minus(b2) * np.sign(v[d] - g[d] ** 2) * g[d] ** 2
        c = lr / (np.sqrt(v[d]) + h["epsilon"])
        t[d] = _nearest(h, t[d] - c * m[d], c)


def _frequency_estimator(
    h: dict, g: np.ndarray, t: np.ndarray, slots: list, step: float
) -> None:
    (last,) = slots
    delta = min(step - last[0], h["max_delta"])
    outlier = delta >= h["outlier_threshold"] * t[0]
    t[0] = delta if outlier else _one_minus(h["tau"]) * t[0] + h["tau"] * delta
    last[0] = step


# Each rule, and by name of a slot where its initial value comes from: an argument, or a
# number.
_RULES: dict[str, tuple[Callable[..., None], dict[str, str | float]]] = {
    "SGD": (_sgd, {}),
    "Adagrad": (_adagrad, {"accumulators": "initial_accumulator_value"}),
    "AdagradMomentum": (_adagrad_momentum, {"accumulators": 0.0, "momenta": 0.0}),
    "FTRL": (_ftrl, {"accumulators": "initial_accumulator_value", "linears": 0.0}),
    "Adam": (_adam, {"momenta": 0.0, "velocities": 0.0}),
    "RowwiseAdagrad": (_rowwise, {"accumulators": "initial_accumulator_value"}),
    "Momentum": (_momentum, {"momenta": 0.0}),
    "RMSProp": (_rms_prop, {"ms": 0.0, "mom": 0.0}),
    "CenteredRMSProp": (_centered_rms_prop, {"ms": 0.0, "mom": 0.0, "mg": 0.0}),
    "Adadelta": (_adadelta, {"accumulators": 0.0, "updates": 0.0}),
    "ProximalAdagrad": (
        _proximal_adagrad,
        {"accumulators": "initial_accumulator_value"},
    ),
    "ProximalYogi": (_proximal_yogi, {"v": "initial_accumulator_value", "m": 0.0}),
    "FrequencyEstimator": (_frequency_estimator, {"last_hit_step": 0.0}),
}
