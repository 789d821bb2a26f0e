"""Configurations as JSON, and what cannot be written so."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding, translate_keras_optimizer


def tables_of_all_kinds() -> list[Any]:
    stock = tf.tpu.experimental.embedding
    return [
        te.TableConfig(
            5,
            2,
            keras.initializers.RandomNormal(stddev=0.1, seed=3),
            te.FTRL(0.1, beta=0.5, clipvalue=(-1.0, 2.0), clip_weight_max=3.0),
            "sqrtn",
            "a",
            te.QuantizationConfig(4, -1.0, 1.0),
            invalid_ids="mod",
            placement="whole",
        ),
        te.TableConfig(5, 2, te.RowIdInitializer(3), "adam", name="b"),
        te.TableConfig(
            5,
            2,
            tf.constant_initializer(np.eye(5, 2)),
            name="c",
            dtype="bfloat16",
            rounding_seed=7,
        ),
        stock.TableConfig(5, 2, optimizer=stock.Adagrad(0.5), combiner="sum"),
        te.TableConfig(5, 2, optimizer=keras.optimizers.Ftrl(0.25, beta=0.5)),
    ]


def layer_of_all_kinds(tables: list[Any]) -> TPUEmbedding:
    stock = tf.tpu.experimental.embedding
    config = {
        "x": [te.FeatureConfig(tables[0]), te.FeatureConfig(tables[0], 3)],
        "y": (te.FeatureConfig(tables[1], output_shape=(None, 2), name="f"),),
        "z": {
            "2": te.FeatureConfig(tables[2]),
            "3": stock.FeatureConfig(tables[3]),
            "4": te.FeatureConfig(tables[4]),
        },
    }
    return TPUEmbedding(
        config, te.SGD(0.5), batch_size=4, loss_scale=2.0, invalid_ids="drop"
    )


def test_configurations_survive_json():
    layer = layer_of_all_kinds(tables_of_all_kinds())
    written = json.loads(json.dumps(layer.get_config()))
    other = TPUEmbedding.from_config(written)
    # Keras says "ftrl" of its Ftrl, and "Ftrl" of one that it has read.
    again = json.dumps(other.get_config())
    assert again.lower() == json.dumps(written).lower()
    layer.build()
    other.build()
    for name, value in models.state(layer).items():
        if name not in ("table_3", "table_4"):  # Truncated normal, without a seed.
            np.testing.assert_array_equal(models.state(other)[name], value)


def test_features_may_be_called_like_the_options_of_features():
    table = te.TableConfig(4, 2, te.RowIdInitializer(), name="t")
    names = ["kind", "max_sequence_length", "table"]
    layer = TPUEmbedding({name: te.FeatureConfig(table) for name in names}, "sgd")
    other = TPUEmbedding.from_config(json.loads(json.dumps(layer.get_config())))
    activations = other({name: tf.constant([1]) for name in names})
    assert sorted(activations) == names


@pytest.mark.parametrize("key", [3, ("user", "film")])
def test_keys_need_not_be_strings(key: Any):
    table = te.TableConfig(4, 2, te.RowIdInitializer(), name="t")
    layer = TPUEmbedding({key: te.FeatureConfig(table)}, "sgd")
    other = TPUEmbedding.from_config(json.loads(json.dumps(layer.get_config())))
    assert list(other({key: tf.constant([1])})) == [key]


def test_tables_and_optimizers_survive_json():
    tables = tables_of_all_kinds()
    layer = layer_of_all_kinds(tables)
    other = TPUEmbedding.from_config(json.loads(json.dumps(layer.get_config())))
    ours_alone = [f.name for f in dataclasses.fields(te.TableConfig) if f.kw_only]
    ours, theirs = (each._built.features.plan.tables for each in (layer, other))
    for before, after in zip(ours, theirs, strict=True):
        assert before.name == after.name
        assert before.features == after.features
        for name in ("vocabulary_size", "dim", "combiner", "dtype", *ours_alone):
            assert getattr(before.config, name) == getattr(after.config, name)
        quantization = before.config.quantization_config
        assert after.config.quantization_config == quantization
        assert type(before.optimizer) is type(after.optimizer)
    optimizers: list[Any] = [table.optimizer for table in theirs]
    assert optimizers[0] == tables[0].optimizer
    assert optimizers[2] == te.SGD(0.5)
    assert optimizers[4].learning_rate() == 0.25


def test_rates_that_are_objects_of_keras_survive(tmp_path: pathlib.Path):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)
    for optimizer in (
        te.SGD(schedule),
        translate_keras_optimizer(keras.optimizers.Adam(0.5)),
        translate_keras_optimizer(keras.optimizers.Adam(schedule)),
        translate_keras_optimizer(keras.optimizers.SGD(0.5)),
    ):
        layer = TPUEmbedding(models.feature_config(), optimizer)
        other = TPUEmbedding.from_config(json.loads(json.dumps(layer.get_config())))
        rates: list[Any] = []
        for each in (layer, other):
            resolved: Any = each._built.features.plan.tables[0].optimizer
            rates.append(resolved.learning_rate)
        takes_step = (
            not isinstance(optimizer, te.SGD) or optimizer.learning_rate is schedule
        )
        arguments = [tf.constant(7)] if takes_step else []
        np.testing.assert_array_equal(rates[1](*arguments), rates[0](*arguments))


def no_name(shape: Any, dtype: Any) -> tf.Tensor:
    return tf.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"optimizer": te.SGD(lambda: 0.1)}, "`learning_rate` of the optimizer of the"),
        ({"loss_scale": lambda: 2.0}, "`loss_scale`"),
        ({"initializer": no_name}, "The initializer of table 't'"),
    ],
)
def test_what_cannot_be_saved_says_so(options: dict[str, Any], what: str):
    table = te.TableConfig(3, 2, options.pop("initializer", None), name="t")
    layer = TPUEmbedding(te.FeatureConfig(table), **{"optimizer": "sgd", **options})
    with pytest.raises(ValueError, match=rf"^{what}.* cannot be saved: .*register_ker"):
        layer.get_config()


def test_a_namedtuple_cannot_be_saved():
    pair = collections.namedtuple("Pair", "a b")
    feature = te.FeatureConfig(te.TableConfig(4, 2, name="t"))
    layer = TPUEmbedding([pair(feature, feature)], "sgd")
    ids = tf.constant([1])
    assert type(layer([pair(ids, ids)])[0]) is pair
    with pytest.raises(ValueError, match=r"namedtuple Pair in .* Use a dict, or sav"):
        layer.get_config()
