"""The rule of each optimizer, against the reference and TensorFlow's training ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from optimizer_cases import (
    ALL_OPTIONS,
    COMMON_OPTIONS,
    NUMPY_OPS,
    Case,
    D,
    V,
    apply,
    each_variant,
    initial_slots,
)
from reference import optimizers as reference

from tpu_embedding import optimizers
from tpu_embedding.engines.portable.engine import TENSORFLOW_OPS
from tpu_embedding.optimizers import base

# Roundings of float32 that one step may pile up, a generous count: powers and the
# differences in FTRL lose more than one each.
ROUNDINGS = 40


def _assert_close(actual: Any, expected: Any, steps: int, message: str = "") -> None:
    relative = steps * ROUNDINGS * float(np.finfo(np.float32).eps)
    np.testing.assert_allclose(
        actual, expected, rtol=relative, atol=relative / 4, err_msg=message
    )


def _table(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(V, D)).astype(np.float32)


def _gradients(rng: np.random.Generator) -> dict[int, np.ndarray]:
    """Some touched rows, one of them with a gradient of zeros."""
    rows = rng.choice(V, size=4, replace=False)
    gradients = {int(row): rng.normal(size=D).astype(np.float32) for row in rows}
    gradients[int(rows[0])] = np.zeros(D, np.float32)
    return gradients


def _assert_follows_reference(
    case: Case,
    options: dict[str, Any],
    rng: np.random.Generator,
    ops: base.ArrayOps = NUMPY_OPS,
) -> None:
    optimizer = case.cls(**options)
    table = _table(rng)
    ours = [table, *initial_slots(optimizer)]
    theirs = (table, reference.initial_slots(case.name, options, (V, D)))
    for step in range(4):
        gradients = _gradients(rng)
        rate = 0.1 / (step + 1)
        ours = apply(optimizer, ours, gradients, rate, ops)
        theirs = reference.apply(case.name, options, *theirs, gradients, rate)
        expected = {"table": theirs[0], **theirs[1]}
        for (name, b), a in zip(expected.items(), ours, strict=True):
            _assert_close(a, b, step + 1, f"{name} diverged at step {step}")


def test_each_option_that_kernels_read_has_a_case() -> None:
    read = {option.name for option in base.OPTIONS if option.record(option.off)}
    assert read == set().union(*COMMON_OPTIONS)


@pytest.mark.parametrize("common", COMMON_OPTIONS, ids=str)
@each_variant
def test_update_follows_the_reference(
    case: Case,
    options: dict[str, Any],
    common: dict[str, Any],
    rng: np.random.Generator,
) -> None:
    _assert_follows_reference(case, {**options, **common}, rng)


@each_variant
def test_update_runs_on_tensorflow(
    case: Case, options: dict[str, Any], rng: np.random.Generator
) -> None:
    _assert_follows_reference(case, {**options, **ALL_OPTIONS}, rng, TENSORFLOW_OPS)


@each_variant
def test_a_gradient_of_zeros_makes_no_nan(
    case: Case, options: dict[str, Any], rng: np.random.Generator
) -> None:
    optimizer = case.cls(**options)
    state = [_table(rng), *initial_slots(optimizer)]
    state = apply(optimizer, state, {2: np.zeros(D, np.float32)}, rate=0.1)
    assert all(np.isfinite(values).all() for values in state)


@each_variant
def test_a_gradient_of_nan_shows_itself(
    case: Case, options: dict[str, Any], rng: np.random.Generator
) -> None:
    optimizer = case.cls(**options)
    state = [_table(rng), *initial_slots(optimizer)]
    state = apply(optimizer, state, {2: np.full(D, np.nan, np.float32)}, rate=0.1)
    assert np.isnan(state[0][2]).all()


@pytest.mark.parametrize(
    "cls",
    [optimizers.Adagrad, optimizers.RowwiseAdagrad, optimizers.ProximalAdagrad],
)
def test_adagrad_makes_no_step_where_the_accumulator_stays_zero(
    cls: type[Any], rng: np.random.Generator
) -> None:
    optimizer = cls()
    table, *slots = [_table(rng), *initial_slots(optimizer)]
    state = [table, np.zeros_like(slots[0])]  # As a checkpoint may bring it.
    new = apply(optimizer, state, {1: np.zeros(D, np.float32)}, rate=0.1)
    np.testing.assert_array_equal(new[0], table)
    np.testing.assert_array_equal(new[1], 0.0)


def test_a_variance_that_rounding_leaves_below_zero_makes_no_nan() -> None:
    optimizer = optimizers.CenteredRMSProp(rho=0.5, epsilon=1e-12)
    mean = np.full((V, D), 0.1, np.float32)
    table, square = np.zeros_like(mean), np.nextafter(mean * mean, np.float32(0))
    state = [table, square, np.zeros_like(mean), mean]
    new = apply(optimizer, state, {1: mean[1]}, rate=0.1)
    assert (new[1] - new[3] * new[3])[1].max() < 0
    assert all(np.isfinite(values).all() for values in new)


def test_ftrl_with_linear_times_rate_survives_a_rate_of_zero(
    rng: np.random.Generator,
) -> None:
    optimizer = optimizers.FTRL(multiply_linear_by_learning_rate=True)
    state = [_table(rng), *initial_slots(optimizer)]
    for rate in (0.0, 0.1, 0.0):
        state = apply(optimizer, state, {1: np.ones(D, np.float32)}, rate)
        assert all(np.isfinite(values).all() for values in state)


# A second oracle: TensorFlow's own training ops, where the rules are the same.
# Each takes ([table, *slots] as variables, gradient, rate).


def _stock_sgd(state: list[tf.Variable], gradient: Any, rate: float) -> None:
    tf.raw_ops.ResourceApplyGradientDescent(
        var=state[0].handle, alpha=rate, delta=gradient
    )


def _stock_adagrad(state: list[tf.Variable], gradient: Any, rate: float) -> None:
    tf.raw_ops.ResourceApplyAdagrad(
        var=state[0].handle, accum=state[1].handle, lr=rate, grad=gradient
    )


def _stock_ftrl(**options: Any) -> Callable[..., None]:
    def apply(state: list[tf.Variable], gradient: Any, rate: float) -> None:
        tf.raw_ops.ResourceApplyFtrl(
            var=state[0].handle,
            accum=state[1].handle,
            linear=state[2].handle,
            grad=gradient,
            lr=rate,
            **options,
        )

    return apply


def _stock_adam(state: list[tf.Variable], gradient: Any, rate: float) -> None:
    tf.raw_ops.ResourceApplyAdam(
        var=state[0].handle,
        m=state[1].handle,
        v=state[2].handle,
        beta1_power=0.0,  # No bias correction.
        beta2_power=0.0,
        lr=rate,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-3,
        grad=gradient,
    )


def _stock_rms_prop(state: list[tf.Variable], gradient: Any, rate: float) -> None:
    # Its momentum holds rate * m.
    state[2].assign(state[2] * rate)
    tf.raw_ops.ResourceApplyRMSProp(
        var=state[0].handle,
        ms=state[1].handle,
        mom=state[2].handle,
        lr=rate,
        rho=0.9,
        momentum=0.8,
        epsilon=1e-3,
        grad=gradient,
    )
    state[2].assign(state[2] / rate)


@pytest.mark.parametrize(
    ("optimizer", "stock_apply"),
    [
        (optimizers.SGD(), _stock_sgd),
        (optimizers.Adagrad(), _stock_adagrad),
        (
            optimizers.FTRL(
                l1_regularization_strength=0.1, l2_regularization_strength=0.2
            ),
            _stock_ftrl(l1=0.1, l2=0.2, lr_power=-0.5),
        ),
        (
            optimizers.FTRL(learning_rate_power=-0.7),
            _stock_ftrl(l1=0.0, l2=0.0, lr_power=-0.7),
        ),
        (
            optimizers.FTRL(
                l1_regularization_strength=0.1,
                l2_regularization_strength=0.2,
                multiply_linear_by_learning_rate=True,
            ),
            _stock_ftrl(l1=0.1, l2=0.2, lr_power=-0.5, multiply_linear_by_lr=True),
        ),
        (optimizers.Adam(epsilon=1e-3, sum_inside_sqrt=False), _stock_adam),
        (
            optimizers.AdagradMomentum(momentum=0.8, beta2=0.9, epsilon=1e-3),
            _stock_rms_prop,
        ),
    ],
    ids=lambda value: getattr(value, "rule", ""),
)
def test_update_follows_tensorflow_s_training_op(
    optimizer: base.Optimizer,
    stock_apply: Callable[..., None],
    rng: np.random.Generator,
) -> None:
    table = _table(rng)
    ours = [table, *initial_slots(optimizer)]
    theirs = [tf.Variable(tf.constant(values)) for values in ours]
    for step in range(20):
        gradient = _table(rng)
        ours = apply(optimizer, ours, dict(enumerate(gradient)), rate=0.05)
        stock_apply(theirs, gradient, 0.05)
        for a, b in zip(ours, theirs, strict=True):
            _assert_close(a, b, step + 1, f"diverged at step {step}")


def test_adagrad_follows_keras(rng: np.random.Generator) -> None:
    keras_rule = tf.keras.optimizers.Adagrad(
        0.05, initial_accumulator_value=0.1, epsilon=0.0
    )
    optimizer = optimizers.Adagrad(0.05)
    table = _table(rng)
    variable = tf.Variable(tf.constant(table))
    ours = [table, *initial_slots(optimizer)]
    for _ in range(5):
        gradient = _table(rng)
        ours = apply(optimizer, ours, dict(enumerate(gradient)), rate=0.05)
        keras_rule.apply_gradients([(tf.constant(gradient), variable)])
    _assert_close(ours[0], variable, steps=5)
