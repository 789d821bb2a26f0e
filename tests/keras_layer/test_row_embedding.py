"""`te.keras.Embedding`, `convert` and `unconvert`: Keras's numbers, masks and files.

`tests/test_tf_keras.py` runs this file with tf_keras, too.
"""

from __future__ import annotations

import json
import pathlib
import zipfile
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_layer.models import mirrored
from keras_layer.version import keras
from new_process import printed_by
from reference.lookup import gains

import tpu_embedding as te
from tpu_embedding.keras import Embedding, RowSparseOptimizer
from tpu_embedding.ops import library

V, D = 20, 4
IS_KERAS_3 = hasattr(keras, "ops")
keras_3 = pytest.mark.skipif(not IS_KERAS_3, reason="tf_keras does not have it")


def both(**options: Any) -> tuple[Any, Any]:
    """Keras's layer and ours, with the same weights."""
    theirs, ours = keras.layers.Embedding(V, D, **options), Embedding(V, D, **options)
    for layer in (theirs, ours):
        layer.build((None, None))
    ours.set_weights(theirs.get_weights())
    return theirs, ours


def model(layer: Any, optimizer: Any) -> Any:
    """Two calls of one layer, and a dense layer; the weights depend on nothing."""
    inputs = [keras.Input([3], dtype="int64"), keras.Input([2], dtype="int64")]
    rows = [keras.layers.Flatten()(layer(ids)) for ids in inputs]
    output = keras.layers.Dense(1)(keras.layers.Concatenate()(rows))
    made = keras.Model(inputs, output)
    made.set_weights(
        [np.linspace(-1, 1, w.size).reshape(w.shape) for w in made.get_weights()]
    )
    made.compile(optimizer, "mse")
    return made


def by_rows(rule: str, **options: Any) -> Any:
    """`model` by rows, with a rule of Keras."""
    optimizer = getattr(keras.optimizers, rule)(0.1, **options)
    return model(Embedding(V, D), RowSparseOptimizer(optimizer))


def data(rng: np.random.Generator, n: int = 32) -> tuple[Any, Any]:
    ids = [rng.integers(0, 6, (n, 3)), rng.integers(0, 6, (n, 2))]
    return ids, rng.normal(size=(n, 1)).astype(np.float32)


def losses(made: Any, batches: Any, epochs: int = 1) -> list[float]:
    x, y = batches
    fitted = made.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return fitted.history["loss"]


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
@pytest.mark.parametrize("shape", [(2, 3), (4,), (0, 3), (2, 1, 2)])
def test_a_lookup_has_the_bits_of_keras(
    dtype: str, shape: tuple[int, ...], rng: np.random.Generator
):
    theirs, ours = both()
    ids = tf.constant(rng.integers(0, V, shape), dtype)
    np.testing.assert_array_equal(ours(ids), theirs(ids))


@keras_3
def test_negative_ids_count_from_the_end_as_in_keras_3():
    theirs, ours = both()
    ids = tf.constant([[-1, 0], [-V, V - 1]])
    np.testing.assert_array_equal(ours(ids), theirs(ids))


def test_ids_beyond_the_table_are_an_error_that_changes_nothing():
    made = by_rows("Adam")
    ids = [np.array([[1, 2, 3]]), np.array([[4, 5]])]
    made.train_on_batch(ids, np.ones([1, 1]))
    before = [*made.get_weights(), *slots(made)[1:]]  # Keras counts the step.
    ids[1][0, 0] = V
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{V} is not in"):
        made.train_on_batch(ids, np.ones([1, 1]))
    same([*made.get_weights(), *slots(made)[1:]], before)


def test_ragged_and_sparse_ids_are_as_in_keras():
    theirs, ours = both()
    ragged = tf.ragged.constant([[1, 2], [], [3]])
    for ids in (ragged, ragged.to_sparse()):
        found, expected = ours(ids), theirs(ids)
        assert type(found) is type(expected)
        if isinstance(found, tf.RaggedTensor):
            found, expected = found.to_tensor(), expected.to_tensor()
        np.testing.assert_array_equal(found, expected)


