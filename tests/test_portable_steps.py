"""Steps of the portable engine: the orders of calls, and steps that are refused.

For one replica the host engine is the oracle: after each call both engines must be in
the same state. For several replicas a sum of the good steps is.
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
    outcome,
)

import tpu_embedding as te
from tpu_embedding.engines import Engine, batch_queue


class Calls:
    """The calls of one replica on an engine and its queue.

    Attributes:
      looked_up: What lookups past the queue returned.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.queue = engine, engine.queue()
        self.looked_up: list[Any] = []

    def enqueue(
        self,
        seed: int = 0,
        *,
        training: bool = True,
        bad: bool = False,
        replica: int = 0,
    ) -> None:
        batch = Mixed.batch(seed, bad=bad)
        prepared = self.engine.prepare(batch, training=training)
        self.queue.enqueue([prepared], replica, training=training)

    def dequeue(self, replica: int = 0) -> list[tf.Tensor]:
        return self.queue.dequeue(replica)

    def apply(self, seed: int = 0, *, bad: bool = False, replica: int = 0) -> None:
        self.queue.apply_gradients(Mixed.gradients(seed, bad=bad), replica)

    def look_up(self, seed: int, *, bad: bool = False) -> list[tf.Tensor]:
        prepared = self.engine.prepare(Mixed.batch(seed, bad=bad), training=True)
        activations, looked_up = self.engine.lookup(prepared, 0, training=True)
        self.looked_up.append(looked_up)
        return activations

    def update(self, which: float, seed: int, *, bad: bool = False) -> None:
        if self.looked_up:
            looked_up = self.looked_up[int(which * len(self.looked_up))]
            self.engine.update(looked_up, Mixed.gradients(seed, bad=bad), 0)


def random_call(rng: np.random.Generator, kinds: str) -> Any:
    """One call, by name and as a function of `Calls`."""
    kind = kinds[rng.integers(len(kinds))]
    training, bad = bool(rng.random() < 0.8), bool(rng.random() < 0.08)
    seed, which = int(rng.integers(1 << 30)), float(rng.random())
    calls: dict[str, Any] = {
        "e": lambda calls: calls.enqueue(seed, training=training, bad=bad),
        "d": lambda calls: calls.dequeue(),
        "a": lambda calls: calls.apply(seed, bad=bad),
        "f": lambda calls: calls.engine.flush(),
        "r": lambda calls: calls.engine.reset(),
        "l": lambda calls: calls.look_up(seed, bad=bad),
        "s": lambda calls: calls.update(which, seed, bad=bad),
    }
    return f"{kind}{'t' * training}{'b' * bad}", calls[kind]


@pytest.mark.parametrize("kinds", ["eedadadadafr", "lsslssfr"])
@pytest.mark.parametrize("pipelined", [False, True])
def test_any_order_of_calls(
    kinds: str, pipelined: bool, rng: np.random.Generator
) -> None:
    engines = [
        Calls(Mixed.engine(name, 1, pipelined=pipelined))
        for name in ("portable", "host")
    ]
    trace = []
    for number in range(40):
        name, call = random_call(rng, kinds)
        trace.append(name)
        results = [outcome(functools.partial(call, calls)) for calls in engines]
        assert_same(results[0], results[1], trace)
        # When a pending update is applied may differ, but not what it does.
        if not pipelined or number % 8 == 7:
            for calls in engines:
                calls.engine.flush()
            assert_same_variables(engines[0].engine, engines[1].engine, trace)


