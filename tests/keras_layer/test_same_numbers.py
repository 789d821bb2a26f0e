"""Fifty steps: custom loop, fit, TPUEmbedding by hand and NumPy agree.

One model holds a pair of tables for each optimizer, and a prediction of its own for
each pair, so that the optimizers do not see each other and all are traced at once.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models
from reference import embedding as reference

import tpu_embedding as te
from tpu_embedding import distribution

DENSE_RATE = 0.05
OPTIMIZERS = {
    "SGD": {"learning_rate": 0.3},
    "Adagrad": {"learning_rate": 0.2},
    "AdagradMomentum": {"learning_rate": 0.1, "momentum": 0.9, "epsilon": 1e-3},
    "FTRL": {"learning_rate": 0.2, "l1_regularization_strength": 0.001},
    "Adam": {"learning_rate": 0.01, "epsilon": 1e-3},
    "RowwiseAdagrad": {"learning_rate": 0.2},
}
COMBINERS = {"films": "mean", "users": "sum"}
Outcome = tuple[dict[str, np.ndarray], np.ndarray]  # Tables and slots; the kernel.


def make_config(names: list[str]) -> list[dict[str, Any]]:
    """For each optimizer the features over a pair of tables."""
    return [
        {
            feature: te.FeatureConfig(tables[table])
            for feature, table in models.FEATURES.items()
        }
        for name in names
        for tables in [
            models.table_configs(
                prefix=f"{name}_", optimizer=getattr(te, name)(**OPTIMIZERS[name])
            )
        ]
    ]


def loss_of(labels: Any, predictions: Any) -> Any:
    """Of each sample, summed over the optimizers; their mean is the loss."""
    return keras.ops.sum((predictions - labels) ** 2, axis=-1)


def make_model(names: list[str]) -> Any:
    layer = models.TPUEmbedding(make_config(names), None, name="embedding")
    inputs = models.inputs()
    groups = [
        keras.ops.concatenate([group[feature] for feature in models.FEATURES], -1)
        for group in layer([inputs] * len(names))
    ]
    head = keras.layers.EinsumDense(
        "bgd,gd->bg", len(names), kernel_initializer=keras.initializers.Constant(0.5)
    )
    return keras.Model(inputs, head(keras.ops.stack(groups, axis=1)))


def outcome(model: Any) -> Outcome:
    state = models.state(models.embedding_of(model))
    named = {name.replace("%2F", "/"): value for name, value in state.items()}
    return named, model.layers[-1].kernel.numpy()


def by_loop(names: list[str], steps: list[Any]) -> Outcome:
    model = make_model(names)
    dense = keras.optimizers.SGD(DENSE_RATE)
    dense.build(model.trainable_variables)

    @tf.function(reduce_retracing=True)
    def step(features: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(labels, model(features)))
        weights = model.trainable_variables
        gradients = tape.gradient(loss, weights)
        dense.apply_gradients(zip(gradients, weights, strict=True))

    for features, labels in steps:
        step(features, labels)
    return outcome(model)


def by_fit(names: list[str], steps: list[Any]) -> Outcome:
    model = make_model(names)
    model.compile(keras.optimizers.SGD(DENSE_RATE), loss_of)
    wide = [(f, tf.repeat(labels, len(names), axis=1)) for f, labels in steps]
    model.fit(models.dataset(wide), shuffle=False, verbose=0)
    return outcome(model)


def by_hand(names: list[str], steps: list[Any]) -> Outcome:
    embedding = te.TPUEmbedding(make_config(names), None)
    kernel = tf.Variable(tf.fill([len(names), 8], 0.5))

    @tf.function(reduce_retracing=True)
    def step(features: Any, labels: Any) -> None:
        embedding.enqueue([features] * len(names))
        activations = embedding.dequeue()
        with tf.GradientTape() as tape:
            tape.watch(activations)
            groups = [
                tf.concat([g[f] for f in models.FEATURES], -1) for g in activations
            ]
            predictions = tf.einsum("bgd,gd->bg", tf.stack(groups, 1), kernel)
            loss = tf.reduce_mean(loss_of(labels, predictions))
        gradients, of_kernel = tape.gradient(loss, (activations, kernel))
        embedding.apply_gradients(gradients)
        kernel.assign_sub(DENSE_RATE * of_kernel)

    for features, labels in steps:
        step(features, labels)
    variables = embedding.core.checkpoint_variables()
    return {name: v.numpy() for name, v in variables.items()}, kernel.numpy()


def by_numpy(names: list[str], steps: list[Any]) -> Outcome:
    tables = {
        f"{name}_{table}": reference.Table(
            models.initial_table(table), name, OPTIMIZERS[name], combiner
        )
        for name in names
        for table, combiner in COMBINERS.items()
    }
    features = [
        reference.Feature(f"{name}_{table}")
        for name in names
        for table in models.FEATURES.values()
    ]
    embedding = reference.ReferenceEmbedding(tables, features)
    kernel = np.full((len(names), 8), 0.5)
    for values, labels in steps:
        flat = [values[f] for f in models.FEATURES] * len(names)
        (activations,) = embedding.forward([flat])
        groups = np.concatenate(activations, -1).reshape(len(labels), len(names), 8)
        predictions = np.einsum("bgd,gd->bg", groups, kernel)
        of_prediction = 2 * (predictions - labels.numpy()) / len(labels)
        of_groups = np.einsum("bg,gd->bgd", of_prediction, kernel)
        cuts = [cut + 8 * i for i in range(len(names)) for cut in (3, 6, 8)][:-1]
        embedding.backward([np.split(of_groups.reshape(len(labels), -1), cuts, -1)])
        kernel = kernel - DENSE_RATE * np.einsum("bgd,bg->gd", groups, of_prediction)
    slots = {
        f"{table}/{slot}": values
        for table, named in embedding.slots.items()
        for slot, values in named.items()
    }
    return {**embedding.tables, **slots}, kernel


def assert_same(actual: Outcome, expected: Outcome) -> None:
    assert actual[0].keys() == expected[0].keys()
    # 50 steps of a few float32 roundings each; the loss contracts errors.
    for name, value in actual[0].items():
        np.testing.assert_allclose(
            value, expected[0][name], rtol=2e-4, atol=2e-5, err_msg=name
        )
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-4)


def test_fit_agrees_on_the_portable_engine(seed: int, monkeypatch: pytest.MonkeyPatch):
    steps = models.batches(seed, 12)
    expected = by_numpy(["Adagrad"], steps)
    monkeypatch.setenv(distribution.ENGINE_VARIABLE, "portable")
    assert_same(by_fit(["Adagrad"], steps), expected)


def test_loop_fit_hand_and_numpy_agree(seed: int):
    steps, names = models.batches(seed, 50), list(OPTIMIZERS)
    expected = by_numpy(names, steps)
    for name in names:
        for table in COMBINERS:
            moved = expected[0][f"{name}_{table}"] - models.initial_table(table)
            assert np.abs(moved).max() > 0.02
    assert_same(by_hand(names, steps), expected)
    assert_same(by_loop(names, steps), expected)
    assert_same(by_fit(names, steps), expected)
