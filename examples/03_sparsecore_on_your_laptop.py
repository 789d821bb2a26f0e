"""The recommender of 01_movielens_ranking.py on SparseCores, without a TPU.

    python examples/03_sparsecore_on_your_laptop.py

te.TPUEmbeddingV2 trains under SoftwareTPUStrategy: two devices of TPU v6e with two
SparseCores each, emulated on this machine's CPU. They run TensorFlow's SparseCore ops,
with the buffers and limits of the hardware. The same code then trains on the host
engine, under MirroredStrategy, and reaches the same metrics. Finally the example shows
the error of a batch beyond the limits, and counts dropped ids.

Writes sparse_core.json into build/sparse_core.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# TensorFlow reads both variables when it starts. oneDNN rounds differently per CPU.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from movielens import data, metrics, model, source

import tpu_embedding as te
from tpu_embedding.testing import SoftwareTPUStrategy

BUILD = Path(__file__).resolve().parents[1] / "build"
REPLICAS = 2
BATCH = 256  # The samples of each replica.
# The largest number of ids that one SparseCore may request from another.
MANY = 4096


class Ranker:
    """The recommender under any strategy."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        catalogue: data.Catalogue,
        mean_rating: float,
        limits: te.SparseCoreEmbeddingConfig,
    ) -> None:
        self.strategy, self.catalogue = strategy, catalogue
        self.features = model.make_feature_config(catalogue.vocabulary_sizes, BATCH)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            self.embedding = te.TPUEmbeddingV2(
                self.features, te.Adagrad(0.05), sparse_core_embedding_config=limits
            )
            self.embedding.build()
            self.dense_part = model.make_dense_part(self.features, mean_rating)
            self.optimizer = keras.optimizers.Adam(1e-3)
            self.optimizer.build(self.dense_part.trainable_variables)

    @tf.function
    def train_step(self, batches: Any) -> tf.Tensor:
        """Trains on the next batch of each replica; returns the mean squared error."""
        errors = self.strategy.run(self._replica_step, (next(batches),))
        return self.strategy.reduce("SUM", errors, axis=None) / (REPLICAS * BATCH)

    def _replica_step(self, batch: data.Batch) -> tf.Tensor:
        ids, dense = self.catalogue.inputs(batch)
        weights = self.dense_part.trainable_variables
        activations, preserved = self.embedding(ids)
        with tf.GradientTape() as tape:
            tape.watch(activations)
            # There is no dropout, because its random numbers depend on the strategy.
            inputs = {**activations, "numbers": dense}
            predicted = self.dense_part(inputs, training=False)
            error = tf.reduce_sum((predicted - batch["rating"]) ** 2)
            loss = error / (REPLICAS * BATCH)
        gradients: Any = tape.gradient(loss, (activations, weights))
        of_activations, of_weights = gradients
        self.embedding.apply_gradients(of_activations, preserved)
        self.optimizer.apply_gradients(zip(of_weights, weights, strict=True))
        return error

    def train(self, ratings: data.Ratings, epochs: int) -> None:
        """Trains on whole batches only, because SparseCores need one batch size."""
        for epoch in range(epochs):
            batches = batches_of(ratings, epoch)
            distributed = self.strategy.distribute_datasets_from_function(
                lambda _, batches=batches: batches
            )
            iterator = iter(distributed)
            steps = int(batches.cardinality()) // REPLICAS
            losses = [self.train_step(iterator) for _ in range(steps)]
            print(f"epoch {epoch + 1}: training RMSE {np.mean(losses) ** 0.5:.4f}")

    def evaluate(self, ratings: data.Ratings, rows: np.ndarray) -> metrics.Evaluation:
        """Evaluates predictions, with lookups by TensorFlow's ops."""
        plain = {
            name: te.FeatureConfig(feature.table, name=name)
            for name, feature in self.features.items()
        }
        tables = self.embedding.embedding_tables
        predicted = []
        for batch in ratings.batches(rows, 4096):
            ids, dense = self.catalogue.inputs(batch)
            activations = te.serving_embedding_lookup(ids, None, tables, plain)
            inputs = {**activations, "numbers": dense}
            predicted.append(self.dense_part(inputs, training=False).numpy())
        return metrics.evaluate(np.concatenate(predicted), ratings.rating[rows])


