"""Steps of the portable engine: the orders of calls, and steps that are refused.

The host engine is the oracle: after each call both engines must be in the same state.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from engine_calls import Mixed, assert_same, assert_same_variables, outcome
from steps import train_on

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


def test_steps_in_a_loop_of_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "portable")
    films = te.TableConfig(2, 1, te.RowIdInitializer(), combiner="sum", name="films")
    # The n-th update has the learning rate 2^n.
    rate = te.SGD(lambda step: 2.0 ** tf.cast(step, tf.float32))
    embedding = te.TPUEmbedding(te.FeatureConfig(films), rate)
    embedding.build()

    @tf.function
    def steps() -> None:
        for _ in tf.range(4):
            train_on(embedding, tf.constant([0, 1]))

    steps()
    assert embedding.embedding_tables[films].numpy()[:, 0].tolist() == [-15, -14]


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
