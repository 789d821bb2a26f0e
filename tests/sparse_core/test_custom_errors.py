"""User functions that cannot be used, and arguments that are no functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tensorflow as tf
from software_tpu.calls import strategy_of
from sparse_core.custom_models import feature

import tpu_embedding as te
from tpu_embedding.testing import SoftwareTPUStrategy


def captures(g: Any, t: Any, *_: Any) -> Any:
    return t - g * OUTSIDE


SLOT = {"slot_names": ["a"], "slot_initializers": [0.0]}
WEIGHTS_NAME = "custom_combiner_variables"
OUTSIDE = tf.Variable(1.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"optimizer": te.CustomOptimizer(captures)},
            "'films': .*CustomOptimizer captures",
        ),
        (
            {"combiner": te.CustomCombiner(lambda n, v: v[0] * OUTSIDE, 2)},
            "'films': .*CustomCombiner captures .* not support. Create the tensors",
        ),
        (
            {"optimizer": te.CustomOptimizer(lambda g, t, *_: (t, g))},
            "returned 2 tensors; it must return 1",
        ),
        (
            {"optimizer": te.CustomOptimizer(lambda g, t, *_: t[0])},
            r"'films': .*shape \(2,\); .* a float32 tensor of shape \(1, 2\)",
        ),
        (
            {"combiner": te.CustomCombiner(lambda n, v: v, 2)},
            r"'films': .*shape \(2, 2\); it must return a float32 .* \(2,\)",
        ),
    ],
    ids=lambda x: "",
)
def test_functions_that_cannot_be_used(options: Any, text: str) -> None:
    for strategy in (strategy_of("v6e", 1), tf.distribute.get_strategy()):
        if "captures" in text and not isinstance(strategy, SoftwareTPUStrategy):
            continue  # The host may use variables from outside.
        with strategy.scope():
            embedding = te.TPUEmbeddingV2(
                feature(**{"optimizer": te.SGD(1.0), **options})
            )
        with pytest.raises(ValueError, match=text):
            embedding.build()


@pytest.mark.parametrize("options", ["optimizer", "combiner"])
def test_what_a_function_raises(options: str) -> None:
    """The user's own exception, with a note of whose function it was."""

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("mine")

    what = {
        "optimizer": te.CustomOptimizer(fail),
        "combiner": te.CustomCombiner(fail, 2),
    }
    for strategy in (strategy_of("v6e", 1), tf.distribute.get_strategy()):
        with strategy.scope():
            given = {"optimizer": te.SGD(1.0), options: what[options]}
            embedding = te.TPUEmbeddingV2(feature(**given))
        whose = f"^mine\\n.* of the Custom{options.title()} of table 'films'"
        with pytest.raises(ZeroDivisionError, match=whose):
            embedding.build()


def unknown(x: tf.Tensor) -> Any:
    return tf.py_function(lambda y: y, [x], tf.float32)


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda x: None, TypeError, "returned None of type NoneType; it must"),
        (lambda x: {"a": x}, TypeError, "of type dict; it must"),
        (lambda x: tf.cast(x, tf.float64), TypeError, "a tensor of float64; it must"),
        (unknown, ValueError, "unknown rank; .* Use tf.ensure_shape"),
    ],
    ids=["none", "dict", "dtype", "rank"],
)
def test_what_a_function_returns(function: Any, error: Any, text: str) -> None:
    combiner = te.CustomCombiner(lambda n, v: function(v[0]), 2)
    optimizer = te.CustomOptimizer(lambda g, t, *_: function(t))

    @tf.function(autograph=False)
    def compute(row: tf.Tensor) -> None:
        with pytest.raises(error, match=f"Table 'a': .*{text}"):
            combiner.compute(1, row, table="a")
        with pytest.raises(error, match=f"Table 'a': .*{text}"):
            optimizer.compute(row, row, [], 0.1, table="a")

    compute(tf.zeros([1, 2]))


def rule(*arguments: Any, **options: Any) -> Any:
    return lambda: te.CustomOptimizer(*(arguments or (captures,)), **options)


def combiner(*arguments: Any, **options: Any) -> Any:
    return lambda: te.CustomCombiner(*(arguments or (captures, 2)), **options)


RATE = "combiner_weights_learning_rate"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (rule(3), TypeError, "custom_computation"),
        (rule(captures, 1.0, ["a"]), ValueError, "`slot_initializers` has 0"),
        (rule(captures, 1.0, ["a"], [0.0], None, [3]), ValueError, "`slot_dims` is"),
        (rule(captures, 1.0, ["a", "a"], [0.0, 1.0]), ValueError, "`slot_names` is"),
        (rule(hyperparameters=["a"]), TypeError, "hyperparameters"),
        (rule(hyperparameters=0.9), TypeError, "`hyperparameters` must be a"),
        (rule(hyperparameters=0), TypeError, "`hyperparameters` must be a"),
        (rule(slot_names="ab"), TypeError, "`slot_names` must be a list"),
        (rule(**{**SLOT, "slot_names": [""]}), TypeError, "at least one character"),
        (rule(**{**SLOT, "slot_names": [1]}), TypeError, "must be a string"),
        (rule(**{**SLOT, "slot_names": ["parameters"]}), ValueError, "are reserved"),
        (rule(**{**SLOT, "slot_names": [WEIGHTS_NAME]}), ValueError, "are reserved"),
        (rule(**SLOT, slot_dims=1), TypeError, "`slot_dims` must be a list"),
        (rule(**SLOT, slot_dims=[True]), ValueError, "`slot_dims` is"),
        (combiner(**{RATE: True}), TypeError, RATE),
        (combiner(**{RATE: math.nan}), ValueError, RATE),
        (combiner(**{RATE: 1e39}), ValueError, RATE),
        (combiner(**{RATE: 10**400}), ValueError, RATE),
        (combiner(**{RATE: "fast"}), TypeError, RATE),
        (combiner(captures, 0), ValueError, "max_valency"),
        (combiner(captures, 2.0), TypeError, "max_valency"),
        (combiner(None, 2), TypeError, "combiner_computation"),
        (combiner(captures, 2, 1), ValueError, "needs an `initial"),
        (combiner(captures, 2, 1, "zeros"), TypeError, "initializer"),
    ],
    ids=range(24),
)
def test_arguments(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
