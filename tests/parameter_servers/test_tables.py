"""Which servers have which rows, and how these start."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from parameter_servers.cluster import (
    JOB,
    MIXED,
    D,
    V,
    features,
    make,
    require_same,
    schedule,
    step_of,
)

import tpu_embedding as te
from tpu_embedding.layout.balancing import place_on_servers
from tpu_embedding.layout.placement import ALL_PROCESSES
from tpu_embedding.tables import variables

pytestmark = pytest.mark.second_tier


def test_tables_are_spread_by_load() -> None:
    _, served = make(te.TPUEmbedding, features(), te.SGD(0.1))
    devices = [t.values()["parameters"].device for t in served.core.tables().values()]
    assert devices[0] != devices[1] == devices[2]
    assert place_on_servers(served.core.plan, 1, "rows").owners == (0, 0, 0)
    assert len(set(place_on_servers(served.core.plan, 3).owners)) == 3
    assert place_on_servers(served.core.plan, 51, "rows").owners == (0, 1, 2)


def large(*rows: int) -> Any:
    """The plan of tables with so many rows of 4 KiB, and an accumulator."""
    configs = [
        te.FeatureConfig(te.TableConfig(n, 1024, name=f"t{k}"))
        for k, n in enumerate(rows)
    ]
    return te.TPUEmbedding(configs, te.SGD(0.1)).core.plan


def test_large_tables_are_divided() -> None:
    everywhere = ALL_PROCESSES
    assert place_on_servers(large(9000, 9000), 2).owners == (0, 1)
    assert place_on_servers(large(9000, 3000), 2).owners == (everywhere, 0)
    assert place_on_servers(large(900, 500), 2).owners == (0, 1)
    assert place_on_servers(large(9000, 9000, 9000), 2).owners.count(everywhere) == 1
    assert place_on_servers(large(9000, 500), 2, "whole").owners == (0, 1)


def test_random_initial_values_are_those_of_one_process() -> None:
    with mock.patch.object(variables, "_BLOCK_BYTES", 256):
        for placements in ((None, None, None), MIXED):
            require_equal_starts(placements)


def require_equal_starts(placements: Any) -> None:
    configs = features(placements=placements)
    for config in configs.values():
        object.__setattr__(config.table, "initializer", None)
    tf.random.set_seed(7)
    one = te.TPUEmbedding(configs, te.Adagrad(0.1))
    one.build()
    tf.random.set_seed(7)
    with JOB.strategy.scope():
        served = te.TPUEmbedding(configs, te.Adagrad(0.1))
        served.build()
    require_same(one, served)


def test_each_server_makes_its_own_rows() -> None:
    wanted = np.random.default_rng(3).standard_normal((V + 1, D)).astype(np.float32)
    asked = []

    class FromFile:
        def __call__(self, shape: Any, dtype: Any = tf.float32) -> Any:
            raise AssertionError(shape)

        def by_rows(self, shape: Any, dtype: Any = tf.float32) -> Any:
            assert shape == wanted.shape

            def read(start: int, stop: int) -> tf.Tensor:
                asked.append(stop - start)
                return tf.constant(wanted[start:stop], dtype)

            return read

    table = te.TableConfig(V + 1, D, FromFile(), placement="rows", name="films")
    with mock.patch.object(variables, "_BLOCK_BYTES", 256), JOB.strategy.scope():
        served = te.TPUEmbedding({"film": te.FeatureConfig(table)}, te.Adagrad(0.1))
        served.build()
    assert max(asked) * D * 4 <= 256
    np.testing.assert_array_equal(served.embedding_tables[table].numpy(), wanted)


@pytest.mark.parametrize("kind", [te.TPUEmbedding, te.TPUEmbeddingV2])
def test_telemetry_counts_what_servers_apply(kind: Any) -> None:
    one, served = make(kind, features(placements=MIXED), te.Adagrad(0.1))
    expected, found = (te.Telemetry(e, every=1, hottest=9) for e in (one, served))
    for number in range(3):
        step_of(one)(number)
    schedule(tf.function(step_of(served)), range(3))
    require_same(one, served)
    ours, theirs = expected.read(), found.read()
    assert ours.keys() == theirs.keys()
    assert theirs["*"] == ours["*"]
    for name in ("t0", "t1", "t2"):
        assert not {"samples", "samples_without_ids"} & theirs[name].keys()
        for figure, (value, exact) in theirs[name].items():
            assert exact
            wanted = ours[name][figure].value
            if isinstance(value, float):
                wanted = pytest.approx(wanted, rel=1e-6)
            assert value == wanted, figure
    status = found.status()
    assert status["steps_per_second"] > 0
    assert "samples_per_second" not in status
    found.stop()