WRONG_ORDERS: dict[str, tuple[str, int, list[Callable[[Calls], Any]]]] = {
    "full": (
        "enqueue: the queue is full (64 batches). Call dequeue once for each enqueue.",
        1,
        [Calls.enqueue] * 65,
    ),
    "training": (
        "enqueue: the replicas disagree on `training` within one step. Pass the same "
        "value in every replica.",
        2,
        [Calls.enqueue, lambda c: c.enqueue(training=False, replica=1)],
    ),
    "nothing": (
        "dequeue: no batch is enqueued. Call enqueue before dequeue, once for each "
        "dequeue.",
        2,
        [lambda c: c.enqueue(replica=1), Calls.dequeue],
    ),
    "owing": (
        "dequeue: the training batch dequeued before still owes its gradients. Call "
        "apply_gradients first, or enqueue with training=False; after a step that "
        "failed call flush and reset.",
        1,
        [Calls.enqueue, Calls.enqueue, Calls.dequeue, Calls.dequeue],
    ),
    "other_owing": (
        "dequeue: another replica has not applied its gradients of the step before. "
        "Put the loop over steps outside of strategy.run",
        2,
        [Calls.enqueue, Calls.enqueue, Calls.dequeue, Calls.apply, Calls.dequeue],
    ),
    "evaluation": (
        "apply_gradients: ",
        1,
        [lambda c: c.enqueue(training=False), Calls.dequeue, Calls.apply],
    ),
    "not_dequeued": ("apply_gradients: ", 1, [Calls.enqueue, Calls.apply]),
    "twice": (
        "apply_gradients: no dequeued batch owes gradients",
        1,
        [Calls.enqueue, Calls.dequeue, Calls.apply, Calls.apply],
    ),
    "replicas": (
        "The gradients of this replica came before those of the replica before it.",
        2,
        [
            lambda c: c.enqueue(replica=1),
            lambda c: c.dequeue(1),
            lambda c: c.apply(replica=1),
        ],
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", WRONG_ORDERS)
def test_refuses_order(case: str, mode: str) -> None:
    name, function = MODES[mode]
    if case == "replicas" and name == "host":
        return  # Only the portable engine relies on the order of replicas.
    message, num_replicas, (*right, wrong) = WRONG_ORDERS[case]
    calls = Calls(Mixed.engine(name, num_replicas, pipelined=False))
    for call in right:
        call(calls)
    variables = calls.engine.checkpoint_variables().values()
    before = [tf.identity(v) for v in variables]
    for _ in range(2):  # The first refusal changes nothing: the second is the same.
        with pytest.raises(tf.errors.FailedPreconditionError) as raised:
            function(lambda: wrong(calls))()
        assert message in raised.value.message
    for old, new in zip(before, variables, strict=True):
        np.testing.assert_array_equal(old, new)


def test_owes_after_bad_gradients() -> None:
    calls = Calls(Mixed.engine("portable", 1, pipelined=False))
    calls.enqueue()
    calls.dequeue()
    with pytest.raises(tf.errors.InvalidArgumentError, match="Feature f1: the gradie"):
        calls.apply(bad=True)
    calls.apply()


def test_a_lookup_is_used_once_within_one_graph() -> None:
    calls, other = (
        Calls(Mixed.engine(name, 1, pipelined=False)) for name in ("portable", "host")
    )

    @tf.function
    def step() -> None:
        calls.look_up(0)
        calls.update(0.0, 0)
        calls.update(0.0, 1)

    with pytest.raises(tf.errors.FailedPreconditionError, match="were applied already"):
        step()
    other.look_up(0)
    other.update(0.0, 0)
    assert_same_variables(calls.engine, other.engine, "after one update")


FAULTS = ["", "id", "nan", "assertion"]


class Program:
    """Steps of R replicas that a fault may refuse, and the table that they leave.

    All rows have the same gradient, 1 for each replica (5 in steps with a fault), and
    the n-th update the learning rate 2^n, so that the table tells which updates were
    made, and as which.
    """

    def __init__(
        self, kind: str, num_replicas: int, *, pipelined: bool, graph: bool
    ) -> None:
        self.kind, self.num_replicas = kind, num_replicas
        devices = [f"CPU:{replica}" for replica in range(num_replicas)]
        self.strategy = tf.distribute.MirroredStrategy(devices)
        self.config = te.FeatureConfig(
            te.TableConfig(2, 1, te.RowIdInitializer(), combiner="sum", name="table")
        )
        rate = te.SGD(lambda step: 2.0 ** tf.cast(step, tf.float32))
        with self.strategy.scope():
            made = te.TPUEmbeddingV2 if kind == "V2" else te.TPUEmbedding
            self.embedding: Any = made(
                self.config, rate, pipelined, check_numerics=True
            )
            self.embedding.build()
        self.run = tf.function(self._run) if graph else self._run

    def _run(self, fault: tf.Tensor, where: tf.Tensor) -> None:
        if self.kind == "queue":
            ids = tf.constant([0, 1])
            if fault == 1 and where >= 0:
                ids = tf.constant([0, 2])
            values = self.strategy.experimental_distribute_values_from_function(
                lambda context: tf.where(
                    tf.equal(context.replica_id_in_sync_group, where),
                    ids,
                    tf.constant([0, 1]),
                )
            )
            self.embedding.enqueue(values)
        self.strategy.run(self._replica_step, args=(fault, where))

    @tf.autograph.experimental.do_not_convert
    def _replica_step(self, fault: tf.Tensor, where: tf.Tensor) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        here = tf.equal(replica, where)
        ids = tf.where(here & tf.equal(fault, 1), [0, 2], [0, 1])
        preserved: Any = None
        if self.kind == "V2":
            activations, preserved = self.embedding(ids)
        else:
            if self.kind == "queue inside":
                self.embedding.enqueue(ids)
            activations = self.embedding.dequeue()
        broken = here & tf.equal(fault, 3)
        with tf.control_dependencies([tf.debugging.Assert(~broken, ["broken"])]):
            # Gradients of a refused step that are applied later show.
            size = tf.where(tf.equal(fault, 0), np.float32(1), np.float32(5))
            gradients = tf.fill(tf.shape(activations), size)
        gradients = tf.where(here & tf.equal(fault, 2), np.float32("nan"), gradients)
        if self.kind == "V2":
            self.embedding.apply_gradients(gradients, preserved)
        else:
            self.embedding.apply_gradients(gradients)

    def column(self) -> list[float]:
        return self.embedding.embedding_tables[self.config.table].numpy()[:, 0].tolist()


@pytest.mark.parametrize(
    ("pipelined", "graph"), [(False, True), (True, False), (True, True)]
)
@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("kind", ["V2", "queue", "queue inside"])
def test_refused_steps_are_given_up(
    kind: str,
    num_replicas: int,
    pipelined: bool,
    graph: bool,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """Nothing of a refused step is applied, and the next step trains."""
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "portable")
    program = Program(kind, num_replicas, pipelined=pipelined, graph=graph)
    faults, trace, good = [0, 0, 1, 2, 3], [], 0
    if kind != "V2" and num_replicas == 1:
        faults = [0, 0, 1]  # A batch that one replica owes stays owed: see below.
    for _ in range(12):
        fault = int(rng.choice(faults))
        where = int(rng.integers(num_replicas))
        trace.append((FAULTS[fault], where))
        call = functools.partial(program.run, tf.constant(fault), tf.constant(where))
        if fault:
            with pytest.raises(tf.errors.InvalidArgumentError):
                call()
        else:
            call()
            good += 1
        if rng.random() < 0.3:
            total = num_replicas * (2**good - 1)
            assert program.column() == [0 - total, 1 - total], trace
    total = num_replicas * (2**good - 1)
    assert program.column() == [0 - total, 1 - total], trace


def test_reset_takes_a_forgotten_update_out_of_the_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "portable")
    program = Program("V2", 1, pipelined=True, graph=False)
    good = (tf.constant(0), tf.constant(0))
    for _ in range(3):
        program.run(*good)
    program.embedding.reset()  # Updates 0 and 1 are applied, update 2 is not.
    program.embedding.reset()
    assert program.column() == [-3, -2]
    program.run(*good)
    assert program.column() == [-7, -6]  # The new update is number 2.


def test_loops_of_tensorflow_inside_of_run_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "portable")
    program = Program("V2", 2, pipelined=False, graph=False)
    zero = tf.constant(0)

    @tf.function(autograph=False)
    def steps() -> None:
        def in_replica() -> None:
            def body(i: tf.Tensor) -> list[tf.Tensor]:
                program._replica_step(zero, zero)
                return [i + 1]

            tf.while_loop(lambda i: i < 3, body, [zero])

        program.strategy.run(in_replica)

    with pytest.raises(
        tf.errors.FailedPreconditionError, match=r"outside of\s+strategy.run"
    ):
        steps()


