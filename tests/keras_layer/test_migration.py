"""Models from the documentation of the TFRS layer train after the edits.

The edits are those of docs/from_tfrs.md and no others.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models

from tpu_embedding import keras as tpu_embedding_layer

embedding = tf.tpu.experimental.embedding
BATCH = 8


def make_feature_config() -> dict[str, Any]:
    one = embedding.TableConfig(vocabulary_size=16, dim=4)
    two = embedding.TableConfig(vocabulary_size=16, dim=2)
    return {
        "feature_one": embedding.FeatureConfig(table=one),
        "feature_two": embedding.FeatureConfig(table=one),
        "feature_three": embedding.FeatureConfig(table=two),
    }


def make_inputs() -> dict[str, Any]:
    """Sparse and ragged inputs have shape=(None,) now, and dict inputs names."""
    return {
        "feature_one": keras.Input((), BATCH, "int32", name="feature_one"),
        "feature_two": keras.Input(
            (None,), BATCH, "int32", ragged=True, name="feature_two"
        ),
        "feature_three": keras.Input((), BATCH, "int32", name="feature_three"),
    }


def functional_model() -> keras.Model:
    inputs = make_inputs()
    activations = tpu_embedding_layer.TPUEmbedding(
        feature_config=make_feature_config(), optimizer=embedding.SGD(0.1)
    )(inputs)
    flat = tf.nest.flatten(activations)
    logits = keras.layers.Dense(1)(keras.ops.concatenate(flat, axis=-1))
    return keras.Model(inputs, logits)


class ModelWithEmbeddings(keras.Model):
    def __init__(self, optimizer: Any = None) -> None:
        super().__init__()
        self.embedding_layer = tpu_embedding_layer.TPUEmbedding(
            feature_config=make_feature_config(),
            optimizer=optimizer or embedding.SGD(0.1),
        )
        self.dense = keras.layers.Dense(1)  # Made in __init__, not in call.

    def call(self, inputs: Any) -> Any:
        flat = tf.nest.flatten(self.embedding_layer(inputs))
        return self.dense(tf.concat(flat, axis=-1))


def model_with_separate_optimizer() -> keras.Model:
    """The optimizer of the tables is made by Keras, without `.legacy`."""
    optimizer = keras.optimizers.Adagrad(0.1)
    return ModelWithEmbeddings(tpu_embedding_layer.translate_keras_optimizer(optimizer))


def make_batch(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    ids = tf.constant(rng.integers(0, 16, (3, BATCH)), tf.int32)
    ragged = tf.RaggedTensor.from_row_lengths(tf.repeat(ids[1], 2), tf.fill([BATCH], 2))
    features = {"feature_one": ids[0], "feature_two": ragged, "feature_three": ids[2]}
    labels = tf.cast(ids[0] > 7, tf.float32)[:, tf.newaxis]
    return labels, features


def make_training_step(strategy: Any, model: Any, optimizer: Any) -> Any:
    replicas = strategy.num_replicas_in_sync

    @tf.function
    def training_step(dataset_iterator: Any, num_steps: Any) -> tf.Tensor:
        def tpu_step(inputs: Any) -> tf.Tensor:
            labels, features = inputs
            with tf.GradientTape() as tape:
                model_output = model(features)
                losses = keras.losses.binary_crossentropy(
                    labels, model_output, from_logits=True
                )
                loss = tf.reduce_mean(losses) / replicas
            trainable_variables = model.trainable_variables
            gradients = tape.gradient(loss, trainable_variables)
            optimizer.apply_gradients(zip(gradients, trainable_variables, strict=True))
            return loss

        loss = tf.zeros([])
        for _ in tf.range(num_steps):
            per_replica = strategy.run(tpu_step, args=(next(dataset_iterator),))
            loss = strategy.reduce("SUM", per_replica, axis=None)
        return loss

    return training_step


def make_evaluation_step(strategy: Any, model: Any) -> Any:
    @tf.function
    def evaluation_step(dataset_iterator: Any) -> tf.Tensor:
        def tpu_step(inputs: Any) -> tf.Tensor:
            labels, features = inputs
            return tf.reduce_mean(
                tf.cast((model(features) > 0) == (labels > 0.5), "float32")
            )

        per_replica = strategy.run(tpu_step, args=(next(dataset_iterator),))
        return strategy.reduce("MEAN", per_replica, axis=None)

    return evaluation_step


@pytest.mark.parametrize(
    ("make", "replicas"),
    [
        (functional_model, 1),
        (ModelWithEmbeddings, 2),
        (model_with_separate_optimizer, 1),
    ],
)
def test_training_and_evaluation_steps(make: Any, replicas: int):
    strategy = models.mirrored(replicas)
    with strategy.scope():
        model = make()
        optimizer = keras.optimizers.SGD(0.1)
    labels, features = make_batch(3)
    data = tf.data.Dataset.from_tensors((labels, features)).repeat()
    iterator = iter(strategy.distribute_datasets_from_function(lambda _: data))
    training_step = make_training_step(strategy, model, optimizer)
    evaluation_step = make_evaluation_step(strategy, model)
    if make is not functional_model:
        with strategy.scope():
            strategy.run(model, args=(features,))
    optimizer.build(model.trainable_variables)
    first = float(training_step(iterator, tf.constant(1)))
    last = float(training_step(iterator, tf.constant(60)))
    assert last < 0.5 * first
    assert float(evaluation_step(iterator)) == 1.0


@pytest.mark.parametrize("make", [functional_model, ModelWithEmbeddings])
def test_fit(make: Any):
    labels, features = make_batch(3)
    model = make()
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    data = tf.data.Dataset.from_tensors((features, labels)).repeat(40)
    losses = model.fit(data, epochs=2, shuffle=False, verbose=0).history["loss"]
    assert losses[1] < losses[0]


def test_an_exported_serving_signature(tmp_path: Any):
    """Other FeatureConfigs over the same tables, as TFRS documents it."""
    model = ModelWithEmbeddings()
    _, features = make_batch(3)
    model(features)
    (table, _) = model.embedding_layer.embedding_tables
    serving_config = {"only": embedding.FeatureConfig(table=table)}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def serve(ids: tf.Tensor) -> Any:
        return model.embedding_layer({"only": ids}, serving_config=serving_config)

    expected = serve(features["feature_one"])["only"]
    # Not the subclassed model itself: Keras 3 takes its inputs for floats then.
    module = tf.Module()
    module.layer = model.embedding_layer
    tf.saved_model.save(module, tmp_path / "model", signatures={"serve": serve})
    loaded = tf.saved_model.load(tmp_path / "model")
    served = loaded.signatures["serve"](features["feature_one"])
    np.testing.assert_array_equal(served["only"], expected)


def test_a_subclassed_model_is_exported_with_a_signature(tmp_path: Any):
    model = ModelWithEmbeddings()
    _, features = make_batch(3)
    features["feature_two"] = features["feature_one"]
    expected = model(features)
    spec = {name: tf.TensorSpec([None], tf.int32, name=name) for name in features}
    model.export(tmp_path / "model", verbose=False, input_signature=[spec])
    loaded = tf.saved_model.load(tmp_path / "model")
    np.testing.assert_allclose(loaded.serve(features), expected, rtol=1e-5)


def test_a_serving_function_is_exported_through_an_archive(tmp_path: Any):
    model = ModelWithEmbeddings()
    ids = tf.constant([3, 5])
    names = make_feature_config()
    expected = model(dict.fromkeys(names, ids))

    def serve(text: tf.Tensor) -> Any:
        parsed = tf.strings.to_number(text, tf.int32)
        return model(dict.fromkeys(names, parsed))

    archive = keras.export.ExportArchive()
    archive.track(model)
    signature = [tf.TensorSpec([None], tf.string)]
    archive.add_endpoint("serving", serve, input_signature=signature)
    archive.write_out(tmp_path / "model", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "model")
    served = loaded.serving(tf.constant(["3", "5"]))
    np.testing.assert_allclose(served, expected, rtol=1e-5)


def test_separate_optimizers_split_by_layer():
    """The last training step of the TFRS documentation."""
    embedding_optimizer = keras.optimizers.Adagrad(0.1)
    dense_optimizer = keras.optimizers.Adam(0.1)
    model = ModelWithEmbeddings(embedding_optimizer)
    labels, features = make_batch(3)

    @tf.function
    def training_step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = keras.losses.binary_crossentropy(
                labels, model(features), from_logits=True
            )
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        pairs = list(zip(tape.gradient(loss, variables), variables, strict=True))
        embedding_ids = [id(v) for v in model.embedding_layer.trainable_variables]
        dense_optimizer.apply_gradients(
            [(g, v) for g, v in pairs if id(v) not in embedding_ids]
        )
        embedding_optimizer.apply_gradients(
            [(g, v) for g, v in pairs if id(v) in embedding_ids]
        )
        return loss

    losses = [float(training_step()) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
