"""Every bad input on the engines of TPUs: the error, its words, and nothing changed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reliability import bad_calls, bad_inputs
from reliability.bad_calls import GOOD, eager, graph
from reliability.bad_inputs import BY_TYPE, BY_VALUE, DIM, ROWS
from reliability.test_bad_input import ARGUMENTS

import tpu_embedding as te
from tpu_embedding.testing import SoftwareTPUStrategy

BATCH = {"bad": tf.constant([1, 2]), "good": GOOD}
ONES = {"bad": tf.ones([2, DIM]), "good": tf.ones([2, DIM])}


class OnTPU(bad_calls.Subject):
    """What an embedding under a strategy holds."""

    strategy: SoftwareTPUStrategy
    embedding: Any

    def bits(self) -> list[bytes]:
        rows = self.embedding.core.checkpoint_rows().values()
        arrays = [array.numpy() for arrays in rows for array in arrays.values()]
        arrays.append(self.embedding.core.checkpoint_updates().numpy())
        return [array.tobytes() for array in arrays]


def features() -> dict[str, te.FeatureConfig]:
    films = te.TableConfig(ROWS, DIM, te.RowIdInitializer(), name="films")
    return {
        name: te.FeatureConfig(films, output_shape=[2], name=name)
        for name in ("bad", "good")
    }


def rate(step: Any) -> Any:
    """Takes the step, so that the count of updates is kept."""
    return 0.1 / tf.cast(step + 1, tf.float32)


class OnV4(OnTPU):
    """A TPUEmbedding with a batch in its queue."""

    def __init__(self) -> None:
        super().__init__()
        self.strategy = SoftwareTPUStrategy("v4", 1)
        with self.strategy.scope():
            self.embedding = te.TPUEmbedding(
                features(), te.Adagrad(rate), check_numerics=True
            )
            self.embedding.build(2)
        self.embedding.enqueue(BATCH)
        self.strategy.run(self.train)
        self.embedding.enqueue(BATCH, training=False)

    def train(self) -> None:
        self.embedding.dequeue()
        self.embedding.apply_gradients(ONES)

    def call(self, entry: str, features: Any, weights: Any) -> Any:
        self.embedding.enqueue(features, weights)

    def check_queue(self) -> None:
        """Twice: what stands behind the one batch would come first then."""
        (rows,) = self.embedding.core.checkpoint_rows().values()
        for _ in range(2):
            activations = self.strategy.run(self.embedding.dequeue)
            for name, ids in BATCH.items():
                expected = rows["parameters"].numpy()[ids.numpy()]
                np.testing.assert_array_equal(activations[name], expected)
            self.embedding.enqueue(BATCH, training=False)


class OnV6e(OnTPU):
    """A TPUEmbeddingV2, which has no queue."""

    def __init__(self) -> None:
        super().__init__()
        self.strategy = SoftwareTPUStrategy("v6e", 1)
        with self.strategy.scope():
            self.embedding = te.TPUEmbeddingV2(
                features(), te.Adagrad(rate), check_numerics=True
            )
        self.embedding.build()
        self.strategy.run(self.train)

    def train(self) -> None:
        _, preserved = self.embedding(BATCH)
        self.embedding.apply_gradients(ONES, preserved)

    def call(self, entry: str, features: Any, weights: Any) -> Any:
        calls: dict[str, Callable[[], Any]] = {
            "preprocess": lambda: self.embedding.preprocess_features(features, weights),
            "data": lambda: bad_calls.in_tf_data(self.embedding, features, weights),
            "run": lambda: self.strategy.run(
                lambda: self.embedding(features, weights)[0]
            ),
        }
        return calls[entry]()

    def check_queue(self) -> None:
        """There is none."""


@functools.cache
def on_v6e() -> OnV6e:
    return OnV6e()


def of_known_shapes(bad: bad_inputs.Bad) -> bad_inputs.Bad:
    """What is said where the input's own shape is known and is another one."""
    if bad.value.shape[:1] == [2] or bad.error is not bad_inputs.VALUE:
        return bad
    words = ("Feature bad: the output shape (2,)", "does not match", "the input of")
    return dataclasses.replace(bad, words=words, error=ValueError)


EAGER = [of_known_shapes(bad) for bad in [*BY_VALUE, *BY_TYPE]]
TRACED = [*bad_inputs.IDS[4:12], *bad_inputs.STRUCTURES, *bad_inputs.WEIGHTS]


STRUCTURED = {"v4": ["enqueue"], "v6e": ["preprocess", "data", "run"]}


def test_enqueue_on_v4() -> None:
    own = OnV4()
    for argument in ARGUMENTS:
        bad_calls.check_structures(own, argument, STRUCTURED["v4"])
    bad_calls.check_refused(own, eager("enqueue"), EAGER)
    bad_calls.check_refused(own, graph("enqueue"), TRACED)


@pytest.mark.parametrize(
    ("call", "cases"),
    [(eager("preprocess"), EAGER), (graph("data"), TRACED), (graph("run"), TRACED)],
    ids=["preprocess", "data", "run"],
)
def test_v6e(call: Any, cases: Any) -> None:
    bad_calls.check_refused(on_v6e(), call, cases)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_another_structure_is_refused_on_v6e(argument: str) -> None:
    bad_calls.check_structures(on_v6e(), argument, STRUCTURED["v6e"])
