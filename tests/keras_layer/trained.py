"""A model with two optimizers and a schedule, and all that training changes in it."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras_layer import models
from keras_layer.version import keras

import tpu_embedding as te

ALL_SLOTS = {
    "films",
    "films%2Fmomenta",
    "films%2Fvelocities",
    "users",
    "users%2Faccumulators",
    "_updates",
}


def make_model() -> Any:
    """With two optimizers, one of them of Keras, and a schedule."""
    schedule = keras.optimizers.schedules.InverseTimeDecay(0.1, 2, 0.5)
    tables = {
        "films": te.TableConfig(
            11,
            3,
            models.TableInitializer("films"),
            optimizer=keras.optimizers.Adam(schedule, epsilon=1e-3),
            name="films",
        ),
        "users": te.TableConfig(7, 2, combiner="sum", name="users"),
    }
    config = models.feature_config(tables)
    model = models.make_model(te.Adagrad(0.2), feature_config=config)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def fit(model: Any, steps: list[Any]) -> None:
    model.fit(models.dataset(steps), shuffle=False, verbose=0)


def everything(model: Any) -> dict[str, np.ndarray]:
    state = models.state(models.embedding_of(model))
    kernel = model.get_layer("head").kernel.numpy()
    return {**state, "head": kernel}


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Of two models, or of what `everything` gave for them."""
    actual, expected = (
        each if isinstance(each, dict) else everything(each)
        for each in (actual, expected)
    )
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
