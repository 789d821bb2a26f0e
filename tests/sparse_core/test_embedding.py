"""TPUEmbeddingV2 on SparseCores beyond its numbers, which test_conformance.py has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import v2_calls
from software_tpu.calls import strategy_of
from sparse_core.models import SYSTEM, films, two_tables
from sparse_core.twins import run
from steps import train_on
from v2_calls import BATCH, table

import tpu_embedding as te
from tpu_embedding.layout.csr import PreprocessedFeatures

ONES = {name: tf.ones([2, 2]) for name in "abc"}
STRATEGY = strategy_of(*SYSTEM)


def test_a_step_that_builds_the_tables() -> None:
    embedding = two_tables()

    def step() -> Any:
        activations, preserved = embedding(BATCH)
        embedding.apply_gradients({**ONES, "b": None}, preserved)
        return activations, preserved

    (activations, preserved), _ = run(STRATEGY, step)
    np.testing.assert_array_equal(activations["a"], [[7, 7], [0, 0]])
    np.testing.assert_array_equal(activations["b"], [[208, 208], [0, 0]])
    np.testing.assert_array_equal(activations["c"], [[5, 5], [0, 0]])
    assert list(preserved) == ["films_users"]
    assert type(preserved["films_users"]) is te.PartitionedCsrFormatTensor
    assert preserved["films_users"].sample_count == 6
    # Both replicas looked each of these rows up once.
    changed = [-2, 1, 0, 1, 4, 5, 6, 5]
    assert table(embedding, "films")[:, 0].tolist() == changed
    assert table(embedding, "users")[:, 0].tolist() == [100, 101, 102, 103, 104]


def test_values_by_table_and_storage_by_stack() -> None:
    embedding = two_tables()
    films, users = embedding.embedding_tables
    assert (films.name, users.name) == ("films", "users")
    shards = embedding.embedding_table_shards
    for key, value in embedding.embedding_tables.items():
        assert value.shape == (key.vocabulary_size, 2)
        devices = [device[-5:] for device, _ in shards[key]]
        assert devices == ["CPU:0", "CPU:1"]
        parts = np.concatenate([part for _, part in shards[key]])
        np.testing.assert_array_equal(np.sort(parts, axis=0), value)
    assert set(embedding.variables[films]) == {"parameters"}
    # 8 rows of each table on each of 4 SparseCores, the width a multiple of 8.
    (stack,) = embedding.stacked_tables.items()
    assert (stack[0], [part.shape for part in stack[1]]) == (
        "films_users",
        [(32, 8), (32, 8)],
    )
    layout = embedding.embedding_layouts["users"]
    assert layout.stacked_table_name == "films_users"
    assert (layout.num_sparse_cores, layout.num_partitions) == (4, 2)
    assert layout.sparse_core_shard_row_offset == 8
    assert layout.sparse_core_shard_rotation == 2
    assert list(layout.unsharded_padded_shape) == [32, 8]


def test_batches_may_be_prepared_in_tf_data() -> None:
    embedding = two_tables()
    ids = tf.data.Dataset.from_tensors(BATCH).repeat(2)
    batches = ids.map(embedding.preprocess_features).prefetch(1)
    assert isinstance(batches.element_spec, PreprocessedFeatures)
    for batch in batches:
        dropped = {name: n.numpy() for name, n in batch.dropped_ids.items()}
        assert dropped == {"films": 0, "users": 0}
        found = run(STRATEGY, lambda own: embedding(own)[0], batch)
        assert found[1]["b"].tolist() == [[208, 208], [0, 0]]


def test_a_loop_in_a_function() -> None:
    embedding = two_tables()
    embedding.build()
    batch = embedding.preprocess_features(BATCH)

    def step() -> None:
        train_on(embedding, batch, ONES)

    @tf.function
    def train(steps: tf.Tensor) -> None:
        for _ in tf.range(steps):
            STRATEGY.run(step)

    train(tf.constant(3))
    assert table(embedding, "films")[7, 0] == 7 - 6
    assert table(embedding, "users")[4, 0] == 104 - 12


def test_a_program_flushes() -> None:
    """Refused steps have all other orders of pipelined updates."""
    embedding = films(pipeline_execution_with_tensor_core=True)
    gradients = tf.constant([[1.0, 2.0], [0.0, 0.0]])
    for expected in ([3, 1], [1, -3]):
        STRATEGY.run(train_on, (embedding, tf.constant([5, 0]), gradients))
        STRATEGY.run(embedding.flush)
        found = run(STRATEGY, lambda: embedding(tf.constant([5, 0]))[0])
        assert found[1][0].tolist() == expected


def test_a_row_with_gradients_that_cancel_is_touched() -> None:
    """Adam moves it by what its momenta hold."""
    embedding = films(optimizer=te.Adam(0.5))
    tables = []
    for second in (1.0, -1.0):
        gradients = tf.constant([[1.0, 1.0], [second, second]])
        STRATEGY.run(train_on, (embedding, tf.constant([1, 1]), gradients))
        tables.append(table(embedding, "films"))
    assert np.flatnonzero(np.all(tables[1] != tables[0], axis=1)).tolist() == [1]


@pytest.mark.parametrize("rule", ["drop", "mod"])
def test_invalid_ids(rule: str) -> None:
    config = te.TableConfig(
        8, 2, te.RowIdInitializer(1), name="films", invalid_ids=rule
    )
    with STRATEGY.scope():
        embedding = te.TPUEmbeddingV2(
            te.FeatureConfig(config, output_shape=[2], name="film"), te.SGD(1.0)
        )
    ids = tf.ragged.constant([[11, 2], [-5]], dtype=tf.int64)
    found = run(STRATEGY, lambda: embedding(ids)[0])[0]
    expected = {"drop": [[3, 3], [0, 0]], "mod": [[3.5, 3.5], [4, 4]]}
    np.testing.assert_array_equal(found, expected[rule])


def test_calls_outside_of_replicas() -> None:
    for system in (SYSTEM, ("v6e", 1)):
        embedding = two_tables(system)
        for call in (
            lambda own=embedding: own(BATCH),
            lambda own=embedding: own.apply_gradients(ONES, {}),
        ):
            embedding.build()
            with pytest.raises(RuntimeError, match=r"to `strategy.run`"):
                call()


def test_a_batch_of_another_engine_is_refused() -> None:
    batch = v2_calls.two_tables(output_shape=[2]).preprocess_features(BATCH)
    embedding = two_tables()
    with pytest.raises(ValueError, match="no sizes for stacked table films_users"):
        STRATEGY.run(lambda: embedding(batch))


def four_films() -> te.TPUEmbeddingV2:
    config = te.TableConfig(8, 2, combiner="sum", name="films")
    with strategy_of("v5p", 1).scope():
        return te.TPUEmbeddingV2(
            te.FeatureConfig(config, output_shape=[4], name="film"), te.SGD(1.0)
        )


def test_a_batch_for_other_hardware_or_tables_is_refused() -> None:
    """Of a batch before it is copied; of preserved outputs by what sizes tell."""
    batches = {
        r"made for 1 devices of 4 SparseCores .* has 2 devices of 2": four_films(),
        r"made for 1 devices of 2 SparseCores": films(system=("v6e", 1)),
        "with other tables, features or limits": films(
            sparse_core_embedding_config=te.SparseCoreEmbeddingConfig(
                max_ids_per_table={"films": 255}
            )
        ),
    }
    embedding = films()
    ids = tf.constant([5, 0, 1, 2])
    for text, other in batches.items():
        samples = 4 if "of 4" in text else 2
        batch = other.preprocess_features(ids[:samples])
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            STRATEGY.run(lambda own=batch: embedding(own)[0])
    bigger = films(
        sparse_core_embedding_config=te.SparseCoreEmbeddingConfig(
            max_ids_per_chip_per_sample=128
        )
    )

    def step() -> None:
        _, preserved = bigger(ids[:2])
        embedding.apply_gradients(tf.ones([2, 2]), preserved)

    embedding.build()
    with pytest.raises(ValueError, match="'films': `sorted_token_ids` has size"):
        STRATEGY.run(step)


def test_twelve_shards() -> None:
    """Row pointers come in eights, as ConvertToSparseCoreCsrWrappedCooTensor's do.

    Seen of Google's kernel: 16 of them for 12 shards, 24 for 20 and for 24.
    """
    strategy = strategy_of("v5p", 3)
    config = te.TableConfig(50, 2, te.RowIdInitializer(), combiner="sum", name="films")
    with strategy.scope():
        embedding = te.TPUEmbeddingV2(
            te.FeatureConfig(config, output_shape=[4], name="film"),
            te.SGD(1.0),
            pipeline_execution_with_tensor_core=True,
        )

    def step() -> Any:
        activations, preserved = embedding(tf.constant([49, 13, 13, 0]))
        embedding.apply_gradients(tf.ones([4, 2]), preserved)
        return activations, preserved

    (activations, preserved), *_ = run(strategy, step)
    assert activations[:, 0].tolist() == [49, 13, 13, 0]
    assert preserved["films"].row_pointers.shape == (4 * 64 * 16,)
    assert table(embedding, "films")[[49, 13, 0, 1], 0].tolist() == [46, 7, -3, 1]


@pytest.mark.parametrize("length", [0, 3])
def test_shapes_of_the_first_batch(length: int) -> None:
    """Without output_shape the first batch fixes the shapes, as on TPU v2 to v4."""
    config = te.TableConfig(8, 2, te.RowIdInitializer(), name="films", combiner="sum")
    with STRATEGY.scope():
        embedding = te.TPUEmbeddingV2(
            te.FeatureConfig(config, max_sequence_length=length, name="film"),
            te.SGD(1.0),
        )
    with pytest.raises(ValueError, match=r"Feature .*not fully known.*output_shap"):
        embedding.build()
    ids = tf.constant([[7, 1], [2, 3]])
    found = run(STRATEGY, lambda: embedding(ids)[0])
    if length:
        assert found[1][1, :, 0].tolist() == [2, 3, 0]
    else:
        assert found[1][:, 0].tolist() == [8, 5]
    with pytest.raises(ValueError, match="the first batch"):
        run(STRATEGY, lambda: embedding(tf.constant([[7], [2], [3], [4]]))[0])


def test_a_batch_for_a_device() -> None:
    embedding = two_tables()
    batch = embedding.enqueue(BATCH, device="/device:CPU:1")
    found = run(STRATEGY, lambda: embedding(batch)[0])
    assert found[0]["b"].tolist() == [[208, 208], [0, 0]]
    with pytest.raises(ValueError, match="CPU:3"):
        embedding.enqueue(BATCH, device="/device:CPU:3")


def test_control_flow_inside_of_a_program() -> None:
    embedding = two_tables()

    def step() -> tf.Tensor:
        looked_up = lambda: embedding(BATCH)[0]["a"]  # noqa: E731
        return tf.cond(tf.constant(True), looked_up, looked_up)

    with pytest.raises(RuntimeError, match=r"control flow or a tf.function inside"):
        STRATEGY.run(step)


def test_frozen_tables_train_on_sparse_cores() -> None:
    table = te.TableConfig(te.GrowingVocabulary(20), 8, name="films")
    growing = te.TPUEmbedding({"film": te.FeatureConfig(table)}, te.SGD(0.5))
    ids = tf.constant([7, -3, 2**62, 7], tf.int64)

    def train(factor: float) -> np.ndarray:
        growing.enqueue({"film": ids})
        found = growing.dequeue()["film"]
        growing.apply_gradients({"film": factor * tf.cos(found)})
        return found.numpy()

    train(1.0)
    frozen = growing.freeze_vocabulary(table)
    strategy = strategy_of("v6e", 2)
    feature = te.FeatureConfig(frozen.config, output_shape=[4])
    with strategy.scope():
        embedding = te.TPUEmbeddingV2({"film": feature}, te.SGD(0.5))

    def step(batch: dict[str, tf.Tensor]) -> tf.Tensor:
        activations, preserved = embedding(batch)
        found = activations["film"]
        embedding.apply_gradients({"film": tf.cos(found)}, preserved)
        return found

    for _ in range(3):
        expected = train(2.0)  # Both replicas have the same batch.
        found = strategy.run(step, ({"film": frozen.rows_of(ids)},))
        for replica in strategy.experimental_local_results(found):
            np.testing.assert_allclose(replica, expected, rtol=1e-6)
