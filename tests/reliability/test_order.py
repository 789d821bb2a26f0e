"""Every order of a few calls: an error at the call that is wrong, and no hang."""

from __future__ import annotations

import faulthandler
import itertools
from collections.abc import Callable, Iterator
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
# One order for each refusal but that of a full queue; the last call is refused twice.
REFUSED = [
    ("dequeue",) * 2,
    ("apply_gradients",) * 2,
    ("train", *("apply_gradients",) * 2),
    ("evaluate", "dequeue", *("apply_gradients",) * 2),
    ("train", "dequeue", *("apply_gradients",) * 3),
    ("train", "train", *("dequeue",) * 3),
]
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


def calls_of(embedding: te.TPUEmbedding) -> dict[str, Callable[[], Any]]:
    return {
        "train": lambda: embedding.enqueue(BATCH),
        "evaluate": lambda: embedding.enqueue(BATCH, training=False),
        "dequeue": embedding.dequeue,
        "apply_gradients": lambda: embedding.apply_gradients(GRADIENTS),
        "flush": embedding.flush,
        "reset": embedding.reset,
    }


def refusal(call: Callable[[], Any]) -> str:
    """Makes a call; returns the text of its refusal, or nothing."""
    try:
        call()
    except tf.errors.FailedPreconditionError as error:
        return error.message
    return ""


def rows(embedding: te.TPUEmbedding) -> list[float]:
    (table,) = embedding.embedding_tables.values()
    return table.numpy().ravel().tolist()


@pytest.mark.parametrize(
    ("engine", "pipelined", "traced"),
    [
        ("host", False, False),
        ("host", True, False),
        ("portable", False, False),
        ("portable", False, True),
    ],
)
def test_every_order(
    engine: str, pipelined: bool, traced: bool, rng: np.random.Generator
) -> None:
    """Each call is refused as the model says; those that are may be traced."""
    embedding = make(engine, pipelined=pipelined)
    calls = calls_of(embedding)
    wrong = {n: tf.function(call) if traced else call for n, call in calls.items()}
    before = rows(embedding)
    orders = list(itertools.product(NAMES, repeat=LENGTH))
    if engine == "portable":  # Its eager calls are slower.
        drawn = rng.choice(len(orders), 40, replace=False)
        orders = [*REFUSED, *(orders[i] for i in drawn)]
    for order in orders:
        model, updates = Model(), 0
        embedding.reset()
        for name in order:
            owed = model.owed
            words = model.call(name)
            text = refusal((wrong if words else calls)[name])
            assert bool(words) == bool(text), (order, name, text)
            assert words in text, (order, name, text)
            updates += owed and name == "apply_gradients"
        if not pipelined:
            # Exactly the updates that were taken, each once.
            step = 0.5 * updates
            expected = [
                v - step if i // 2 in (1, 2) else v for i, v in enumerate(before)
            ]
            assert rows(embedding) == expected, order
        (table,) = embedding.embedding_tables.values()
        table.assign(tf.reshape(before, table.shape))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_a_full_queue(engine: str, traced: bool) -> None:
    calls, model = calls_of(make(engine, pipelined=False)), Model()
    for name in ["evaluate"] * (CAPACITY + 2) + ["dequeue", "evaluate", "evaluate"]:
        words = model.call(name)
        text = refusal(tf.function(calls[name]) if words and traced else calls[name])
        assert bool(words) == bool(text), text
        assert words in text
