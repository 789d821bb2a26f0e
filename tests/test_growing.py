"""Growing tables: against static tables with the same rows, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance import cases
from optimizer_cases import Case, each_variant
from reference import growing, hashing, int8_rows, rounding
from reference.lookup import samples_of
from replica_values import mirrored, of_replicas, replicated, this_replica
from steps import evaluate_on, train_on

import tpu_embedding as te
from tpu_embedding.tables.rows import STORED

BFLOAT16: Any = tf.bfloat16.as_numpy_dtype
D = 4
# Extremes, and ids whose low bits are alike.
POOL = np.array(
    [0, -1, 5, 2**63 - 1, -(2**63), 1 << 32, 3 << 32, 7 << 48, 12, -77], np.int64
)


def _as_ids(value: Any, ids: np.ndarray) -> Any:
    """The same input with `ids[i]` in the place of i."""
    return cases.with_values(value, ids[cases.values_of(value)])


def _first_values(ids: np.ndarray, **table: Any) -> np.ndarray:
    """What the rows of these ids start as: what evaluation sees of unknown ones."""
    vocabulary = te.GrowingVocabulary(1000, unknown="initializer")
    embedding = te.TPUEmbedding(
        te.FeatureConfig(te.TableConfig(vocabulary, D, **table)), None
    )
    return evaluate_on(embedding, tf.constant(ids)).numpy()


def _train(
    embedding: Any, strategy: tf.distribute.Strategy, steps: Sequence[Any]
) -> list[np.ndarray]:
    """One update for each element, which has a batch for each replica."""
    found = []
    queues = isinstance(embedding, te.TPUEmbedding)
    for number, batches in enumerate(steps):
        batch = [of_replicas(strategy, own) for own in zip(*batches, strict=True)]
        if queues:
            embedding.enqueue(batch)

        def in_replica(own: Any, number: int = number) -> list[tf.Tensor]:
            activations, *preserved = (
                [embedding.dequeue()] if queues else embedding(own)
            )
            gradients = [
                tf.random.stateless_normal(a.shape, [number, 10 * this_replica() + f])
                for f, a in enumerate(activations)
            ]
            embedding.apply_gradients(gradients, *preserved)
            return activations

        for activation in strategy.run(in_replica, args=(batch,)):
            values = strategy.experimental_local_results(activation)
            found += [value.numpy() for value in values]
    embedding.flush()
    return found


def _order_of_sight(
    inputs: Sequence[cases.Input], batches: Sequence[Sequence[Any]]
) -> list[int]:
    """The places in POOL that occur, in the order in which they get rows."""
    seen: dict[int, None] = {}
    for batch in batches:
        for value, spec in zip(batch, inputs, strict=True):
            samples = samples_of(
                value, None, spec.max_sequence_length, spec.output_shape
            )
            seen.update((i, None) for own in samples.entries for i, _ in own)
    return list(seen)


def _assert_as_static(
    inputs: Sequence[cases.Input],
    optimizer: Any,
    rng: np.random.Generator,
    *,
    replicas: int = 1,
    pipelined: bool = False,
    make: Any = te.TPUEmbedding,
    **table: Any,
) -> None:
    """Trains a growing table, and a static one with its rows: the bits are equal."""
    steps = [
        [[i.draw(rng, len(POOL)) for i in inputs] for _ in range(replicas)]
        for _ in range(4)
    ]
    strategy = replicated(replicas)
    order = _order_of_sight(inputs, [batch for step in steps for batch in step])
    rows = np.zeros(len(POOL), np.int64)
    rows[order] = np.arange(len(order))
    values = _first_values(POOL[order])

    def embed(vocabulary: Any, initializer: Any) -> tuple[Any, Any]:
        config = te.TableConfig(vocabulary, D, initializer, **table)
        features = [
            te.FeatureConfig(config, i.max_sequence_length, output_shape=i.output_shape)
            for i in inputs
        ]
        with strategy.scope():
            embedding = make(
                features, optimizer, pipeline_execution_with_tensor_core=pipelined
            )
        return embedding, config

    def with_ids(ids: np.ndarray) -> list[Any]:
        return [[[_as_ids(v, ids) for v in b] for b in step] for step in steps]

    ours, grown = embed(te.GrowingVocabulary(100), None)
    static, fixed = embed(len(order), lambda shape, dtype: tf.cast(values, dtype))
    found = _train(ours, strategy, with_ids(POOL))
    expected = _train(static, strategy, with_ids(rows))
    names = [i.name for i in inputs]
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert np.array_equal(a, b), (names, number)
    for name, array in static.variables[fixed].items():
        own = ours.variables[grown][name]
        assert np.array_equal(own.numpy(), array.numpy()), name
    contents = ours.vocabularies[grown]
    assert contents.ids.tolist() == sorted(POOL[order])
    assert [
        rows[POOL.tolist().index(i)] for i in contents.ids
    ] == contents.rows.tolist()


def test_first_values_follow_the_initializer() -> None:
    """Quantiles, by TensorFlow's function, of the numbers that the reference makes."""
    numbers = np.array([growing.uniforms(0, int(i), D) for i in POOL])
    below, above = (0.5 * (1 + math.erf(bound / math.sqrt(2))) for bound in (-2.0, 2.0))
    initializers = tf.keras.initializers
    for initializer, expected in (
        (None, 0.5 * tf.math.ndtri(below + (above - below) * numbers)),
        (initializers.RandomNormal(1.0, 3.0), 1.0 + 3.0 * tf.math.ndtri(numbers)),
        (initializers.RandomUniform(-2.0, 1.0), -2.0 + 3.0 * numbers),
        (initializers.Constant(0.75), np.full((len(POOL), D), 0.75)),
        ("ones", np.ones((len(POOL), D))),
    ):
        found = _first_values(POOL, initializer=initializer)
        # The quantile has seven digits.
        np.testing.assert_allclose(found, expected, rtol=3e-7, atol=3e-7)


