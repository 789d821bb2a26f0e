"""Trains an old EmbeddingConfigSpec model, then moves it into a TPUEmbedding.

    python examples/05_estimator_spec.py [--quick]

TensorFlow 2.16 removed tf.estimator.tpu.experimental.EmbeddingConfigSpec, whose
documentation had an example with three mistakes. Here the example runs with
`feature_columns=` instead of `column=`, dense_features instead of `DenseFeature`, and
AdagradParameters from the right module. The checkpoint then goes into a
te.TPUEmbedding, which predicts the same and can be trained further.

The data are synthetic: a visitor reads one article and is shown another, with an
advertisement, and likes it if hidden tastes agree.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

# TensorFlow reads both variables when it starts. oneDNN rounds differently per CPU.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding import estimator, interop

# Feature columns log long deprecation warnings.
tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)

ARTICLES, ADVERTISEMENTS, DIMENSION, BATCH = 50, 20, 8, 64

column_a = tf.feature_column.categorical_column_with_identity("read", ARTICLES)
column_b = tf.feature_column.categorical_column_with_identity("shown", ARTICLES)
column_c = tf.feature_column.categorical_column_with_identity("ad", ADVERTISEMENTS)
tpu_shared_columns = interop.shared_embedding_columns([column_a, column_b], DIMENSION)
tpu_non_shared_column = interop.embedding_column(column_c, DIMENSION)
tpu_columns = [tpu_non_shared_column, *tpu_shared_columns]

spec = interop.EmbeddingConfigSpec(
    feature_columns=tpu_columns,
    optimization_parameters=interop.AdagradParameters(0.1),
)


def model_fn(features: Any, labels: Any, mode: str) -> estimator.TPUEstimatorSpec:
    """Builds a logistic regression over products of the three activations."""
    joined = estimator.dense_features(features, tpu_columns)
    score = tf.compat.v1.get_variable("scale", initializer=1.0) * agreement(joined)
    predictions = {"probability": tf.sigmoid(score)}
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.TPUEstimatorSpec(mode, predictions)
    loss = tf.compat.v1.losses.sigmoid_cross_entropy(labels, score)
    optimizer = tf.compat.v1.train.AdagradOptimizer(0.1)
    return estimator.TPUEstimatorSpec(
        mode,
        predictions,
        loss,
        optimizer.minimize(loss, tf.compat.v1.train.get_global_step()),
        eval_metrics=(metric_fn, [labels, score]),
    )


def agreement(joined: tf.Tensor) -> tf.Tensor:
    """Returns a score per row of [ad, read, shown], the order of the columns' names."""
    ad, read, shown = tf.split(joined, 3, axis=1)
    return tf.reduce_sum(read * shown + ad * shown, axis=1)


def metric_fn(labels: tf.Tensor, score: tf.Tensor) -> dict[str, Any]:
    """Computes the fraction of visits that are predicted correctly."""
    return {"accuracy": tf.compat.v1.metrics.accuracy(labels, score > 0)}


def visits(count: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Makes synthetic visits: features [count, 1] and labels [count]."""
    tastes = np.random.default_rng(0)
    articles = tastes.normal(size=(ARTICLES, 3))
    advertisements = tastes.normal(size=(ADVERTISEMENTS, 3))
    draws = np.random.default_rng(seed)
    read, shown = draws.integers(1, ARTICLES, size=(2, count))  # 0 is for "none".
    ad = draws.integers(1, ADVERTISEMENTS, size=count)
    score = ((articles[read] + advertisements[ad]) * articles[shown]).sum(axis=1)
    features = {"read": read[:, None], "shown": shown[:, None], "ad": ad[:, None]}
    return features, (score > 0).astype(np.float32)


def input_fn_of(data: Any) -> Callable[[dict[str, Any]], tf.data.Dataset]:
    """Returns an input_fn that repeats the visits."""

    def input_fn(params: dict[str, Any]) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(data).repeat()
        return dataset.batch(params["batch_size"], drop_remainder=True)

    return input_fn


def train(out: str, steps: int, data: Any, held_back: Any) -> Any:
    """Trains the documented example: a TPUEstimator with the spec."""
    trained = estimator.TPUEstimator(
        model_fn=model_fn,
        model_dir=out,
        config=estimator.RunConfig(tf_random_seed=1),
        use_tpu=True,
        train_batch_size=BATCH,
        eval_batch_size=BATCH,
        predict_batch_size=BATCH,
        embedding_config_spec=spec,
    )
    for moment in ("before", "after"):
        if moment == "after":
            trained.train(input_fn_of(data), steps=steps)
        metrics = trained.evaluate(input_fn_of(held_back), steps=10)
        print(
            f"{moment} training: loss {metrics['loss']:.3f}, "
            f"accuracy {metrics['accuracy']:.3f}"
        )
    return trained


def move(trained: Any, data: Any) -> te.TPUEmbedding:
    """Imports tables and slots; compares predictions with the estimator's."""
    embedding = spec.to_tpu_embedding()
    path = trained.latest_checkpoint()
    interop.import_estimator_checkpoint(path, spec).assign(embedding)
    first = {key: tf.constant(values[:BATCH]) for key, values in data[0].items()}
    embedding.enqueue(first, training=False)
    found = embedding.dequeue()
    joined = tf.concat([found[key] for key in ("ad", "read", "shown")], axis=1)
    scale = trained.get_variable_value("scale")
    ours = tf.sigmoid(scale * agreement(joined)).numpy()
    predictions = trained.predict(input_fn_of(data))
    theirs = [p["probability"] for p in itertools.islice(predictions, BATCH)]
    print(f"largest difference of predictions: {np.abs(ours - theirs).max():.1e}")
    return embedding


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, evaluates, and moves the model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--out", help="a new folder for checkpoints")
    options = parser.parse_args(arguments)
    steps = 100 if options.quick else 1000
    out = options.out or tempfile.mkdtemp(prefix="estimator_spec_")
    data, held_back = visits(BATCH * 200, seed=1), visits(BATCH * 10, seed=2)
    trained = train(out, steps, data, held_back)
    embedding = move(trained, held_back)
    names = [config.name for config in embedding.embedding_tables]
    print(f"tables, ready to be trained further: {', '.join(names)}")


if __name__ == "__main__":
    main()
