"""Tables of bfloat16 through everything that holds, saves, serves or refuses tables."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from reference import rounding
from rounded_tables import (
    IDS,
    initial,
    refusals,
    save_numpy,
    save_ours,
    save_tensorflow,
    table_of,
    train,
)
from steps import evaluate_on, train_on

import tpu_embedding as te
from tpu_embedding import checkpoint, distribution, serving
from tpu_embedding.keras import TPUEmbedding

ROWS, DIM = 11, 10


def feature(
    dtype: Any = "bfloat16", rows: int = ROWS, **options: Any
) -> dict[str, te.FeatureConfig]:
    options = {"combiner": "sum", "initializer": initial, "name": "films", **options}
    table = te.TableConfig(rows, DIM, dtype=dtype, **options)
    return {"seen": te.FeatureConfig(table, name="seen", output_shape=[2])}


def make(dtype: Any = "bfloat16", optimizer: Any = None, **options: Any) -> Any:
    return te.TPUEmbedding(feature(dtype, **options), optimizer or te.Adagrad(0.01))


def slot_of(embedding: Any) -> np.ndarray:
    (variables,) = embedding.variables.values()
    return variables["accumulators"].numpy()


def test_halves_the_bytes_of_the_table_alone(engine: str) -> None:
    embedding = make(tf.bfloat16)  # A dtype object is as good as its name.
    (variables,) = embedding.variables.values()
    assert variables["parameters"].dtype == tf.bfloat16
    assert variables["accumulators"].dtype == tf.float32
    assert evaluate_on(embedding, {"seen": IDS})["seen"].dtype == tf.float32
    exact = initial([ROWS, DIM]).numpy()
    np.testing.assert_array_equal(table_of(embedding), rounding.nearest(exact))


def test_initializers_may_give_float32(engine: str) -> None:
    asked = []

    def numpy_values(shape: Any, dtype: Any) -> np.ndarray:
        asked.append(dtype)
        return initial(shape).numpy()

    embedding = make(initializer=numpy_values)
    np.testing.assert_array_equal(table_of(embedding), table_of(make()))
    assert asked == [tf.bfloat16]
    for initializer in (None, te.RowIdInitializer(), keras.initializers.Ones()):
        values = table_of(make(initializer=initializer))
        assert np.isfinite(values).all()
        assert (values != 0).any()


def test_both_engines_give_the_same_table(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = []
    for engine in distribution.CPU_ENGINES:
        monkeypatch.setenv(distribution.ENGINE_VARIABLE, engine)
        # Products and sums of few terms: nothing that engines may sum otherwise.
        embedding = make(optimizer=te.SGD(0.25))
        train(embedding)
        tables.append(table_of(embedding))
    np.testing.assert_array_equal(*tables)


def test_seeds(engine: str) -> None:

    def trained(**options: Any) -> np.ndarray:
        embedding = make(**options)
        train(embedding, range(1))
        return table_of(embedding)

    by_name = trained()
    seed = rounding.seed_of("films")
    np.testing.assert_array_equal(by_name, trained(rounding_seed=seed, name="other"))
    assert not np.array_equal(by_name, trained(name="other"))
    assert not np.array_equal(by_name, trained(rounding_seed=seed + 2**32))
    of_zero = trained(rounding_seed=0)  # A seed like any other.
    assert not np.array_equal(by_name, of_zero)
    np.testing.assert_array_equal(of_zero, trained(rounding_seed=0, name="other"))


def test_small_steps_are_not_lost(engine: str) -> None:
    """The mean over many elements is that of float32 (the second oracle).

    A rounding is off by less than a spacing, 2^-8 below 1, with a variance of at most
    a quarter of its square; those of different elements and steps are independent.
    The bound is five standard deviations of the mean of all elements.
    """
    rows, dim, steps, rate = 64, 256, 16, 2.0**-12
    table = te.TableConfig(
        rows, dim, keras.initializers.Constant(0.75), name="t", dtype="bfloat16"
    )
    embedding = te.TPUEmbedding([te.FeatureConfig(table)], te.SGD(rate))
    for _ in range(steps):
        train_on(embedding, [tf.range(rows)], [tf.ones([rows, dim])])
    values = table_of(embedding)
    exact = 0.75 - steps * rate
    deviation = np.sqrt(steps / 4 / (rows * dim)) * 2.0**-8
    assert abs(values.mean(dtype=float) - exact) < 5 * deviation
    # Rounded to the nearest, every element would have stayed where it was.
    assert (values == 0.75).mean() < 0.5
    # No element has gone farther than one spacing in each step.
    assert np.abs(values - 0.75).max() <= steps * 2.0**-8


def test_float32_is_followed_within_the_spacings(engine: str) -> None:
    """Adagrad's step does not depend on the table: only roundings set them apart."""
    half, whole = make(), make("float32")
    train(half)
    train(whole)
    np.testing.assert_array_equal(slot_of(half), slot_of(whole))
    # Once at the start, to the nearest, then in each step less than a spacing.
    largest = np.abs(table_of(whole)).max() + 1
    bound = (1 / 2 + 3) * largest * 2.0**-7
    assert np.abs(table_of(half) - table_of(whole)).max() <= bound
    untouched = [r for r in range(ROWS) if r not in IDS.numpy()]
    start = rounding.nearest(initial([ROWS, DIM]).numpy())
    np.testing.assert_array_equal(table_of(half)[untouched], start[untouched])