def batches_of(ratings: data.Ratings, epoch: int) -> tf.data.Dataset:
    """Returns the training part in the order of this epoch, in whole batches."""
    rows = np.random.default_rng((1, epoch)).permutation(ratings.split.train)
    whole = len(rows) // (REPLICAS * BATCH) * REPLICAS * BATCH
    dataset = ratings.batches(rows[:whole], BATCH)
    return dataset.apply(tf.data.experimental.assert_cardinality(whole // BATCH))


def limits_of(sizes: Iterable[str], limit: int) -> te.SparseCoreEmbeddingConfig:
    """Returns limits for two stacks: the biases, and all other tables.

    A stack's name joins the names of its tables.
    """
    biases = sorted(name for name in sizes if name.endswith("_bias"))
    others = sorted(name for name in sizes if not name.endswith("_bias"))
    limits = {"_".join(names): limit for names in (biases, others)}
    return te.SparseCoreEmbeddingConfig(
        max_ids_per_table=limits, max_unique_ids_per_table=limits
    )


def what_is_wrong(ranker: Ranker, ratings: data.Ratings) -> str:
    """Returns the error of the first batch, if it exceeds the limits."""
    (batch,) = batches_of(ratings, 0).take(1)
    try:
        ranker.embedding.preprocess_features(ranker.catalogue.inputs(batch)[0])
    except tf.errors.InvalidArgumentError as error:
        return error.message.split("}} ")[-1]  # Without the name of TensorFlow's node.
    return "nothing"


def count_dropped(
    ranker: Ranker, ratings: data.Ratings, batches: int
) -> dict[str, int]:
    """Counts the dropped ids of some batches, by table."""
    dropped: collections.Counter[str] = collections.Counter()
    for batch in batches_of(ratings, 0).take(batches):
        ids, _ = ranker.catalogue.inputs(batch)
        found = ranker.embedding.preprocess_features(ids)
        dropped.update({name: int(n) for name, n in found.dropped_ids.items()})
    return dict(sorted(dropped.items()))


def main() -> None:
    """Trains on both engines, compares the metrics, and exceeds the limits."""
    parser = argparse.ArgumentParser(description="Trains on SparseCores in software.")
    parser.add_argument("--out", type=Path, default=BUILD / "sparse_core")
    parser.add_argument("--quick", action="store_true", help="one epoch only")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    # This comes first, because it creates the logical devices.
    tpu = SoftwareTPUStrategy("v6e", num_devices=REPLICAS)
    tf.config.experimental.enable_op_determinism()
    host = tf.distribute.MirroredStrategy([f"CPU:{r}" for r in range(REPLICAS)])
    read = functools.partial(source.read_wheel, source.download(BUILD / "data"))
    ratings, catalogue = data.load(read)
    make = functools.partial(Ranker, catalogue=catalogue, mean_rating=ratings.mean())
    limits = limits_of(catalogue.vocabulary_sizes, MANY)

    results: dict[str, Any] = {}
    for name, strategy in (("sparse_core", tpu), ("host", host)):
        ranker = make(strategy, limits=limits)
        # With more epochs small rounding differences would grow.
        ranker.train(ratings, 1 if options.quick else 3)
        found = ranker.evaluate(ratings, ratings.split.test)
        print(f"{name}, test: {found}")
        results[name] = {"rmse": found.rmse, "auc": found.auc}

    print("\nWith the default limit of 256 ids for each partition:")
    print(what_is_wrong(make(tpu, limits=te.SparseCoreEmbeddingConfig()), ratings))

    print("\nWith 16 places per sample, and further ids dropped:")
    small = te.SparseCoreEmbeddingConfig(
        disable_table_stacking=True,
        max_ids_per_chip_per_sample=16,
        max_ids_per_table=dict.fromkeys(catalogue.vocabulary_sizes, MANY),
        max_unique_ids_per_table=dict.fromkeys(catalogue.vocabulary_sizes, MANY),
        allow_id_dropping=True,
    )
    results["dropped_ids"] = count_dropped(make(tpu, limits=small), ratings, 20)
    print(*(f"{name}: {n}" for name, n in results["dropped_ids"].items()), sep="\n")
    (options.out / "sparse_core.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
