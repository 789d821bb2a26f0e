"""Calls and gradients of the layer inside programs of TPUs, and what they refuse."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models
from keras_layer.trained import assert_same_bits

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding
from tpu_embedding.testing import SoftwareTPUStrategy

EmbeddingFeature = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
IDS = [tf.constant([0, 1, 1, 5]), tf.constant([5, 2, 3, 1])]


def make_layer(strategy: Any = None, optimizer: Any = None, **options: Any) -> Any:
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        table = te.TableConfig(8, 2, te.RowIdInitializer(), combiner="sum", name="t")
        arguments = {"batch_size": 4, "name": "embedding", **options}
        layer = TPUEmbedding(
            te.FeatureConfig(table), optimizer or te.Adagrad(0.5), **arguments
        )
        layer.build()
    return layer


def two_towers(layer: Any, ids: list[Any]) -> None:
    with tf.GradientTape() as tape:
        first, second = (layer(batch) for batch in ids)
        loss = tf.reduce_sum(first) + 2 * tf.reduce_sum(second**2)
    tape.gradient(loss, layer.trainable_variables)


def one_after_the_other(layer: Any, ids: list[Any]) -> None:
    for batch in ids:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(batch) ** 2)
        tape.gradient(loss, layer.trainable_variables)


def same_on_host(tpu: Any, step: Any) -> None:
    layer, host = make_layer(tpu), make_layer()
    tpu.run(lambda *ids: step(layer, ids), IDS)
    step(host, IDS)
    state = models.state(layer)
    for name, value in models.state(host).items():
        np.testing.assert_allclose(state[name], value, rtol=1e-6, err_msg=name)
    assert state["t"][1, 0] != 1.0


def test_two_towers_on_sparse_cores():
    """Two updates; both lookups see the tables before any of them."""
    same_on_host(SoftwareTPUStrategy("v6e", 1), two_towers)


def test_calls_on_v4_take_turns():
    same_on_host(SoftwareTPUStrategy("v4", 1), one_after_the_other)
    tpu = SoftwareTPUStrategy("v4", 1)
    layer = make_layer(tpu)
    before = models.state(layer)
    with pytest.raises(NotImplementedError, match="cannot look up twice before its"):
        tpu.run(lambda *ids: two_towers(layer, ids), IDS)
    with pytest.raises(RuntimeError, match="already configured by another"):
        make_layer(tpu)
    assert_same_bits(models.state(layer), before)


@pytest.mark.parametrize("generation", ["v6e", "v4"])
def test_what_a_program_cannot_do_changes_nothing(generation: str):
    tpu = SoftwareTPUStrategy(generation, 1)
    layer = make_layer(tpu)
    before = models.state(layer)

    def second_gradient(ids: Any) -> None:
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(layer(ids))
        tape.gradient(loss, layer.trainable_variables)
        tape.gradient(loss, layer.trainable_variables)

    def nested(ids: Any) -> None:
        tf.function(layer)(ids)

    def serving(ids: Any) -> None:
        layer(ids, serving_config=te.FeatureConfig(next(iter(layer.embedding_tables))))

    def table(ids: Any) -> Any:
        return next(iter(layer.embedding_tables.values())).read_value()

    for call, error, text in (
        (second_gradient, tf.errors.FailedPreconditionError, "takes them once"),
        (nested, RuntimeError, "inside control flow or a tf.function"),
        (serving, NotImplementedError, "outside of strategy.run"),
        (table, NotImplementedError, "can be read and assigned only outside of"),
    ):
        with pytest.raises(error, match=text):
            tpu.run(call, (IDS[0],))

    assert_same_bits(models.state(layer), before)


@pytest.mark.parametrize("generation", ["v6e", "v4"])
def test_frozen_layers_and_tables_that_are_set(generation: str):
    tpu = SoftwareTPUStrategy(generation, 1)
    layer = make_layer(tpu)
    layer.trainable = False
    ((table, variable),) = layer.embedding_tables.items()
    layer.update_embedding_table(table, tf.fill([8, 2], 3.0))
    with pytest.raises(ValueError, match=r"'t' has shape \(8, 2\)\. Received"):
        layer.update_embedding_table(table, tf.zeros([8, 3]))
    assert repr(variable) == "<LogicalVariable 't' shape=(8, 2) dtype=float32>"
    with pytest.raises(NotImplementedError, match="'t' is stored in parts and is not"):
        tf.function(variable.read_value)()

    def step(ids: Any) -> Any:
        kernel = tf.ones([2])
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            found = layer(ids)
            loss = tf.reduce_sum(found * kernel)
        return found, tape.gradient(loss, kernel)

    found, gradient = tpu.run(step, (IDS[0],))
    np.testing.assert_array_equal(found, np.full([4, 2], 3.0))
    np.testing.assert_array_equal(gradient, [12.0, 12.0])
    np.testing.assert_array_equal(variable, np.full([8, 2], 3.0))
    np.testing.assert_array_equal(variable.read_value(), variable.numpy())


def test_options_for_tpus_are_carried_or_refused():
    tpu = SoftwareTPUStrategy("v6e", 1)
    make_layer(tpu, embedding_feature=EmbeddingFeature.V2)
    limits = te.SparseCoreEmbeddingConfig(max_ids_per_table={"t": 1})
    layer = make_layer(tpu, sparse_core_embedding_config=limits)

    def look_up(ids: Any) -> Any:
        return layer(ids)

    with pytest.raises(tf.errors.InvalidArgumentError, match="max_ids_per_table"):
        tpu.run(look_up, (tf.reshape(tf.range(32) % 8, [4, 8]),))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"embedding_feature": EmbeddingFeature.V1},
            ValueError,
            r"`embedding_feature` is V1, but .* are v6e",
        ),
        (
            {"batch_size": None},
            ValueError,
            "a TPU needs the shape of each input .* `batch_size`",
        ),
        (
            {"trainable_tables": True, "batch_size": None},
            NotImplementedError,
            "that TPU programs do not support",
        ),
        ({"batch_size": 3}, ValueError, "samples per replica"),
        ({"optimizer": te.SGD(0.1, clipvalue=1.0)}, NotImplementedError, "clipvalue"),
    ],
    ids=["feature", "shapes", "trainable", "samples", "clipvalue"],
)
def test_options_that_sparse_cores_refuse(options: Any, error: Any, text: str):
    with pytest.raises(error, match=text):
        make_layer(SoftwareTPUStrategy("v6e", 1), **options)


@pytest.mark.parametrize("generation", ["v6e", "v4"])
def test_a_scalar_id_has_no_shape_that_a_tpu_can_use(generation: str):
    tpu = SoftwareTPUStrategy(generation, 1)
    with tpu.scope():
        config = te.FeatureConfig(te.TableConfig(8, 2, name="t"))
        layer = TPUEmbedding(config, te.SGD(0.1))

        @tf.function
        def look_up(ids: Any) -> Any:
            return tpu.run(layer, (ids,))

        with pytest.raises(ValueError, match="a TPU needs the shape of each input"):
            look_up(tf.constant(3))


@pytest.mark.parametrize("generation", ["v6e", "v4"])
def test_the_batch_size_of_an_input_is_that_of_a_replica(generation: str):
    with SoftwareTPUStrategy(generation, 2).scope():
        ids = keras.Input([], batch_size=16, dtype="int64")
        layer = TPUEmbedding(te.FeatureConfig(te.TableConfig(8, 8)), te.SGD(0.1))
        model = keras.Model(ids, layer(ids))
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"\(16,\) given by the inputs of the model"):
        model.fit(np.zeros(16, np.int64), np.zeros([16, 8]), batch_size=16, verbose=0)


@pytest.mark.parametrize("generation", ["v6e", "v4"])
def test_tpus_need_optimizers(generation: str):
    feature = te.FeatureConfig(te.TableConfig(8, 2, name="t"))
    with (
        SoftwareTPUStrategy(generation, 1).scope(),
        pytest.raises(ValueError, match="has no optimizer"),
    ):
        TPUEmbedding(feature, None, batch_size=4)


def test_layers_stay_with_their_strategy():
    tpu = SoftwareTPUStrategy("v6e", 1)
    host, layer = make_layer(), make_layer(tpu)

    def look_up(ids: Any) -> Any:
        return host(ids)

    with pytest.raises(RuntimeError, match="is called under SoftwareTPUStrategy"):
        tpu.run(look_up, (IDS[0],))
    with (
        pytest.raises(RuntimeError, match="must run inside a replica"),
        tf.GradientTape(),
    ):
        layer(IDS[0])
    np.testing.assert_array_equal(layer(IDS[0]), host(IDS[0]))


def test_a_second_layer_on_v4_says_what_to_do():
    strategy = SoftwareTPUStrategy("v4", 1)
    layer = make_layer(strategy)
    text = r"`load_weights` loads other tables .*, or initialize the TPU system again"
    with pytest.raises(RuntimeError, match=text):
        make_layer(strategy)
    (table,) = layer.embedding_tables
    layer.update_embedding_table(table, np.ones((8, 2)))
    make_layer(SoftwareTPUStrategy("v4", 1))


def functional(tpu: Any, batch_size: int | None) -> Any:
    with tpu.scope():
        table = te.TableConfig(8, 2, te.RowIdInitializer(), combiner="sum", name="t")
        features = {"a": te.FeatureConfig(table), "b": te.FeatureConfig(table)}
        layer = TPUEmbedding(features, te.SGD(0.5))
        inputs = {
            "a": keras.Input((), batch_size, dtype="int64", name="a"),
            "b": keras.Input((3,), batch_size, dtype="int64", name="b"),
        }
        return keras.Model(inputs, layer(inputs)), layer


@pytest.mark.parametrize("generation", ["v6e", "v4"])
def test_batch_sizes_come_from_inputs(generation: str):
    tpu = SoftwareTPUStrategy(generation, 2)
    model, layer = functional(tpu, 4)

    def step(ids: Any) -> None:
        with tf.GradientTape() as tape:
            found = model({"a": ids, "b": tf.stack([ids] * 3, 1)})
            loss = tf.reduce_sum(found["a"]) + tf.reduce_sum(found["b"])
        tape.gradient(loss, layer.trainable_variables)

    if generation == "v6e":  # On v4 the ids are arguments of strategy.run.
        tpu.run(step, (IDS[0],))
        (table,) = layer.embedding_tables.values()
        # Row 1 occurs twice, four times in each sample, in each of two replicas.
        np.testing.assert_array_equal(table.numpy()[:, 0], [-4, -7, 2, 3, 4, 1, 6, 7])
    with pytest.raises(ValueError, match=r"Feature a: a TPU needs the shape of each"):
        functional(SoftwareTPUStrategy(generation, 2), None)


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        table = te.TableConfig(8, 2, te.RowIdInitializer(), name="t")
        self.embedding = TPUEmbedding(te.FeatureConfig(table), te.SGD(0.5))

    def call(self, inputs: Any) -> Any:
        return self.embedding(inputs)


@pytest.mark.parametrize("generation", ["v6e", "v4"])
def test_a_loaded_model_has_the_batch_sizes_of_its_inputs(
    generation: str, tmp_path: pathlib.Path
):
    model, layer = functional(tf.distribute.get_strategy(), 4)
    layer.update_embedding_table(next(iter(layer.embedding_tables)), tf.ones([8, 2]))
    model.save(tmp_path / "model.keras")
    with SoftwareTPUStrategy(generation, 2).scope():
        loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    (table,) = loaded.layers[-1].embedding_tables.values()
    np.testing.assert_array_equal(table, np.ones((8, 2)))


@pytest.mark.parametrize("generation", ["v6e", "v4"])
def test_batch_sizes_come_from_the_first_batch_of_fit(generation: str):
    tpu = SoftwareTPUStrategy(generation, 2)
    with tpu.scope():
        model = Subclassed()
        model.compile("sgd", "mse")
    labels = np.zeros((8, 2), np.float32)
    data = tf.data.Dataset.from_tensor_slices((np.arange(8), labels)).batch(8, True)
    model.fit(data, verbose=0, shuffle=False)
    (table,) = model.embedding.embedding_tables.values()
    np.testing.assert_allclose(table.numpy()[:, 0], np.arange(8) * (1 - 0.5 / 8))


def test_layers_without_shapes_say_so():
    with SoftwareTPUStrategy("v6e", 1).scope():
        model = Subclassed()
        with pytest.raises(ValueError, match="a TPU needs the shape of each input"):
            _ = model.embedding.embedding_tables


def test_updates_are_one_step_late_on_v4_where_asked():
    tpu = SoftwareTPUStrategy("v4", 1)
    layer = make_layer(tpu, te.SGD(1.0), pipeline_execution_with_tensor_core=True)

    def step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            found = layer(ids)
            loss = tf.reduce_sum(found)
        tape.gradient(loss, layer.trainable_variables)
        return found[0, 0]

    ids = tf.constant([7, 6, 5, 4])
    assert [float(tpu.run(step, (ids,))) for _ in range(3)] == [7.0, 7.0, 6.0]
    (table,) = layer.embedding_tables.values()
    np.testing.assert_array_equal(table.numpy()[:, 0], [0, 1, 2, 3, 1, 2, 3, 4])
