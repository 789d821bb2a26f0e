"""Many steps, many threads: flat memory, no drift, no half of an update."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cpu_engines import EACH_ENGINE
from everywhere.twins import place, strategy_of
from reliability import load
from steps import train_on
from threads import repeated

import tpu_embedding as te
from tpu_embedding import distribution
from tpu_embedding.testing import SoftwareTPUStrategy

THREADS = 8
UPDATES = {"host": 150, "portable": 25}
ROWS, DIM = 64, 3
# What the allocators of Python and TensorFlow keep; a leak of one batch for each of
# the 50,000 steps of `make fuzz` would be 100 times as much.
MAX_GROWTH = 8 << 20


def test_steps_of_random_shapes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(distribution.ENGINE_VARIABLE, "host")
    figures = load.run(600, seed)
    assert figures.traces == 3  # one for each kind of input
    assert figures.differences == 0
    assert figures.growth < MAX_GROWTH


def make(engine: str, monkeypatch: pytest.MonkeyPatch) -> te.TPUEmbedding:
    monkeypatch.setenv(distribution.ENGINE_VARIABLE, engine)
    films = te.TableConfig(ROWS, DIM, te.RowIdInitializer(), name="films")
    embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(1.0))
    embedding.build()
    return embedding


def test_eager_calls_on_the_portable_engine_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(distribution.ENGINE_VARIABLE, "portable")
    updating, go_on, looked_up = (threading.Event() for _ in range(3))

    def rate() -> float:
        updating.set()
        go_on.wait(60)
        return 1.0

    films = te.TableConfig(ROWS, DIM, te.RowIdInitializer(), name="films")
    embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(rate))
    ids = tf.constant([0], tf.int64)
    embedding.enqueue({"film": ids})
    activations = embedding.dequeue()

    def look_up() -> None:
        embedding.core.look_up([ids])
        looked_up.set()

    threads = [
        threading.Thread(target=embedding.apply_gradients, args=[activations]),
        threading.Thread(target=look_up),
    ]
    threads[0].start()
    assert updating.wait(60)
    threads[1].start()
    waited = not looked_up.wait(1)
    go_on.set()
    for thread in threads:
        thread.join()
    assert waited
    assert looked_up.is_set()


@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_lookups_while_training(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lookup sees the table as it was before an update or after it."""
    embedding = make(engine, monkeypatch)
    every_row = {"film": tf.range(ROWS, dtype=tf.int64)}
    ones = {"film": tf.ones([ROWS, DIM])}
    seen: list[set[float]] = [set() for _ in range(THREADS)]
    failed: list[object] = []

    def look_up(thread: int) -> None:
        (activations,), _ = embedding.core.look_up([every_row["film"]])
        counts = np.arange(ROWS)[:, np.newaxis] - activations.numpy()
        if np.unique(counts).size != 1 or counts[0, 0] < max(seen[thread], default=0):
            failed.append(counts)
        seen[thread].add(counts[0, 0])

    with repeated(look_up, THREADS):
        for _ in range(UPDATES[engine]):
            train_on(embedding, every_row, ones)
    assert not failed
    assert all(seen)
    (table,) = embedding.embedding_tables.values()
    expected = np.arange(ROWS)[:, np.newaxis] - float(UPDATES[engine])
    np.testing.assert_array_equal(table.numpy(), np.repeat(expected, DIM, axis=1))


@pytest.mark.parametrize(
    ("wrap", "steps"), [(lambda step: step, 16), (tf.function, 60)], ids=["", "graph"]
)
@pytest.mark.parametrize(
    ("engine", "replicas"),
    [("host", 2), ("portable", 1), ("v4", 1), ("v6e", 1), ("v6e", 2)],
)
def test_one_thread_enqueues_ahead(
    engine: str, replicas: int, wrap: Any, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one runs the steps: no batch is lost, and they stay in order."""
    place(engine, monkeypatch)
    strategy = strategy_of(engine, replicas)
    films = te.TableConfig(8, 8, te.RowIdInitializer(), combiner="sum", name="films")
    with strategy.scope():
        embedding = te.TPUEmbedding(
            te.FeatureConfig(films, output_shape=[8]), te.SGD(1.0)
        )
        embedding.build()
    ready, failed = threading.Semaphore(0), []
    enqueue = wrap(embedding.enqueue)

    def enqueue_all() -> None:
        try:
            for number in range(steps):
                enqueue(tf.fill([8], number % 8))
                ready.release()
        except tf.errors.OpError as error:
            failed.append(error)
            ready.release(steps)

    @wrap
    def step() -> Any:
        def in_replica() -> tf.Tensor:
            activations = embedding.dequeue()
            embedding.apply_gradients(tf.ones_like(activations))
            return activations

        return strategy.run(in_replica)

    thread = threading.Thread(target=enqueue_all)
    thread.start()
    found = []
    try:
        for _ in range(steps):
            assert ready.acquire(timeout=60)
            found.append(strategy.experimental_local_results(step()))
    finally:
        thread.join(timeout=60)
    assert not failed
    for number, values in enumerate(found):
        # Eight samples of each replica name one row, which each step before changed.
        expected = number % 8 - number // 8 * 8.0 * replicas
        for value in values:
            np.testing.assert_array_equal(value, np.full([8, 8], expected))


def make_v2(engine: str, monkeypatch: pytest.MonkeyPatch) -> te.TPUEmbeddingV2:
    films = te.TableConfig(ROWS, DIM, te.RowIdInitializer(), name="films")
    feature = te.FeatureConfig(films, output_shape=[16], name="film")
    if engine == "v6e":
        with SoftwareTPUStrategy(engine, 1).scope():
            return te.TPUEmbeddingV2({"film": feature}, te.SGD(1.0))
    monkeypatch.setenv(distribution.ENGINE_VARIABLE, engine)
    return te.TPUEmbeddingV2({"film": feature}, te.SGD(1.0))


def set_part(prepared: Any) -> list[Any]:
    """All tensors, of buffers the part that is set."""
    tables = dict(prepared.tables)
    for name, sizes in prepared.sizes.items():
        own = tables[name]
        fields = ("sorted_sample_ids", "sorted_token_ids", "sorted_gains")
        cut = {field: getattr(own, field)[: sizes.ids] for field in fields}
        pointers = own.row_pointers[: sizes.row_pointers]
        tables[name] = own._replace(row_pointers=pointers, **cut)
    return tf.nest.flatten(prepared._replace(tables=tables), expand_composites=True)


@pytest.mark.parametrize("engine", [*EACH_ENGINE, "v6e"])
def test_parallel_calls_of_tf_data(
    engine: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Batches prepared on several threads are those prepared one by one."""
    embedding = make_v2(engine, monkeypatch)
    batches = rng.integers(0, ROWS, [60, 16, 4])
    data = tf.data.Dataset.from_tensor_slices(batches).map(
        lambda ids: embedding.preprocess_features({"film": ids}),
        num_parallel_calls=4,
        deterministic=True,
    )
    for ids, prepared in zip(batches, data, strict=True):
        alone = embedding.preprocess_features({"film": tf.constant(ids)})
        for own, other in zip(set_part(prepared), set_part(alone), strict=True):
            np.testing.assert_array_equal(own, other)
