"""The rule of each optimizer, against the reference.

conformance/test_update_oracle.py compares engines with TensorFlow's training ops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
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
def test_a_gradient_of_nan_shows_itself(
    case: Case, options: dict[str, Any], rng: np.random.Generator
) -> None:
    optimizer = case.cls(**options)
    state = [_table(rng), *initial_slots(optimizer)]
    state = apply(optimizer, state, {2: np.full(D, np.nan, np.float32)}, rate=0.1)
    assert np.isnan(state[0][2]).all()


def test_a_variance_that_rounding_leaves_below_zero_makes_no_nan() -> None:
    optimizer = optimizers.CenteredRMSProp(rho=0.5, epsilon=1e-12)
    mean = np.full((V, D), 0.1, np.float32)
    table, square = np.zeros_like(mean), np.nextafter(mean * mean, np.float32(0))
    state = [table, square, np.zeros_like(mean), mean]
    new = apply(optimizer, state, {1: mean[1]}, rate=0.1)
    assert (new[1] - new[3] * new[3])[1].max() < 0
    assert all(np.isfinite(values).all() for values in new)
