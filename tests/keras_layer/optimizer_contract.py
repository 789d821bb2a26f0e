"""What translate_keras_optimizer promises for every package of Keras optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding, translate_keras_optimizer

OURS = {"SGD": te.SGD, "Adagrad": te.Adagrad, "Adam": te.Adam, "Ftrl": te.FTRL}
CARRIED: dict[str, dict[str, Any]] = {
    "SGD": {},
    "Adagrad": {"initial_accumulator_value": 0.3},
    "Adam": {"beta_1": 0.5, "beta_2": 0.6, "epsilon": 1e-3},
    "Ftrl": {
        "learning_rate_power": -0.7,
        "initial_accumulator_value": 0.3,
        "l1_regularization_strength": 0.1,
        "l2_regularization_strength": 0.2,
        "beta": 0.3,
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adagrad": {"epsilon": 1e-3},
    "Adam": {"amsgrad": True},
    "Ftrl": {"l2_shrinkage_regularization_strength": 0.1},
}
# Of every class; these two are new in Keras 3.
REFUSED_ALIKE: dict[str, Any] = {
    "weight_decay": 0.1,
    "clipnorm": 1.0,
    "global_clipnorm": 1.0,
    "use_ema": True,
    "ema_momentum": 0.5,
    "ema_overwrite_frequency": 5,
}
REFUSED_IN_KERAS_3: dict[str, Any] = {
    "loss_scale_factor": 8.0,
    "gradient_accumulation_steps": 2,
}


def make_layer(optimizer: Any, of_table: Any = None) -> tuple[Any, te.TableConfig]:
    """A layer of one table, whose row r starts as r."""
    table = te.TableConfig(4, 2, te.RowIdInitializer(), of_table, "sum", "t")
    layer = TPUEmbedding(te.FeatureConfig(table), optimizer)
    layer.build()
    return layer, table


def step(layer: Any, scale: float = 1.0) -> None:
    """One update of row 1, with the gradient `scale`."""
    with tf.GradientTape() as tape:
        loss = scale * tf.reduce_sum(layer(tf.constant([1])))
    tape.gradient(loss, layer.trainable_variables)


def row_1(layer: Any, table: te.TableConfig) -> np.ndarray:
    return layer.embedding_tables[table].numpy()[1]


def check_options_are_carried(package: Any, name: str) -> None:
    cls, options = getattr(package, name), CARRIED[name]
    ours: Any = translate_keras_optimizer(cls(0.25, **options), bias_correction=False)
    assert type(ours) is OURS[name]
    assert {option: getattr(ours, option) for option in options} == options
    assert callable(ours.learning_rate)
    assert float(ours.learning_rate()) == 0.25
    defaults = translate_keras_optimizer(cls())
    config = cls().get_config()
    for option in options:
        assert getattr(defaults, option) == config[option]
    assert translate_keras_optimizer(cls(0.1, clipvalue=0.5)).clipvalue == 0.5


def check_option_is_refused(cls: Any, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"do not support `{option}={value!r}` of the"):
        translate_keras_optimizer(cls(0.1, **{option: value}))


def check_a_plain_rate_is_read_at_each_update(package: Any) -> None:
    optimizer = package.SGD(0.5)
    layer, table = make_layer(optimizer)
    traced = tf.function(step)
    traced(layer)
    optimizer.learning_rate = 0.25
    traced(layer)
    np.testing.assert_allclose(row_1(layer, table), 1 - 0.75)


def check_a_schedule_is_evaluated_at_the_layers_own_count(package: Any) -> None:
    schedule = package.schedules.PiecewiseConstantDecay([0, 1], [1.0, 2.0, 4.0])
    optimizer = package.SGD(schedule)
    layer, table = make_layer(optimizer)
    traced = tf.function(step)
    for _ in range(3):
        traced(layer)
    np.testing.assert_array_equal(row_1(layer, table), 1 - 7)
    assert int(optimizer.iterations) == 0
    optimizer.iterations.assign(100)
    traced(layer)
    np.testing.assert_array_equal(row_1(layer, table), 1 - 11)
    assert int(optimizer.iterations) == 100
