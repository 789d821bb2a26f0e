"""Steps of the portable engine: the orders of calls, and steps that are refused.

The host engine is the oracle: after each call both engines must be in the same state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from engine_calls import MODES, Mixed, assert_same, assert_same_variables, outcome
from steps import look_up

import tpu_embedding as te
from tpu_embedding.engines import Call, Engine

CALL = Call(replica=0)


class Calls:
    """The calls of one replica on an engine, its queue, and lookups past the queue."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.queue = engine, engine.queue
        self.looked_up: list[Any] = []

    def enqueue(
        self,
        seed: int = 0,
        *,
        training: bool = True,
        bad: bool = False,
    ) -> None:
        batch = Mixed.batch(seed, bad=bad)
        call = Call(replica=0, training=training)
        self.queue.enqueue(self.engine.prepare([batch], call), call)

    def dequeue(self) -> list[tf.Tensor]:
        return self.queue.dequeue(CALL)

    def apply(self, seed: int = 0, *, bad: bool = False) -> None:
        self.queue.apply_gradients(Mixed.gradients(seed, bad=bad), CALL)

    def look_up(self, seed: int, *, bad: bool = False) -> list[tf.Tensor]:
        (prepared,) = self.engine.prepare([Mixed.batch(seed, bad=bad)], CALL)
        activations, looked_up = self.engine.lookup(prepared, CALL)
        self.looked_up.append(looked_up)
        return activations

    def update(self, which: float, seed: int, *, bad: bool = False) -> None:
        if self.looked_up:
            looked_up = self.looked_up[int(which * len(self.looked_up))]
            self.engine.update(looked_up, Mixed.gradients(seed, bad=bad), CALL)


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
def test_any_order_of_calls(kinds: str, rng: np.random.Generator) -> None:
    engines = [Calls(Mixed.engine(name)) for name in ("portable", "host")]
    trace = []
    for _ in range(40):
        name, call = random_call(rng, kinds)
        trace.append(name)
        results = [outcome(functools.partial(call, calls)) for calls in engines]
        assert_same(results[0], results[1], trace)
        assert_same_variables(engines[0].engine, engines[1].engine, trace)


