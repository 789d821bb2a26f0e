"""The layer under TPU strategies: the same lines, the same numbers, the same files.

v6e has SparseCores, v4 an embedding engine with one queue.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models, tpu_models
from keras_layer.trained import assert_same_bits, everything
from serving.exported import ops_of

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding
from tpu_embedding.testing import SoftwareTPUStrategy

GENERATIONS = ["v6e", "v4"]
HOST = tf.distribute.get_strategy()
EmbeddingFeature = tf.tpu.experimental.HardwareFeature.EmbeddingFeature


def make_tpu(generation: str) -> SoftwareTPUStrategy:
    return SoftwareTPUStrategy(generation, tpu_models.REPLICAS)


def assert_close(actual: Any, expected: Any) -> None:
    """Of two models: sums of a batch may have another order."""
    actual, expected = everything(actual), everything(expected)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            actual[name], value, rtol=1e-4, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_custom_loop_trains_as_on_the_host(generation: str, seed: int):
    steps, tpu = tpu_models.make_steps(seed, 4), make_tpu(generation)
    host, model = tpu_models.make_model(HOST), tpu_models.make_model(tpu)
    assert_same_bits(model, host)  # The tables start alike.
    joined = [tpu_models.whole(step) for step in steps]
    expected = tpu_models.make_trainer(host, HOST)(joined)
    losses = tpu_models.make_trainer(model, tpu)(steps)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_close(model, host)
    assert everything(model)["_updates"] == len(steps)
    # Outside of replicas the layer looks up by stock ops, and batches of any size.
    before, (features, _) = everything(model), joined[0][0]
    np.testing.assert_allclose(model(features), host(features), rtol=1e-4, atol=1e-5)
    assert_same_bits(before, model)


def fit_model(strategy: tf.distribute.Strategy, steps: int) -> Any:
    with strategy.scope():
        table = models.table_configs()["users"]
        layer = TPUEmbedding(
            te.FeatureConfig(table),
            te.Adam(0.1, epsilon=1e-3),
            batch_size=tpu_models.BATCH,
            name="embedding",
        )
        inputs = keras.Input((2,), dtype="int64")
        ones = keras.initializers.Constant(0.5)
        head = keras.layers.Dense(1, kernel_initializer=ones, name="head")
        model = keras.Model(inputs, head(layer(inputs)))
        model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=steps)
    return model


@pytest.mark.parametrize(("generation", "steps"), [("v6e", 2), ("v4", 1)])
def test_fit_evaluate_and_predict_as_on_the_host(
    generation: str, steps: int, seed: int
):
    data = tpu_models.dense_data(seed, 4)
    host, model = fit_model(HOST, 1), fit_model(make_tpu(generation), steps)
    assert not model.jit_compile
    losses = [
        m.fit(data, epochs=2, shuffle=False, verbose=0).history["loss"]
        for m in (host, model)
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert_close(model, host)
    before = everything(model)
    found = [m.evaluate(data, verbose=0) for m in (host, model)]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)
    found = [m.predict(data, verbose=0) for m in (host, model)]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert_same_bits(before, model)


def by_checkpoint(path: pathlib.Path) -> Callable[[Any, Any], None]:
    def copy(source: Any, target: Any) -> None:
        saved = tf.train.Checkpoint(model=source).save(path / "checkpoint")
        status = tf.train.Checkpoint(model=target).restore(saved)
        status.assert_existing_objects_matched().expect_partial()

    return copy


def by_weights(path: pathlib.Path) -> Callable[[Any, Any], None]:
    def copy(source: Any, target: Any) -> None:
        source.save_weights(path / "model.weights.h5")
        target.load_weights(path / "model.weights.h5")

    return copy


def by_arrays(path: pathlib.Path) -> Callable[[Any, Any], None]:
    return lambda source, target: target.set_weights(source.get_weights())


@pytest.mark.parametrize("generation", GENERATIONS)
def test_files_go_both_ways_and_training_goes_on(
    generation: str, tmp_path: pathlib.Path, seed: int
):
    steps, tpu = tpu_models.make_steps(seed, 2), make_tpu(generation)
    host, model = tpu_models.make_model(HOST), tpu_models.make_model(tpu)
    joined = [tpu_models.whole(step) for step in steps]
    untouched = host.get_weights()
    on_host, on_tpu = (
        tpu_models.make_trainer(*pair) for pair in ((host, HOST), (model, tpu))
    )
    for copy in (by_checkpoint, by_weights, by_arrays):
        on_host(joined)
        copy(tmp_path)(host, model)
        assert_same_bits(model, host)
        on_tpu(steps)
        copy(tmp_path)(model, host)
        assert_same_bits(host, model)
        model.set_weights(untouched)
        assert not np.array_equal(everything(model)["films"], everything(host)["films"])
    model.save(tmp_path / "tpu.keras")
    loaded = keras.models.load_model(tmp_path / "tpu.keras")
    assert_same_bits(loaded, model)
    host.save(tmp_path / "host.keras")
    tpu = make_tpu(generation)  # A TPU of v4 has one engine: a new one, then.
    with tpu.scope():
        loaded = keras.models.load_model(tmp_path / "host.keras")
    assert_same_bits(loaded, host)
    on_host(joined)
    tpu_models.make_trainer(loaded, tpu)(steps)
    assert_close(loaded, host)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_exports_hold_stock_ops_alone(
    generation: str, tmp_path: pathlib.Path, seed: int
):
    model, host = fit_model(make_tpu(generation), 1), fit_model(HOST, 1)
    model.set_weights([1.5 * value + 0.1 for value in host.get_weights()])
    host.set_weights(model.get_weights())
    model.export(tmp_path / "model", verbose=False)
    served = tf.saved_model.load(tmp_path / "model")
    ids, _ = next(iter(tpu_models.dense_data(seed, 1)))
    np.testing.assert_allclose(served.serve(ids), host(ids), rtol=1e-5)
    ops = ops_of(tmp_path / "model")
    assert not [op for op in ops if "TPU" in op.upper() or "Xla" in op]
