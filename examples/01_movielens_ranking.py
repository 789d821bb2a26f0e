"""Trains a recommender on MovieLens-100K: how would a user rate a film?

    python examples/01_movielens_ranking.py [--resume]

One te.TPUEmbedding holds all embedding tables and trains them with its optimizers; the
dense model is made of Keras layers. `Ranker.train_step` is one training step: enqueue,
dequeue, gradients, apply_gradients, in one tf.function. The folder movielens/ beside
this file has the rest: data, layers, the loop with its checkpoints, reports.

Writes metrics.json, curves.png, saved_model/ and checkpoints/ into build/demo. The same
seed gives the same metrics, to the last digit, even if a run is killed and resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# TensorFlow reads both variables when it starts. oneDNN rounds differently per CPU.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from movielens import data, metrics, model, report, serving, training

import tpu_embedding as te

BUILD = Path(__file__).resolve().parents[1] / "build"


class Ranker:
    """The recommender: one step of training, and predictions."""

    def __init__(self, catalogue: data.Catalogue, mean_rating: float) -> None:
        self.catalogue = catalogue
        self.features = model.make_feature_config(catalogue.vocabulary_sizes)
        self.embedding = te.TPUEmbedding(self.features, te.Adagrad(0.05))
        self.embedding.build()
        self.dense_part = model.make_dense_part(self.features, mean_rating)
        self.optimizer = keras.optimizers.Adam(1e-3)
        self.optimizer.build(self.dense_part.trainable_variables)

    @tf.function(reduce_retracing=True)
    def train_step(self, batch: data.Batch) -> tf.Tensor:
        """Trains on one batch; returns its mean squared error."""
        ids, dense = self.catalogue.inputs(batch)
        weights = self.dense_part.trainable_variables
        self.embedding.enqueue(ids, training=True)
        activations = self.embedding.dequeue()
        with tf.GradientTape() as tape:
            tape.watch(activations)
            inputs = {**activations, "numbers": dense}
            predicted = self.dense_part(inputs, training=True)
            loss = tf.reduce_mean((predicted - batch["rating"]) ** 2)
        gradients: Any = tape.gradient(loss, (activations, weights))
        of_activations, of_weights = gradients
        self.embedding.apply_gradients(of_activations)
        self.optimizer.apply_gradients(zip(of_weights, weights, strict=True))
        return loss

    @tf.function(reduce_retracing=True)
    def predict(self, batch: data.Batch) -> tf.Tensor:
        """Predicts the ratings that the users of a batch would give, float32 [B]."""
        ids, dense = self.catalogue.inputs(batch)
        self.embedding.enqueue(ids, training=False)
        inputs = {**self.embedding.dequeue(), "numbers": dense}
        return self.dense_part(inputs, training=False)

    def evaluate(self, ratings: data.Ratings, rows: np.ndarray) -> metrics.Evaluation:
        """Evaluates the predictions for the ratings of these rows."""
        batches = ratings.batches(rows, 4096)
        predicted = np.concatenate([self.predict(batch).numpy() for batch in batches])
        return metrics.evaluate(predicted, ratings.rating[rows])


class Options(argparse.Namespace):
    """The command line."""

    data: Path | None
    out: Path
    epochs: int
    seed: int
    user: int
    resume: bool
    quick: bool


def parse_options(argv: Sequence[str] | None) -> Options:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Trains a recommender on MovieLens.")
    add = parser.add_argument
    add("--data", type=Path, help="folder with ml-100k.*; default: download them")
    add("--out", type=Path, default=BUILD / "demo", help="default: build/demo")
    add(
        "--epochs",
        type=int,
        default=8,
        help="the best is kept; default: 8",
    )
    add("--seed", type=int, default=1, help="seed of weights and order; default: 1")
    add("--user", type=int, default=1, help="user to recommend films to, from 1")
    add("--resume", action="store_true", help="continue an interrupted run")
    add("--quick", action="store_true", help="two epochs, to see that everything works")
    options = parser.parse_args(argv, namespace=Options())
    options.epochs = 2 if options.quick else options.epochs
    return options


def results_on_test(
    ranker: Ranker, ratings: data.Ratings, run: training.Run
) -> dict[str, float]:
    """Returns the numbers for metrics.json; only this function uses the test part."""
    test = ratings.split.test
    found = ranker.evaluate(ratings, test)
    baseline = metrics.biases_alone(ratings, ratings.split.rest, test)
    seconds = float(run.progress.seconds)
    return {
        "test_rmse": found.rmse,
        "test_auc": found.auc,
        "baseline_rmse": metrics.rmse(baseline, ratings.rating[test]),
        "best_epoch": run.progress.best_epoch,
        "ids_per_second": round(run.ids_trained() / seconds),
        "seconds": round(seconds, 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and evaluates the model, exports it, and recommends films."""
    options = parse_options(argv)
    keras.utils.set_random_seed(options.seed)
    tf.config.experimental.enable_op_determinism()
    # The rounding of a matrix product depends on the number of threads.
    tf.config.threading.set_intra_op_parallelism_threads(2)
    ratings, catalogue = data.find(options.data, BUILD / "data")

    ranker = Ranker(catalogue, ratings.mean())
    schedule = training.Schedule(
        options.epochs, options.seed, options.out / "checkpoints"
    )
    training.prepare(schedule, resume=options.resume)
    run = training.Run(ranker, ratings, schedule)
    if options.resume:
        run.resume()
    run.train()

    report.plot(run.progress, ratings, options.out / "curves.png")
    results = results_on_test(ranker, ratings, run)
    (options.out / "metrics.json").write_text(json.dumps(results, indent=2) + "\n")
    print(*(f"{name}: {value}" for name, value in results.items()), sep="\n")

    user = options.user - 1
    recent = catalogue.latest[user]
    recommender = serving.Recommender(catalogue, ranker.dense_part)
    shutil.rmtree(options.out / "saved_model", ignore_errors=True)
    serving.export(recommender, ranker.embedding, options.out / "saved_model")
    served = serving.query(options.out / "saved_model", user, recent)
    own = ranker.predict(catalogue.all_films(user, recent))
    np.testing.assert_allclose(served, own, rtol=1e-4)
    print(report.recommendations(user, served, ratings, catalogue))


if __name__ == "__main__":
    main()