def test_a_gradient_names_the_rows_of_the_batch():
    _, ours = both()
    table = ours.trainable_variables[0]
    table = getattr(table, "value", table) if IS_KERAS_3 else table
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(ours(tf.constant([[3, 1, 3]])))
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, tf.IndexedSlices)
    assert gradient.indices.numpy().tolist() == [3, 1, 3]


def test_a_regularizer_of_strength_0_is_left_out():
    for name, strengths in (("L2", [0.0]), ("L1L2", [0.0, 0.0]), ("L2", [0.1])):
        regularizer = getattr(keras.regularizers, name)(*strengths)
        layer = Embedding(V, D, embeddings_regularizer=regularizer)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([[3, 1, 3]]))) + sum(layer.losses)
        (table,) = layer.trainable_variables
        table = getattr(table, "value", table) if IS_KERAS_3 else table
        gradient = tape.gradient(loss, table)
        assert isinstance(gradient, tf.IndexedSlices) == (not any(strengths))
        assert layer.get_config()["embeddings_regularizer"] is not None


def test_rows_need_no_compiled_kernels(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
):
    monkeypatch.setattr(library, "unavailable_reason", lambda: "There is none.")
    monkeypatch.setattr(library, "load", lambda: pytest.fail("loads the library"))
    layer = Embedding(V, D, combiner="mean")
    bags = keras.Sequential([keras.Input([3], dtype="int64"), layer])
    bags.compile(RowSparseOptimizer(keras.optimizers.Adagrad(0.1)), "mse")
    bags.fit(rng.integers(0, V, (8, 3)), np.ones([8, D]), verbose=0)


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_training_has_the_numbers_of_dense_gradients(
    optimizer: str, rng: np.random.Generator
):
    batches = data(rng)
    # A regularizer makes the gradient dense.
    none = keras.regularizers.L2(0.0)
    theirs = keras.layers.Embedding(V, D, embeddings_regularizer=none)
    expected = model(theirs, getattr(keras.optimizers, optimizer)(0.1))
    found = by_rows(optimizer)
    np.testing.assert_allclose(
        losses(found, batches, 50), losses(expected, batches, 50), rtol=1e-6
    )
    for ours, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        # 50 epochs of 4 steps, of which each rounds weights to 24 bits.
        atol = 50 * 4 * 2**-24 * np.abs(other).max()
        np.testing.assert_allclose(ours, other, rtol=0, atol=atol)
    assert found.count_params() == expected.count_params()


