"""Every bad input at every entry point: the error, its words, and nothing changed.

What follows each refused call: tables, slots and the count of updates hold the same
bits, and the queue the one batch that it held before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reliability import bad_inputs
from reliability.bad_inputs import BY_TYPE, BY_VALUE, DIM, ROWS, Bad

import tpu_embedding as te
import tpu_embedding.keras
from tpu_embedding import topology

ENGINES = ("host", "portable")
GOOD = tf.constant([5, 6])


class Subject:
    """The objects behind all entry points, trained a little, with a batch queued."""

    def __init__(self, engine: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(topology.ENGINE_VARIABLE, engine)
            self.films = te.TableConfig(ROWS, DIM, te.RowIdInitializer(), name="films")
            self.features = {
                "bad": te.FeatureConfig(self.films),
                "good": te.FeatureConfig(self.films),
            }
            # A rate that takes the step: the count of updates is kept.
            optimizer = te.Adagrad(lambda step: 0.1 / tf.cast(step + 1, tf.float32))
            options: dict[str, Any] = {"check_numerics": True}
            self.first = te.TPUEmbedding(self.features, optimizer, **options)
            self.second = te.TPUEmbeddingV2(self.features, optimizer, **options)
            self.layer = te.keras.TPUEmbedding(self.features, optimizer, **options)
            batch = {"bad": tf.constant([1, 2]), "good": GOOD}
            ones = {"bad": tf.ones([2, DIM]), "good": tf.ones([2, DIM])}
            self.first.enqueue(batch)
            self.first.dequeue()
            self.first.apply_gradients(ones)
            _, preserved = self.second(batch)
            self.second.apply_gradients(ones, preserved)
            self.layer(batch)
        self.first.enqueue(batch, training=False)
        self.queued = batch
        # The same function for all cases of one signature: one trace.
        self.traced = functools.cache(self._trace)

    def bits(self) -> list[bytes]:
        """Of every variable there is."""
        variables = [
            *self.first._engine.checkpoint_variables().values(),  # pyright: ignore[reportOptionalMemberAccess]
            *self.second._engine.checkpoint_variables().values(),  # pyright: ignore[reportOptionalMemberAccess]
            *self.layer.variables,
        ]
        return [np.asarray(tf.convert_to_tensor(v)).tobytes() for v in variables]

    def check_queue(self) -> None:
        """One batch is in the queue, and it is the one that was put there."""
        activations = self.first.dequeue()
        for name, ids in self.queued.items():
            rows = tf.gather(self.first.embedding_tables[self.films], ids)
            np.testing.assert_array_equal(activations[name], rows)
        with pytest.raises(tf.errors.FailedPreconditionError, match="no batch"):
            self.first.dequeue()
        self.first.enqueue(self.queued, training=False)

    def call(self, entry: str, features: Any, weights: Any) -> Any:
        """What a user writes."""
        tables = {self.films: self.first.embedding_tables[self.films]}
        calls: dict[str, Callable[[], Any]] = {
            "enqueue": lambda: self.first.enqueue(features, weights),
            "lookup": lambda: self.first.lookup(features, weights),
            "preprocess": lambda: self.second.preprocess_features(features, weights),
            "v2": lambda: self.second(features, weights)[0],
            "layer": lambda: self.layer(features, weights),
            "serving": lambda: te.serving_embedding_lookup(
                features, weights, tables, self.features
            ),
        }
        return calls[entry]()

    def _trace(self, entry: str, specs: Any) -> Callable[..., Any]:
        def traced(bad: Any, weights: Any = None) -> tf.Tensor:
            features = {"bad": bad, "good": GOOD}
            self.call(entry, features, {"bad": weights, "good": None})
            return tf.constant(0)

        return tf.function(traced, input_signature=specs, autograph=False)


@functools.cache
def subject(engine: str) -> Subject:
    return Subject(engine)


def any_size(value: Any) -> Any:
    """The spec of the same kind, rank and dtype, of any size."""
    dims = [None] * value.shape.rank
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec(dims, value.dtype)
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec(dims, value.dtype, ragged_rank=1)
    return tf.TensorSpec(dims, value.dtype)


def eager(entry: str) -> Callable[[Subject, Bad], Any]:
    def call(own: Subject, bad: Bad) -> Any:
        features = {"bad": bad.value, "good": GOOD}
        return own.call(entry, features, {"bad": bad.weights, "good": None})

    return call


def graph(entry: str) -> Callable[[Subject, Bad], Any]:
    def call(own: Subject, bad: Bad) -> Any:
        values = (bad.value,) if bad.weights is None else (bad.value, bad.weights)
        spec = any_size if bad.error is bad_inputs.VALUE else tf.type_spec_from_value
        return own.traced(entry, tuple(map(spec, values)))(*values)

    return call


def data(own: Subject, bad: Bad) -> Any:
    """Preprocessing in tf.data, two elements at once."""
    dataset = tf.data.Dataset.from_tensors(bad.value).map(
        lambda ids: own.second.preprocess_features({"bad": ids, "good": GOOD}),
        num_parallel_calls=2,
    )
    return list(dataset)


ENTRIES: dict[str, Callable[[Subject, Bad], Any]] = {
    "enqueue": eager("enqueue"),
    "enqueue_traced": graph("enqueue"),
    "lookup": eager("lookup"),
    "preprocess": eager("preprocess"),
    "v2_traced": graph("v2"),
    "layer": eager("layer"),
    "serving": eager("serving"),
    "serving_traced": graph("serving"),
    "data": data,
}
# A trace for each signature takes its time: these leave out what the first has had.
CASES = {
    "enqueue_traced": [
        *bad_inputs.IDS[4:12],
        *bad_inputs.STRUCTURES,
        *bad_inputs.WEIGHTS,
    ],
    "v2_traced": [*bad_inputs.IDS[4:12], *bad_inputs.STRUCTURES],
    "serving_traced": [*bad_inputs.IDS[4:12], *bad_inputs.STRUCTURES],
    "data": bad_inputs.IDS[4:6],
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_refused(entry: str, engine: str) -> None:
    own = subject(engine)
    own.check_queue()
    before = own.bits()
    wrong = []
    for bad in CASES.get(entry, [*BY_VALUE, *BY_TYPE]):
        if entry.startswith("serving") and "not finite" in bad.words:
            continue  # It has no `check_numerics`: such weights give such activations.
        error = outcome(ENTRIES[entry], own, bad)
        missing = [word for word in bad.words if word not in str(error)]
        if type(error) is not bad.error or missing or own.bits() != before:
            wrong.append((bad.name, missing, repr(error)))
    assert not wrong, "\n".join(map(str, wrong))
    own.check_queue()


def outcome(call: Callable[[Subject, Bad], Any], own: Subject, bad: Bad) -> Any:
    """The error that a call raises, or None."""
    try:
        call(own, bad)
    except (tf.errors.OpError, TypeError, ValueError) as error:
        return error
    return None