@each_variant
def test_every_optimizer_trains_as_a_static_table(
    case: Case, options: dict[str, Any], rng: np.random.Generator
) -> None:
    inputs = [i for i in cases.INPUTS if i.name in ("dense2", "ragged")]
    _assert_as_static(inputs, case.cls(**options), rng, combiner="sum")


@pytest.mark.parametrize("make", [te.TPUEmbedding, te.TPUEmbeddingV2])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_every_input_trains_as_a_static_table(
    combiner: str, make: Any, rng: np.random.Generator
) -> None:
    for spec in cases.INPUTS:
        _assert_as_static([spec], te.Adagrad(0.3), rng, combiner=combiner, make=make)


@pytest.mark.parametrize(
    ("replicas", "pipelined", "make"),
    [
        (1, True, te.TPUEmbedding),
        (2, False, te.TPUEmbedding),
        (3, True, te.TPUEmbedding),
        (2, False, te.TPUEmbeddingV2),
    ],
)
def test_steps_of_replicas_and_pending_updates_are_as_static(
    replicas: int, pipelined: bool, make: Any, rng: np.random.Generator
) -> None:
    inputs = [i for i in cases.INPUTS if i.name in ("dense2", "ragged")]
    _assert_as_static(
        inputs, te.Adam(0.3), rng, replicas=replicas, pipelined=pipelined, make=make
    )


class _Rounded:
    """The rows of ids as a table of bfloat16 or int8 stores them."""

    def __init__(self, dtype: str, seed: int) -> None:
        self._is_coded, self._seed = dtype == "int8", seed
        self.stored: dict[int, list[np.ndarray]] = {}

    def write(self, id_: int, values: np.ndarray, step: int) -> None:
        row = hashing.mixed(id_ % 2**64) % 2**32
        if self._is_coded:
            grid = self.stored.get(id_, [None, np.zeros([1, 2], BFLOAT16)])[1]
            row_of = np.array([row]), self._seed, step
            self.stored[id_] = [*int8_rows.store(values[np.newaxis], grid, *row_of)]
            return
        is_new = id_ not in self.stored
        rounded = (
            rounding.nearest(values)
            if is_new
            else rounding.round_row(values, self._seed, step, row)
        )
        self.stored[id_] = [rounded[np.newaxis].astype(BFLOAT16)]

    def read(self, id_: int) -> np.ndarray:
        (row,) = (
            int8_rows.values_of(*self.stored[id_])
            if self._is_coded
            else self.stored[id_][0].astype(np.float32)
        )
        return row


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_rounded_rows_have_the_random_bits_of_their_ids(
    eviction: str, dtype: str, rng: np.random.Generator
) -> None:
    """An id that comes back begins anew, also where its row has another grid."""
    vocabulary = te.GrowingVocabulary(7, eviction=eviction, min_rows=2, seed=3)
    start = tf.keras.initializers.RandomUniform(-2.0, 1.0)
    table = te.TableConfig(
        vocabulary, 20, start, name="films", dtype=dtype, rounding_seed=2**40 + 7
    )
    embedding = te.TPUEmbedding({"film": te.FeatureConfig(table)}, te.SGD(1.0))
    expected, back = _Rounded(dtype, 2**40 + 7), 0
    gone: set[int] = set()
    for step in range(12):
        ids = rng.permutation(POOL)[:4]
        for id_ in set(ids.tolist()) - {*expected.stored}:
            first = -2.0 + 3.0 * np.array(growing.uniforms(3, id_, 20))
            expected.write(id_, first.astype(np.float32), 0)
            back += id_ in gone
        embedding.enqueue({"film": tf.constant(ids)})
        values = embedding.dequeue()["film"].numpy()
        np.testing.assert_array_equal(values, [expected.read(i) for i in ids.tolist()])
        gradient = rng.normal(size=values.shape).astype(np.float32) * 10.0 ** -(
            step % 3
        )
        embedding.apply_gradients({"film": tf.constant(gradient)})
        for id_, x in zip(ids.tolist(), values - gradient, strict=True):
            expected.write(id_, x, step)
        if step % 3 == 2:
            embedding.evict(table)
        state = embedding.core.growing()["films"].read()
        lost = {*expected.stored} - {*state["ids"].tolist()}
        gone |= lost
        for id_ in lost:
            del expected.stored[id_]
        arrays = [state[name] for name in STORED if name in state]
        for place, id_ in enumerate(state["ids"].tolist()):
            for own, array in zip(expected.stored[id_], arrays, strict=True):
                found = array[place].view(np.uint8)
                np.testing.assert_array_equal(found, own[0].view(np.uint8))
    assert back > 0


SHARED: Any = {"unknown": "shared_row", "when_full": "shared_row"}


def _grown(
    max_rows: int,
    make: Any = te.TPUEmbedding,
    *,
    pipelined: bool = False,
    check_numerics: bool = False,
    **vocabulary: Any,
) -> tuple[Any, te.TableConfig]:
    """Makes an embedding of a growing table of ones, "films", and its table."""
    grows = te.GrowingVocabulary(max_rows, **vocabulary)
    table = te.TableConfig(grows, 2, "ones", combiner="sum", name="films")
    features = {"film": te.FeatureConfig(table, name="film")}
    return make(features, te.SGD(0.5), pipelined, check_numerics=check_numerics), table


def _step(embedding: Any, ids: Sequence[int]) -> list[float]:
    """Trains with gradients of ones; returns the first column of the activations."""
    found = train_on(embedding, {"film": tf.constant(ids, tf.int64)})["film"]
    return found[:, 0].numpy().tolist()


