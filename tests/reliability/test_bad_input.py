"""Every bad input at every entry point: the error, its words, and nothing changed.

test_bad_input_tpus.py has the engines of TPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cpu_engines import EACH_ENGINE
from reliability import bad_calls, bad_inputs
from reliability.bad_calls import GOOD, eager, graph
from reliability.bad_inputs import BY_TYPE, BY_VALUE, DIM, ROWS
from steps import train_on

import tpu_embedding as te
import tpu_embedding.keras
from tpu_embedding import distribution


class Subject(bad_calls.Subject):
    """All three classes, and a batch in the queue of the first."""

    def __init__(self, engine: str) -> None:
        super().__init__()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(distribution.ENGINE_VARIABLE, engine)
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
            train_on(self.first, batch, ones)
            train_on(self.second, batch, ones)
            self.layer(batch)
        self.first.enqueue(batch, training=False)
        self.queued = batch

    def bits(self) -> list[bytes]:
        variables = [
            *self.first.core.engine.checkpoint_variables().values(),  # pyright: ignore[reportOptionalMemberAccess]
            *self.second.core.engine.checkpoint_variables().values(),  # pyright: ignore[reportOptionalMemberAccess]
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
        tables = {self.films: self.first.embedding_tables[self.films]}
        calls: dict[str, Callable[[], Any]] = {
            "enqueue": lambda: self.first.enqueue(features, weights),
            "evaluate": lambda: self.first.enqueue(features, weights, training=False),
            "look_up": lambda: self.look_up(features, weights),
            "preprocess": lambda: self.second.preprocess_features(features, weights),
            "v2": lambda: self.second(features, weights)[0],
            "data": lambda: bad_calls.in_tf_data(self.second, features, weights),
            "layer": lambda: self.layer(features, weights),
            "serving": lambda: te.serving_embedding_lookup(
                features, weights, tables, self.features
            ),
        }
        return calls[entry]()

    def look_up(self, features: Any, weights: Any) -> Any:
        """As the Keras layer: a flat batch, past the queue."""
        structure = self.first.core.structure
        return self.first.core.look_up(
            structure.flatten("features", features), structure.flatten_weights(weights)
        )


@functools.cache
def subject(engine: str) -> Subject:
    return Subject(engine)


ENTRIES: dict[str, bad_calls.Call] = {
    "enqueue": eager("enqueue"),
    "enqueue_traced": graph("enqueue"),
    "evaluate": eager("evaluate"),
    "look_up": eager("look_up"),
    "preprocess": eager("preprocess"),
    "v2": eager("v2"),
    "v2_traced": graph("v2"),
    "layer": eager("layer"),
    "layer_traced": graph("layer"),
    "serving": eager("serving"),
    "serving_traced": graph("serving"),
    "data": graph("data"),
}
# A trace for each signature takes its time: graphs leave out the ids that are wrong
# in another way, and what is known from types alone.
TRACED = [*bad_inputs.IDS[4:12], *bad_inputs.STRUCTURES]
CASES = {
    "enqueue_traced": [*TRACED, *bad_inputs.WEIGHTS],
    "v2_traced": TRACED,
    "layer_traced": TRACED,
    "serving_traced": TRACED,
    # Of the portable engine "v2_traced" has the same graph, for all kinds.
    "data": [bad for bad in TRACED if isinstance(bad.value, tf.RaggedTensor)],
}
ARGUMENTS = ("features", "weights")
STRUCTURED = [entry for entry in ENTRIES if not entry.endswith("_traced")]


def cases_of(entry: str) -> list[bad_inputs.Bad]:
    return [
        bad
        for bad in CASES.get(entry, [*BY_VALUE, *BY_TYPE])
        # Serving has no `check_numerics`: such weights give such activations.
        if not (entry.startswith("serving") and "not finite" in bad.words)
        and not (entry == "layer" and bad.name == "a_scalar")  # A sample, as in TFRS.
    ]


@pytest.mark.parametrize("engine", EACH_ENGINE)
@pytest.mark.parametrize("entry", ENTRIES)
def test_refused(entry: str, engine: str) -> None:
    bad_calls.check_refused(subject(engine), ENTRIES[entry], cases_of(entry))


@pytest.mark.parametrize("engine", EACH_ENGINE)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_another_structure_is_refused(argument: str, engine: str) -> None:
    """Of features and of weights: missing, extra, or of another nesting."""
    # Serving takes any part of the features: serving/test_lookup.py.
    entries = [e for e in STRUCTURED if (e, argument) != ("serving", "features")]
    bad_calls.check_structures(subject(engine), argument, entries)
