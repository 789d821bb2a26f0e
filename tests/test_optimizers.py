"""The contract of all optimizers as values; their rules are in test_optimizer_rules."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from optimizer_cases import (
    OPTIMIZERS,
    SPECIAL,
    STOCK,
    Case,
    D,
    V,
    each_case,
    each_stock_case,
)
from reference import optimizers as reference

import tpu_embedding as te
from tpu_embedding import optimizers
from tpu_embedding.keras import serialization
from tpu_embedding.optimizers import base


def test_every_optimizer_of_the_package_is_under_test() -> None:
    classes = set(optimizers.OPTIMIZERS.values())
    assert classes == {case.cls for case in [*OPTIMIZERS, *SPECIAL]}
    assert set(optimizers.OPTIMIZERS) == set(reference.DEFAULTS)
    exported = {
        value
        for value in vars(te).values()
        if isinstance(value, type) and issubclass(value, base.Optimizer)
    }
    assert exported == {*classes, optimizers.CustomOptimizer}
    assert {cls.__name__ for cls in exported} <= set(te.__all__)


@each_stock_case
def test_arguments_are_those_of_tensorflow(case: Case) -> None:
    def arguments(cls: type) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(cls).parameters.values()
        return [(p.name, p.default, p.kind) for p in parameters]

    # New keywords of ours stand behind a star.
    own = [
        (field.name, field.default, inspect.Parameter.KEYWORD_ONLY)
        for field in dataclasses.fields(base.KeywordOptions)
    ]
    assert arguments(case.cls) == [*arguments(case.stock), *own]


@pytest.mark.parametrize(
    ("case", "options"),
    [(case, options) for case in STOCK for options in case.options],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_slots_are_those_of_tensorflow(case: Case, options: dict[str, Any]) -> None:
    assert case.stock is not None
    if options.get("allow_zero_accumulator"):  # TensorFlow still refuses 0.
        options = {**options, "initial_accumulator_value": 0.5}
    ours, theirs = case.cls(**options).slots, case.stock(**options)
    assert [slot.name for slot in ours] == theirs._slot_names()
    for slot, initializer in zip(ours, theirs._slot_initializers(), strict=True):
        np.testing.assert_array_equal(
            np.float32(slot.initial_value), initializer([], dtype=tf.float32)
        )
        assert not slot.per_row


@pytest.mark.parametrize("name", reference.DEFAULTS)
def test_slots_and_defaults_are_those_of_the_reference(name: str) -> None:
    slots = reference.initial_slots(name, {}, (V, D))
    ours = optimizers.OPTIMIZERS[name]()
    assert {
        s.name: values.shape
        for s, values in zip(ours.slots, slots.values(), strict=True)
    } == {name: values.shape for name, values in slots.items()}
    for argument, default in reference.DEFAULTS[name].items():
        assert getattr(ours, argument) == default


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
    values = {cls() for cls in optimizers.OPTIMIZERS.values()}
    assert len(values) == len(optimizers.OPTIMIZERS)


@each_case
def test_is_frozen_and_survives_pickle(case: Case) -> None:
    optimizer = case.cls()
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.learning_rate = 0.5
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer


@each_case
def test_rules_have_names_of_their_own(case: Case) -> None:
    rules = [cls.rule for cls in optimizers.OPTIMIZERS.values()]
    assert rules.count(case.cls.rule) == 1


@each_case
def test_hyperparameters_are_fields(case: Case) -> None:
    fields = [field.name for field in dataclasses.fields(case.cls)]
    assert set(case.cls.hyperparameter_names) <= set(fields)
    optimizer = case.cls(**case.options[-1])
    for name, value in zip(
        optimizer.hyperparameter_names, optimizer.hyperparameters, strict=True
    ):
        assert type(value) is float
        assert value == getattr(optimizer, name)


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
@each_stock_case
def test_gradient_limits_are_those_of_tensorflow(
    case: Case, clipvalue: Any, limits: tuple
) -> None:
    for cls in (case.cls, case.stock):
        assert cls is not None
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


@each_case
def test_the_keras_layer_writes_it_down(case: Case) -> None:
    argument, value = case.other
    for optimizer in (case.cls(), case.cls(**{argument: value})):
        written = json.loads(json.dumps(serialization.encode_optimizer(optimizer, "a")))
        assert serialization.decode_optimizer(written) == optimizer


def test_a_file_with_an_optimizer_that_is_gone() -> None:
    written = serialization.encode_optimizer(te.Adagrad(), "a")
    with pytest.raises(ValueError, match="saved with the optimizer MDLAdagradLight, "):
        serialization.decode_optimizer({**written, "class": "MDLAdagradLight"})