def _look_up(embedding: te.TPUEmbedding, ids: Sequence[int]) -> list[float]:
    found = evaluate_on(embedding, {"film": tf.constant(ids, tf.int64)})["film"]
    return found[:, 0].numpy().tolist()


def test_evaluation_creates_nothing() -> None:
    embedding, table = _grown(10)
    assert _look_up(embedding, [3, 4]) == [0, 0]
    assert _step(embedding, [3, -3]) == [1, 1]
    assert _look_up(embedding, [3, 4, -3]) == [0.5, 0, 0.5]
    contents = embedding.vocabularies[table]
    assert contents.ids.tolist() == [-3, 3]
    assert contents.rows.tolist() == [1, 0]
    assert (contents.unknown, contents.admitted, contents.refused) == (2, 2, 0)
    assert embedding.embedding_tables[table].shape.as_list() == [None, 2]
    assert embedding.embedding_tables[table].numpy().tolist() == [[0.5] * 2] * 2


def test_int32_ids_and_functions() -> None:
    embedding, table = _grown(10)

    @tf.function
    def step(ids: tf.Tensor) -> tf.Tensor:
        return train_on(embedding, {"film": ids})["film"]

    step(tf.constant([7, -7]))
    assert step(tf.constant([-7, 8])).numpy()[:, 0].tolist() == [0.5, 1]
    assert embedding.vocabularies[table].ids.tolist() == [-7, 7, 8]


def test_what_an_unknown_id_looks_up() -> None:
    """An update trains what its lookup read, also if it gives the id a row."""
    zeros, _ = _grown(10, min_count=2)
    assert _step(zeros, [3]) == [0]
    assert _step(zeros, [3]) == [0]
    assert _step(zeros, [3]) == [1]
    assert _look_up(zeros, [3, 4]) == [0.5, 0]
    first, _ = _grown(10, min_count=2, unknown="initializer")
    assert _step(first, [3]) == [1]
    assert _step(first, [3]) == [1]
    assert _look_up(first, [3, 4]) == [0.5, 1]
    shared, table = _grown(10, min_count=2, unknown="shared_row")
    assert _look_up(shared, [3]) == [1]
    assert _step(shared, [3, 4, 5]) == [1, 1, 1]
    assert _step(shared, [3, 4]) == [-0.5, -0.5]
    assert _look_up(shared, [3, 4, 5]) == [1, 1, -1.5]
    contents = shared.vocabularies[table]
    assert contents.ids.tolist() == [3, 4]
    assert contents.rows.tolist() == [1, 2]
    assert (contents.unknown, contents.admitted, contents.refused) == (5, 2, 3)


