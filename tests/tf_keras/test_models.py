"""Models of tf_keras train tables with the numbers of a loop over te.TPUEmbedding."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models
from keras_layer.version import keras as tf_keras

import tpu_embedding as te
from tpu_embedding.keras import (
    TelemetryCallback,
    TPUEmbedding,
    translate_keras_optimizer,
)

STEPS = 6
RATE = 0.1
legacy = tf_keras.optimizers.legacy


class Subclassed(tf_keras.Model):
    """The model of `models.make_model`, with the layer as an attribute."""

    def __init__(self, optimizer: Any = None, **options: Any) -> None:
        super().__init__()
        config = options.pop("feature_config", None) or models.feature_config()
        self.embedding = TPUEmbedding(config, optimizer, name="embedding", **options)
        ones = tf_keras.initializers.Constant(0.5)
        self.dense = tf_keras.layers.Dense(
            1, use_bias=False, kernel_initializer=ones, dtype="float32"
        )

    def call(self, features: Any) -> Any:
        activations = self.embedding(features)
        return self.dense(tf.concat([activations[f] for f in models.FEATURES], -1))


MAKERS = [models.make_model, Subclassed]
each_model = pytest.mark.parametrize("make", MAKERS)


def expected_losses(steps: list[Any], rule: te.Adagrad) -> list[float]:
    """The losses of a loop without Keras, with SGD for the dense kernel."""
    embedding = te.TPUEmbedding(models.feature_config(), rule)
    kernel = tf.Variable(tf.fill([sum(models.DIM.values()) + 3, 1], 0.5))
    losses = []
    for features, labels in steps:
        embedding.enqueue(features)
        with tf.GradientTape() as tape:
            activations = embedding.dequeue()
            tape.watch(activations)
            joined = tf.concat([activations[f] for f in models.FEATURES], -1)
            loss = tf.reduce_mean((joined @ kernel - labels) ** 2)
        gradients, of_kernel = tape.gradient(loss, (activations, kernel))
        embedding.apply_gradients(gradients)
        kernel.assign_sub(RATE * of_kernel)
        losses.append(float(loss))
    return losses


def test_the_layer_is_a_layer_of_tf_keras():
    assert issubclass(TPUEmbedding, tf_keras.layers.Layer)
    assert issubclass(TPUEmbedding, tf.keras.layers.Layer)


@each_model
@pytest.mark.parametrize("optimizer", [tf_keras.optimizers.SGD, legacy.SGD])
@pytest.mark.parametrize("eager", [False, True])
def test_fit(make: Any, optimizer: Any, eager: bool, seed: int):
    steps = models.batches(seed, STEPS)
    model = make(te.Adagrad(RATE))
    model.compile(optimizer(RATE), "mse", run_eagerly=eager)
    losses = []
    record = tf_keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: losses.append(logs["loss"])
    )
    data = [models.dataset([step]) for step in steps]
    for one in data:
        model.fit(one, verbose=0, callbacks=[record])
    np.testing.assert_allclose(
        losses, expected_losses(steps, te.Adagrad(RATE)), atol=1e-6
    )
    before = model.evaluate(data[0], verbose=0)
    assert model.predict(data[0], verbose=0).shape == (models.BATCH, 1)
    assert model.evaluate(data[0], verbose=0) == before


@each_model
@pytest.mark.parametrize("wrap", [lambda f: f, tf.function(reduce_retracing=True)])
@pytest.mark.parametrize("package", [tf_keras.optimizers, legacy])
def test_a_loop_of_ones_own(make: Any, wrap: Any, package: Any, seed: int):
    steps = models.batches(seed, STEPS)
    model, optimizer = make(te.Adagrad(RATE)), package.SGD(RATE)
    step = wrap(lambda f, y: models.train_step(model, optimizer, f, y))
    losses = [float(step(features, labels)) for features, labels in steps]
    np.testing.assert_allclose(
        losses, expected_losses(steps, te.Adagrad(RATE)), atol=1e-6
    )


def test_a_train_step_that_the_user_overrides_is_seen(seed: int):
    """AutoGraph renames it; the layer must still notice the scaled loss in it."""

    class WithStep(Subclassed):
        def train_step(self, data: Any) -> Any:
            features, labels = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(features) - labels) ** 2)
                scaled = self.optimizer.get_scaled_loss(loss)
            gradients = tape.gradient(scaled, self.trainable_variables)
            gradients = self.optimizer.get_unscaled_gradients(gradients)
            pairs = zip(gradients, self.trainable_variables, strict=True)
            self.optimizer.apply_gradients(pairs)
            return {"loss": loss}

    steps = models.dataset(models.batches(seed, 2))
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
        tf_keras.optimizers.SGD(RATE)
    )
    model = WithStep(te.SGD(RATE))
    model.compile(optimizer)
    with pytest.raises(ValueError, match="Pass `loss_scale` to the layer"):
        model.fit(steps, verbose=0)
    plain, model = (
        Subclassed(te.SGD(RATE)),
        WithStep(te.SGD(RATE), loss_scale=optimizer),
    )
    plain.compile(tf_keras.optimizers.SGD(RATE), "mse")
    model.compile(optimizer)
    plain.fit(steps, verbose=0)
    model.fit(steps, verbose=0)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("package", [tf_keras.optimizers, legacy])
def test_float16_fits_with_the_scale_of_the_model(package: Any, seed: int):
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    with pytest.raises(ValueError, match="Under the dtype policy 'mixed_float16'"):
        models.make_model("sgd")
    model: Any = None
    model = Subclassed("sgd", loss_scale=lambda: model.optimizer)
    model.compile(package.SGD(0.01), "mse")
    history = model.fit(models.dataset(models.batches(seed, 8)), epochs=3, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


def test_trainable_tables_are_trained_by_the_models_optimizer(seed: int):
    steps = models.batches(seed, STEPS)
    losses = []
    for optimizer, options in ((te.SGD(RATE), {}), (None, {"trainable_tables": True})):
        model = Subclassed(optimizer, **options)
        model.compile(legacy.SGD(RATE), "mse")
        history = model.fit(models.dataset(steps), verbose=0, shuffle=False)
        losses.append(history.history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-6)
    assert len(model.embedding.trainable_weights) == len(models.VOCABULARY)


def test_sparse_and_ragged_inputs_may_be_declared_as_scalars():
    """As in the documentation of TFRS."""
    config = models.feature_config()
    inputs = {
        "liked": tf_keras.Input((), 4, "liked", dtype="int32", sparse=True),
        "seen": tf_keras.Input((), 4, "seen", dtype="int32", ragged=True),
        "user": tf_keras.Input((), 4, "user", dtype="int32"),
    }
    outputs = TPUEmbedding(config, translate_keras_optimizer(legacy.SGD(0.1)))(inputs)
    assert {name: tuple(o.shape) for name, o in outputs.items()} == {
        "liked": (4, 3),
        "seen": (4, 3),
        "user": (4, 2),
    }


def test_symbolic_ids_that_are_wrong():
    layer = TPUEmbedding(models.feature_config(), te.SGD(0.1))
    inputs = {**models.inputs(), "user": tf_keras.Input((), dtype="float32")}
    with pytest.raises(TypeError, match="ids of feature user must be int32 or int64"):
        layer(inputs)


def test_weights_of_ids(seed: int):
    films = te.TableConfig(8, 2, initializer=te.RowIdInitializer(), combiner="sum")
    layer = TPUEmbedding({"f": te.FeatureConfig(films)}, "sgd")
    inputs = {"f": tf_keras.Input((2,), dtype="int64", name="f")}
    weights = {"f": tf_keras.Input((2,), name="w")}
    outputs = layer(inputs, weights=weights)["f"]
    model = tf_keras.Model([inputs, weights], outputs)
    ids = tf.constant([[1, 2], [3, 4]], tf.int64)
    found = model([{"f": ids}, {"f": tf.constant([[1.0, 2.0], [0.0, 1.0]])}])
    np.testing.assert_array_equal(found, [[5.0, 5.0], [4.0, 4.0]])


def test_state_is_in_get_weights_and_the_placeholder_is_the_only_trainable_one(
    seed: int,
):
    model = models.make_model("adagrad")
    layer = models.embedding_of(model)
    assert [w.shape.as_list() for w in layer.trainable_weights] == [[]]
    values = model.get_weights()
    model.compile("sgd", "mse")
    model.fit(models.dataset(models.batches(seed, 2)), verbose=0)
    assert any((a != b).any() for a, b in zip(values, model.get_weights(), strict=True))
    model.set_weights(values)
    for a, b in zip(values, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@each_model
def test_telemetry_callback(make: Any, tmp_path: pathlib.Path, seed: int):
    steps = models.batches(seed, STEPS)
    model = make(te.Adagrad(RATE))
    model.compile("sgd", "mse", steps_per_execution=4)
    callback = TelemetryCallback(tmp_path, every=1, write_every=3)
    model.fit(models.dataset(steps), verbose=0, callbacks=[callback])
    figures = callback.read()["embedding"]
    assert figures["*"]["steps"].value == STEPS
    assert list(tmp_path.glob("events*"))
    both = [callback, TelemetryCallback(tmp_path)]
    with pytest.raises(RuntimeError, match="Pass one TelemetryCallback"):
        model.fit(models.dataset(steps), verbose=0, callbacks=both)