def test_v2_and_the_layer_give_the_same_bits(engine: str) -> None:
    embedding = make()
    train(embedding)
    second = te.TPUEmbeddingV2(feature(), te.Adagrad(0.01))
    second.build()
    layer = TPUEmbedding(feature(), te.Adagrad(0.01))
    for step in range(3):
        gradient = tf.random.stateless_normal([2, DIM], seed=[step, 0])
        train_on(second, {"seen": IDS}, {"seen": gradient})
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer({"seen": IDS})["seen"] * gradient)
        tape.gradient(loss, layer.trainable_variables)
    expected = table_of(embedding)
    np.testing.assert_array_equal(table_of(second), expected)
    np.testing.assert_array_equal(table_of(layer), expected)


def test_the_layer_is_saved(engine: str, tmp_path: pathlib.Path) -> None:
    config = feature(initializer=None, rounding_seed=7)
    inputs = {"seen": keras.Input([2], dtype="int64", name="seen")}
    layer = TPUEmbedding(config, te.Adagrad(0.01))
    model = keras.Model(inputs, layer(inputs)["seen"])
    model(inputs={"seen": IDS})
    path = str(tmp_path / "model.keras")
    model.save(path)
    loaded: Any = keras.models.load_model(path)
    (other,) = [part for part in loaded.layers if isinstance(part, type(layer))]
    np.testing.assert_array_equal(table_of(other), table_of(layer))
    (table,) = other.embedding_tables
    assert (table.dtype, table.rounding_seed) == ("bfloat16", 7)


@pytest.mark.parametrize("save", [save_ours, save_tensorflow])
def test_a_resumed_training_has_the_bits_of_an_unbroken_one(
    save: Callable[..., str], engine: str, tmp_path: pathlib.Path
) -> None:
    unbroken = make()
    train(unbroken, range(4))
    first = make()
    train(first, range(2))
    path = save(first, tmp_path)
    resumed = make()
    if save is save_ours:
        checkpoint.restore(resumed, path)
    else:
        read = tf.train.Checkpoint(embedding=resumed).read(path)
        read.assert_consumed()
    train(resumed, range(2, 4))
    np.testing.assert_array_equal(table_of(resumed), table_of(unbroken))
    np.testing.assert_array_equal(slot_of(resumed), slot_of(unbroken))


@pytest.mark.parametrize("save", [save_ours, save_tensorflow, save_numpy])
def test_checkpoints_go_from_one_dtype_to_the_other(
    save: Callable[..., str], engine: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "whole").mkdir()
    half, whole = make(), make("float32")
    train(half)
    train(whole)
    widened, rounded = make("float32"), make()
    checkpoint.restore(widened, save(half, tmp_path / "half"))
    np.testing.assert_array_equal(table_of(widened), table_of(half))
    np.testing.assert_array_equal(slot_of(widened), slot_of(half))
    checkpoint.restore(rounded, save(whole, tmp_path / "whole"))
    expected = rounding.nearest(table_of(whole))
    np.testing.assert_array_equal(table_of(rounded), expected)
    # Fewer rows, and the other dtype.
    smaller = make(rows=4)
    checkpoint.restore(smaller, str(tmp_path / "whole" / WRITTEN[save]), resize=True)
    np.testing.assert_array_equal(table_of(smaller), expected[:4])


WRITTEN = {save_ours: "ours", save_tensorflow: "tensorflow", save_numpy: "arrays"}


def test_tensorflow_refuses_to_restore_another_dtype(tmp_path: pathlib.Path) -> None:
    whole, embedding = make("float32", name="a/b.c"), make(name="a/b.c")
    path = save_tensorflow(whole, tmp_path)
    before = table_of(embedding)
    with pytest.raises(TypeError, match=r"a/b\.c is bfloat16, .* float32.*t\.restore"):
        tf.train.Checkpoint(embedding=embedding).read(path)
    np.testing.assert_array_equal(table_of(embedding), before)
    both = tf.train.Checkpoint(whole=whole, half=embedding)
    both.read(both.write(str(tmp_path / "both"))).assert_consumed()


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_export(storage: str, tmp_path: pathlib.Path) -> None:
    embedding = make()
    train(embedding)
    ids = tf.constant([1, 10], tf.int64)
    expected = evaluate_on(embedding, {"seen": ids})["seen"].numpy()
    path = str(tmp_path / "served")
    serving.export(embedding, path, storage=storage)
    served = tf.saved_model.load(path).signatures["serving_default"]
    # Both storages hold the very values.
    (actual,) = served(seen=ids).values()
    np.testing.assert_array_equal(actual.numpy(), expected)


def test_serving_classes() -> None:
    config = feature()
    expected = make()
    activations = evaluate_on(expected, {"seen": IDS})["seen"].numpy()
    serving_embedding = te.TPUEmbeddingForServing(config, te.Adagrad(0.01))
    np.testing.assert_array_equal(
        serving_embedding.embedding_lookup({"seen": IDS})["seen"].numpy(), activations
    )
    tables = expected.embedding_tables
    looked_up = te.serving_embedding_lookup(
        {"seen": IDS}, None, tables, {"seen": te.FeatureConfig(*tables)}
    )
    np.testing.assert_array_equal(looked_up["seen"].numpy(), activations)


REFUSALS = refusals(feature)


@pytest.mark.parametrize("what", REFUSALS)
def test_refused_at_construction(what: str) -> None:
    with pytest.raises(NotImplementedError, match=f"Table films: .*{what}") as raised:
        REFUSALS[what]()
    assert "bfloat16" in str(raised.value)
    assert 'Set `dtype="float32"`' in str(raised.value)


def test_a_slot_of_bfloat16_is_refused() -> None:
    def halves(table: Any, names: list[str], initializers: list[Any]) -> Any:
        zeros = tf.zeros(table.shape, tf.bfloat16)
        return {name: tf.Variable(zeros, trainable=False) for name in names}

    with pytest.raises(ValueError, match="float32"):
        make(optimizer=te.Adagrad(0.01, slot_variable_creation_fn=halves)).build()