def test_full_table_refuses_and_nothing_changes() -> None:
    embedding, table = _grown(3, functools.partial(te.TPUEmbedding, batch_size=2))
    _step(embedding, [1, 2])
    before = embedding.embedding_tables[table].numpy()
    text = (
        "Table films is full: 2 of max_rows=3 rows are in use, the update needs 2 more"
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        _step(embedding, [3, 4])
    assert np.array_equal(embedding.embedding_tables[table].numpy(), before)
    assert embedding.vocabularies[table].ids.tolist() == [1, 2]
    embedding.reset()
    assert _step(embedding, [1, 3]) == [0.5, 1]
    with pytest.raises(tf.errors.InvalidArgumentError, match="is full: 3 of"):
        _step(embedding, [1, 4])


def test_full_table_shares_a_row() -> None:
    embedding, table = _grown(3, **SHARED)
    assert _step(embedding, [1, 2, 3, 4]) == [1, 1, 1, 1]
    assert _look_up(embedding, [1, 2, 3, 4]) == [0.5, 0.5, 0, 0]
    assert embedding.vocabularies[table].refused == 2


@pytest.mark.parametrize(
    "options",
    [{"eviction": "age", "max_age": 1000}, {"eviction": "lru", "min_rows": 2}, {}],
)
def test_full_table_trains_the_row_that_lookups_read(options: dict[str, Any]) -> None:
    embedding, table = _grown(3, **SHARED, **options)
    assert _step(embedding, [1, 2]) == [1, 1]
    assert _step(embedding, [7]) == [1]
    assert _step(embedding, [7, 8, 1]) == [0.5, 0.5, 0.5]
    assert _step(embedding, [7]) == [-0.5]
    assert _look_up(embedding, [7, 9, 1, 2]) == [-1, -1, 0, 0.5]
    assert embedding.vocabularies[table].ids.tolist() == [1, 2]


def test_lookups_promise_the_rows_that_are_free() -> None:
    vocabulary = te.GrowingVocabulary(4, unknown="shared_row", when_full="shared_row")
    table = te.TableConfig(vocabulary, 2, "ones", combiner="sum")
    embedding = te.TPUEmbedding(te.FeatureConfig(table), te.SGD(0.5))
    core, gradients = embedding.core, [tf.ones([2, 2])]

    def look_up(ids: list[int]) -> tuple[list[float], Any]:
        (found,), looked_up = core.look_up([tf.constant(ids)])
        return found[:, 0].numpy().tolist(), looked_up

    core.update(look_up([1, 0])[1], gradients)  # One row of three is left.
    core.update(look_up([0, 0])[1], gradients)
    values, promised = look_up([2, 3])
    assert values == [1, 1]
    values, other = look_up([4, 2])  # 2 is promised already.
    assert values == [1, 1]
    core.update(other, gradients)
    assert embedding.vocabularies[table].ids.tolist() == [0, 1, 2]
    core.update(promised, gradients)
    contents = embedding.vocabularies[table]
    assert contents.ids.tolist() == [0, 1, 2]
    rows = embedding.embedding_tables[table].numpy()[:, 0]
    assert rows[contents.rows].tolist() == [-0.5, 0.5, 0]
    assert rows[0] == 0  # 3 and 4 have read the shared row.


@pytest.mark.parametrize("unknown", ["zeros", "shared_row"])
def test_pending_update_admits_what_was_looked_up(unknown: str) -> None:
    embedding, table = _grown(
        10, min_count=2, unknown=unknown, eviction="lru", min_rows=5, pipelined=True
    )
    shared = unknown == "shared_row"
    # The shared row is one update old in each lookup.
    expected = [1, 1, 0.5] if shared else [0, 0, 0]
    assert [_step(embedding, [7])[0] for _ in range(3)] == expected
    embedding.flush()
    contents = embedding.vocabularies[table]
    assert contents.hits.tolist() == [3]  # An occurrence counts, whatever it trains.
    assert contents.last_updates.tolist() == [3]
    rows = embedding.embedding_tables[table].numpy()[:, 0]
    assert rows[contents.rows].tolist() == [1]
    assert rows.tolist() == ([-0.5, 1] if shared else [1])


def test_weight_gradients_have_the_row_that_the_lookup_read() -> None:
    embedding, _ = _grown(3, **SHARED)
    _step(embedding, [1])
    features = {"film": tf.constant([[2, 3, 1]])}
    weights = {"film": tf.ones([1, 3])}
    for expected in ([2, 2, 1], [1, 1, 0]):
        embedding.enqueue(features, weights)
        gradients = {"film": tf.ones_like(embedding.dequeue()["film"])}
        found = embedding.weight_gradients(gradients, features, weights)["film"]
        assert found.numpy().tolist() == [expected]
        embedding.apply_gradients(gradients)


def test_rows_that_were_not_used_are_evicted() -> None:
    embedding, table = _grown(4, eviction="lru", min_rows=2)
    for ids in ([1], [2], [3], [1, 4], [5]):
        _step(embedding, ids)
    contents = embedding.vocabularies[table]
    assert {1, 4, 5} <= set(contents.ids.tolist())
    assert contents.evicted > 0
    assert contents.rows_of(contents.ids).tolist() == contents.rows.tolist()
    assert contents.rows_of([[9, 5]]).tolist() == [[-1, contents.rows[-1]]]
    last = dict(zip(contents.ids.tolist(), contents.last_updates, strict=True))
    assert (last[1], last[4], last[5]) == (4, 4, 5)
    assert _step(embedding, [2]) == [1]  # It is a new one.


def test_rows_are_evicted_by_hand() -> None:
    embedding, table = _grown(9, eviction="age", max_age=2, pipelined=True)
    for ids in ([1], [2], [3], [4]):
        _step(embedding, ids)
    # The pending update is applied, and evicts those that are too old.
    assert embedding.evict(table) == 0
    assert embedding.vocabularies[table].ids.tolist() == [2, 3, 4]
    embedding, table = _grown(9, eviction="lfu", min_rows=2)
    for ids in ([1, 1], [2, 3], [4]):
        _step(embedding, ids)
    embedding.enqueue({"film": tf.constant([2])})
    embedding.dequeue()  # Its update will come.
    assert embedding.evict(table) == 2
    contents = embedding.vocabularies[table]
    assert contents.ids.tolist() == [1, 2]
    assert contents.evicted == 2
    static, table = _grown(9)
    with pytest.raises(ValueError, match="has eviction=None, which does not say which"):
        static.evict(table)
    with pytest.raises(ValueError, match="Growing tables: films"):
        embedding.evict(table)


@pytest.mark.parametrize("kind", [te.TPUEmbedding, te.TPUEmbeddingV2])
def test_rows_age_by_the_clock_of_the_user(kind: Any, tmp_path: pathlib.Path) -> None:
    vocabulary = te.GrowingVocabulary(9, eviction="age", max_age=60, clock=True)
    films = te.TableConfig(vocabulary, 2, "ones", name="films")

    def make() -> Any:
        return kind({"film": te.FeatureConfig(films)}, te.SGD(0.5))

    def step(embedding: Any, ids: Any, clock: Any) -> None:
        train_on(embedding, {"film": ids}, clock=clock)

    embedding = make()
    step(embedding, tf.constant([1]), 1000)
    traced = tf.function(lambda ids, clock: step(embedding, ids, clock))
    traced(tf.constant([2]), tf.constant(1060))
    assert embedding.vocabularies[films].ids.tolist() == [1, 2]
    contents = embedding.vocabularies[films]
    assert contents.last_updates.tolist() == [1000, 1060]
    before = embedding.embedding_tables[films].numpy()
    for clock, error, text in (
        (1059, tf.errors.InvalidArgumentError, "clock goes back from 1060 to 1059"),
        (-1, tf.errors.InvalidArgumentError, "the clock is -1"),
        (None, ValueError, "table 'films' has clock=True. Pass `clock`, an integer"),
        (2000.5, TypeError, "`clock` must be an integer"),
        (True, TypeError, "`clock` must be an integer"),
    ):
        with pytest.raises(error, match=text):
            step(embedding, tf.constant([3]), clock)
        if kind is te.TPUEmbedding:
            embedding.reset()
    shapes = [tf.TensorSpec([1], tf.int64), tf.TensorSpec(None, tf.int64)]
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"Shape of tensor .*\[0\]"
    ):
        tf.function(traced.python_function, shapes)([3], tf.zeros([0], tf.int64))
    embedding.reset()
    assert np.array_equal(embedding.embedding_tables[films].numpy(), before)
    paths = (
        te.checkpoint.save(embedding, tmp_path / "ours"),
        tf.train.Checkpoint(embedding=embedding).write(str(tmp_path / "theirs")),
    )
    for path in paths:
        restored = make()
        te.checkpoint.restore(restored, path)
        with pytest.raises(tf.errors.InvalidArgumentError, match="goes back from 1060"):
            step(restored, tf.constant([3]), 0)
        if kind is te.TPUEmbedding:
            restored.reset()
        step(restored, tf.constant([3]), 1061)  # 1 is older than 60.
        assert restored.vocabularies[films].ids.tolist() == [2, 3]
    step(embedding, tf.constant([3]), np.int64(1120))
    assert embedding.vocabularies[films].ids.tolist() == [2, 3]
    assert embedding.evict(films) == 0
    step(embedding, tf.constant([3]), 1121)
    assert embedding.vocabularies[films].ids.tolist() == [3]
    without = te.TableConfig(te.GrowingVocabulary(9), 2, name="films")
    other = te.TPUEmbedding({"film": te.FeatureConfig(without)}, te.SGD(0.5))
    with pytest.raises(ValueError, match="has clock=False, but was saved with"):
        te.checkpoint.restore(other, paths[0])
    with pytest.raises(ValueError, match="`clock` was passed, but no table has"):
        other.apply_gradients({"film": None}, clock=3)
    with pytest.raises(NotImplementedError, match="'films' has clock=True, but a "):
        te.keras.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_pending_update_keeps_its_clock(replicas: int) -> None:
    strategy = mirrored(replicas)
    with strategy.scope():
        embedding, films = _grown(
            9, eviction="age", max_age=5, clock=True, pipelined=True
        )

    def step(ids: tf.Tensor, clock: tf.Tensor) -> None:
        embedding.enqueue({"film": ids})
        ones = {"film": tf.ones_like(embedding.dequeue()["film"])}
        embedding.apply_gradients(ones, clock=clock)

    for ids, clock in ([1], 10), ([2], 15), ([3], 16):
        strategy.run(step, args=(tf.constant(ids), tf.constant(clock)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="goes back from 16 to 15"):
        strategy.run(step, args=(tf.constant([4]), tf.constant(15)))
    embedding.flush()
    contents = embedding.vocabularies[films]
    assert contents.ids.tolist() == [2, 3]
    assert contents.last_updates.tolist() == [15, 16]


@pytest.mark.parametrize("replicas", [1, 2])
def test_refused_update_of_v2_lets_go_of_its_rows(replicas: int) -> None:
    """Also while its preserved outputs exist, as those in a traceback do."""
    strategy = mirrored(replicas)
    with strategy.scope():
        embedding, table = _grown(
            9, te.TPUEmbeddingV2, eviction="lru", min_rows=1, check_numerics=True
        )
    kept = []

    def step(ids: Sequence[int], *, bad: bool = False) -> None:
        def in_replica() -> None:
            found, preserved = embedding({"film": tf.constant(ids, tf.int64)})
            value = np.nan if bad and this_replica() == replicas - 1 else 1.0
            kept.append(preserved)
            embedding.apply_gradients({"film": value * found["film"]}, preserved)

        strategy.run(in_replica)

    step([1, 2, 3])
    kept.clear()
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        step([1, 2], bad=True)
    assert embedding.evict(table) == 2
    step([3, 4])
    assert embedding.vocabularies[table].ids.tolist() == [3, 4]


def test_telemetry_counts_ids_since_it_began() -> None:
    embedding, table = _grown(4, min_count=2, eviction="lru", min_rows=1)
    _step(embedding, [1, 1, 2])
    telemetry = te.Telemetry(embedding, every=2)
    for ids in ([3, 3, 2], [4, 4, 5], [6, 6]):
        _step(embedding, ids)
    embedding.evict(table)
    figures = telemetry.read()["films"]
    found = {
        name: figures[f"{name}_ids"]
        for name in ("unknown", "admitted", "refused", "evicted")
    }
    contents = embedding.vocabularies[table]
    assert (contents.unknown, contents.admitted) == (7, 5)
    assert found == {
        "unknown": (5, True),
        "admitted": (4, True),
        "refused": (1, True),
        "evicted": (contents.evicted, True),
    }
    assert contents.evicted > 0


def test_a_lookup_leaves_the_pending_update_its_room() -> None:
    embedding, table = _grown(2, eviction="lru", min_rows=1, pipelined=True)
    _step(embedding, [1, 2])
    _step(embedding, [3])
    embedding.enqueue({"film": tf.constant([1, 2])})
    with pytest.raises(tf.errors.InvalidArgumentError, match="Call `flush` before"):
        embedding.dequeue()
    embedding.flush()
    assert embedding.vocabularies[table].ids.tolist() == [2, 3]
    assert embedding.dequeue()["film"].numpy().tolist() == [[1, 1], [0.5, 0.5]]


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@pytest.mark.parametrize("unknown", ["zeros", "shared_row"])
def test_small_tables_evict_by_default(eviction: str, unknown: str) -> None:
    for max_rows in range(2, 14):
        embedding, table = _grown(max_rows, eviction=eviction, unknown=unknown)
        for number in range(2 * max_rows):
            _step(embedding, [number])
        contents = embedding.vocabularies[table]
        assert contents.ids[-1] == 2 * max_rows - 1
        assert contents.evicted >= max_rows


def test_error_of_a_full_table_names_min_rows() -> None:
    embedding, _ = _grown(10, eviction="lru")
    _step(embedding, range(10))
    text = "needs 2 more, and 1 can be freed: evictions keep min_rows=9 ids.* Lower min"
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        _step(embedding, [10, 11])


def test_values_that_are_assigned_are_trained_on(tmp_path: pathlib.Path) -> None:
    embedding, table = _grown(10)
    _step(embedding, [3, 4])
    variable = embedding.embedding_tables[table]
    before = variable.read_value()
    variable.assign([[2.0, 2.0], [3.0, 3.0]])
    assert _look_up(embedding, [4, 3]) == [3, 2]
    assert _step(embedding, [4, 5]) == [3, 1]
    assert _look_up(embedding, [4, 3, 5]) == [2.5, 2, 0.5]
    assert before.numpy().tolist() == [[0.5, 0.5]] * 2
    variable.assign([[2.0, 2.0]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="its vocabulary has 3"):
        _look_up(embedding, [4])
    with pytest.raises(tf.errors.InvalidArgumentError, match="its vocabulary has 3"):
        te.checkpoint.save(embedding, str(tmp_path / "refused"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_rows": 0}, "`max_rows` must be an int from 1 to"),
        ({"max_rows": 2.5}, "`max_rows` must be an int >= 1"),
        ({"max_rows": 5, "min_rows": 6, "eviction": "lru"}, "`min_rows` must be an"),
        ({"max_rows": 5, "min_rows": 3}, "`min_rows` must be None unless"),
        ({"max_rows": 5, "eviction": "fifo"}, "`eviction` must be one of"),
        ({"max_rows": 5, "eviction": "age"}, "`max_age` must be set if"),
        ({"max_rows": 5, "eviction": "lru", "max_age": 3}, "`max_age` must be set if"),
        ({"max_rows": 5, "clock": True}, "`clock` must be False unless"),
        ({"max_rows": 5, "clock": 1}, "`clock` must be a bool"),
        ({"max_rows": 5, "unknown": "mean"}, "`unknown` must be one of"),
        ({"max_rows": 5, "when_full": "drop"}, "`when_full` must be"),
        ({"max_rows": 5, "when_full": "shared_row"}, '`unknown` must be "shared_row"'),
        ({"max_rows": 1, "unknown": "shared_row"}, "`max_rows` must be >= 2"),
        ({"max_rows": 5, "min_count": 0}, "`min_count` must be an int from 1"),
        ({"max_rows": 5, "max_candidates": 3}, "`max_candidates` must be None if"),
        ({"max_rows": 5, "seed": -1}, "`seed` must be an int from 0"),
    ],
)
def test_vocabularies_that_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        te.GrowingVocabulary(**arguments)


def test_what_growing_tables_do_not_support() -> None:
    vocabulary = te.GrowingVocabulary(10)
    with pytest.raises(ValueError, match='`invalid_ids` must be "error" if'):
        te.TableConfig(vocabulary, 2, invalid_ids="drop")

    def feature(**table: Any) -> te.FeatureConfig:
        return te.FeatureConfig(te.TableConfig(vocabulary, 2, name="films", **table))

    text = "Table 'films': .* a GrowingVocabulary. Use TPUEmbedding, "
    for make in (
        lambda: te.TPUEmbeddingV0(feature(), te.SGD(0.5)),
        lambda: te.keras.TPUEmbedding(feature(), te.SGD(0.5), trainable_tables=True),
    ):
        with pytest.raises(NotImplementedError, match=text):
            make()
    with pytest.raises(NotImplementedError, match="while another one is pending"):
        te.TPUEmbeddingV2(feature(), te.SGD(0.5), True)
    with pytest.raises(NotImplementedError, match="from a seed and an id"):
        te.TPUEmbedding(feature(initializer=te.RowIdInitializer()), te.SGD(0.5))
    optimizer = te.Adagrad(slot_variable_creation_fn=lambda *_: {})
    with pytest.raises(NotImplementedError, match="so a function cannot create them"):
        te.TPUEmbedding(feature(), optimizer)


@pytest.mark.parametrize("keeps", [True, False])
def test_rows_of_a_v2_lookup_stay_until_its_update(keeps: bool) -> None:
    embedding, table = _grown(3, te.TPUEmbeddingV2, eviction="lru", min_rows=1)
    _step(embedding, [1, 2])
    activations, preserved = embedding({"film": tf.constant([1], tf.int64)})
    if not keeps:
        del preserved
    _step(embedding, [3, 4])
    kept, evicted = (1, 2) if keeps else (2, 1)
    assert embedding.vocabularies[table].ids.tolist() == [kept, 3, 4]
    if keeps:
        embedding.apply_gradients({"film": tf.ones([1, 2])}, preserved)
        assert _step(embedding, [1]) == [0]
        # An update ends it, though the outputs are there.
        _step(embedding, [3, 4])
        _step(embedding, [5])
        assert embedding.vocabularies[table].ids.tolist() == [4, 5]


def test_v2_batches_are_prepared_in_data_and_have_ids_as_tokens() -> None:
    growing = te.TableConfig(te.GrowingVocabulary(9), 2, "ones", name="films")
    static = te.TableConfig(9, 2, name="users", combiner="sum")
    other = te.TableConfig(te.GrowingVocabulary(9), 2, name="labels")
    embedding = te.TPUEmbeddingV2(
        [te.FeatureConfig(t) for t in (growing, static, other)], te.SGD(0.5)
    )
    batch = [[2**60, -1], [3, 4], [5, 5]]
    data = tf.data.Dataset.from_tensors(tuple(tf.constant(b, tf.int64) for b in batch))
    prepared = data.map(lambda *ids: embedding.preprocess_features(list(ids)))
    (own,) = prepared
    activations, preserved = embedding.embedding_lookup(own)
    assert activations[0].numpy().tolist() == [[1, 1]] * 2
    tokens = {name: stack.sorted_token_ids for name, stack in preserved.items()}
    assert {n: t.dtype for n, t in tokens.items()} == {
        "films": tf.int64,
        "users": tf.int32,
        "labels": tf.int64,
    }
    assert tokens["films"].numpy().tolist() == batch[0]
    embedding.apply_gradients([tf.ones([2, 2])] * 3, preserved)
    contents = embedding.vocabularies
    assert contents[growing].ids.tolist() == sorted(batch[0])
    assert contents[other].ids.tolist() == [5]
    layouts = embedding.embedding_layouts
    assert layouts["films"].unsharded_shape == [9, 2]


def _restored(path: str, max_rows: int, **vocabulary: Any) -> Any:
    embedding, table = _grown(max_rows, **vocabulary)
    tf.train.Checkpoint(tables=embedding).read(path).assert_consumed()
    return embedding, table


def test_restored_into_another_budget(tmp_path: pathlib.Path) -> None:
    embedding, table = _grown(5, eviction="lru", min_rows=4)
    for ids in ([7], [8], [9], [7, 6], [5]):
        _step(embedding, ids)
    path = tf.train.Checkpoint(tables=embedding).write(str(tmp_path / "saved"))
    values = _look_up(embedding, range(10))
    kept = {7, 6, 5}  # The last that were updated.
    assert kept < set(embedding.vocabularies[table].ids.tolist())

    larger, table = _restored(path, 20)
    assert _look_up(larger, range(10)) == values
    assert _step(larger, [100, 7]) == [1, 0]
    contents = larger.vocabularies[table]
    assert sorted(contents.rows.tolist()) == [*range(len(contents.rows))]

    smaller, table = _restored(path, 3, eviction="lru")
    expected = [v if i in kept else 0.0 for i, v in enumerate(values)]
    assert _look_up(smaller, range(10)) == expected
    assert set(smaller.vocabularies[table].ids.tolist()) == kept
    assert _step(smaller, [1, 7]) == [1, 0]

    with pytest.raises(ValueError, match="max_rows=3, but the table that was saved"):
        _restored(path, 3)
    with pytest.raises(ValueError, match="was saved with another value"):
        _restored(path, 9, unknown="shared_row")


def test_candidates_are_restored_into_fewer_places(tmp_path: pathlib.Path) -> None:
    options = {"min_count": 2, "unknown": "shared_row"}
    embedding, _ = _grown(9, max_candidates=4, **options)
    _step(embedding, [1, 2, 3, 4, 5])
    path = tf.train.Checkpoint(tables=embedding).write(str(tmp_path / "saved"))
    smaller, table = _restored(path, 9, max_candidates=2, **options)
    _step(smaller, [1, 3, 4, 5])
    assert smaller.vocabularies[table].ids.tolist() == [4, 5]


def test_static_and_growing_tables_are_not_mixed_up(tmp_path: pathlib.Path) -> None:
    growing, _ = _grown(9)
    _step(growing, [1, 2])
    static = te.TPUEmbedding(
        te.FeatureConfig(te.TableConfig(2, 2, name="films")), te.SGD(0.5)
    )
    kinds = {"grows": growing, "does not grow": static}
    paths = {
        kind: tf.train.Checkpoint(tables=embedding).write(str(tmp_path / kind[:4]))
        for kind, embedding in kinds.items()
    }
    before = static.embedding_tables
    for kind, other in (("grows", static), ("does not grow", growing)):
        with pytest.raises(
            ValueError, match=f"'films' {kind} in .*, so its rows are in another"
        ):
            tf.train.Checkpoint(tables=other).read(paths[kind])
    with pytest.raises((KeyError, ValueError)):
        te.checkpoint.restore(static, paths["grows"])
    assert all(
        np.array_equal(value.numpy(), before[table].numpy())
        for table, value in static.embedding_tables.items()
    )
    assert _look_up(growing, [1, 2, 3]) == [0.5, 0.5, 0]


def test_damaged_vocabularies_are_refused() -> None:
    """Nothing changes."""
    embedding, table = _grown(9, eviction="lru")
    _step(embedding, [1, 2])
    state = embedding.core.create_engine().checkpoint_variables()["films"]
    good = state.read()
    twice = good | {"ids": np.array([1, 1])}
    outside = good | {"rows": np.array([0, 7])}
    short = good | {"state": good["state"][:9]}
    for bad, text in (
        (twice, "an id or a row twice"),
        (outside, "is damaged"),
        (short, "is damaged"),
        (good | {"parameters": np.ones([2, 3], np.float32)}, "values of shape"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            state.write(bad)
    assert _look_up(embedding, [1, 2, 3]) == [0.5, 0.5, 0]
    assert embedding.vocabularies[table].ids.tolist() == [1, 2]


@pytest.mark.parametrize("kind", ["queue", "lookup", "layer"])
def test_gradients_of_weights_are_those_of_a_static_table(kind: str) -> None:
    classes = {"queue": te.TPUEmbedding, "lookup": te.TPUEmbeddingV2}
    make: Any = classes.get(kind) or te.keras.TPUEmbedding
    first = _first_values(POOL)
    growing = te.TableConfig(te.GrowingVocabulary(20), D, combiner="sqrtn")
    static = te.TableConfig(
        len(POOL), D, lambda *_, **__: tf.constant(first), combiner="sqrtn"
    )
    dense = np.array([[0, 3], [3, 4]])
    ragged = tf.RaggedTensor.from_row_lengths([5, 0, 6], [2, 0, 1])
    weights = [tf.constant([[1.0, 2.0], [0.5, 3.0]]), tf.constant([2.0, 1.5, 0.25])]
    found = []
    for table, ids in ((growing, POOL), (static, np.arange(len(POOL)))):
        embedding = make([te.FeatureConfig(table)] * 2, te.Adagrad(0.3))
        features = [
            tf.constant(ids[dense]),
            ragged.with_values(tf.constant(ids[ragged.values.numpy()])),
        ]
        for _ in range(2):  # All ids are new, and then none.
            given = [weights[0], ragged.with_values(weights[1])]
            if kind == "queue":
                embedding.enqueue(features, given)
                gradients = [tf.cos(a) for a in embedding.dequeue()]
                own = embedding.weight_gradients(gradients, features, given)
                found.append([own[0].numpy(), own[1].values.numpy()])
                embedding.apply_gradients(gradients)
                continue
            with tf.GradientTape() as tape:
                tape.watch(weights)
                given = [weights[0], ragged.with_values(weights[1])]
                activations = embedding(features, given)
                if kind == "lookup":
                    activations, preserved = activations
                loss = tf.add_n([tf.reduce_sum(tf.sin(a)) for a in activations])
            sources = [*weights, *getattr(embedding, "trainable_variables", [])]
            found.append([g.numpy() for g in tape.gradient(loss, sources)[:2]])
            if kind == "lookup":
                embedding.apply_gradients([tf.cos(a) for a in activations], preserved)
    for own, other in zip(found[:2], found[2:], strict=True):
        assert all(map(np.array_equal, own, other))


@pytest.mark.parametrize("unknown", ["zeros", "shared_row"])
def test_frozen_tables_go_on_with_the_same_bits(unknown: str) -> None:
    vocabulary = te.GrowingVocabulary(10, min_count=2, unknown=unknown)
    table = te.TableConfig(vocabulary, 2, "uniform", name="films")
    growing = te.TPUEmbedding(te.FeatureConfig(table), te.Adagrad(0.5))

    def train(embedding: te.TPUEmbedding, ids: Any) -> np.ndarray:
        found = train_on(embedding, ids)
        return found.numpy()

    for ids in ([[7, -3, 7]], [[9, -3, 2**60]]):
        train(growing, tf.constant(ids, tf.int64))
    frozen = growing.freeze_vocabulary(table)
    assert frozen.ids.tolist() == [-3, 7]
    ids = tf.ragged.constant([[7, 5, 2**63 - 1], [], [-3, -(2**63)]], dtype=tf.int64)
    rows = frozen.rows_of(ids)
    assert rows.to_list() == [[1, 2, 2], [], [0, 2]]
    static = te.TPUEmbedding(te.FeatureConfig(frozen.config), te.Adagrad(0.5))
    for name, values in frozen.slots.items():
        static.variables[frozen.config][name].assign(values)
    growing.enqueue(ids, training=False)
    assert np.array_equal(growing.dequeue(), evaluate_on(static, rows))
    known = tf.constant([[7, -3], [-3, -3]], tf.int64)
    for _ in range(2):
        ours = train(growing, known)
        assert np.array_equal(ours, train(static, frozen.rows_of(known)))
    # Any class takes it.
    v2 = te.TPUEmbeddingV2(te.FeatureConfig(frozen.config), te.Adagrad(0.5))
    assert v2(frozen.rows_of(known))[0].shape == (2, 2)
    assert te.plan(te.FeatureConfig(frozen.config), te.Adagrad(0.5), batch_size=8)


def test_what_cannot_be_frozen() -> None:
    embedding, table = _grown(9, unknown="initializer")
    with pytest.raises(NotImplementedError, match="has its own initial values"):
        embedding.freeze_vocabulary(table)
    other, _ = _grown(9)
    with pytest.raises(ValueError, match="Growing tables: films"):
        other.freeze_vocabulary(table)
    empty, table = _grown(9)
    frozen = empty.freeze_vocabulary(table)
    assert frozen.rows_of(tf.constant([[4], [5]])).numpy().tolist() == [[0], [0]]
    assert frozen.config.vocabulary_size == 1


def test_one_vocabulary_stands_for_a_table_of_its_own() -> None:
    """Tables with one vocabulary share no rows, and may have other budgets."""
    vocabulary = te.GrowingVocabulary(3)
    tables = [
        te.TableConfig(vocabulary, 2, "ones", name=name) for name in ("films", "users")
    ]
    config = [te.FeatureConfig(table) for table in tables]
    embedding = te.TPUEmbedding(config, te.SGD(0.5))
    embedding.enqueue([tf.constant([1, 2, 3]), tf.constant([-4, 5])])
    embedding.apply_gradients([tf.ones_like(a) for a in embedding.dequeue()])
    found = [embedding.vocabularies[table].ids.tolist() for table in tables]
    assert found == [[1, 2, 3], [-4, 5]]
    wider = dataclasses.replace(tables[0], vocabulary_size=te.GrowingVocabulary(9))
    with pytest.raises(ValueError, match="films"):
        te.TPUEmbedding([config[0], te.FeatureConfig(wider)], te.SGD(0.5))


@pytest.mark.third_tier
@pytest.mark.parametrize("pipelined", ["plain", "pipelined"])
def test_a_killed_program_resumes_with_the_same_bits(
    pipelined: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    """It is killed while it trains, evicts and saves, at a random moment of each."""

    def start(folder: str) -> subprocess.Popen[str]:
        program = pathlib.Path(__file__).with_name("killed_trainer.py")
        return subprocess.Popen(
            [sys.executable, str(program), str(tmp_path / folder), pipelined],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(pathlib.Path(te.__file__).parents[1])},
        )

    expected = start("unbroken").communicate()[0].splitlines()
    for kind in ("train", "evict", "save", "save"):
        process = start("killed")
        assert process.stdout is not None
        lines = (line for line in process.stdout if line.startswith(kind))
        for _ in range(2):
            next(lines)
        time.sleep(float(rng.uniform(0.0, 0.01)))
        process.kill()
        process.wait()
        process.stdout.close()
    found = start("killed").communicate()[0].splitlines()
    results = [line for line in expected if len(line) > 50]
    assert len(results) > 5
    assert [line for line in found if len(line) > 50] == results