def test_steps_in_a_loop_of_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "portable")
    for pipelined in (False, True):
        program = Program("queue inside", 2, pipelined=pipelined, graph=False)

        @tf.function
        def steps(program: Program = program) -> None:
            for _ in tf.range(4):
                program._run(tf.constant(0), tf.constant(0))

        steps()
        assert program.column() == [-30, -29]


def test_a_step_interrupted_while_it_was_noted_is_given_up() -> None:
    """Replica 0 has begun the next step when replica 1 finds the refused one.

    A program that fails elsewhere stops between the notes of two replicas now and then.
    """
    refused = [[24, 24], [24, 24], [0, 1]]  # Enqueued, dequeued, owed.
    begun = [[25, 25], [25, 24], [1, 1]]
    for counts, replica in ((refused, 0), (begun, 1)):
        matrix = tf.constant([*counts, [0, 0], [1, 1], [1, 1]], tf.int64)
        if replica == 0:  # It has enqueued; replica 1 has not.
            matrix += tf.constant([[1, 0], *[[0, 0]] * 5], tf.int64)
        code, after, gave_up, training = batch_queue._dequeue(
            matrix, tf.constant(False), replica, True
        )
        assert int(code) == 0
        assert bool(training)
        assert bool(gave_up) == (replica == 1)
        assert after[1].numpy().tolist() == ([25, 24] if replica == 0 else [25, 25])
        assert after[2].numpy().tolist() == [1, 1]
