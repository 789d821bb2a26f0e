"""TPUEmbeddingV2 beyond its numbers, which conformance/test_embedding_v2.py checks."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from replica_values import mirrored
from steps import train_on
from v2_calls import BATCH, films, table, two_tables

import tpu_embedding as te
from tpu_embedding.layout.csr import PreprocessedFeatures

stock = tf.tpu.experimental.embedding


pytestmark = pytest.mark.usefixtures("engine")


@pytest.mark.parametrize(
    "method",
    ["__call__", "apply_gradients", "build", "dequeue", "embedding_lookup", "enqueue"],
)
def test_arguments_are_those_of_tensorflow(method: str) -> None:
    own = inspect.signature(getattr(te.TPUEmbeddingV2, method)).parameters
    expected = inspect.signature(getattr(stock.TPUEmbeddingV2, method)).parameters
    assert [
        (p.name, p.default) for p in own.values() if p.kind is not p.KEYWORD_ONLY
    ] == [(p.name, p.default) for p in expected.values()]


def test_constructor_arguments_are_those_of_tensorflow() -> None:
    own = inspect.signature(te.TPUEmbeddingV2).parameters.values()
    expected = inspect.signature(stock.TPUEmbeddingV2).parameters.values()
    assert [(p.name, p.default) for p in own if p.kind is not p.KEYWORD_ONLY] == [
        (p.name, p.default) for p in expected
    ]


def test_preserved_outputs_are_plain_csr() -> None:
    activations, preserved = two_tables()(BATCH)
    np.testing.assert_array_equal(activations["a"], [[7, 7], [0, 0]])
    np.testing.assert_array_equal(activations["b"], [[208, 208], [0, 0]])
    np.testing.assert_array_equal(activations["c"], [[5, 5], [0, 0]])
    assert list(preserved) == ["films_users"]
    batch = preserved["films_users"]
    assert type(batch) is te.PartitionedCsrFormatTensor
    np.testing.assert_array_equal(batch.row_pointers, [0, 1, 2, 4, 4, 6, 6])
    np.testing.assert_array_equal(batch.sorted_sample_ids, [0, 1, 2, 2, 4, 4])
    # Rows of users come after the 8 of films.
    np.testing.assert_array_equal(batch.sorted_token_ids, [7, 0, 12, 12, 2, 3])
    np.testing.assert_array_equal(batch.sorted_gains, [1] * 6)
    np.testing.assert_array_equal(batch.sample_count, [2, 2, 2])
    assert batch.num_minibatches_per_physical_sparse_core == 1
    dtypes = [tensor.dtype for tensor in batch]
    assert dtypes == [tf.int32, tf.int32, tf.int32, tf.float32, tf.int32, tf.int32]


def test_the_sample_count_is_a_scalar_where_shapes_are_given() -> None:
    embedding = two_tables(output_shape=[2])
    _, preserved = embedding(BATCH)
    assert preserved["films_users"].sample_count.numpy() == 6
    embedding.apply_gradients({"a": None, "b": tf.ones([2, 2]), "c": None}, preserved)
    assert table(embedding, "users")[4].tolist() == [102, 102]


def test_stacking_can_be_disabled() -> None:
    config = te.SparseCoreEmbeddingConfig(disable_table_stacking=True)
    tables = [te.TableConfig(8, 2, name=name) for name in ("b", "a")]
    embedding = te.TPUEmbeddingV2(
        [te.FeatureConfig(t) for t in tables], te.SGD(0.1), False, config
    )
    _, preserved = embedding([tf.constant([1]), tf.constant([2])])
    assert set(preserved) == set(embedding.stacked_tables) == {"a", "b"}


def test_stacked_tables_are_the_tables() -> None:
    embedding = two_tables()
    (stacked,) = embedding.stacked_tables.values()
    tables = list(embedding.embedding_tables.values())
    assert [v is t for v, t in zip(stacked, tables, strict=True)] == [True, True]
    layouts = embedding.embedding_layouts
    users = layouts["users"]
    assert users.stacked_table_name == "films_users"
    assert users.sparse_core_shard_row_offset == 8
    assert users.num_sparse_cores == users.num_partitions == 1
    assert users.total_rows_per_sparse_core_shard == 13
    shards = embedding.embedding_table_shards
    assert shards.keys() == embedding.embedding_tables.keys()
    ((device, value),) = next(iter(shards.values()))
    assert "CPU:0" in device
    np.testing.assert_array_equal(value, tables[0])


def test_batches_may_be_prepared_in_tf_data() -> None:
    embedding = two_tables()
    ids = tf.data.Dataset.from_tensors(BATCH).repeat(2)
    batches = list(ids.map(embedding.preprocess_features).prefetch(1))
    assert isinstance(batches[0], PreprocessedFeatures)
    expected, _ = embedding(BATCH)
    for batch in batches:
        activations, preserved = embedding.embedding_lookup(batch)
        for name, value in expected.items():
            np.testing.assert_array_equal(activations[name], value)
    assert embedding.enqueue(batches[0]) is batches[0]
    embedding.apply_gradients({n: tf.ones([2, 2]) for n in "abc"}, preserved)
    assert table(embedding, "films")[7].tolist() == [6, 6]


def test_preserved_outputs_pass_through_functions() -> None:
    embedding = two_tables()
    embedding.build()

    @tf.function(reduce_retracing=True)
    def forward(batch: Any) -> Any:
        return embedding(batch)

    @tf.function(reduce_retracing=True)
    def backward(gradients: Any, preserved: Any) -> None:
        embedding.apply_gradients(gradients, preserved)

    for rows in (2, 3):
        ids = {n: tf.fill([rows], 1) for n in "abc"}
        activations, preserved = forward(ids)
        assert activations["a"].shape == (rows, 2)
        backward({"a": None, "b": tf.ones([rows, 2]), "c": None}, preserved)
    assert table(embedding, "users")[1].tolist() == [96, 96]


def test_a_loop_in_a_function() -> None:
    embedding = two_tables(output_shape=[2])
    embedding.build()

    @tf.function
    def train(steps: int) -> None:
        for _ in tf.range(steps):
            train_on(embedding, BATCH, {n: tf.ones([2, 2]) for n in "abc"})

    train(tf.constant(5))
    assert table(embedding, "films")[7].tolist() == [2, 2]


@pytest.mark.parametrize("engine", ["host"], indirect=True)
def test_replicas_sum_their_gradients() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        embedding = two_tables()
        embedding.build()

    def step(batch: Any) -> Any:
        activations = train_on(embedding, batch, {n: tf.ones([2, 2]) for n in "abc"})
        return activations["a"]

    batches = (
        tf.data.Dataset.from_tensors(BATCH).repeat().map(embedding.preprocess_features)
    )
    for _ in range(2):
        strategy.run(step, (BATCH,))
    dataset = strategy.distribute_datasets_from_function(lambda _: batches)
    strategy.run(step, (next(iter(dataset)),))
    assert table(embedding, "films")[7].tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="must run inside one of 2 replicas"):
        embedding(BATCH)


def test_a_batch_may_be_applied_more_than_once() -> None:
    embedding = te.TPUEmbeddingV2(te.FeatureConfig(films()), te.SGD(1.0))
    _, first = embedding(tf.constant([5]))
    _, second = embedding(tf.constant([6]))
    for preserved in (second, first, first):
        embedding.apply_gradients(tf.ones([1, 2]), preserved)
    assert table(embedding, "films")[:, 0].tolist() == [0, 1, 2, 3, 4, 3, 5, 7]


def test_the_checkpoint_is_that_of_tpu_embedding(tmp_path: Any) -> None:
    embedding = two_tables()
    train_on(embedding, BATCH, {n: tf.ones([2, 2]) for n in "abc"})
    path = tf.train.Checkpoint(embedding=embedding).save(str(tmp_path / "c"))
    keys = [te.TableConfig(8, 2, name="films"), te.TableConfig(5, 2, name="users")]
    other = te.TPUEmbedding([te.FeatureConfig(key) for key in keys], te.SGD(1.0))
    other.build()
    tf.train.Checkpoint(embedding=other).restore(path).assert_consumed()
    for key in keys:
        np.testing.assert_array_equal(
            other.embedding_tables[key], table(embedding, str(key.name))
        )


def test_without_an_optimizer_there_are_lookups_only() -> None:
    embedding = te.TPUEmbeddingV2(te.FeatureConfig(films()))
    activations, preserved = embedding(tf.constant([5]))
    assert activations.numpy().tolist() == [[5, 5]]
    with pytest.raises(RuntimeError, match="apply_gradients"):
        embedding.apply_gradients(tf.ones([1, 2]), preserved)


def test_calls_before_build() -> None:
    embedding = two_tables()
    with pytest.raises(RuntimeError, match="apply_gradients"):
        embedding.apply_gradients({}, {})
    with pytest.raises(RuntimeError, match="dequeue"):
        embedding.dequeue({})  # pyright: ignore[reportArgumentType]


def test_configs_of_tensorflow_are_taken() -> None:
    key = stock.TableConfig(8, 2, initializer=te.RowIdInitializer(), name="films")
    embedding = te.TPUEmbeddingV2(
        stock.FeatureConfig(key),
        stock.SGD(0.5),
        sparse_core_embedding_config=stock.SparseCoreEmbeddingConfig(
            max_ids_per_table={"films": 3}
        ),
    )
    train_on(embedding, tf.constant([5]))
    assert embedding.embedding_tables[key].numpy()[5].tolist() == [4.5, 4.5]


@pytest.mark.parametrize("made", [te.TPUEmbedding, te.TPUEmbeddingV2])
def test_static_batch_sizes_stay_known_in_graphs(made: Any) -> None:
    tables = [te.TableConfig(8, 4, name=name) for name in ("a", "b")]
    embedding = made([te.FeatureConfig(table) for table in tables], te.SGD(1.0))
    embedding.build()
    shapes = []

    @tf.function
    def look_up(dense: tf.Tensor, ragged: tf.RaggedTensor) -> Any:
        if made is te.TPUEmbedding:
            embedding.enqueue([dense, ragged], training=False)
            found = embedding.dequeue()
        else:
            found, _ = embedding([dense, ragged])
        shapes.append([activation.shape.as_list() for activation in found])
        return found

    ragged = tf.ragged.constant([[1], [2, 3]], tf.int32)
    look_up(tf.constant([1, 2]), ragged)
    assert shapes[0] == [[2, 4], [2, 4]]
    three = tf.ragged.constant([[1], [2, 3], []], tf.int32)
    found = look_up(tf.constant([1, 2, 3]), three)
    assert [activation.shape for activation in found] == [[3, 4], [3, 4]]
    # A queue may hold batches of both sizes now.
    three_rows = [3, 4] if made is te.TPUEmbeddingV2 else [None, 4]
    assert shapes[1] == [three_rows] * 2


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"pipeline_execution_with_tensor_core": 1}, TypeError, "pipeline_execution"),
        ({"sparse_core_embedding_config": 3}, TypeError, "a SparseCoreEmbeddingConfig"),
        ({"check_numerics": None}, TypeError, "check_numerics"),
        ({"invalid_ids": "skip"}, ValueError, "invalid_ids"),
        ({"optimizer": 3}, ValueError, "optimizer"),
    ],
)
def test_bad_constructor_arguments(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        te.TPUEmbeddingV2(te.FeatureConfig(films()), **arguments)


def test_what_only_a_tpu_can_carry_is_refused_at_construction() -> None:
    with pytest.raises(NotImplementedError, match=r"layout=3.*of table films"):
        te.TPUEmbeddingV2(te.FeatureConfig(films(layout=3)), te.SGD(0.1))
    optimizer = te.SGD(0.1, low_dimensional_packing_status=True)
    with pytest.raises(NotImplementedError, match="low_dimensional_packing_status"):
        te.TPUEmbeddingV2(te.FeatureConfig(films()), optimizer)


def test_two_stacks_of_one_name_are_refused_at_construction() -> None:
    tables = [te.TableConfig(8, d, name=n) for n, d in (("a", 2), ("b", 2), ("a_b", 3))]
    with pytest.raises(ValueError, match="both in stack 'a_b'"):
        te.TPUEmbeddingV2([te.FeatureConfig(t) for t in tables], te.SGD(0.1))


def test_bad_preserved_outputs() -> None:
    embedding = two_tables()
    _, preserved = embedding(BATCH)
    gradients = {n: tf.ones([2, 2]) for n in "abc"}
    with pytest.raises(TypeError, match=r"names of stacked tables\. Received: list"):
        embedding.apply_gradients(gradients, [])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="have the stacked tables films, but this emb"):
        embedding.apply_gradients(gradients, {"films": preserved["films_users"]})
    with pytest.raises(
        ValueError, match=r"a PartitionedCsrFormatTensor\. Received: in"
    ):
        embedding.apply_gradients(gradients, {"films_users": 3})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="dequeue takes the PreprocessedFeatures"):
        embedding.dequeue(preserved)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match="batch has 0 features, but this embedding has 3"
    ):
        embedding.dequeue(PreprocessedFeatures(preserved, (), {}, {}))
    with pytest.raises(ValueError, match="`weights` cannot be passed with pre"):
        embedding.enqueue(embedding.preprocess_features(BATCH), BATCH)
    with pytest.raises(ValueError, match="TPU:0"):
        embedding.enqueue(BATCH, device="TPU:0")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("row_pointers", [0, 1, 2, 4, 4, 6], "6 row_pointers for 6 samples; the num"),
        ("row_pointers", [1, 1, 2, 4, 4, 6, 6], "row_pointers must rise from 0 to"),
        ("row_pointers", [0, 1, 2, 4, 4, 6, 7], "row_pointers must rise from 0 to"),
        ("row_pointers", [0, 3, 2, 4, 4, 6, 6], "row_pointers must rise from 0 to"),
        ("sorted_gains", [1.0] * 5, "row_pointers must rise from 0 to"),
        (
            "sorted_token_ids",
            [7, 0, 7, 12, 2, 3],
            "entry 2 has token id 7, but it belongs to feature b, whose table has the "
            r"ids \[8, 13\)",
        ),
        ("sorted_token_ids", [7, -1, 12, 12, 2, 3], "entry 1 has token id -1, but"),
        ("sample_count", [2, 2, -1], "feature c has a negative or too large number"),
        ("sample_count", [2, 2, 3], "7 row_pointers for 7 samples"),
    ],
)
def test_preserved_outputs_are_not_trusted(
    field: str, value: Any, text: str, engine: str
) -> None:
    if engine == "portable":
        text = "Stacked table films_users: .* Pass the second output of"
    embedding = two_tables()
    before, preserved = embedding(BATCH)
    bad = {
        "films_users": preserved["films_users"]._replace(**{field: tf.constant(value)})
    }
    gradients = {"a": tf.ones([2, 2]), "b": None, "c": None}
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        embedding.apply_gradients(gradients, bad)
    for name, activation in embedding(BATCH)[0].items():
        np.testing.assert_array_equal(activation, before[name])


def test_gradients_of_another_batch_are_refused() -> None:
    embedding = two_tables()
    _, preserved = embedding(BATCH)
    gradients = {"a": tf.ones([1, 2]), "b": tf.ones([3, 2]), "c": None}
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"Feature a: the gradient has shape \[1,2"
    ):
        embedding.apply_gradients(gradients, preserved)
    gradients["a"] = tf.ones([2, 3])
    with pytest.raises(ValueError, match="a"):
        embedding.apply_gradients(gradients, preserved)
    np.testing.assert_array_equal(table(embedding, "films")[:, 0], np.arange(8))


def test_a_refused_first_batch_fixes_no_rank() -> None:
    embedding = two_tables()
    with pytest.raises(tf.errors.InvalidArgumentError):
        embedding({**BATCH, "a": tf.constant([[[3, 8]]])})
    embedding(BATCH)


def test_preserved_outputs_are_not_trusted_in_a_function(engine: str) -> None:
    text = "entry 1 has token id -1" if engine == "host" else "is not a row of"
    embedding = two_tables()
    _, preserved = embedding(BATCH)
    tokens = tf.constant([7, -1, 12, 12, 2, 3])
    batch = preserved["films_users"]._replace(sorted_token_ids=tokens)
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        tf.function(embedding.apply_gradients)(
            {"a": tf.ones([2, 2]), "b": None, "c": None}, {"films_users": batch}
        )
    np.testing.assert_array_equal(table(embedding, "films")[:, 0], np.arange(8))
