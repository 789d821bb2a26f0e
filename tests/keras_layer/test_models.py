"""Keras models of all styles, and all ways to run them."""

from __future__ import annotations

import collections
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding


class Subclassed(keras.Model):
    def __init__(self, optimizer: Any, **options: Any) -> None:
        super().__init__()
        self.embedding = TPUEmbedding(
            models.feature_config(), optimizer, name="embedding", **options
        )
        self.dense = keras.layers.Dense(
            1, use_bias=False, kernel_initializer=keras.initializers.Constant(0.5)
        )

    def call(self, inputs: Any) -> Any:
        activations = self.embedding(inputs)
        ordered = [activations[feature] for feature in models.FEATURES]
        return self.dense(keras.ops.concatenate(ordered, -1))

    def get_layer(self, name: Any = None, index: Any = None) -> Any:
        return {"embedding": self.embedding, "head": self.dense}[name]


STEPS = models.batches(7, 6)


def after_training(make: Any = models.make_model, **compile_: Any) -> Any:
    model = make(te.Adagrad(0.1))
    model.compile(keras.optimizers.SGD(0.1), "mse", **compile_)
    model.fit(models.dataset(STEPS), shuffle=False, verbose=0)
    return models.state(models.embedding_of(model))


@pytest.fixture(scope="module")
def trained() -> Any:
    """Tables and slots after `fit` with the defaults."""
    return after_training()


def assert_states_agree(actual: Any, expected: Any) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (models.make_model, {"run_eagerly": True}),
        (Subclassed, {"steps_per_execution": 3}),
    ],
)
def test_all_ways_to_fit_agree(make: Any, options: dict[str, Any], trained: Any):
    assert_states_agree(after_training(make, **options), trained)


def test_train_on_batch_agrees_with_fit(trained: Any):
    model = Subclassed(te.Adagrad(0.1))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    for features, labels in STEPS:
        model.train_on_batch(features, labels)
    assert_states_agree(models.state(models.embedding_of(model)), trained)


def test_the_layer_turns_jit_compilation_off():
    model = models.make_model("sgd")
    model.compile("sgd", "mse", jit_compile="auto")
    assert not model.jit_compile
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        model.compile("sgd", "mse", jit_compile=True)
    assert not model.jit_compile


def test_summary_counts_tables_and_slots_as_non_trainable():
    model = models.make_model(te.Adagrad(0.1))
    model.compile("sgd", "mse")
    model.train_on_batch(*STEPS[0])
    lines: list[str] = []  # tf_keras has no commas in numbers.
    model.summary(print_fn=lambda line, **_: lines.append(line))
    state = models.state(models.embedding_of(model))
    count = sum(np.size(value) for value in state.values())
    text = "\n".join(lines).replace(",", "")
    assert f"Non-trainable params: {count} (" in text


def test_evaluate_and_predict_change_nothing():
    model = models.make_model("adam")
    data = models.dataset(STEPS[:2])
    before = models.state(models.embedding_of(model))
    labels = np.concatenate([labels for _, labels in STEPS[:2]])
    for eager in (False, True):
        model.compile("sgd", "mse", run_eagerly=eager)
        loss = model.evaluate(data, verbose=0)
        predicted = model.predict(data, verbose=0)
        np.testing.assert_allclose(loss, np.mean((predicted - labels) ** 2), rtol=1e-5)
    with tf.GradientTape():  # Training looks up the same.
        as_trained = model(STEPS[0][0])
    np.testing.assert_allclose(predicted[: models.BATCH], as_trained, rtol=1e-6)
    after = models.state(models.embedding_of(model))
    for name in before:
        np.testing.assert_array_equal(after[name], before[name])


def test_numpy_data_callbacks_and_validation():
    table = te.TableConfig(10, 2, name="t")
    layer = TPUEmbedding({"id": te.FeatureConfig(table)}, te.SGD(0.5))
    inputs = {"id": keras.Input((), dtype="int32", name="id")}
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)["id"]))
    model.compile("sgd", "mse")
    ids = np.arange(40) % 10
    labels = (ids > 4).astype(np.float32)[:, None]
    seen = []
    history = model.fit(
        {"id": ids},
        labels,
        batch_size=8,
        epochs=6,
        validation_split=0.25,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: seen.append(epoch)
            ),
            keras.callbacks.EarlyStopping(patience=10),
            keras.callbacks.TerminateOnNaN(),
        ],
        verbose=0,
    ).history
    assert len(seen) == 6
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    assert history["val_loss"][-1] < 0.5 * history["val_loss"][0]


