"""Steps that fail half-way: what is kept, what can be repeated, and reset."""

from __future__ import annotations

import pytest
import tensorflow as tf
from steps import train_on

import tpu_embedding as te

V, D = 8, 2
FEATURES = {"film": tf.constant([3, 5, 3])}
GRADIENTS = {"film": tf.ones([3, D])}


pytestmark = pytest.mark.usefixtures("engine")


def make(optimizer: te.SGD, *, pipelined: bool = False) -> te.TPUEmbedding:
    films = te.TableConfig(V, D, te.RowIdInitializer(), combiner="sum", name="films")
    return te.TPUEmbedding({"film": te.FeatureConfig(films)}, optimizer, pipelined)


def rows(embedding: te.TPUEmbedding) -> list[float]:
    (table,) = embedding.embedding_tables.values()
    return table.numpy()[:, 0].tolist()


def train_once(embedding: te.TPUEmbedding) -> None:
    train_on(embedding, FEATURES, GRADIENTS)


@pytest.mark.parametrize(
    ("engine", "pipelined"),
    [("host", False), ("host", True), ("portable", False)],
    indirect=["engine"],
)
def test_a_rate_that_fails_changes_nothing(pipelined: bool) -> None:
    fails = [True]

    def rate() -> float:
        if fails[0]:
            raise ArithmeticError
        return 1.0

    embedding = make(te.SGD(rate), pipelined=pipelined)
    embedding.enqueue(FEATURES)
    embedding.dequeue()
    before = rows(embedding)
    with pytest.raises(ArithmeticError):
        embedding.apply_gradients(GRADIENTS)
    assert rows(embedding) == before
    fails[0] = False
    embedding.apply_gradients(GRADIENTS)  # they are still owed
    assert rows(embedding) == [0, 1, 2, 1, 4, 4, 6, 7]


def test_a_rate_that_is_no_scalar() -> None:
    embedding = make(te.SGD(lambda: tf.constant([1.0, 2.0])))
    with pytest.raises(ValueError, match="must return a scalar"):
        train_once(embedding)


@pytest.mark.parametrize("engine", ["host"], indirect=True)
def test_a_pipelined_update_has_the_rate_of_its_own_step() -> None:
    rate = tf.Variable(1.0)
    embedding = make(te.SGD(lambda: rate), pipelined=True)
    for value in (1.0, 10.0, 100.0):
        rate.assign(value)
        train_once(embedding)
    rate.assign(1000.0)
    assert rows(embedding)[5] == 5 - 111


def test_build_that_fails_fixes_nothing() -> None:
    films = te.TableConfig(V, D)
    features = [te.FeatureConfig(films), te.FeatureConfig(films, output_shape=[4])]
    embedding = te.TPUEmbedding(features, te.SGD(1.0))
    with pytest.raises(ValueError, match=r"\(4,\) given by FeatureConfig.output_shape"):
        embedding.build([(3, 1), (3, 1)])
    embedding.build([(4, 1), (4, 1)])
    other = te.TPUEmbedding(features, te.SGD(1.0), batch_size=4)
    with pytest.raises(ValueError, match="A batch size of 4 per replica was given"):
        other.build(2)


def test_reset_forgets_what_is_under_way() -> None:
    embedding = make(te.SGD(1.0))
    embedding.reset()  # before build there is nothing to forget
    embedding.enqueue(FEATURES)
    embedding.dequeue()  # and here something fails
    embedding.enqueue({"film": tf.constant([0, 1, 2])})
    with pytest.raises(tf.errors.FailedPreconditionError, match="reset"):
        embedding.dequeue()
    embedding.reset()
    with pytest.raises(tf.errors.FailedPreconditionError, match="no batch is"):
        embedding.dequeue()
    before = rows(embedding)
    embedding.enqueue(FEATURES)
    assert embedding.dequeue()["film"].numpy()[:, 0].tolist() == [3, 5, 3]
    assert rows(embedding) == before
    embedding.apply_gradients(GRADIENTS)
    assert rows(embedding) != before
