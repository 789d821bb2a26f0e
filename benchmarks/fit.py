"""One model for both sides of the comparison in `model.fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.scenarios import Scenario
from benchmarks.timing import timed

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.01),
}
STEPS = 12  # of one call of fit


def prepare(
    scenario: Scenario, optimizer: str, look_up: Callable[[list[Any]], list[Any]]
) -> dict[str, Callable[[], float]]:
    """Times a step of `model.fit` of a model with a small dense part.

    Args:
      scenario: What the inputs are.
      optimizer: The Keras optimizer of the model, by name.
      look_up: Converts symbolic ids [batch, ids] of each feature to its activations.
    """
    inputs = [keras.Input([width], dtype="int32") for width in scenario.ids_per_sample]
    joined = keras.layers.Concatenate()(look_up(inputs))
    hidden = keras.layers.Dense(64, "relu")(joined)
    model: Any = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(OPTIMIZERS[optimizer](), "mse")
    features = [np.stack(ids) for ids in zip(*scenario.batches(STEPS), strict=True)]
    labels = np.random.default_rng(1).random([STEPS, scenario.batch_size, 1])
    data = tf.data.Dataset.from_tensor_slices((tuple(features), labels))
    data = data.cache().repeat().prefetch(1)

    def fit() -> None:
        model.fit(data, steps_per_epoch=STEPS, shuffle=False, verbose=0)

    one_call = timed(fit)
    return {"step": lambda: one_call() / STEPS}
