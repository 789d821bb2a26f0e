"""Each option is carried or refused by name on SparseCores."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from software_tpu.calls import strategy_of
from sparse_core.models import SYSTEM, films, two_tables
from sparse_core.twins import run
from v2_calls import BATCH, table

import tpu_embedding as te

STRATEGY = strategy_of(*SYSTEM)


def config(**fields: Any) -> dict[str, Any]:
    return {"sparse_core_embedding_config": te.SparseCoreEmbeddingConfig(**fields)}


def stacks(**fields: Any) -> set[str]:
    return set(two_tables(**config(**fields)).stacked_tables)


def stocks_count(**fields: Any) -> set[str]:
    """Of three tables whose activations together are above the limit of a stack."""
    tables = [te.TableConfig(8, 64, name=name) for name in "abc"]
    features = [
        te.FeatureConfig(t, output_shape=[8192], name=str(t.name)) for t in tables
    ]
    with STRATEGY.scope():
        embedding = te.TPUEmbeddingV2(features, te.SGD(1.0), **config(**fields))
    return set(embedding.stacked_tables)


def ids_of(count: int, **fields: Any) -> Any:
    """What a batch of `count` ids for one sample gives, and how many were dropped."""
    embedding = films(**config(**fields))
    rows = [list(range(count)), []]
    batch = embedding.preprocess_features(tf.ragged.constant(rows, dtype=tf.int64))
    found = run(STRATEGY, lambda: embedding(batch)[0])[0][0, 0]
    return found, int(batch.dropped_ids["films"])


def start(**fields: Any) -> np.ndarray:
    tf.random.set_seed(3)
    tables = [te.TableConfig(11, 3, name=n) for n in ("films", "users")]
    features = [te.FeatureConfig(t, output_shape=[2], name=str(t.name)) for t in tables]
    with STRATEGY.scope():
        embedding = te.TPUEmbeddingV2(features, te.SGD(1.0), **config(**fields))
    return table(embedding, "users")


def check_disable_table_stacking() -> None:
    assert stacks() == {"films_users"}
    assert stacks(disable_table_stacking=True) == {"films", "users"}


def check_max_ids_per_chip_per_sample() -> None:
    # A partition takes 8 places: of two samples, 4 of 8 SparseCores' parts fit into 16.
    assert ids_of(8) == (28, 0)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"max_ids_per_chip_per"):
        ids_of(8, max_ids_per_chip_per_sample=8)


def check_allow_id_dropping() -> None:
    small = {"max_ids_per_chip_per_sample": 8, "allow_id_dropping": True}
    # Ids are 0 and 4, 1 and 5, ... on the four SparseCores; the first two fit.
    assert ids_of(8, **small) == (0 + 4 + 1 + 5, 4)


def check_max_ids_per_table() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"films.* 2 ids"):
        ids_of(8, max_ids_per_table={"films": 1})
    with pytest.raises(ValueError, match="max_ids_per_table names users"):
        films(**config(max_ids_per_table={"users": 1}))


def check_max_unique_ids_per_table() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"films.* 2 unique"):
        ids_of(8, max_unique_ids_per_table={"films": 1})


def check_initialize_tables_on_host() -> None:
    np.testing.assert_array_equal(start(initialize_tables_on_host=False), start())


def check_enable_fast_table_initialization() -> None:
    fast = start(enable_fast_table_initialization=True)
    assert np.abs(fast).min() > 0
    assert np.all(fast != start())


def check_stock_feature_counts() -> None:
    assert stocks_count() == {"a", "b", "c"}
    assert stocks_count(stock_feature_counts=True) == {"a_b_c"}


def check_minibatching() -> None:
    """test_conformance.py shows that several replicas train so."""
    limits = {"max_ids_per_table": {"films": 1}, "minibatching": True}
    with pytest.raises(RuntimeError, match=r"all 2 replicas must be cut at the same"):
        ids_of(8, **limits)
    embedding = films(system=("v6e", 1), **config(**limits))
    batch = embedding.preprocess_features(tf.ragged.constant([[0, 1, 2, 3, 4], []]))
    # On a SparseCore 0, 2 and 4 come one by one.
    assert batch.tables["films"].num_minibatches_per_physical_sparse_core.numpy() == 3


def check_shard_loads() -> None:
    """All ids of users that are asked for would be where those of films are."""
    loads = {"films": [1.0, 0, 0, 0], "users": [0, 0, 1.0, 0]}
    embedding = two_tables(**config(shard_loads=loads))
    turns = [
        layouts["users"].sparse_core_shard_rotation
        - layouts["films"].sparse_core_shard_rotation
        for layouts in (two_tables().embedding_layouts, embedding.embedding_layouts)
    ]
    assert turns[0] == 2
    assert turns[1] % 4 != 2
    found = run(STRATEGY, lambda: embedding(BATCH)[0])[0]
    assert found["b"].tolist() == [[208, 208], [0, 0]]


@pytest.mark.parametrize(
    "field", [f.name for f in dataclasses.fields(te.SparseCoreEmbeddingConfig)]
)
def test_every_field_of_the_configuration(field: str) -> None:
    globals()[f"check_{field}"]()


def test_the_same_start_as_on_the_host() -> None:
    """Random numbers too: the initializers are called in the same order."""
    tf.random.set_seed(3)
    tables = [te.TableConfig(11, 3, name=name) for name in ("films", "users")]
    host = te.TPUEmbeddingV2([te.FeatureConfig(t) for t in tables], te.SGD(1.0))
    expected = table(host, "users")
    np.testing.assert_array_equal(start(), expected)


def test_initializers_by_shard() -> None:
    """As TensorFlow's class calls them: a value for each place of a device's part."""
    calls = []

    def initializer(shape: Any, dtype: Any, shard_info: Any) -> tf.Tensor:
        calls.append((tuple(shape), tuple(shard_info.shape), tuple(shard_info.offset)))
        rows = shard_info.offset[0] + tf.range(shard_info.shape[0], dtype=dtype)
        return tf.broadcast_to(rows[:, tf.newaxis] % shape[0], shard_info.shape)

    tables = [te.TableConfig(20, 3, initializer, name=name) for name in "ab"]
    features = [te.FeatureConfig(t, output_shape=[2], name=str(t.name)) for t in tables]
    with STRATEGY.scope():
        embedding = te.TPUEmbeddingV2(features, te.SGD(1.0))
    # Of 32 rows with padding each of 4 SparseCores has 8. Table b begins at the third.
    found = np.arange(20) % 4 * 8 + np.arange(20) // 4
    np.testing.assert_array_equal(table(embedding, "a")[:, 0], found)
    np.testing.assert_array_equal(table(embedding, "b")[:, 2], found)
    assert calls == [((32, 8), (16, 8), (first, 0)) for first in (0, 16, 16, 0)]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"optimizer": None}, ValueError, "Table 'films' has no optimizer"),
        (
            {"optimizer": te.SGD(1.0, clipvalue=1.0)},
            NotImplementedError,
            "Table 'films': `clipvalue=1.0` of its optimizer is not supported by S",
        ),
        (
            {"optimizer": te.Adam(1.0, slot_variable_creation_fn=lambda *_: {})},
            NotImplementedError,
            "`slot_variable_creation_fn=.* is not supported by SparseCores, only by",
        ),
        (
            {"optimizer": te.SGD(1.0, low_dimensional_packing_status=True)},
            NotImplementedError,
            "`low_dimensional_packing_status=True` of .*, only by TPU v2 to v4",
        ),
        ({"output_shape": [3]}, ValueError, "3 samples per replica, which is not"),
    ],
)
def test_refused_at_construction(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    values = {"optimizer": te.SGD(1.0), "output_shape": [4], "name": "film", **change}
    key = te.TableConfig(8, 2, name="films")
    optimizer = values.pop("optimizer")
    with STRATEGY.scope(), pytest.raises(error, match=text):
        te.TPUEmbeddingV2({"films": te.FeatureConfig(key, **values)}, optimizer)


def test_tables_without_names_are_numbered_in_order_of_first_use() -> None:
    first, second = (
        te.TableConfig(8, 2, te.RowIdInitializer(), combiner="sum") for _ in range(2)
    )
    features = {
        name: te.FeatureConfig(table, output_shape=[2])
        for name, table in [("a", first), ("b", second), ("c", first)]
    }
    with STRATEGY.scope():
        embedding = te.TPUEmbeddingV2(features, te.SGD(1.0))
    assert set(embedding.embedding_layouts) == {"table_0", "table_1"}
    assert set(embedding.stacked_tables) == {"table_0_table_1"}
    found = run(STRATEGY, lambda: embedding(BATCH)[0])[1]
    assert [found[name][0, 0] for name in "abc"] == [7, 8, 5]


def test_limits_are_those_of_the_statistics() -> None:
    table = te.TableConfig(8, 2, te.RowIdInitializer(), combiner="sum", name="films")
    feature = te.FeatureConfig(table, output_shape=[2])
    needs = te.TPUEmbeddingV2.compute_sparse_core_requirements(
        BATCH["b"], feature, 2, 2, te.SGD(1.0)
    )
    limits = te.SparseCoreEmbeddingConfig(
        max_ids_per_table=needs.max_ids,
        max_unique_ids_per_table=needs.max_unique_ids,
        max_ids_per_chip_per_sample=needs.max_ids_per_chip_per_sample,
    )
    assert limits.max_ids_per_table == {"films": 1}
    assert type(limits.max_ids_per_chip_per_sample) is int
    with STRATEGY.scope():
        embedding = te.TPUEmbeddingV2(
            feature, te.SGD(1.0), sparse_core_embedding_config=limits
        )
    assert run(STRATEGY, lambda: embedding(BATCH["b"])[0])[1][0, 0] == 8


def test_limits_of_a_stack_that_a_batch_does_not_use() -> None:
    features = {
        name: te.FeatureConfig(te.TableConfig(8, dim, name=name), output_shape=[8])
        for name, dim in (("a", 8), ("b", 128))
    }
    nothing = tf.RaggedTensor.from_row_splits(tf.zeros([0], tf.int64), [0] * 9)
    ids, unique_ids = te.TPUEmbeddingV2.compute_sparse_core_stats(
        {"a": tf.range(8), "b": nothing}, features, 1, 4, te.SGD()
    )
    limits = te.SparseCoreEmbeddingConfig(
        max_ids_per_table=ids, max_unique_ids_per_table=unique_ids
    )
    assert limits.max_ids_per_table is not None
    assert limits.max_ids_per_table["b"] == 1


def test_tables_and_stacks_are_found_by_name() -> None:
    tables = two_tables().embedding_tables
    assert len(tables) == 2
    assert "users" in tables
    assert tables.get("users") is tables["users"]
    assert ("tags" in tables, tables.get("tags", 3)) == (False, 3)
    assert tables["users"].numpy()[:, 0].tolist() == [100, 101, 102, 103, 104]
    parts = tables["films_users"].values
    assert [part.shape for part in parts] == [(32, 8), (32, 8)]
    with pytest.raises(KeyError, match="tags"):
        tables["tags"]


def test_layouts_given_by_the_user() -> None:
    layout = two_tables().embedding_layouts
    configs = [
        te.TableConfig(
            8, 2, te.RowIdInitializer(), name="films", layout=layout["films"]
        ),
        te.TableConfig(
            5, 2, te.RowIdInitializer(100), name="users", layout=layout["users"]
        ),
    ]
    features = [
        te.FeatureConfig(c, output_shape=[2], name=str(c.name)) for c in configs
    ]
    with STRATEGY.scope():
        embedding = te.TPUEmbeddingV2(
            features, te.SGD(1.0), **config(disable_table_stacking=True)
        )
    assert set(embedding.stacked_tables) == {"films_users"}
    found = run(STRATEGY, lambda: embedding([BATCH["a"], BATCH["b"]])[0])[1]
    assert [value[0, 0] for value in found] == [7, 104]