class Tied(keras.Model):
    """A language model whose logits are the rows of its table."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.table, self.dense = layer, keras.layers.Dense(D, kernel_initializer="ones")

    def call(self, ids: Any) -> Any:
        hidden = self.dense(self.table(ids))
        table = self.table.embeddings
        return tf.matmul(hidden, tf.convert_to_tensor(table), transpose_b=True)


@pytest.mark.parametrize("regularized", [False, True])
def test_tied_logits_and_regularizers_have_the_numbers_of_keras(
    regularized: bool, rng: np.random.Generator
):
    ids = rng.integers(0, V, (16, 3))
    options: dict[str, Any] = {"embeddings_initializer": "ones"}
    if regularized:
        options["embeddings_regularizer"] = keras.regularizers.L2(0.01)
    histories = []
    for cls, wrap in (
        (keras.layers.Embedding, lambda o: o),
        (Embedding, RowSparseOptimizer),
    ):
        tied = Tied(cls(V, D, **options))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        tied.compile(wrap(keras.optimizers.Adam(0.1)), loss)
        fitted = tied.fit(ids, ids, batch_size=8, epochs=5, shuffle=False, verbose=0)
        histories.append(fitted.history["loss"])
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-6)


# Keras 3.16 warns of each RNN that gets a mask.
@pytest.mark.filterwarnings("ignore:Layer 'lstm' .of type LSTM.:UserWarning")
def test_masks_reach_an_lstm(rng: np.random.Generator):
    theirs, ours = both(mask_zero=True)
    lstm = keras.layers.LSTM(3)
    ids = tf.constant(rng.integers(0, 3, (4, 5)))
    np.testing.assert_array_equal(lstm(ours(ids)), lstm(theirs(ids)))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy: str, rng: np.random.Generator):
    theirs, ours = both(dtype=policy)
    ids = tf.constant(rng.integers(0, V, (2, 3)))
    assert ours(ids).dtype == theirs(ids).dtype != tf.float32
    np.testing.assert_array_equal(ours(ids), theirs(ids))


def test_a_loss_scale_around_rows(rng: np.random.Generator):
    scaled = keras.mixed_precision.LossScaleOptimizer(
        RowSparseOptimizer(keras.optimizers.Adagrad(0.1))
    )
    batches = data(rng)
    found = losses(model(Embedding(V, D), scaled), batches, 3)
    expected = losses(by_rows("Adagrad"), batches, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
def test_frozen_tables_do_not_change(when: str, rng: np.random.Generator):
    layer = Embedding(V, D, trainable=when == "after")
    made = model(layer, RowSparseOptimizer(keras.optimizers.Adam(0.1)))
    if when == "after":
        losses(made, data(rng))
        layer.trainable = False
        made.compile(RowSparseOptimizer(keras.optimizers.Adam(0.1)), "mse")
    before = layer.get_weights()[0]
    losses(made, data(rng))
    np.testing.assert_array_equal(layer.get_weights()[0], before)


@keras_3
def test_lora_is_that_of_keras(rng: np.random.Generator):
    ids = tf.constant(rng.integers(0, V, (2, 3)))
    theirs, ours = both()
    for layer in (theirs, ours):
        layer.enable_lora(2)
    for name in ("lora_embeddings_a", "lora_embeddings_b"):
        value = rng.normal(size=getattr(theirs, name).shape)
        for layer in (theirs, ours):
            getattr(layer, name).assign(value)
    np.testing.assert_allclose(ours(ids), theirs(ids), rtol=1e-5)
    assert len(ours.trainable_variables) == 2


@keras_3
def test_quantize_is_that_of_keras(rng: np.random.Generator):
    ids = tf.constant(rng.integers(0, V, (2, 3)))
    theirs, ours = both()
    bags = Embedding(V, D, combiner="sum")
    bags.build((None, 3))
    bags.set_weights(theirs.get_weights())
    for layer in (theirs, ours, bags):
        layer.quantize("int8")
    np.testing.assert_array_equal(ours(ids), theirs(ids))
    np.testing.assert_allclose(bags(ids), tf.reduce_sum(theirs(ids), 1), rtol=1e-6)


@keras_3
@pytest.mark.parametrize("change", [te.keras.convert, te.keras.unconvert])
def test_quantize_of_a_layer_whose_class_changed(change: Any, rng: np.random.Generator):
    ids = tf.constant(rng.integers(0, V, (2, 3)))
    layers = both()
    for layer in layers:
        sequential = keras.Sequential([keras.Input([3]), layer])
        te.keras.unconvert(te.keras.convert(sequential))
        once = layer.quantize
        change(sequential)
        assert layer.quantize is once  # Not wrapped once more each time.
        layer.quantize("int8", type_check=True)  # As Model.quantize calls it.
        assert layer.get_weights()[0].dtype == np.int8
    assert type(layers[0]) is type(layers[1])
    np.testing.assert_array_equal(*(layer(ids) for layer in layers))


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("options", [{}, {"clipvalue": 0.05}], ids=str)
def test_several_steps_in_one_call_and_xla(
    jit_compile: bool, options: dict[str, float], rng: np.random.Generator
):
    batches = data(rng)
    expected, found = (by_rows("Adam", **options) for _ in range(2))
    found.compile(
        *(found.optimizer, "mse"), steps_per_execution=2, jit_compile=jit_compile
    )
    np.testing.assert_allclose(
        losses(found, batches, 3), losses(expected, batches, 3), rtol=1e-5
    )


@pytest.mark.parametrize("mask_zero", [False, True])
def test_xla_has_the_numbers_of_keras(mask_zero: bool, rng: np.random.Generator):
    """Of masked ids, and of ids beyond the table, which XLA does not report."""
    ids, y = rng.integers(0, 6, (8, 3)), rng.normal(size=(8, 1)).astype(np.float32)
    ids[2, 1] = V
    found = []
    for layer in both(mask_zero=mask_zero):
        inputs = keras.Input([3], dtype="int64")
        pooled = keras.layers.GlobalAveragePooling1D()(layer(inputs))
        made = keras.Model(inputs, keras.layers.Dense(1, "tanh", False, "ones")(pooled))
        optimizer = keras.optimizers.SGD(0.1)
        rows = isinstance(layer, Embedding)
        made.compile(
            RowSparseOptimizer(optimizer) if rows else optimizer,
            "mse",
            jit_compile=True,
        )
        losses(made, (ids, y), 3)
        found.append(made.get_weights())
    close(*found)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_xla_has_the_numbers_of_bags(combiner: str, rng: np.random.Generator):
    ids, y = rng.integers(0, 6, (8, 3)), rng.normal(size=(8, 1)).astype(np.float32)
    found = []
    for jit_compile in (False, True):
        layer = Embedding(V, D, combiner=combiner, mask_zero=True)
        inputs = keras.Input([3], dtype="int64")
        made = keras.Model(inputs, keras.layers.Dense(1, "tanh")(layer(inputs)))
        made.set_weights(
            [np.linspace(-1, 1, w.size).reshape(w.shape) for w in made.get_weights()]
        )
        optimizer = RowSparseOptimizer(keras.optimizers.Adagrad(0.1))
        made.compile(optimizer, "mse", jit_compile=jit_compile)
        losses(made, (ids, y), 3)
        found.append(made.get_weights())
    close(*found)


def test_replicas_have_the_numbers_of_one(rng: np.random.Generator):
    strategy = mirrored(2)
    batches = data(rng)
    one = by_rows("Adam")
    with strategy.scope():
        two = by_rows("Adam")
    np.testing.assert_allclose(
        losses(two, batches, 3), losses(one, batches, 3), rtol=1e-5
    )
    for found, expected in zip(two.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


FROM_RAGGED: dict[str, Any] = {
    "dense": lambda x: x.to_tensor(),
    "ragged": lambda x: x,
    "sparse": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("kind", FROM_RAGGED)
@pytest.mark.parametrize("weighted", [False, True])
def test_bags(combiner: str, kind: str, weighted: bool, rng: np.random.Generator):
    layer = Embedding(V, D, combiner=combiner)
    layer.build((None, 3))
    table = layer.get_weights()[0]
    lists = [[1, 2, 1], [4, 0, 3]] if kind == "dense" else [[1, 2, 1], [], [4]]
    ids = tf.ragged.constant(lists, tf.int64)
    weights = ids.with_values(tf.constant(rng.uniform(0.5, 2, ids.values.shape[0])))
    used = weights if weighted else tf.ones_like(weights)
    convert = FROM_RAGGED[kind]
    call = {"weights": convert(tf.cast(weights, tf.float32))} if weighted else {}
    found = layer(convert(ids), **call)
    for row, (bag, given) in enumerate(zip(lists, used.to_list(), strict=True)):
        gains = np.asarray(given)
        divisor = {
            "sum": 1.0,
            "mean": gains.sum() or 1.0,
            "sqrtn": np.sqrt((gains**2).sum()) or 1.0,
        }[combiner]
        rows = table[np.asarray(bag, int)]
        expected = (rows * gains[:, np.newaxis]).sum(0) / divisor
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_bags_have_the_gains_of_other_classes(combiner: str):
    """Also where weights of both signs almost cancel, or float32 rounds twice."""
    layer = Embedding(D, D, combiner=combiner, weights=[np.eye(D, dtype=np.float32)])
    weights = [[1e8, 1.0, -1e8, 3e-4], [0.1, 0.3, 0.7, 1.1]]
    found = layer(tf.constant([[*range(D)]] * 2), weights=tf.constant(weights))
    given = np.array(weights, np.float32).astype(np.float64).tolist()
    expected = [gains(each, combiner) for each in given]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


@pytest.mark.parametrize("kind", FROM_RAGGED)
def test_weighted_bags_of_a_functional_model(kind: str, tmp_path: pathlib.Path):
    options: Any = {kind: True} if kind != "dense" else {}
    inputs = [keras.Input([None], dtype=t, **options) for t in ("int64", "float32")]
    bags = Embedding(V, D, combiner="mean")(inputs[0], weights=inputs[1])
    assert tuple(bags.shape) == (None, D)
    made = keras.Model(inputs, keras.layers.Dense(1)(bags))
    made.compile(RowSparseOptimizer(keras.optimizers.Adagrad(0.1)), "mse")
    ids = tf.ragged.constant([[1, 2, 2], [4, 3, 3]], tf.int64)
    weights = tf.ragged.constant([[1.0, 2.0, 0.0], [3.0, 1.0, 1.0]])
    x = tuple(map(FROM_RAGGED[kind], (ids, weights)))
    batches = tf.data.Dataset.from_tensors((x, tf.ones([2, 1])))
    made.fit(batches, shuffle=False, verbose=0)
    made.save(path := str(tmp_path / "bags.keras"))
    table, kernel, bias = keras.models.load_model(path).get_weights()
    rows = [table[1] / 3 + table[2] * 2 / 3, table[4] * 0.6 + table[3] * 0.4]
    np.testing.assert_allclose(made(x), rows @ kernel + bias, rtol=1e-5, atol=1e-7)


def test_a_bag_leaves_padding_out_and_trains(rng: np.random.Generator):
    inputs = keras.Input([4], dtype="int64")
    layer = Embedding(V, D, combiner="mean", mask_zero=True)
    bags = layer(inputs)
    assert tuple(bags.shape) == (None, D)
    made = keras.Model(inputs, keras.layers.Dense(1)(bags))
    made.compile(RowSparseOptimizer(keras.optimizers.Adagrad(0.1)), "mse")
    before = layer.get_weights()[0]
    ids = np.array([[5, 0, 0, 0], [5, 7, 0, 0]])
    np.testing.assert_allclose(
        layer(tf.constant(ids)), [before[5], (before[5] + before[7]) / 2], rtol=1e-6
    )
    made.fit(ids, np.ones([2, 1]), verbose=0)
    changed = np.any(layer.get_weights()[0] != before, axis=1)
    assert np.flatnonzero(changed).tolist() == [5, 7]


def test_bad_bags():
    with pytest.raises(ValueError, match=r"`combiner` must be None or one of.*'max'"):
        Embedding(V, D, combiner="max")
    with pytest.raises(ValueError, match="`weights` need a combiner"):
        Embedding(V, D)(tf.constant([[1]]), weights=tf.constant([[1.0]]))
    bags = Embedding(V, D, combiner="sum")
    with pytest.raises(ValueError, match=r"needs ids of the shape \[batch, n\]"):
        bags(tf.constant([1]))
    # Of symbols, too, where the model is made.
    ids, gains = keras.Input([2], dtype="int64"), keras.Input([2])
    with pytest.raises(ValueError, match="`weights` need a combiner"):
        Embedding(V, D)(ids, weights=gains)
    with pytest.raises(ValueError, match=r"needs ids of the shape \[batch, n\]"):
        bags(keras.Input([], dtype="int64"))
    with pytest.raises(ValueError, match="must have the type of the ids"):
        bags(tf.ragged.constant([[1]]), weights=tf.constant([[1.0]]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many values as"):
        bags(tf.constant([[1, 2]]), weights=tf.constant([[1.0]]))


def same(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def close(found: Any, expected: Any) -> None:
    """XLA adds in another order: some roundings of values of about 1 in three steps."""
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-7)


def slots(made: Any) -> list[Any]:
    return [variable.numpy() for variable in made.optimizer.variables]


@pytest.mark.parametrize("ours_first", [False, True])
def test_weight_files_pass_between_keras_and_rows(
    ours_first: bool, tmp_path: pathlib.Path, rng: np.random.Generator
):
    plain = model(keras.layers.Embedding(V, D), keras.optimizers.Adam(0.1))
    kinds = [plain, by_rows("Adam")]
    saved, loaded = reversed(kinds) if ours_first else kinds
    losses(saved, data(rng))
    losses(loaded, data(rng))
    path = str(tmp_path / "model.weights.h5")
    saved.save_weights(path)
    loaded.load_weights(path)
    same(loaded.get_weights(), saved.get_weights())
    if IS_KERAS_3:  # Only then the file has the slots.
        same(slots(loaded), slots(saved))


def test_a_model_file_continues_by_rows_and_back(
    tmp_path: pathlib.Path, rng: np.random.Generator
):
    batches, path = data(rng), str(tmp_path / "model.keras")
    made = model(keras.layers.Embedding(V, D), keras.optimizers.Adam(0.1))
    losses(made, batches)
    made.save(path)
    # A file of Keras, continued by rows: as the model itself, converted.
    loaded = te.keras.load_model(path)
    same(slots(loaded), slots(made))
    table = loaded.get_layer("embedding").get_weights()
    assert te.keras.convert(made) is made
    same(made.get_layer("embedding").get_weights(), table)
    np.testing.assert_array_equal(losses(loaded, batches, 2), losses(made, batches, 2))
    # A file of rows.
    loaded.save(path)
    again = te.keras.load_model(path)
    assert type(again.get_layer("embedding")) is Embedding
    assert type(again.optimizer) is type(made.optimizer)
    same(slots(again), slots(loaded))
    np.testing.assert_array_equal(losses(again, batches), losses(made, batches))
    # And back to a file of Keras.
    again.save(path)
    plain = keras.models.load_model(path)
    assert type(plain.get_layer("embedding")) is keras.layers.Embedding
    assert type(plain.optimizer) is keras.optimizers.Adam
    same(plain.get_weights(), again.get_weights())


RULES = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.05),
}


@pytest.mark.parametrize("rule", RULES)
def test_files_pass_between_keras_and_rows_in_the_middle_of_a_run(
    rule: str, tmp_path: pathlib.Path, rng: np.random.Generator
):
    """Ids do not repeat in a batch, where Keras 3 squares each occurrence."""
    ids = np.stack([rng.permutation(V)[:5] for _ in range(24)])
    batches = [ids[:, :3], ids[:, 3:]], rng.normal(size=(24, 1)).astype(np.float32)
    parts = [
        ([x[8 * k : 8 * k + 8] for x in batches[0]], batches[1][8 * k : 8 * k + 8])
        for k in range(3)
    ]

    def go_on(made: Any, part: Any) -> list[float]:
        x, y = part
        made.reset_metrics()
        fitted = made.fit(x, y, batch_size=1, shuffle=False, verbose=0)
        return fitted.history["loss"]

    def make(cls: Any, optimizer: Any) -> Any:
        return model(cls(V, D), optimizer)

    path = str(tmp_path / "model.keras")
    unbroken = make(keras.layers.Embedding, RULES[rule]())
    expected = [go_on(unbroken, part) for part in parts]
    made = make(Embedding, RowSparseOptimizer(RULES[rule]()))
    found = [go_on(made, parts[0])]
    made.save(path)
    plain = keras.models.load_model(path)
    assert type(plain.get_layer(index=2)) is keras.layers.Embedding
    assert type(plain.optimizer) is type(unbroken.optimizer)
    found.append(go_on(plain, parts[1]))
    plain.save(path)
    again = te.keras.load_model(path)
    found.append(go_on(again, parts[2]))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    again.save(path)
    same(keras.models.load_model(path).get_weights(), again.get_weights())
    assert te.keras.load_model(path, lazy=True).optimizer.lazy


def config_of(path: str) -> Any:
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("config.json"))


def test_a_file_of_rows_names_the_classes_of_keras(tmp_path: pathlib.Path):
    kinds = (
        (keras.layers.Embedding, keras.optimizers.Adam),
        (Embedding, lambda rate: RowSparseOptimizer(keras.optimizers.Adam(rate), True)),
    )
    configs = []
    for number, (cls, optimizer) in enumerate(kinds):
        made = model(cls(V, D, name="words"), optimizer(0.1))
        made.save(path := str(tmp_path / f"{number}.keras"))
        configs.append(config_of(path))
    layers = [
        [x for x in config["config"]["layers"] if x["name"] == "words"]
        for config in configs
    ]
    for found in layers:
        for each in found:  # Keras counts its tensors and models.
            each.pop("inbound_nodes")
    assert layers[1] == layers[0]
    optimizers = [config["compile_config"]["optimizer"] for config in configs]
    for found in optimizers:
        found["config"].pop("name")  # Keras counts optimizers.
    assert optimizers[1] == optimizers[0]
    assert "tpu_embedding" not in json.dumps(configs[1])
    bags = keras.Sequential([keras.Input([2]), Embedding(V, D, combiner="sum")])
    bags.save(path := str(tmp_path / "bags.keras"))
    assert '"tpu_embedding>Embedding"' in json.dumps(config_of(path))
    loaded = te.keras.load_model(path)
    assert loaded.layers[-1].combiner == "sum"
    same(loaded.get_weights(), bags.get_weights())
    # A layer that Keras creates of a configuration has the class of the configuration.
    clone = keras.models.clone_model(bags)
    assert type(clone.layers[-1]) is type(bags.layers[-1])


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5:UserWarning")
@pytest.mark.second_tier
def test_a_file_of_rows_needs_no_package(
    tmp_path: pathlib.Path, rng: np.random.Generator
):
    made = by_rows("Adam")
    # Keras reads no "mse".
    made.compile(made.optimizer, keras.losses.MeanSquaredError())
    batches = data(rng)
    losses(made, batches)
    names = ["model.keras", "model.h5"]
    for name in names:
        made.save(str(tmp_path / name))
    expected = made.evaluate(*batches, batch_size=32, verbose=0)
    np.savez(tmp_path / "data.npz", a=batches[0][0], b=batches[0][1], y=batches[1])
    program = f"""
