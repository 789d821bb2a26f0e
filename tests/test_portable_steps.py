"""Steps of the portable engine: the orders of calls, and replicas of which one fails.

The host engine is the oracle: after each call both must be where the other is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from engine_calls import (
    MODES,
    Mixed,
    assert_same,
    assert_same_variables,
    films,
    outcome,
)

import tpu_embedding as te
from tpu_embedding.engines import Engine


def random_call(rng: np.random.Generator, num_replicas: int, kinds: str) -> Any:
    """One call of an engine, as a function of (engine, its tickets)."""
    replica = int(rng.integers(num_replicas))
    kind = kinds[rng.integers(len(kinds))]
    training, bad = bool(rng.random() < 0.8), bool(rng.random() < 0.08)
    seed, which = int(rng.integers(1 << 30)), float(rng.random())
    everyone = range(num_replicas)

    def enqueue_all(engine: Engine, tickets: list) -> None:
        batches = [Mixed.batch(seed + r, bad=bad and r == 0) for r in everyone]
        caller = None if num_replicas > 1 else 0
        engine.enqueue(batches, caller, training=training)

    def look_up(engine: Engine, tickets: list) -> list[tf.Tensor]:
        result = engine.lookup_call(Mixed.batch(seed, bad=bad), replica)
        tickets.append((result.ticket, replica))
        return result.activations

    def submit(engine: Engine, tickets: list) -> None:
        if tickets:
            ticket, caller = tickets[int(which * len(tickets))]
            engine.submit(ticket, Mixed.gradients(seed, bad=bad), caller)

    calls: dict[str, Any] = {
        "E": enqueue_all,
        "e": lambda engine, _: engine.enqueue(
            [Mixed.batch(seed, bad=bad)], replica, training=training
        ),
        "d": lambda engine, _: engine.dequeue(replica),
        "a": lambda engine, _: engine.apply_gradients(
            Mixed.gradients(seed, bad=bad), replica
        ),
        "f": lambda engine, _: engine.flush(),
        "r": lambda engine, _: engine.reset(),
        "l": look_up,
        "s": submit,
    }
    return f"{kind}{replica}{'t' * training}{'b' * bad}", calls[kind]


@pytest.mark.parametrize("kinds", ["eEdadadadafr", "lsslssfr", "Edadaels"])
@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("pipelined", [False, True])
def test_any_order_of_calls(
    kinds: str, num_replicas: int, pipelined: bool, rng: np.random.Generator
) -> None:
    """A random walk: after each call both engines are where the other is."""
    engines = [
        Mixed.engine(name, num_replicas, pipelined=pipelined)
        for name in ("portable", "host")
    ]
    tickets: list[list] = [[], []]
    trace = []
    for _ in range(30):
        name, call = random_call(rng, num_replicas, kinds)
        trace.append(name)
        results = [
            outcome(functools.partial(call, engine, own))
            for engine, own in zip(engines, tickets, strict=True)
        ]
        assert_same(results[0], results[1], trace)
        assert_same_variables(engines[0], engines[1], trace)


def enqueue(engine: Engine, replica: int = 0, *, training: bool = True) -> None:
    engine.enqueue([Mixed.batch(0)], replica, training=training)


def apply(engine: Engine, replica: int = 0) -> None:
    engine.apply_gradients(Mixed.gradients(0), replica)


WRONG_ORDERS: dict[str, tuple[str, int, list[Callable[[Engine], Any]]]] = {
    "full": (
        "enqueue: the queue is full (64 batches). Call dequeue once for each enqueue.",
        1,
        [enqueue] * 65,
    ),
    "training": (
        "enqueue: the replicas disagree on `training` within one step. Pass the same "
        "value in every replica.",
        2,
        [enqueue, lambda e: enqueue(e, 1, training=False)],
    ),
    "nothing": (
        "dequeue: no batch is enqueued. Call enqueue before dequeue, once for each "
        "dequeue.",
        2,
        [lambda e: enqueue(e, 1), lambda e: e.dequeue(0)],
    ),
    "owing": (
        "dequeue: the training batch dequeued before still owes its gradients. Call "
        "apply_gradients first, or enqueue with training=False; after a step that "
        "failed call reset.",
        1,
        [enqueue, enqueue, lambda e: e.dequeue(0), lambda e: e.dequeue(0)],
    ),
    "other_owing": (
        "dequeue: another replica has not applied its gradients of the step before. "
        "Put the loop over steps outside of strategy.run; after a step that failed "
        "call reset.",
        2,
        [enqueue, enqueue, lambda e: e.dequeue(0), apply, lambda e: e.dequeue(0)],
    ),
    "evaluation": (
        "apply_gradients: the batch was enqueued with training=False. Enqueue with "
        "training=True to train on it.",
        1,
        [lambda e: enqueue(e, training=False), lambda e: e.dequeue(0), apply],
    ),
    "not_dequeued": (
        "apply_gradients: the enqueued batch was not dequeued. Call dequeue first.",
        1,
        [enqueue, apply],
    ),
    "twice": (
        "apply_gradients: no dequeued batch owes gradients; they can be applied once "
        "per dequeue.",
        1,
        [enqueue, lambda e: e.dequeue(0), apply, apply],
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", WRONG_ORDERS)
def test_refuses_order(case: str, mode: str) -> None:
    name, function = MODES[mode]
    message, num_replicas, (*right, wrong) = WRONG_ORDERS[case]
    engine = Mixed.engine(name, num_replicas, pipelined=False)
    for call in right:
        call(engine)
    before = [tf.identity(v) for v in engine.checkpoint_variables().values()]
    for _ in range(2):  # The first refusal changes nothing: the second is the same.
        with pytest.raises(tf.errors.FailedPreconditionError) as raised:
            function(lambda: wrong(engine))()
        assert message in raised.value.message
    for old, new in zip(before, engine.checkpoint_variables().values(), strict=True):
        np.testing.assert_array_equal(old, new)


def step_of_two(engine: Engine) -> None:
    """One right step of two replicas, which must train every table."""
    before = [table.parameters.numpy() for table in engine.tables]
    engine.enqueue([Mixed.batch(5), Mixed.batch(6)], None, training=True)
    for replica in range(2):
        engine.dequeue(replica)
    for replica in range(2):
        apply(engine, replica)
    engine.flush()
    for old, table in zip(before, engine.tables, strict=True):
        assert (old != table.parameters.numpy()).any()


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("are_all_there", [False, True])
def test_goes_on_after_bad_gradients(are_all_there: bool, pipelined: bool) -> None:
    """Gradients of one of several replicas that fail give the step up, no more."""
    engine = Mixed.engine("portable", 2, pipelined=pipelined)
    if are_all_there:
        engine.enqueue([Mixed.batch(1), Mixed.batch(2)], None, training=True)
    else:
        enqueue(engine, 0)
    engine.dequeue(0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Feature f1: the gradie"):
        engine.apply_gradients(Mixed.gradients(0, bad=True), 0)
    with pytest.raises(tf.errors.FailedPreconditionError, match="no dequeued batch"):
        apply(engine, 0)
    step_of_two(engine)


def test_owes_after_bad_gradients() -> None:
    engine = Mixed.engine("portable", 1, pipelined=False)
    enqueue(engine)
    engine.dequeue(0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Feature f1: the gradie"):
        engine.apply_gradients(Mixed.gradients(0, bad=True), 0)
    apply(engine)


@pytest.mark.parametrize("call", ["enqueue", "dequeue", "apply_gradients"])
def test_call_broken_off(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stops a call before the ledger is written leaves all as it was."""
    engine: Any = Mixed.engine("portable", 1, pipelined=False)
    calls = {
        "enqueue": lambda: enqueue(engine),
        "dequeue": lambda: engine.dequeue(0),
        "apply_gradients": lambda: apply(engine),
    }
    for name, run in calls.items():
        if name == call:
            with monkeypatch.context() as patch:
                patch.setattr(engine._steps, "_commit", lambda outcome: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    run()
        run()


@pytest.mark.parametrize("bad_replica", [0, 1])
def test_replica_with_bad_input(
    bad_replica: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one graph under MirroredStrategy: nothing changes, then training goes on."""
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "portable")
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    table = films()
    with strategy.scope():
        embedding = te.TPUEmbedding(te.FeatureConfig(table), te.SGD(1.0))

    def in_replica(ids: tf.Tensor) -> None:
        embedding.enqueue(ids)
        embedding.apply_gradients(tf.ones_like(embedding.dequeue()))

    @tf.function(reduce_retracing=True)
    def step(ids: tf.Tensor) -> None:
        shards = tf.split(ids, 2)
        values = strategy.experimental_distribute_values_from_function(
            lambda context: tf.identity(shards[context.replica_id_in_sync_group])
        )
        strategy.run(in_replica, args=(values,))

    start = [[float(row)] * 2 for row in range(8)]
    bad = tf.where(tf.range(4) // 2 == bad_replica, 8, tf.range(4))
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="has id 8, but ids"):
            step(bad)
        np.testing.assert_array_equal(embedding.embedding_tables[table], start)
    step(tf.range(4))
    start[:4] = [[row - 1.0] * 2 for row in range(4)]
    np.testing.assert_array_equal(embedding.embedding_tables[table], start)


def test_a_ticket_is_used_once_within_one_graph():
    engine, other = (
        Mixed.engine(name, 1, pipelined=False) for name in ("portable", "host")
    )

    @tf.function
    def step() -> None:
        ticket = engine.lookup_call(Mixed.batch(0), 0).ticket
        engine.submit(ticket, Mixed.gradients(0), 0)
        engine.submit(ticket, Mixed.gradients(1), 0)

    with pytest.raises(tf.errors.FailedPreconditionError, match="were applied already"):
        step()
    other.submit(other.lookup_call(Mixed.batch(0), 0).ticket, Mixed.gradients(0), 0)
    assert_same_variables(engine, other, "after one update")
