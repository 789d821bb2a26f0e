from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

import tpu_embedding as te
import tpu_embedding.keras
from tpu_embedding import initializers
from tpu_embedding.tables.initial import table_values


@pytest.mark.parametrize("dim", [1, 4, 64])
def test_default_is_a_truncated_normal_of_stddev_one_over_root_dim(dim: int) -> None:
    tf.random.set_seed(17)
    values = initializers.default_initializer(dim)([40_000 // dim, dim], tf.float32)
    stddev = 1 / math.sqrt(dim)
    # Cut at two standard deviations a normal keeps 0.8796 of its own.
    np.testing.assert_allclose(np.std(values), 0.8796 * stddev, rtol=0.03)
    assert abs(np.mean(values)) < 0.02 * stddev
    assert np.max(np.abs(values)) <= 2 * stddev * (1 + 1e-6)


def test_default_equals_tensorflow_s_default_under_one_seed() -> None:
    stock = tf.tpu.experimental.embedding.TableConfig(100, 16, name="t").initializer
    tf.random.set_seed(5)
    expected = stock([100, 16], dtype=tf.float32)  # pyright: ignore[reportCallIssue]
    tf.random.set_seed(5)
    actual = initializers.default_initializer(16)([100, 16], dtype=tf.float32)
    np.testing.assert_array_equal(actual, expected)


def test_names_of_keras_are_taken() -> None:
    def table_of(initializer: str) -> np.ndarray:
        table = te.TableConfig(4, 2, initializer, name="films")
        embedding = te.TPUEmbedding(te.FeatureConfig(table), te.SGD())
        embedding.build()
        return embedding.embedding_tables[table].numpy()

    np.testing.assert_array_equal(table_of("ones"), np.ones((4, 2)))
    assert 0 < np.abs(table_of("uniform")).max() <= 0.05
    with pytest.raises(ValueError, match=r"Table films: Keras has no .* called 'onse'"):
        table_of("onse")
    layer = te.keras.TPUEmbedding(te.FeatureConfig(te.TableConfig(4, 2, "ones")), None)
    copy = te.keras.TPUEmbedding.from_config(layer.get_config())
    (table,) = copy.embedding_tables.values()
    np.testing.assert_array_equal(table, np.ones((4, 2)))


def test_default_draws_anew_for_each_table() -> None:
    draw = initializers.default_initializer(16)
    first, second = draw([100, 16]), draw(tf.TensorShape([100, 16]))
    assert np.mean(first.numpy() == second.numpy()) < 0.1
    tf.random.set_seed(5)
    first, second = draw([100, 16]), draw([100, 16], dtype=tf.bfloat16)
    assert second.dtype == tf.bfloat16
    close = np.isclose(first, tf.cast(second, tf.float32), rtol=2**-8)
    assert np.mean(close) < 0.1


@pytest.mark.parametrize("dim", [1, 3, 8])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_any_rows_are_those_of_the_whole_table(dim: int, dtype: tf.DType) -> None:
    shape = (301, dim)
    for initializer in (
        initializers.default_initializer(dim),
        initializers.RowIdInitializer(7),
    ):
        tf.random.set_seed(5)
        tables = [initializer(shape, dtype) for _ in range(2)]
        tf.random.set_seed(5)
        for table in tables:
            read = initializer.by_rows(shape, dtype)
            for start, stop in ((0, 301), (100, 301), (1, 2), (6, 6), (299, 300)):
                rows = read(start, stop)
                assert rows.dtype == dtype
                np.testing.assert_array_equal(rows, table[start:stop])


@pytest.mark.parametrize("dtype", [tf.float32, tf.int32])
@pytest.mark.parametrize("offset", [0, 7])
def test_row_ids(offset: int, dtype: tf.DType) -> None:
    ours = initializers.RowIdInitializer(offset)((5, 3), dtype)
    stock = tf.tpu.experimental.embedding.RowIdInitializer(offset)((5, 3), dtype)
    assert ours.dtype == dtype
    np.testing.assert_array_equal(ours, stock)


def test_many_tables_of_different_sizes_cause_no_warning_of_retracing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tf.get_logger().addHandler(caplog.handler)
    for rows in range(1000, 1008):
        te.TPUEmbedding(te.FeatureConfig(te.TableConfig(rows, 16)), None).build()
    tf.get_logger().removeHandler(caplog.handler)
    assert "retracing" not in caplog.text


def test_row_ids_take_a_tensor_shape() -> None:
    values = initializers.RowIdInitializer()(tf.TensorShape([2, 2]))
    np.testing.assert_array_equal(values, [[0, 0], [1, 1]])


def test_row_ids_compare_by_value() -> None:
    assert initializers.RowIdInitializer(3) == initializers.RowIdInitializer(3)
    assert initializers.RowIdInitializer(3) != initializers.RowIdInitializer(4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_constants_are_made_alone(dtype: str) -> None:
    """Also where the whole table has no place in memory."""
    for initializer, expected in (
        ("zeros", 0.0),
        (tf.keras.initializers.Ones(), 1.0),
        (tf.constant_initializer(0.1), 0.1),
        (tf.keras.initializers.Constant(2), 2.0),
    ):
        config = te.TableConfig(2**31 - 1, 2**12, initializer, dtype=dtype)
        plan = te.TPUEmbedding(te.FeatureConfig(config), te.SGD(0.1)).core.plan
        values = table_values(plan.tables[0]).reader("CPU:0")(
            range(2**30, 2**30 + 5, 2)
        )
        same = tf.fill([3, 2**12], tf.constant(expected, values.dtype))
        np.testing.assert_array_equal(values, same)
        assert values.dtype == dtype
