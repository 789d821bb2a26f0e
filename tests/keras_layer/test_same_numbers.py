"""Fifty steps: custom loop, fit, TPUEmbedding by hand and NumPy agree."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models
from reference import embedding as reference

import tpu_embedding as te
from tpu_embedding import topology

STEPS = 50
DENSE_RATE = 0.05
OPTIMIZERS = {
    "SGD": {"learning_rate": 0.3},
    "Adagrad": {"learning_rate": 0.2},
    "AdagradMomentum": {"learning_rate": 0.1, "momentum": 0.9, "epsilon": 1e-3},
    "FTRL": {"learning_rate": 0.2, "l1_regularization_strength": 0.001},
    "Adam": {"learning_rate": 0.01, "epsilon": 1e-3},
    "RowwiseAdagrad": {"learning_rate": 0.2},
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def by_loop(optimizer: Any, steps: list[Any]) -> tuple[dict[str, np.ndarray], Any]:
    model = models.make_model(optimizer)
    dense = keras.optimizers.SGD(DENSE_RATE)
    dense.build(model.trainable_variables)
    step = tf.function(models.train_step, reduce_retracing=True)
    for features, labels in steps:
        step(model, dense, features, labels)
    return models.state(models.embedding_of(model)), model.get_layer(
        "head"
    ).kernel.numpy()


def by_fit(optimizer: Any, steps: list[Any]) -> tuple[dict[str, np.ndarray], Any]:
    model = models.make_model(optimizer)
    model.compile(keras.optimizers.SGD(DENSE_RATE), "mse")
    model.fit(models.dataset(steps), shuffle=False, verbose=0)
    return models.state(models.embedding_of(model)), model.get_layer(
        "head"
    ).kernel.numpy()


def by_hand(optimizer: Any, steps: list[Any]) -> tuple[dict[str, np.ndarray], Any]:
    embedding = te.TPUEmbedding(models.feature_config(), optimizer)
    kernel = tf.Variable(tf.fill([8, 1], 0.5))
    for features, labels in steps:
        embedding.enqueue(features)
        activations = embedding.dequeue()
        with tf.GradientTape() as tape:
            tape.watch(activations)
            joined = tf.concat([activations[f] for f in models.FEATURES], -1)
            loss = tf.reduce_mean((joined @ kernel - labels) ** 2)
        gradients, of_kernel = tape.gradient(loss, (activations, kernel))
        embedding.apply_gradients(gradients)
        kernel.assign_sub(DENSE_RATE * of_kernel)
    variables = embedding.checkpoint_variables()
    return {name: v.numpy() for name, v in variables.items()}, kernel.numpy()


def by_numpy(name: str, steps: list[Any]) -> tuple[dict[str, np.ndarray], Any]:
    combiners = {"films": "mean", "users": "sum"}
    tables = {
        table: reference.Table(
            models.initial_table(table), name, OPTIMIZERS[name], combiner
        )
        for table, combiner in combiners.items()
    }
    features = [reference.Feature(table) for table in models.FEATURES.values()]
    embedding = reference.ReferenceEmbedding(tables, features)
    kernel = np.full((8, 1), 0.5)
    for values, labels in steps:
        (activations,) = embedding.forward([[values[f] for f in models.FEATURES]])
        joined = np.concatenate(activations, -1)
        of_prediction = 2 * (joined @ kernel - labels.numpy()) / len(labels)
        of_joined = of_prediction @ kernel.T
        embedding.backward([np.split(of_joined, [3, 6], -1)])
        kernel = kernel - DENSE_RATE * joined.T @ of_prediction
    slots = {
        f"{table}/{slot}": values
        for table, named in embedding.slots.items()
        for slot, values in named.items()
    }
    return {**embedding.tables, **slots}, kernel


def assert_same(actual: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    state = {name.replace("%2F", "/"): value for name, value in actual[0].items()}
    assert state.keys() == expected[0].keys()
    # 50 steps of a few float32 roundings each; the loss contracts errors.
    for name, value in state.items():
        np.testing.assert_allclose(
            value, expected[0][name], rtol=2e-4, atol=2e-5, err_msg=name
        )
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-4)


def test_loop_and_fit_agree_on_the_portable_engine(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    steps = models.batches(seed, 12)
    expected = by_numpy("Adagrad", steps)
    monkeypatch.setenv(topology.ENGINE_VARIABLE, "portable")
    optimizer = te.Adagrad(**OPTIMIZERS["Adagrad"])
    assert_same(by_loop(optimizer, steps), expected)
    assert_same(by_fit(optimizer, steps), expected)


@each_optimizer
def test_loop_fit_hand_and_numpy_agree(name: str, seed: int):
    optimizer = getattr(te, name)(**OPTIMIZERS[name])
    steps = models.batches(seed, STEPS)
    expected = by_numpy(name, steps)
    for table in models.VOCABULARY:
        moved = np.abs(expected[0][table] - models.initial_table(table))
        assert moved.max() > 0.02
    assert_same(by_hand(optimizer, steps), expected)
    assert_same(by_loop(optimizer, steps), expected)
    assert_same(by_fit(optimizer, steps), expected)
