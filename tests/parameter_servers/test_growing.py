"""Growing tables on servers have the bits, ids and counts of one process."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parameter_servers.cluster import (
    JOB,
    V,
    features,
    make,
    require_same,
    schedule,
    step_of,
    values,
)

import tpu_embedding as te

pytestmark = pytest.mark.second_tier


def configs(**first: Any) -> dict[str, te.FeatureConfig]:
    """Of three tables the first forgets, the second is static, the third admits."""
    found = features()
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
        "t2": te.GrowingVocabulary(V, min_count=2, unknown="initializer"),
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


@pytest.mark.parametrize("pipelined", [False, True])
def test_servers_have_the_bits_of_one_process(pipelined: bool) -> None:
    one, served = make(te.TPUEmbedding, configs(), te.Adagrad(0.1), pipelined)
    step, expected = tf.function(step_of(served)), step_of(one)
    assert schedule(step, range(4)) == [float(expected(k)) for k in range(4)]
    assert float(step_of(served)(5)) == float(expected(5))
    one.flush()
    served.flush()
    require_same_ids(one, served)
    tables = [c for c in served.vocabularies if c.name == "t0"]
    assert served.evict(tables[0]) == one.evict(tables[0])
    require_same_ids(one, served)


def test_a_push_that_is_repeated_counts_no_hit_twice() -> None:
    one, served = make(te.TPUEmbedding, configs(), te.Adagrad(0.1))
    step, expected = tf.function(step_of(served)), step_of(one)
    numbered = JOB.coordinator._with_number(step)
    for number in (1, 2, 1, 2, 3, 3):
        numbered(tf.constant([7, number], tf.int64), tf.constant(number))
    for k in range(1, 4):
        expected(k)
    require_same_ids(one, served)


def test_checkpoints_go_to_servers_and_back(tmp_path: pathlib.Path) -> None:
    one, served = make(te.TPUEmbedding, configs(), te.Adagrad(0.1))
    for source, target in ((one, served), (served, one)):
        for k in range(3):
            step_of(source)(k)
        path = tf.train.Checkpoint(tables=source).write(str(tmp_path / "saved"))
        tf.train.Checkpoint(tables=target).read(path).assert_consumed()
        require_same_ids(one, served)


def test_a_full_table_refuses_the_step() -> None:
    small = configs(eviction=None, unknown="zeros", when_full="error")
    _, served = make(te.TPUEmbedding, small, te.Adagrad(0.1))
    tables = [values(served)["t0/parameters"]]

    def train() -> None:
        for k in range(40):
            step_of(served)(k)
            tables.append(values(served)["t0/parameters"])

    with pytest.raises(tf.errors.InvalidArgumentError, match="Table t0 is full"):
        train()
    np.testing.assert_array_equal(values(served)["t0/parameters"], tables[-1])


def test_what_servers_lack() -> None:
    with (
        JOB.strategy.scope(),
        pytest.raises(NotImplementedError, match="TPUEmbeddingV2 over servers"),
    ):
        te.TPUEmbeddingV2(configs(), te.Adagrad(0.1))
