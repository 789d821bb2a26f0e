"""Bad inputs given to entry points, and what must follow: a part of test_bad_input*.py.

What follows each refused call: tables, slots and the count of updates hold the same
bits, and the queue what it held before.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import tensorflow as tf
from reliability import bad_inputs
from reliability.bad_inputs import Bad

GOOD = tf.constant([5, 6])


class Subject(abc.ABC):
    """The objects behind some entry points, trained a little."""

    def __init__(self) -> None:
        # The same function for all cases of one signature: one trace.
        self.traced = functools.cache(self._trace)

    @abc.abstractmethod
    def call(self, entry: str, features: Any, weights: Any) -> Any:
        """What a user writes."""

    @abc.abstractmethod
    def bits(self) -> list[bytes]:
        """Of every table, slot and count."""

    @abc.abstractmethod
    def check_queue(self) -> None:
        """Fails unless the queue is as it was."""

    def _trace(self, entry: str, specs: Any) -> Callable[..., Any]:
        def traced(bad: Any, weights: Any = None) -> tf.Tensor:
            features = {"bad": bad, "good": GOOD}
            self.call(entry, features, {"bad": weights, "good": None})
            return tf.constant(0)

        return tf.function(traced, input_signature=specs, autograph=False)


Call = Callable[[Subject, Bad], Any]


def in_tf_data(embedding: Any, features: Any, weights: Any) -> Any:
    """Preprocessing in tf.data, two elements at once."""
    batches = tf.data.Dataset.range(2).map(
        lambda _: embedding.preprocess_features(features, weights), num_parallel_calls=2
    )
    return batches.reduce(0, lambda count, _: count + 1)


def any_size(value: Any) -> Any:
    """The spec of the same kind, rank and dtype, of any size."""
    dims = [None] * value.shape.rank
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec(dims, value.dtype)
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec(dims, value.dtype, ragged_rank=1)
    return tf.TensorSpec(dims, value.dtype)


def eager(entry: str) -> Call:
    def call(own: Subject, bad: Bad) -> Any:
        features = {"bad": bad.value, "good": GOOD}
        return own.call(entry, features, {"bad": bad.weights, "good": None})

    return call


def graph(entry: str) -> Call:
    def call(own: Subject, bad: Bad) -> Any:
        values = (bad.value,) if bad.weights is None else (bad.value, bad.weights)
        spec = any_size if bad.error is bad_inputs.VALUE else tf.type_spec_from_value
        return own.traced(entry, tuple(map(spec, values)))(*values)

    return call


def check_refused(own: Subject, call: Call, cases: Iterable[Bad]) -> None:
    """Every case is refused as it should be, and changes nothing."""
    own.check_queue()
    before = own.bits()
    wrong = []
    for bad in cases:
        error = outcome(call, own, bad)
        missing = [word for word in bad.words if word not in str(error)]
        if type(error) is not bad.error or missing or own.bits() != before:
            wrong.append((bad.name, missing, repr(error)))
    assert not wrong, "\n".join(map(str, wrong))
    own.check_queue()


# Of features and weights {"bad", "good"}: another structure, the error, its words.
NESTINGS: list[tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = [
    (lambda given: {"bad": given["bad"]}, ValueError, "missing keys ['good']"),
    (lambda given: {**given, "more": GOOD}, ValueError, "unknown keys ['more']"),
    (
        lambda given: list(given.values()),
        TypeError,
        "expected a dict, got one of type list",
    ),
    (lambda given: {**given, "bad": [given["bad"]]}, TypeError, "at bad"),
]


def check_structures(own: Subject, argument: str, entries: Iterable[str]) -> None:
    """Features or weights of another structure are refused, and change nothing."""
    own.check_queue()
    before = own.bits()
    given = {"bad": tf.constant([1, 2]), "good": GOOD}
    fine = {"features": given, "weights": {"bad": None, "good": tf.ones([2])}}
    for entry in entries:
        for change, error, words in NESTINGS:
            with pytest.raises(error) as raised:
                own.call(entry, **{**fine, argument: change(fine[argument])})
            where = (entry, words, str(raised.value))
            assert type(raised.value) is error, where
            assert f"The structure of `{argument}`" in where[2], where
            assert words in where[2], where
            assert own.bits() == before, where
    own.check_queue()


def outcome(call: Call, own: Subject, bad: Bad) -> Any:
    """The error that a call raises, or None."""
    try:
        call(own, bad)
    except (tf.errors.OpError, TypeError, ValueError) as error:
        return error
    return None
