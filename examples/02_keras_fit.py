"""The model of 01_movielens_ranking.py with Keras: fit, evaluate, save, export."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
from movielens import data, model

from tpu_embedding.keras import TPUEmbedding

BUILD = Path(__file__).resolve().parents[1] / "build"
warnings.filterwarnings("ignore", "__array__ impl", DeprecationWarning)  # Keras's own.


def make_model(sizes: dict[str, int], mean_rating: float) -> Any:
    """Builds the model: one embedding layer for all features, then the dense model."""
    features = model.make_feature_config(sizes)
    inputs = {name: keras.Input([], None, "int64", name=name) for name in features}
    for name in ("genres", "recent"):
        inputs[name] = keras.Input([None], None, "int64", ragged=True, name=name)
    activations = TPUEmbedding(features, keras.optimizers.Adagrad(0.05))(inputs)
    numbers = keras.Input([model.NUM_DENSE], name="numbers")
    dense_part = model.make_dense_part(features, mean_rating)
    rating = dense_part({**activations, "numbers": numbers})
    return keras.Model((inputs, numbers), rating)


def main() -> None:
    """Trains, evaluates, saves and exports the model."""
    parser = argparse.ArgumentParser(description="Trains a recommender with Keras.")
    parser.add_argument("--out", type=Path, default=BUILD / "keras_fit")
    parser.add_argument("--quick", action="store_true", help="two epochs only")
    options = parser.parse_args()
    keras.utils.set_random_seed(1)
    ratings, films = data.find(None, BUILD / "data")

    def examples(rows: np.ndarray) -> Any:
        batches = ratings.batches(rows, 256)
        return batches.map(lambda batch: (films.inputs(batch), batch["rating"]))

    train = examples(np.random.default_rng(1).permutation(ratings.split.train))
    test = examples(ratings.split.test)
    ranker = make_model(films.vocabulary_sizes, ratings.mean())
    ranker.compile("adam", "mse", metrics=[keras.metrics.RootMeanSquaredError("rmse")])
    ranker.fit(train, epochs=2 if options.quick else 8, shuffle=False)
    print("test", ranker.evaluate(test, return_dict=True))
    ranker.export(options.out / "saved_model", verbose=False)
    ranker.save(options.out / "ranker.keras")
    loaded: Any = keras.models.load_model(options.out / "ranker.keras")
    np.testing.assert_array_equal(loaded.predict(test), ranker.predict(test))


if __name__ == "__main__":
    main()