import sys
sys.modules["tpu_embedding"] = None
import numpy as np
import {keras.__name__} as keras
data = np.load("data.npz")
for name in {names}:
    model = keras.models.load_model(name)
    (layer,) = (x for x in model.layers if isinstance(x, keras.layers.Embedding))
    assert type(layer) is keras.layers.Embedding
    assert type(model.optimizer) is keras.optimizers.Adam, model.optimizer
    assert int(model.optimizer.iterations) == 4
    x, y = [data["a"], data["b"]], data["y"]
    print(model.evaluate(x, y, batch_size=32, verbose=0))
assert not [name for name in sys.modules if name.startswith("tpu_embedding.")]
"""
    printed = printed_by("-c", program, cwd=tmp_path, timeout=120)
    found = [float(line) for line in printed.split()]
    np.testing.assert_allclose(found, [expected] * len(names), rtol=1e-6)


def test_a_refused_conversion_changes_nothing():
    made = model(keras.layers.Embedding(V, D), keras.optimizers.Adamax(0.1))
    with pytest.raises(ValueError, match="Adamax"):
        te.keras.convert(made)
    assert type(made.get_layer("embedding")) is keras.layers.Embedding
    with pytest.raises(TypeError, match="`model` must be a model of the Keras"):
        te.keras.convert(made.layers[0])
    bags = keras.Sequential([keras.Input([2]), Embedding(V, D, combiner="sum")])
    with pytest.raises(ValueError, match=r"embedding.* combine bags or hash"):
        te.keras.unconvert(bags)
    assert isinstance(bags.layers[-1], Embedding)
    lazy = te.keras.convert(model(Embedding(V, D), keras.optimizers.Adam(0.1)))
    with pytest.raises(ValueError, match="is already row-sparse, with lazy=False"):
        te.keras.convert(lazy, lazy=True)


def test_a_conversion_names_what_it_skips(caplog: pytest.LogCaptureFixture):
    class Mine(keras.layers.Embedding):
        pass

    class DistributedEmbedding(keras.layers.Dense):
        __module__ = "keras_rs.src.layers.embedding"

    layers = [Mine(V, D, name="mine"), DistributedEmbedding(3, name="distributed")]
    te.keras.convert(keras.Sequential([keras.Input([2], dtype="int64"), *layers]))
    assert "te.keras.convert did not change mine of " in caplog.text
    assert "Mine, distributed of keras_rs.src.layers.embedding." in caplog.text
    caplog.clear()
    te.keras.convert(model(keras.layers.Embedding(V, D), "sgd"))
    assert "did not change" not in caplog.text


def test_two_optimizers_of_a_custom_loop(rng: np.random.Generator):
    layer, dense = Embedding(V, D), keras.layers.Dense(1)
    layer.build((None, 1))
    dense.build((None, D))
    tables = RowSparseOptimizer(keras.optimizers.Adagrad(0.1))
    rest = keras.optimizers.SGD(0.01)
    before = layer.get_weights()[0]

    @tf.function
    def step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((dense(layer(ids)) - 1) ** 2)
        groups = layer.trainable_variables, dense.trainable_variables
        gradients = tape.gradient(
            loss, [[getattr(v, "_value", v) for v in group] for group in groups]
        )
        for optimizer, found, group in zip(
            (tables, rest), gradients, groups, strict=True
        ):
            optimizer.apply_gradients(zip(found, group, strict=True))
        return loss

    with_ids = [float(step(tf.constant([[3, 1, 3]]))) for _ in range(3)]
    assert with_ids[2] < with_ids[0]
    changed = np.any(layer.get_weights()[0] != before, axis=1)
    assert np.flatnonzero(changed).tolist() == [1, 3]


@keras_3
def test_an_export_serves(tmp_path: pathlib.Path, rng: np.random.Generator):
    made = by_rows("Adam")
    x, y = data(rng)
    losses(made, (x, y))
    made.export(str(tmp_path / "served"), verbose=False)
    served = tf.saved_model.load(str(tmp_path / "served"))
    found = served.serve([tf.constant(ids) for ids in x])
    np.testing.assert_allclose(found, made.predict(x, verbose=0), rtol=1e-5)


def test_a_module_is_saved_with_a_function_that_looks_up(
    tmp_path: pathlib.Path, rng: np.random.Generator
):
    made = by_rows("Adam")
    x, y = data(rng)
    module: Any = tf.Module()
    module.model, inputs = made, [tf.TensorSpec(ids.shape, ids.dtype) for ids in x]
    module.serve = tf.function(lambda *ids: made(ids), inputs)
    module.serve(*map(tf.constant, x))  # Traced before it is saved.
    losses(made, (x, y))
    tf.saved_model.save(module, str(tmp_path / "module"))
    loaded = tf.saved_model.load(str(tmp_path / "module"))
    found = loaded.serve(*map(tf.constant, x))
    np.testing.assert_allclose(found, made.predict(x, verbose=0), rtol=1e-5)


@pytest.mark.parametrize("kind", ["ragged", "sparse", "int32", "empty"])
def test_each_kind_of_ids_trains_as_dense_ones(kind: str, rng: np.random.Generator):
    ids = rng.integers(0, 6, (8, 3))
    given: Any = {
        "ragged": tf.RaggedTensor.from_tensor(tf.constant(ids)),
        "sparse": tf.sparse.from_dense(ids + 1),  # from_dense leaves zeros out.
        "int32": tf.constant(ids, tf.int32),
        "empty": tf.zeros([0, 3], tf.int64),
    }[kind]
    if kind == "sparse":
        given = given.with_values(given.values - 1)
    found = []
    for x in (tf.constant(ids), given):
        layer = Embedding(V, D, embeddings_initializer="ones")
        optimizer = RowSparseOptimizer(keras.optimizers.Adagrad(0.1))

        @tf.function
        def step(x: Any, layer: Any = layer, optimizer: Any = optimizer) -> None:
            with tf.GradientTape() as tape:
                rows = layer(x)
                flat = getattr(rows, "flat_values", rows)
                loss = tf.reduce_sum(flat**2)
            variables = layer.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        layer.build((None, None))
        optimizer.build(layer.trainable_variables)
        for _ in range(3):
            step(x)
        found.append(layer.get_weights()[0])
    expected = np.ones([V, D]) if kind == "empty" else found[0]
    np.testing.assert_array_equal(found[1], expected)
