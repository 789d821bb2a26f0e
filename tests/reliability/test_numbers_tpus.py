"""Numbers at the edges on the engines of TPUs: test_numbers.py has the others."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reference.embedding import Feature, ReferenceEmbedding, Table
from reliability.test_numbers import DIM, LEAST_NORMAL, ROWS, TWO_UPDATES

import tpu_embedding as te
from tpu_embedding.testing import SoftwareTPUStrategy

IDS = tf.constant([0, 2, 2, 2])
OPTIMIZERS = {"sgd": te.SGD(0.1), "adagrad": te.Adagrad(0.1), "adam": te.Adam(0.1)}
# A momentum that is subnormal counts as 0; the step is it times the rate by epsilon.
FLUSHED = 2 * LEAST_NORMAL * 0.1 / 1e-7
START = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM) / 8
Values = dict[str, dict[str, np.ndarray]]


class OnTPU:
    """A table for each optimizer, all looked up alike, and the reference beside it."""

    def __init__(self, kind: str) -> None:
        self.strategy = SoftwareTPUStrategy(kind, 1)
        make = {"v4": te.TPUEmbedding, "v6e": te.TPUEmbeddingV2}[kind]
        with self.strategy.scope():
            self.embedding: Any = make(features(), None, check_numerics=True)
            self.embedding.build()
        self.step = {"v4": self.step_of_queue, "v6e": self.step_of_stacks}[kind]
        self.batch = dict.fromkeys(OPTIMIZERS, IDS)

    def reference(self) -> ReferenceEmbedding:
        """What the tables hold now, on paper."""
        tables = {}
        for name, optimizer in OPTIMIZERS.items():
            tables[name] = Table(
                self.values()[name]["parameters"],
                type(optimizer).__name__,
                dataclasses.asdict(optimizer),
                "sum",
            )
        made = ReferenceEmbedding(tables, [Feature(name) for name in OPTIMIZERS])
        for name, slots in made.slots.items():
            for slot in slots:
                slots[slot] = self.values()[name][slot].astype(float)
        return made

    def values(self) -> Values:
        rows = self.embedding.core.checkpoint_rows()
        return {
            table: {name: array.numpy() for name, array in arrays.items()}
            for table, arrays in rows.items()
        }

    @functools.cached_property
    def traced(self) -> Any:
        run = lambda g: self.strategy.run(self.step, (g,))  # noqa: E731
        return tf.function(run, autograph=False)

    def train(self, gradient: Any) -> None:
        """A step in which each activation has the same gradient [4, DIM]."""
        if isinstance(self.embedding, te.TPUEmbedding):
            self.embedding.enqueue(self.batch)
        self.traced(tf.constant(gradient, tf.float32))

    def step_of_queue(self, gradient: tf.Tensor) -> None:
        self.embedding.dequeue()
        self.embedding.apply_gradients(dict.fromkeys(OPTIMIZERS, gradient))

    def step_of_stacks(self, gradient: tf.Tensor) -> None:
        _, preserved = self.embedding(self.batch)
        gradients = dict.fromkeys(OPTIMIZERS, gradient)
        self.embedding.apply_gradients(gradients, preserved)


def features() -> dict[str, te.FeatureConfig]:
    made = {}
    for name, optimizer in OPTIMIZERS.items():
        table = te.TableConfig(
            ROWS,
            DIM,
            lambda shape, dtype: tf.constant(START[: shape[0], : shape[1]], dtype),
            optimizer,
            combiner="sum",
            name=name,
        )
        made[name] = te.FeatureConfig(table, output_shape=[4], name=name)
    return made


@functools.cache
def on_tpu(kind: str) -> OnTPU:
    return OnTPU(kind)


each_kind = pytest.mark.parametrize("kind", ["v4", "v6e"])


@each_kind
@pytest.mark.parametrize("number", [0.0, 1e-40, 1.0], ids=str)
def test_zero_subnormal_and_plain_gradients(kind: str, number: float) -> None:
    own = on_tpu(kind)
    reference = own.reference()
    gradient = np.full([4, DIM], number, np.float32)
    for _ in range(2):
        own.train(gradient)
        reference.step([[IDS] * 3], None, [[gradient] * 3])
    for name, parts in own.values().items():
        expected = {"parameters": reference.tables[name], **reference.slots[name]}
        for part, values in parts.items():
            np.testing.assert_allclose(
                values, expected[part], TWO_UPDATES, FLUSHED, err_msg=name + part
            )


@each_kind
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_not_finite(kind: str, number: float) -> None:
    own = on_tpu(kind)
    before = own.values()
    gradient = np.zeros([4, DIM], np.float32)
    gradient[1, 1] = number
    text = "Feature adagrad: the gradient of sample 1 is not finite"
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        own.train(gradient)
    for name, parts in own.values().items():
        for part, values in parts.items():
            np.testing.assert_array_equal(values, before[name][part], name + part)


@each_kind
def test_huge_gradients(kind: str) -> None:
    """The squares overflow to infinity, by which a step is 0; a sum does not."""
    own = OnTPU(kind)
    own.train(np.full([4, DIM], 1e30))
    for name, parts in own.values().items():
        assert not np.isnan(parts["parameters"]).any(), name
        np.testing.assert_array_equal(parts["parameters"][[1, 3]], START[[1, 3]])
    own.train(np.zeros([4, DIM]))
    sgd = own.values()["sgd"]["parameters"]
    np.testing.assert_allclose(sgd[2], START[2] - np.float32(3e29), rtol=TWO_UPDATES)