WEIGHTS = {
    "none": {},
    "sample": {"sample_weight": np.array([3.0, 0.0])},
    "class": {"class_weight": {1: 3.0, 0: 0.0}},
}


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 2}])
def test_sample_and_class_weights_weigh_the_updates(options: dict[str, Any]):
    table = te.TableConfig(4, 2, te.RowIdInitializer(), name="t")
    layer = TPUEmbedding(te.FeatureConfig(table), te.SGD(0.1))
    inputs = keras.Input((), dtype="int64")
    summed = keras.layers.Lambda(lambda x: keras.ops.sum(x, -1, keepdims=True))
    model = keras.Model(inputs, summed(layer(inputs)))
    model.compile("sgd", "mse", **options)
    rows = {}
    for kind, weights in WEIGHTS.items():
        layer.update_embedding_table(table, te.RowIdInitializer()((4, 2)))
        ids, labels = np.array([0, 1]), np.array([1.0, 0.0])
        model.fit(ids, labels, epochs=2, verbose=0, **weights)
        rows[kind] = layer.embedding_tables[table].numpy()
    np.testing.assert_allclose(rows["class"], rows["sample"])
    # Row 0 belongs to the first sample, of class 1; row 1 to the second.
    # d loss / d row = w (2 row - 1) 2 / 2 in each column; twice, by 0.1.
    for kind, weight in (("none", 1), ("sample", 3)):
        first = 0.1 * weight
        twice = first - 0.1 * weight * (2 * first * 2 - 2) / 2
        np.testing.assert_allclose(rows[kind][0], twice, rtol=1e-5)
    assert rows["none"][1][0] != 1
    np.testing.assert_array_equal(rows["sample"][1], [1, 1])


