"""Growing tables on servers have the same bits, ids and counts as in one process."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from multi_process import divided
from parameter_servers.cluster import (
    JOB,
    V,
    batch,
    features,
    gradients,
    make,
    require_same,
    require_unchanged,
    schedule,
    step_of,
    values,
)

import tpu_embedding as te
from tpu_embedding.layout.placement import IdDivision

pytestmark = pytest.mark.second_tier


def configs(
    others: Any = None, dtype: str = "float32", **first: Any
) -> dict[str, te.FeatureConfig]:
    """Of three tables the first forgets, the second is static, the third admits."""
    admits = others or {"min_count": 2, "unknown": "initializer"}
    found = features(dtype)
    vocabularies: dict[str, Any] = {
        "t0": te.GrowingVocabulary(
            V // 2,
            **{
                "eviction": "lfu",
                "unknown": "shared_row",
                "when_full": "shared_row",
                **first,
            },
        ),
        "t2": te.GrowingVocabulary(V, **admits),
    }
    for table in {id(c.table): c.table for c in found.values()}.values():
        if table.name in vocabularies:
            table.vocabulary_size = vocabularies[table.name]
            table.initializer = None
    return found


def require_same_ids(one: te.TPUEmbedding, served: te.TPUEmbedding) -> None:
    require_same(one, served)
    expected, found = (list(e.vocabularies.values()) for e in (one, served))
    for own, other in zip(expected, found, strict=True):
        for name, value in own._asdict().items():
            np.testing.assert_array_equal(getattr(other, name), value, err_msg=name)


@pytest.mark.parametrize("kind", [te.TPUEmbedding, te.TPUEmbeddingV2])
@pytest.mark.parametrize("pipelined", [False, True])
def test_servers_have_the_bits_of_one_process(kind: Any, pipelined: bool) -> None:
    options = {"when_full": "shared_row", "unknown": "shared_row"}
    dtype = "int8" if pipelined else "bfloat16"
    tables = configs(options if pipelined else {}, dtype)
    optimizer = te.Adagrad(0.1) if pipelined else te.Adam(0.1, lazy_adam=False)
    one, served = make(kind, tables, optimizer, pipelined)
    step, expected = tf.function(step_of(served)), step_of(one)
    assert schedule(step, range(4)) == [float(expected(k)) for k in range(4)]
    assert float(step_of(served)(5)) == float(expected(5))
    one.flush()
    served.flush()
    require_same_ids(one, served)
    tables = [c for c in served.vocabularies if c.name == "t0"]
    assert served.evict(tables[0]) == one.evict(tables[0])
    require_same_ids(one, served)


@pytest.mark.parametrize("kind", [te.TPUEmbedding, te.TPUEmbeddingV2])
def test_a_push_that_is_repeated_counts_no_hit_twice(kind: Any) -> None:
    one, served = make(kind, configs(), te.Adam(0.1, lazy_adam=False))
    step, expected = tf.function(step_of(served)), step_of(one)
    numbered = JOB.coordinator._with_number(step)
    for number in (1, 2, 1, 2, 3, 3):
        numbered(tf.constant([7, number], tf.int64), tf.constant(number))
    for k in range(1, 4):
        expected(k)
    require_same_ids(one, served)


def test_checkpoints_go_to_servers_and_back(tmp_path: pathlib.Path) -> None:
    one, served = make(te.TPUEmbedding, configs(), te.Adam(0.1, lazy_adam=False))
    for source, target in ((one, served), (served, one)):
        for k in range(3):
            step_of(source)(k)
        path = tf.train.Checkpoint(tables=source).write(str(tmp_path / "saved"))
        tf.train.Checkpoint(tables=target).read(path).assert_consumed()
        require_same_ids(one, served)


@pytest.mark.parametrize("kind", [te.TPUEmbedding, te.TPUEmbeddingV2])
def test_a_full_table_refuses_the_step(kind: Any) -> None:
    small = configs(eviction=None, unknown="zeros", when_full="error")
    _, served = make(kind, small, te.Adagrad(0.1))
    tables = [values(served)["t0/parameters"]]

    def train() -> None:
        for k in range(40):
            step_of(served)(k)
            tables.append(values(served)["t0/parameters"])

    with pytest.raises(tf.errors.InvalidArgumentError, match="Table t0 is full"):
        train()
    np.testing.assert_array_equal(values(served)["t0/parameters"], tables[-1])


def test_a_full_server_rejects_alone() -> None:
    """The other one is updated, also eagerly."""
    table = te.TableConfig(
        te.GrowingVocabulary(4), 2, "ones", name="films", placement="rows"
    )
    with JOB.strategy.scope():
        embedding = te.TPUEmbedding({"film": te.FeatureConfig(table)}, te.SGD(0.5))
    ids = np.arange(100)
    owners = IdDivision(2).owner(ids)
    first, second = ids[owners == 0], ids[owners == 1]

    def train(ids: Any) -> None:
        embedding.enqueue({"film": tf.constant(ids)})
        ones = tf.ones_like(embedding.dequeue()["film"])
        embedding.apply_gradients({"film": ones})

    train(first[:2])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"of 2.* is full"):
        train([first[2], second[0]])
    embedding.reset()
    found = embedding.vocabularies[table].ids
    assert set(found) == {*first[:2], second[0]}


@pytest.mark.parametrize("keeps", [True, False])
def test_rows_of_a_lookup_stay_while_its_preserved_outputs_exist(keeps: bool) -> None:
    vocabulary = te.GrowingVocabulary(3, eviction="lru", min_rows=1)
    table = te.TableConfig(vocabulary, 2, "ones", name="films")
    with JOB.strategy.scope():
        embedding = te.TPUEmbeddingV2({"film": te.FeatureConfig(table)}, te.SGD(0.5))

    def look_up(ids: Any) -> Any:
        return embedding({"film": tf.constant(ids, tf.int64)})

    def apply(activations: Any, preserved: Any) -> None:
        ones = {"film": tf.ones_like(activations["film"])}
        embedding.apply_gradients(ones, preserved)

    @tf.function
    def step() -> None:
        kept = look_up([1])
        apply(*look_up([3, 4]))
        apply(*kept)

    apply(*look_up([1, 2]))
    if keeps:
        step()
        found = embedding.vocabularies[table]
        assert found.hits[found.ids == 1] == [2]
        assert found.admitted == 4  # Id 1 not again.
    else:
        apply(*look_up([3, 4]))
        assert embedding.vocabularies[table].ids.tolist() == [2, 3, 4]


def test_gradients_of_another_function_are_refused() -> None:
    _, served = make(te.TPUEmbeddingV2, configs(), te.Adagrad(0.1))
    activations, preserved = served(batch(0))
    apply = tf.function(served.apply_gradients)
    before = values(served)
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"in one tf\.function"):
        apply(gradients(activations), preserved)
    require_unchanged(before, served)
    served.apply_gradients(gradients(activations), preserved)


def test_a_table_is_saved_by_blocks(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "saved")
    most = divided.save_in_blocks(JOB.strategy, path, alone=True)
    assert divided.BLOCK_BYTES / 4 < most <= divided.BLOCK_BYTES


@pytest.mark.parametrize("kind", [te.TPUEmbedding, te.TPUEmbeddingV2])
def test_divided_tables_have_the_bits_of_one_process(
    kind: Any, tmp_path: pathlib.Path
) -> None:
    """They are never full, and go to one process and back."""
    tables = configs(
        {"min_count": 2, "unknown": "initializer"},
        "int8" if kind is te.TPUEmbedding else "bfloat16",
        eviction="lfu",
        unknown="zeros",
        when_full="error",
        min_rows=1,
    )
    for table in {id(c.table): c.table for c in tables.values()}.values():
        table.placement = "rows"
        if table.vocabulary is not None:
            table.vocabulary_size = dataclasses.replace(table.vocabulary, max_rows=400)
    one, served = make(kind, tables, te.Adagrad(0.1))
    step, expected = tf.function(step_of(served)), step_of(one)
    assert schedule(step, range(4)) == [float(expected(k)) for k in range(4)]
    assert float(step_of(served)(5)) == float(expected(5))
    require_same_rows(one, served)
    for source, target in ((served, one), (one, served)):
        ours = te.checkpoint.save(source, tmp_path / f"ours{source is one}")
        theirs = tf.train.Checkpoint(tables=source).write(str(tmp_path / "theirs"))
        step_of(target)(7)
        te.checkpoint.restore(target, ours)
        require_same_rows(one, served)
        step_of(target)(8)
        tf.train.Checkpoint(tables=target).read(theirs).assert_consumed()
        step_of(source)(9)
        step_of(target)(9)
        require_same_rows(one, served)
    films = next(c for c in served.vocabularies if c.name == "t0")
    assert served.evict(films) > 0
    assert len(served.vocabularies[films].ids) == 2  # min_rows=1 of each part.


def test_a_plan_is_what_growing_tables_take() -> None:
    """Both servers are in this process."""
    grown, tables, needed = divided.fill(JOB.strategy, 80_000, "rows")
    assert 0.9 * sum(tables) < grown < sum(needed), (grown, tables, needed)


def test_an_earlier_clock_counts_as_the_last_one() -> None:
    vocabulary = te.GrowingVocabulary(9, eviction="age", max_age=5, clock=True)
    table = te.TableConfig(vocabulary, 2, "ones", name="films", placement="rows")
    with JOB.strategy.scope():
        embedding = te.TPUEmbedding({"film": te.FeatureConfig(table)}, te.SGD(0.5))

    for number, clock in ((1, 10), (2, 7), (3, 15)):
        embedding.enqueue({"film": tf.constant([number])})
        ones = {"film": tf.ones_like(embedding.dequeue()["film"])}
        embedding.apply_gradients(ones, clock=clock)
    found = embedding.vocabularies[table]
    assert found.ids.tolist() == [1, 2, 3]
    assert found.last_updates.tolist() == [10, 10, 15]


def require_same_rows(one: te.TPUEmbedding, served: te.TPUEmbedding) -> None:
    """The rows, slots, hits and times of each id, and the counts, are the same."""
    one.flush()
    served.flush()
    for table, own in one.vocabularies.items():
        other = served.vocabularies[table]
        for name in ("ids", "hits", "last_updates"):
            np.testing.assert_array_equal(getattr(other, name), getattr(own, name))
        assert other[4:] == own[4:]
        expected, found = values(one), values(served)
        for name, rows in expected.items():
            if name.startswith(f"{table.name}/"):
                np.testing.assert_array_equal(found[name][other.rows], rows[own.rows])