WRONG_ORDERS: dict[str, tuple[str, list[Callable[[Calls], Any]]]] = {
    "full": (
        "enqueue: the queue is full (64 batches). Call dequeue once for each enqueue.",
        [Calls.enqueue] * 65,
    ),
    "nothing": (
        "dequeue: no batch is enqueued. Call enqueue before dequeue, once for each "
        "dequeue.",
        [Calls.dequeue],
    ),
    "owing": (
        "dequeue: the training batch dequeued before still owes its gradients. Call "
        "apply_gradients first, or enqueue with training=False; after a step that "
        "failed call flush and reset.",
        [Calls.enqueue, Calls.enqueue, Calls.dequeue, Calls.dequeue],
    ),
    "evaluation": (
        "apply_gradients: ",
        [lambda c: c.enqueue(training=False), Calls.dequeue, Calls.apply],
    ),
    "not_dequeued": ("apply_gradients: ", [Calls.enqueue, Calls.apply]),
    "twice": (
        "apply_gradients: no dequeued batch owes gradients",
        [Calls.enqueue, Calls.dequeue, Calls.apply, Calls.apply],
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", WRONG_ORDERS)
def test_refuses_order(case: str, mode: str) -> None:
    name, function = MODES[mode]
    message, (*right, wrong) = WRONG_ORDERS[case]
    calls = Calls(Mixed.engine(name))
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
    calls = Calls(Mixed.engine("portable"))
    calls.enqueue()
    calls.dequeue()
    with pytest.raises(tf.errors.InvalidArgumentError, match="Feature f1: the gradie"):
        calls.apply(bad=True)
    calls.apply()


def test_a_lookup_is_used_once_within_one_graph() -> None:
    calls, fresh = (Calls(Mixed.engine("portable")) for _ in range(2))

    @tf.function
    def step() -> None:
        calls.look_up(0)
        calls.update(0.0, 0)
        calls.update(0.0, 1)

    with pytest.raises(tf.errors.FailedPreconditionError, match="were applied already"):
        step()
    assert_same_variables(calls.engine, fresh.engine, "never traced to its end")


FAULTS = ["", "id", "nan", "assertion"]


class Program:
    """Steps that a fault may refuse, and the table that they leave.

    All rows have the same gradient, 1 (5 in steps with a fault), and the n-th update
    the learning rate 2^n, so that the table tells which updates were made, and as
    which.
    """

    def __init__(self, kind: str, *, graph: bool) -> None:
        self.kind = kind
        self.config = te.FeatureConfig(
            te.TableConfig(2, 1, te.RowIdInitializer(), combiner="sum", name="table")
        )
        rate = te.SGD(lambda step: 2.0 ** tf.cast(step, tf.float32))
        made = te.TPUEmbeddingV2 if kind == "V2" else te.TPUEmbedding
        self.embedding: Any = made(self.config, rate, check_numerics=True)
        self.embedding.build()
        self.run = tf.function(self._run) if graph else self._run

    @tf.autograph.experimental.do_not_convert
    def _run(self, fault: tf.Tensor) -> None:
        ids = tf.where(tf.equal(fault, 1), [0, 2], [0, 1])
        activations, preserved = look_up(self.embedding, ids)
        ok = tf.debugging.Assert(tf.not_equal(fault, 3), ["broken"])
        with tf.control_dependencies([ok]):
            # Gradients of a refused step that are applied later show.
            size = tf.where(tf.equal(fault, 0), np.float32(1), np.float32(5))
            gradients = tf.fill(tf.shape(activations), size)
        gradients = tf.where(tf.equal(fault, 2), np.float32("nan"), gradients)
        self.embedding.apply_gradients(gradients, *preserved)

    def column(self) -> list[float]:
        return self.embedding.embedding_tables[self.config.table].numpy()[:, 0].tolist()


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("kind", ["V2", "queue"])
def test_refused_steps_are_given_up(
    kind: str, graph: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Nothing of a refused step is applied, and the next step trains."""
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "portable")
    program = Program(kind, graph=graph)
    # A batch that was dequeued owes its gradients, so that only `reset` goes on.
    faults = [0, 0, 1, 2, 3] if kind == "V2" else [0, 0, 1]
    trace, good = [], 0
    for _ in range(12):
        fault = int(rng.choice(faults))
        trace.append(FAULTS[fault])
        call = functools.partial(program.run, tf.constant(fault))
        if fault:
            with pytest.raises(tf.errors.InvalidArgumentError):
                call()
        else:
            call()
            good += 1
        total = 2**good - 1
        assert program.column() == [0 - total, 1 - total], trace


def test_steps_in_a_loop_of_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "portable")
    program = Program("queue", graph=False)

    @tf.function
    def steps() -> None:
        for _ in tf.range(4):
            program.run(tf.constant(0))

    steps()
    assert program.column() == [-15, -14]


@pytest.mark.parametrize("made", [te.TPUEmbedding, te.TPUEmbeddingV2])
def test_what_it_lacks_is_refused_at_construction(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "portable")
    feature = te.FeatureConfig(te.TableConfig(2, 1, name="table"))
    way_out = "The host engine supports this, but needs the compiled library"
    message = "support `pipeline_execution_with_tensor_core=True`. " + way_out
    with pytest.raises(NotImplementedError, match=message):
        made(feature, te.SGD(1.0), True)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with (
        strategy.scope(),
        pytest.raises(NotImplementedError, match="support 2 replicas. " + way_out),
    ):
        made(feature, te.SGD(1.0))
    with pytest.raises(NotImplementedError, match="portable engine has no telemetry"):
        te.Telemetry(made(feature, te.SGD(1.0)))
