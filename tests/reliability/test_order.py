"""Every order of a few calls: an error at the call that is wrong, and no hang."""

from __future__ import annotations

import faulthandler
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cpu_engines import EACH_ENGINE
from reliability.order_model import CAPACITY, Model

import tpu_embedding as te
from tpu_embedding import distribution

BATCH = {"film": tf.constant([1, 2])}
GRADIENTS = {"film": tf.ones([2, 2])}
NAMES = ("train", "evaluate", "dequeue", "apply_gradients", "flush", "reset")
LENGTH = 4
SECONDS = 300  # A hang ends the tests, with the stack of every thread.


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def make(engine: str, *, pipelined: bool) -> te.TPUEmbedding:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(distribution.ENGINE_VARIABLE, engine)
        films = te.TableConfig(4, 2, te.RowIdInitializer(), name="films")
        embedding = te.TPUEmbedding(
            {"film": te.FeatureConfig(films)}, te.SGD(0.5), pipelined
        )
        embedding.build()
    return embedding


def call(embedding: te.TPUEmbedding, name: str) -> str | None:
    """Makes the call; the text of its refusal, or None."""
    calls: dict[str, Any] = {
        "train": lambda: embedding.enqueue(BATCH),
        "evaluate": lambda: embedding.enqueue(BATCH, training=False),
        "dequeue": embedding.dequeue,
        "apply_gradients": lambda: embedding.apply_gradients(GRADIENTS),
        "flush": embedding.flush,
        "reset": embedding.reset,
    }
    try:
        calls[name]()
    except tf.errors.FailedPreconditionError as error:
        return error.message
    return None


def rows(embedding: te.TPUEmbedding) -> list[float]:
    (table,) = embedding.embedding_tables.values()
    return table.numpy().ravel().tolist()


@pytest.mark.parametrize(
    ("engine", "pipelined"), [("host", False), ("host", True), ("portable", False)]
)
def test_every_order(engine: str, pipelined: bool, rng: np.random.Generator) -> None:
    embedding = make(engine, pipelined=pipelined)
    before = rows(embedding)
    orders = list(itertools.product(NAMES, repeat=LENGTH))
    if engine == "portable":  # Its eager calls are slower.
        orders = [orders[i] for i in rng.choice(len(orders), 40, replace=False)]
    for order in orders:
        model, updates = Model(), 0
        embedding.reset()
        for name in order:
            owed = model.owed
            words, text = model.call(name), call(embedding, name)
            where = (order, name, text)
            assert (words is None) == (text is None), where
            assert words is None or words in (text or ""), where
            updates += owed and name == "apply_gradients"
        if not pipelined and updates:
            # Exactly the updates that were taken, each once.
            step = 0.5 * updates
            expected = [
                v - step if i // 2 in (1, 2) else v for i, v in enumerate(before)
            ]
            assert rows(embedding) == expected, order
        (table,) = embedding.embedding_tables.values()
        table.assign(tf.reshape(before, table.shape))


@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_a_full_queue(engine: str) -> None:
    embedding, model = make(engine, pipelined=False), Model()
    for name in ["evaluate"] * (CAPACITY + 2) + ["dequeue", "evaluate", "evaluate"]:
        words, text = model.call(name), call(embedding, name)
        assert (words is None) == (text is None), text
        assert words is None or words in (text or "")