def test_sequential():
    table = te.TableConfig(6, 3, name="t")
    layer = TPUEmbedding(te.FeatureConfig(table), "adagrad")
    model = keras.Sequential(
        [keras.Input((2,), dtype="int64"), layer, keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    ids = np.array([[0, 1], [2, 3]])
    before = layer.embedding_tables[table].numpy()
    model.fit(ids, np.ones((2, 1)), verbose=0)
    after = layer.embedding_tables[table].numpy()
    np.testing.assert_array_equal((before != after).any(-1), [1, 1, 1, 1, 0, 0])


Pair = collections.namedtuple("Pair", ["left", "right"])


def test_nested_structures_come_out_as_they_go_in():
    table = te.TableConfig(6, 2, te.RowIdInitializer(), name="t")
    config = {
        "pair": Pair(te.FeatureConfig(table), te.FeatureConfig(table)),
        "list": [te.FeatureConfig(table), (te.FeatureConfig(table),)],
    }
    layer = TPUEmbedding(config, "sgd")
    ids = [tf.constant([i]) for i in range(4)]
    features = {"pair": Pair(ids[0], ids[1]), "list": [ids[2], (ids[3],)]}
    outputs = layer(features)
    assert isinstance(outputs["pair"], Pair)
    assert isinstance(outputs["list"], list)
    assert isinstance(outputs["list"][1], tuple)
    assert outputs["pair"].right.numpy()[0, 0] == 1
    assert outputs["list"][1][0].numpy()[0, 0] == 3
    symbolic = layer(
        keras.tree.map_structure(lambda _: keras.Input((), dtype="int64"), features)
    )
    keras.tree.assert_same_structure(symbolic, outputs)


@pytest.mark.parametrize("symbolic", [False, True])
def test_weights_are_given_by_feature(symbolic: bool):
    table = te.TableConfig(6, 2, te.RowIdInitializer(), combiner="sum", name="t")
    config = {"a": te.FeatureConfig(table), "b": te.FeatureConfig(table)}
    layer = TPUEmbedding(config, "sgd")
    ids = {"a": tf.constant([[1, 2]]), "b": tf.constant([[3]])}
    gains = {"a": tf.constant([[0.5, 2.0]]), "b": None}
    if symbolic:
        inputs = {k: keras.Input((None,), dtype="int64", name=k) for k in ids}
        of_a = keras.Input((None,), name="weights")
        model = keras.Model([inputs, of_a], layer(inputs, {"a": of_a, "b": None}))
        outputs = model([ids, gains["a"]])
    else:
        outputs = layer(ids, gains)
    assert outputs["a"].numpy().tolist() == [[4.5, 4.5]]
    assert outputs["b"].numpy().tolist() == [[3, 3]]


def test_weights_keep_their_precision_under_mixed_precision():
    table = te.TableConfig(6, 1, te.RowIdInitializer(), combiner="sum", name="t")
    layer = TPUEmbedding(te.FeatureConfig(table), "sgd", dtype="mixed_bfloat16")
    weight = 1.001  # 1.0 in bfloat16.
    out = layer(tf.constant([[5] * 64]), weights=tf.constant([[weight] * 64]))
    assert out.dtype == tf.bfloat16
    assert float(out[0, 0]) == float(tf.cast(64 * 5 * weight, tf.bfloat16))


def test_mixed_bfloat16_trains_in_float32(trained: Any):
    keras.config.set_dtype_policy("mixed_bfloat16")
    state = after_training()
    for name, value in trained.items():
        assert state[name].dtype == np.float32
        np.testing.assert_allclose(state[name], value, atol=0.02)


def test_tables_of_bfloat16_take_values_of_any_float():
    table = te.TableConfig(4, 1, dtype="bfloat16", name="t")
    layer = TPUEmbedding(te.FeatureConfig(table), "sgd")
    for values in (tf.fill([4, 1], 1.001), np.full((4, 1), 1.001)):
        layer.update_embedding_table(table, tf.zeros([4, 1], tf.bfloat16))
        layer.update_embedding_table(table, values)
        assert layer(tf.constant([3])).numpy().tolist() == [[1.0]]


def test_float16_fits_with_the_scale_of_the_model(trained: Any):
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model = models.make_model(te.Adagrad(0.1), loss_scale=optimizer)
    model.compile(optimizer, "mse")
    model.fit(models.dataset(STEPS), shuffle=False, verbose=0)
    state = models.state(models.embedding_of(model))
    for name, value in trained.items():
        np.testing.assert_allclose(state[name], value, atol=0.02)


def test_mirrored_strategy_sums_the_replicas():
    """Two replicas of half a batch do what one of a whole batch does.

    The last batch is of 3 and 2 samples. Keras takes the mean of each replica's, so
    those of the second one count for more.
    """
    ids = np.random.default_rng(1).integers(0, 8, (17, 2))
    labels = np.random.default_rng(2).normal(size=(17, 1)).astype(np.float32)
    uneven = np.array([1] * 12 + [5 / 6] * 3 + [5 / 4] * 2, np.float32)

    def train(strategy: tf.distribute.Strategy) -> Any:
        with strategy.scope():
            table = te.TableConfig(
                8, 2, te.RowIdInitializer(), combiner="sum", name="t"
            )
            layer = TPUEmbedding(te.FeatureConfig(table), te.Adagrad(0.1), name="e")
            inputs = keras.Input((2,), dtype="int64")
            ones = keras.initializers.Constant(0.1)
            dense: Any = keras.layers.Dense(1, kernel_initializer=ones)
            model = keras.Model(inputs, dense(layer(inputs)))
            model.compile(keras.optimizers.SGD(0.01), "mse")
        weights = np.ones(17, np.float32) if strategy is two else uneven
        data = tf.data.Dataset.from_tensor_slices((ids, labels, weights)).batch(6)
        model.fit(data, shuffle=False, verbose=0)
        seen = model.predict(data, verbose=0)
        return models.state(layer), dense.get_weights()[0], seen

    two = models.mirrored(2)
    mirrored = train(two)
    single = train(tf.distribute.get_strategy())
    for actual, expected in zip(mirrored[1:], single[1:], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4)
    for key, value in single[0].items():
        np.testing.assert_allclose(mirrored[0][key], value, rtol=1e-5)


class DenseOnly(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        table = te.TableConfig(6, 1, te.RowIdInitializer(), name="t")
        self.embedding = TPUEmbedding(te.FeatureConfig(table), te.SGD(0.25))

    def call(self, inputs: Any) -> Any:
        return self.embedding(inputs)


def test_a_subclassed_model_is_built_by_fit_under_replicas():
    """Keras builds it with the mean of the ids that the replicas have, a float."""
    with models.mirrored(2).scope():
        model = DenseOnly()
        model.compile("sgd", "mse")
    data = (np.arange(4), np.zeros((4, 1)))
    model.fit(tf.data.Dataset.from_tensors(data), shuffle=False, verbose=0)
    rows = model.embedding.get_weights()[-1]
    # 0.25 times the gradient of a mean over 4.
    np.testing.assert_allclose(rows[:, 0], [0, 0.875, 1.75, 2.625, 4, 5])
    wrong = DenseOnly()
    wrong.compile("sgd", "mse")
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"sample . has id .\.5"):
        wrong.fit(np.arange(4.0) + 0.5, np.zeros((4, 1)), verbose=0)


def test_gradient_accumulation_of_the_model_leaves_the_tables_alone():
    """One update of the tables for each micro-batch, as documented."""
    model = models.make_model(
        te.Adam(lambda updates: 0.1 + 0.0 * tf.cast(updates, tf.float32))
    )
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model.compile(optimizer, "mse")
    model.fit(models.dataset(STEPS[:4]), shuffle=False, verbose=0)
    assert models.state(models.embedding_of(model))["_updates"] == 4
