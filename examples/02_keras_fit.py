"""The model of 01_movielens_ranking.py in plain Keras: fit, evaluate, save, export."""

from __future__ import annotations

import argparse
import functools
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from movielens import data, model, source

import tpu_embedding as te
import tpu_embedding.keras

BUILD = Path(__file__).resolve().parents[1] / "build"
RAGGED = ("genres", "recent")
# Keras asks its own variables for arrays in a way that NumPy 2 advises against.
warnings.filterwarnings("ignore", "__array__ impl", DeprecationWarning)


def make_model(sizes: dict[str, int], mean_rating: float) -> keras.Model:
    """All features through one embedding layer, then the dense part."""
    features = model.make_feature_config(sizes)
    inputs = {
        name: keras.Input([None], None, "int64", ragged=True, name=name)
        if name in RAGGED
        else keras.Input([], None, "int64", name=name)
        for name in features
    }
    activations = te.keras.TPUEmbedding(features, te.Adagrad(0.05))(inputs)
    inputs["numbers"] = keras.Input([model.NUM_DENSE], name="numbers")
    dense_part = model.make_dense_part(features, mean_rating)
    rating = dense_part({**activations, "numbers": inputs["numbers"]})
    return keras.Model(inputs, rating)


def main() -> None:
    """Trains, evaluates, saves and exports."""
    parser = argparse.ArgumentParser(description="Trains a recommender with Keras.")
    parser.add_argument("--out", type=Path, default=BUILD / "keras_fit")
    parser.add_argument("--quick", action="store_true", help="two epochs only")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(1)
    read = functools.partial(source.read_wheel, source.download(BUILD / "data"))
    ratings, films = data.load(read)

    def examples(rows: np.ndarray) -> tf.data.Dataset:
        def with_label(batch: data.Batch) -> tuple[data.Features, tf.Tensor]:
            ids, numbers = films.inputs(batch)
            return {**ids, "numbers": numbers}, batch["rating"]

        return ratings.batches(rows, 256).map(with_label)

    ranker: Any = make_model(films.vocabulary_sizes, ratings.mean())
    rmse = keras.metrics.RootMeanSquaredError("rmse")
    ranker.compile("adam", "mse", metrics=[rmse])
    rows = np.random.default_rng(1).permutation(ratings.split.train)
    ranker.fit(examples(rows), epochs=2 if options.quick else 8, shuffle=False)
    test = examples(ratings.split.test)
    print("test", ranker.evaluate(test, return_dict=True))

    ranker.save(options.out / "ranker.keras")
    loaded: Any = keras.models.load_model(options.out / "ranker.keras")
    np.testing.assert_array_equal(loaded.predict(test), ranker.predict(test))
    ranker.export(options.out / "saved_model", verbose=False)


if __name__ == "__main__":
    main()
