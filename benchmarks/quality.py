"""AUC of the MovieLens demo's model by kind of table, over several seeds.

    python -m benchmarks.quality --seeds 5 --kinds float32 int8 "concat 4, 1/10"

The model is that of examples/01_movielens_ranking.py, trained for 8 epochs; the AUC on
the test part is that of the epoch with the smallest error on the validation part. A
share such as 1/10 is that of the bytes of the rows of all tables with 100 ids or more.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tpu_embedding as te

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from movielens import data, metrics, model  # noqa: E402

EPOCHS, BATCH = 8, 512
LARGE = 100  # Tables with fewer ids stay as they are.
MakeTable = Callable[[te.TableConfig], te.TableConfig]


def of_dtype(dtype: str, optimizer: Any = None) -> MakeTable:
    """Stores rows as a dtype."""
    return lambda table: dataclasses.replace(table, dtype=dtype, optimizer=optimizer)


def hashed(hashes: int, combine: str, share: Fraction) -> MakeTable:
    """Hashes ids into a share of the bytes."""

    def make(table: te.TableConfig) -> te.TableConfig:
        rows = math.ceil(table.vocabulary_size * share)
        rows *= hashes if combine == "concat" else 1
        own = te.Hashing(rows, hashes, combine)
        return dataclasses.replace(table, vocabulary_size=own, initializer=None)

    return make


def growing(share: Fraction) -> MakeTable:
    """Holds the most frequent ids in a share of the rows; others have one row."""

    def make(table: te.TableConfig) -> te.TableConfig:
        rows = math.ceil(table.vocabulary_size * share)
        ids = te.GrowingVocabulary(
            rows, unknown="shared_row", when_full="shared_row", eviction="lfu"
        )
        return dataclasses.replace(table, vocabulary_size=ids)

    return make


KINDS: dict[str, MakeTable] = {
    "float32": of_dtype("float32"),
    "bfloat16": of_dtype("bfloat16"),
    "int8": of_dtype("int8"),
    "float32, row-wise": of_dtype("float32", te.RowwiseAdagrad(0.05)),
    "bfloat16, row-wise": of_dtype("bfloat16", te.RowwiseAdagrad(0.05)),
    "int8, row-wise": of_dtype("int8", te.RowwiseAdagrad(0.05)),
    **{
        f"{combine} {hashes}, {share}": hashed(hashes, combine, share)
        for share in (Fraction(1, 4), Fraction(1, 10))
        for hashes, combine in (
            *((1, "concat"), (2, "concat"), (4, "concat"), (8, "concat")),
            (2, "sum"),
        )
    },
    "growing, 1/4": growing(Fraction(1, 4)),
    "growing, 1/10": growing(Fraction(1, 10)),
}


def train(kind: str, seed: int, ratings: data.Ratings, films: data.Catalogue) -> float:
    """The AUC of one run."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    features = {
        name: dataclasses.replace(feature, table=KINDS[kind](feature.table))
        if feature.table.dim > 1 and feature.table.vocabulary_size >= LARGE
        else feature
        for name, feature in model.make_feature_config(films.vocabulary_sizes).items()
    }
    embedding = te.TPUEmbedding(features, te.Adagrad(0.05))
    dense = model.make_dense_part(features, ratings.mean())
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(dense.trainable_variables)

    def look_up(batch: Any, *, training: bool) -> dict[str, tf.Tensor]:
        ids, numbers = films.inputs(batch)
        embedding.enqueue(ids, training=training)
        return {**embedding.dequeue(), "numbers": numbers}

    @tf.function(reduce_retracing=True)
    def step(batch: Any) -> None:
        inputs = look_up(batch, training=True)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            error = dense(inputs, training=True) - batch["rating"]
            loss = tf.reduce_mean(tf.square(error))
        weights = dense.trainable_variables
        gradients: Any = tape.gradient(loss, (inputs, weights))
        of_inputs, of_weights = gradients
        embedding.apply_gradients({name: of_inputs[name] for name in features})
        optimizer.apply_gradients(zip(of_weights, weights, strict=True))

    @tf.function(reduce_retracing=True)
    def predict(batch: Any) -> tf.Tensor:
        return dense(look_up(batch, training=False), training=False)

    def evaluate(rows: np.ndarray) -> metrics.Evaluation:
        predicted = [predict(batch).numpy() for batch in ratings.batches(rows, 4096)]
        return metrics.evaluate(np.concatenate(predicted), ratings.rating[rows])

    order, best = np.random.default_rng(seed), (math.inf, 0.0)
    for _ in range(EPOCHS):
        for batch in ratings.batches(order.permutation(ratings.split.train), BATCH):
            step(batch)
        error = evaluate(ratings.split.validation).rmse
        if error < best[0]:
            best = error, evaluate(ratings.split.test).auc
    return best[1]


def main() -> None:
    """Prints a line for each kind."""
    parser = argparse.ArgumentParser(description="Compares kinds of tables.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    ratings, films = data.find(None, ROOT / "build" / "data")
    first: np.ndarray | None = None
    for kind in options.kinds:
        found = np.array(
            [train(kind, 1 + s, ratings, films) for s in range(options.seeds)]
        )
        first = found if first is None else first
        spread = (found - first).std(ddof=1) / math.sqrt(len(found))
        print(
            f"{kind:20} AUC {found.mean():.5f}, {(found - first).mean():+.5f} +- "
            f"{spread:.5f} of {options.kinds[0]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
