"""The contract of all optimizers as values; their rules are in test_optimizer_rules."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from optimizer_cases import OPTIMIZERS, Case, D, V, each_case, each_variant
from reference import optimizers as reference

from tpu_embedding import optimizers
from tpu_embedding.optimizers import base


def test_every_optimizer_of_the_package_is_under_test() -> None:
    classes = {
        value
        for value in vars(optimizers).values()
        if isinstance(value, type)
        and issubclass(value, base.Optimizer)
        and value is not base.Optimizer
    }
    assert classes == {case.cls for case in OPTIMIZERS}
    assert set(reference.DEFAULTS) == {case.name for case in OPTIMIZERS}


@each_case
def test_arguments_are_those_of_tensorflow(case: Case) -> None:
    def arguments(cls: type) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(cls).parameters.values()
        return [(p.name, p.default, p.kind) for p in parameters]

    assert arguments(case.cls) == arguments(case.stock)


@each_variant
def test_slots_are_those_of_tensorflow(case: Case, options: dict[str, Any]) -> None:
    if options.get("allow_zero_accumulator"):  # TensorFlow still refuses 0.
        options = {**options, "initial_accumulator_value": 0.5}
    ours, theirs = case.cls(**options).slots, case.stock(**options)
    assert [slot.name for slot in ours] == theirs._slot_names()
    for slot, initializer in zip(ours, theirs._slot_initializers(), strict=True):
        np.testing.assert_array_equal(
            np.float32(slot.initial_value), initializer([], dtype=tf.float32)
        )
        assert slot.per_row == (case.cls is optimizers.RowwiseAdagrad)


@each_case
def test_slots_and_defaults_are_those_of_the_reference(case: Case) -> None:
    slots = reference.initial_slots(case.name, {}, (V, D))
    ours = case.cls()
    assert {
        s.name: values.shape
        for s, values in zip(ours.slots, slots.values(), strict=True)
    } == {name: values.shape for name, values in slots.items()}
    for name, default in reference.DEFAULTS[case.name].items():
        assert getattr(ours, name) == default


@each_case
def test_compares_and_hashes_by_value(case: Case) -> None:
    argument, value = case.other
    first, same = case.cls(), case.cls()
    other = case.cls(**{argument: value})
    assert first == same
    assert hash(first) == hash(same)
    assert first != other
    assert len({first, same, other}) == 2
    assert getattr(other, argument) == value


def test_two_classes_are_never_equal() -> None:
    values = {case.cls() for case in OPTIMIZERS}
    assert len(values) == len(OPTIMIZERS)


@each_case
def test_is_frozen_and_survives_pickle(case: Case) -> None:
    optimizer = case.cls()
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.learning_rate = 0.5
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer


@each_case
def test_rules_have_names_of_their_own(case: Case) -> None:
    assert [c.cls.rule for c in OPTIMIZERS].count(case.cls.rule) == 1


@each_variant
def test_hyperparameters_are_numbers(case: Case, options: dict[str, Any]) -> None:
    hyperparameters = case.cls(**options).hyperparameters
    assert all(type(value) in (int, float) for value in hyperparameters)
    assert len(hyperparameters) == len(case.cls().hyperparameters)


def test_hyperparameters_stand_in_the_order_of_the_headers() -> None:
    momentum = optimizers.AdagradMomentum(0.1, 0.2, True, 3.0, 0.25, 0.5)
    assert momentum.hyperparameters == (0.2, 1.0, 3.0, 0.25, 0.75, 0.5)
    ftrl = optimizers.FTRL(
        0.1, -0.2, 0.3, 0.4, 0.5, multiply_linear_by_learning_rate=True
    )
    assert ftrl.hyperparameters == (-0.2, 0.3, 0.4, 0.5, 1.0, 0.0)
    adam = optimizers.Adam(0.1, 0.5, 0.25, 0.4)
    assert adam.hyperparameters == (0.5, 0.5, 0.25, 0.75, 0.4, 1.0)


def test_only_dense_adam_touches_all_rows() -> None:
    touching = [
        (case.name, options)
        for case in OPTIMIZERS
        for options in case.options
        if case.cls(**options).touches_all_rows
    ]
    assert touching == [("Adam", {"lazy_adam": False})]


@pytest.mark.parametrize(
    ("clipvalue", "limits"),
    [
        (None, (None, None)),
        (2.0, (-2.0, 2.0)),
        (0, (0, 0)),
        ((None, 1.0), (None, 1.0)),
        ((-1.0, 2.0), (-1.0, 2.0)),
        (np.float32(2.0), (-2.0, 2.0)),
    ],
)
@each_case
def test_gradient_limits_are_those_of_tensorflow(
    case: Case, clipvalue: Any, limits: tuple
) -> None:
    for cls in (case.cls, case.stock):
        optimizer = cls(clipvalue=clipvalue)
        assert (optimizer.clip_gradient_min, optimizer.clip_gradient_max) == limits


def _with_default(step: int = 0) -> float:
    return 0.1 * step


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (lambda: 0.1, False),
        (lambda step: 0.1 * step, True),
        (lambda *steps: 0.1, False),
        (_with_default, False),
        (tf.keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9), True),
        (tf.function(lambda: 0.1), False),
        (tf.Variable(tf.constant(0.1)).read_value, False),
        (max, False),  # Has no signature.
    ],
)
def test_takes_step(rate: Any, expected: bool) -> None:
    assert optimizers.takes_step(rate) is expected
    assert optimizers.SGD(rate).learning_rate is rate
