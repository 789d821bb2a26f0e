"""What TPUEmbeddingV2 refuses, and that nothing has changed then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from v2_calls import BATCH, films, table, two_tables

import tpu_embedding as te
from tpu_embedding.layout.csr import PreprocessedFeatures

pytestmark = pytest.mark.usefixtures("engine")


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


def test_bad_ids_change_nothing() -> None:
    embedding = two_tables()
    bad = {**BATCH, "a": tf.constant([3, 8])}
    with pytest.raises(tf.errors.InvalidArgumentError, match="sample 1 has id 8"):
        embedding(bad)
    dataset = tf.data.Dataset.from_tensors(bad).map(embedding.preprocess_features)
    with pytest.raises(tf.errors.InvalidArgumentError, match="sample 1 has id 8"):
        list(dataset)


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
