"""From a CSV file of strings to a served model, with Keras preprocessing layers.

The file is made up: 60 users rate films, and each user prefers two of six genres. The
exported model takes the strings of the file and needs TensorFlow only.
"""

from __future__ import annotations

import argparse
import csv
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding

BUILD = Path(__file__).resolve().parents[1] / "build"
warnings.filterwarnings("ignore", "__array__ impl", DeprecationWarning)  # Keras's own.

GENRES = ("action", "comedy", "drama", "horror", "romance", "western")
NUM_USERS, NUM_FILMS, DIM, BATCH = 60, 90, 8, 128
COLUMNS = ("user", "film", "genres", "age", "rating")


def write_csv(path: Path, num_rows: int) -> None:
    """Writes ratings: the same rows for each call with the same arguments."""
    random = np.random.default_rng(1)
    likes = random.permuted(np.tile(np.arange(6), (NUM_USERS, 1)), axis=1)[:, :2]
    ages = random.integers(12, 80, NUM_USERS)
    genres = [sorted({n % 6, n // 6 % 6}) for n in range(NUM_FILMS)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for _ in range(num_rows):
            user, film = random.integers(NUM_USERS), random.integers(NUM_FILMS)
            liked = np.isin(genres[film], likes[user]).mean()
            rating = 2 + 2.5 * liked + random.normal(0, 0.3)
            names = " ".join(GENRES[genre] for genre in genres[film])
            row = [f"user {user}", f"film {film}", names, ages[user], f"{rating:.2f}"]
            writer.writerow(row)


def read_csv(path: Path) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns batches for training and for testing: a dict of columns, the ratings."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in COLUMNS}
    for name in ("age", "rating"):
        columns[name] = np.array(columns[name], np.float32)
    ratings = columns.pop("rating")
    data = tf.data.Dataset.from_tensor_slices((columns, ratings))
    num_test = len(rows) // 10
    return data.skip(num_test).batch(BATCH), data.take(num_test).batch(BATCH)


def make_model(train: tf.data.Dataset) -> keras.Model:
    """Builds a model of strings; each preprocessing layer learns its vocabulary."""
    text, number = tf.string.name, tf.float32.name
    inputs = {
        "user": keras.Input((), dtype=text, name="user"),
        "film": keras.Input((), dtype=text, name="film"),
        "genres": keras.Input((), dtype=text, name="genres"),
        "age": keras.Input((), dtype=number, name="age"),
    }
    films = keras.layers.StringLookup(name="film_to_id")
    films.adapt(train.map(lambda row, _: row["film"]))
    # Splits at spaces: any number of ids for each row.
    genres = keras.layers.TextVectorization(ragged=True, name="genres_to_ids")
    genres.adapt(train.map(lambda row, _: row["genres"]))
    users = keras.layers.Hashing(4 * NUM_USERS, name="user_to_bucket")  # No vocabulary.
    ages = keras.layers.Discretization(num_bins=8, name="age_to_bin")
    ages.adapt(train.map(lambda row, _: row["age"]))
    ids = {
        "user": users(inputs["user"]),
        "film": films(inputs["film"]),
        "genres": genres(inputs["genres"]),
        "age": ages(inputs["age"]),
    }
    sizes = {
        "user": users.num_bins,
        "film": films.vocabulary_size(),  # With the row of unknown films.
        "genres": genres.vocabulary_size(),
        "age": len(ages.bin_boundaries) + 1,
    }
    features = {
        name: te.FeatureConfig(te.TableConfig(size, DIM, name=name, combiner="mean"))
        for name, size in sizes.items()
    }
    activations = TPUEmbedding(features, te.Adagrad(0.2), name="tables")(ids)
    user, age = activations["user"], activations["age"]
    match = [user * activations[name] for name in ("film", "genres")]
    hidden = keras.layers.Concatenate()([*match, user, age])
    rating = keras.layers.Dense(1)(keras.layers.Dense(32, activation="relu")(hidden))
    return keras.Model(inputs, keras.ops.squeeze(rating, -1))


def most_alike(model: Any, film: str, count: int) -> list[str]:
    """Returns the films whose rows point in the directions most similar to a film's."""
    (table,) = (
        variable.numpy()
        for config, variable in model.get_layer("tables").embedding_tables.items()
        if config.name == "film"
    )
    names = model.get_layer("film_to_id").get_vocabulary()
    rows = table / np.linalg.norm(table, axis=1, keepdims=True)
    order = np.argsort(-rows @ rows[names.index(film)])
    return [names[row] for row in order if names[row] not in (film, "[UNK]")][:count]


def main() -> None:
    """Writes the file, trains a model, inspects a table, saves, exports and queries."""
    parser = argparse.ArgumentParser(description="From strings to a served model.")
    parser.add_argument("--out", type=Path, default=BUILD / "strings")
    parser.add_argument("--quick", action="store_true", help="five epochs only")
    options = parser.parse_args()
    keras.utils.set_random_seed(1)
    ratings = options.out / "ratings.csv"
    write_csv(ratings, num_rows=20_000)
    train, test = read_csv(ratings)
    model = make_model(train)
    model.compile("adam", "mse", metrics=[keras.metrics.RootMeanSquaredError("rmse")])
    model.fit(train, epochs=5 if options.quick else 15, shuffle=False, verbose=0)
    found = np.concatenate([rating for _, rating in test])
    rmse = model.evaluate(test, return_dict=True, verbose=0)["rmse"]
    print(f"test RMSE {rmse:.3f}; of the mean rating {found.std():.3f}")
    print("most like film 0:", ", ".join(most_alike(model, "film 0", 3)))

    model.save(options.out / "ranker.keras")  # Tables, slots and vocabularies.
    loaded: Any = keras.models.load_model(options.out / "ranker.keras")
    np.testing.assert_array_equal(
        loaded.predict(test, verbose=0), model.predict(test, verbose=0)
    )
    folder = options.out / "saved_model"
    loaded.export(folder, verbose=False)
    served = tf.saved_model.load(folder)
    request = {
        "user": tf.constant(["user 7", "user 7", "a new user"]),
        "film": tf.constant(["film 0", "a new film", "film 0"]),
        "genres": tf.constant(["action", "comedy drama", "action"]),
        "age": tf.constant([30.0, 30.0, 30.0]),
    }
    print("served:", served.serve(request).numpy().round(2))


if __name__ == "__main__":
    main()
