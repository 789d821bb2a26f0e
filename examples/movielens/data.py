"""The ratings of MovieLens-100K as inputs of a ranking model.

All ids count from 0, in the order of the files. Features of a user that are not
in the registration form come from training ratings only.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from movielens import source
from movielens.source import Table

SPLIT_SEED = 7
TEST_SHARE = 0.20  # The share of all ratings.
VALIDATION_SHARE = 0.05  # The share of the other ratings.
MAX_RECENT = 30

Features = dict[str, tf.Tensor | tf.RaggedTensor]
Batch = dict[str, Any]  # "user", "item" and, if known, "rating": [B]; "recent": ragged


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """The positions of the ratings of each part, int64; the parts are disjoint."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray

    @property
    def rest(self) -> np.ndarray:
        """The training and validation parts."""
        return np.concatenate([self.train, self.validation])


@dataclasses.dataclass(frozen=True, eq=False)
class Ratings:
    """N ratings: user, film, rating, and the films that the user rated before."""

    user: np.ndarray  # int64 [N]
    item: np.ndarray  # int64 [N]
    rating: np.ndarray  # float32 [N], 1 to 5
    recent: tf.RaggedTensor  # int64 [N, (films)], the last one rated at the end
    split: Split

    def mean(self) -> float:
        """Returns the mean rating of the training part."""
        return float(self.rating[self.split.train].mean())

    def batches(self, rows: np.ndarray, size: int) -> tf.data.Dataset:
        """Returns the ratings of these rows, in this order, as dicts of `size` each."""

        def gather(batch: tf.Tensor) -> Batch:
            columns = ("user", "item", "rating", "recent")
            return {name: tf.gather(getattr(self, name), batch) for name in columns}

        dataset = tf.data.Dataset.from_tensor_slices(rows).batch(size)
        return dataset.map(gather).prefetch(1)


@dataclasses.dataclass(frozen=True, eq=False)
class Catalogue:
    """The columns of U users and I films."""

    user_columns: dict[str, tf.Tensor]  # int64 [U] each: age, occupation, zip_code
    user_dense: tf.Tensor  # float32 [U, 1]: gender
    latest: tf.RaggedTensor  # int64 [U, (films)], `recent` at the end of the data
    genres: tf.RaggedTensor  # int64 [I, (genres)]
    item_dense: tf.Tensor  # float32 [I, 2]: year, number of ratings
    titles: list[str]  # [I], with the year
    genre_names: list[str]
    vocabulary_sizes: dict[str, int]  # A feature's name -> how many ids it has.

    def inputs(self, batch: Batch) -> tuple[Features, tf.Tensor]:
        """Makes the model's inputs for B pairs of a user and a film.

        Args:
          batch: int64 "user" [B], "item" [B], "recent" [B, (films)].

        Returns:
          Ids by the name of the feature, and dense inputs, float32 [B, 3].
        """
        user, item = batch["user"], batch["item"]
        features: Features = {"user": user, "item": item, "recent": batch["recent"]}
        features |= {"user_bias": user, "item_bias": item}
        features["genres"] = tf.gather(self.genres, item)
        for name, column in self.user_columns.items():
            features[name] = tf.gather(column, user)
        dense = [tf.gather(self.user_dense, user), tf.gather(self.item_dense, item)]
        return features, tf.concat(dense, axis=1)

    def all_films(self, user: tf.Tensor | int, recent: tf.Tensor) -> Batch:
        """Pairs all films with a user, int64 [], and `recent`, int64 [(films)]."""
        films = tf.range(len(self.titles), dtype=tf.int64)
        each = tf.ones_like(films)
        repeated = tf.tile(recent, tf.shape(films))
        lengths = each * tf.size(recent, out_type=tf.int64)
        return {
            "user": each * user,
            "item": films,
            "recent": tf.RaggedTensor.from_row_lengths(repeated, lengths),
        }

    def ids_per_rating(self, ratings: Ratings) -> np.ndarray:
        """Counts the ids that all features look up for each rating, int64 [N]."""
        single = len(self.vocabulary_sizes) - 2
        genres = tf.gather(self.genres.row_lengths(), ratings.item)
        return (single + genres + ratings.recent.row_lengths()).numpy()


def find(folder: Path | None, cache: Path) -> tuple[Ratings, Catalogue]:
    """Reads the data from a folder with ml-100k.*, or downloads it into the cache."""
    print(source.NOTICE)
    if folder is not None:
        return load(functools.partial(source.read_folder, folder))
    return load(functools.partial(source.read_wheel, source.download(cache)))


def load(read: Callable[[str], Table]) -> tuple[Ratings, Catalogue]:
    """Builds the data from `read("inter")`, `read("item")` and `read("user")`."""
    table, films, people = read("inter"), read("item"), read("user")
    user = _codes(people["user_id"], table["user_id"])
    item = _codes(films["item_id"], table["item_id"])
    split = _split(len(user))
    when = np.array(table["timestamp"], np.float64)
    recent, latest = _recent_items(user, item, when, split.train)
    rating = np.array(table["rating"], np.float32)
    counts = np.bincount(item[split.train], minlength=len(films["item_id"]))
    catalogue = _catalogue(films, people, counts, latest)
    return Ratings(user, item, rating, recent, split), catalogue


def _codes(vocabulary: Iterable[str], values: Sequence[str]) -> np.ndarray:
    index = {value: code for code, value in enumerate(vocabulary)}
    return np.array([index[value] for value in values], np.int64)


def _split(count: int) -> Split:
    order = np.random.default_rng(SPLIT_SEED).permutation(count)
    test, rest = np.split(order, [round(count * TEST_SHARE)])
    validation, train = np.split(rest, [round(len(rest) * VALIDATION_SHARE)])
    return Split(train, validation, test)


def _recent_items(
    user: np.ndarray, item: np.ndarray, when: np.ndarray, train: np.ndarray
) -> tuple[tf.RaggedTensor, tf.RaggedTensor]:
    """Lists the films rated before each rating by its user, and each user's last ones.

    Only ratings of the training part count, and never the rating itself.
    """
    known = np.zeros(len(user), bool)
    known[train] = True
    seen = [collections.deque(maxlen=MAX_RECENT) for _ in range(user.max() + 1)]
    recent: list[list[int]] = [[] for _ in user]
    for row in np.argsort(when, kind="stable"):
        films = seen[user[row]]
        recent[row] = list(films)
        if known[row]:
            films.append(item[row])
    return _ragged(recent), _ragged([list(films) for films in seen])


def _ragged(rows: Sequence[Sequence[int]]) -> tf.RaggedTensor:
    values = np.concatenate([np.array(row, np.int64) for row in rows])
    return tf.RaggedTensor.from_row_lengths(values, [len(row) for row in rows])


def _catalogue(
    films: Table, people: Table, counts: np.ndarray, latest: tf.RaggedTensor
) -> Catalogue:
    # The first three characters of a zip code name a region.
    columns = {name: people[name] for name in ("age", "occupation")}
    columns["zip_code"] = [code[:3] for code in people["zip_code"]]
    sizes = {name: len(set(values)) for name, values in columns.items()}
    genre_lists = [names.split() for names in films["class"]]
    genre_names = sorted({name for names in genre_lists for name in names})
    users, items = len(people["user_id"]), len(films["item_id"])
    sizes |= {"user": users, "user_bias": users, "genres": len(genre_names)}
    sizes |= {"item": items, "item_bias": items, "recent": items}
    years = films["release_year"]
    return Catalogue(
        user_columns={
            name: tf.constant(_codes(sorted(set(values)), values))
            for name, values in columns.items()
        },
        user_dense=_standardized([np.array(people["gender"]) == "F"]),
        latest=latest,
        genres=_ragged([_codes(genre_names, names) for names in genre_lists]),
        item_dense=_standardized([_numbers(years), np.log1p(counts)]),
        titles=[
            _title(*film) for film in zip(films["movie_title"], years, strict=True)
        ],
        genre_names=genre_names,
        vocabulary_sizes=sizes,
    )


def _numbers(values: Sequence[str]) -> np.ndarray:
    """Converts values to numbers; those that are not numbers become the median."""
    numbers = np.array([float(v) if v.isdigit() else np.nan for v in values])
    return np.where(np.isnan(numbers), np.nanmedian(numbers), numbers)


def _standardized(columns: Sequence[np.ndarray]) -> tf.Tensor:
    table = np.stack([column.astype(np.float32) for column in columns], axis=1)
    return tf.constant((table - table.mean(axis=0)) / table.std(axis=0))


def _title(name: str, year: str) -> str:
    """Moves the article of a title to its front.

    >>> _title("Usual Suspects, The", "1995")
    'The Usual Suspects (1995)'
    """
    head, comma, article = name.rpartition(", ")
    if comma and article in ("The", "A", "An", "Il", "La", "Le", "Les", "Das", "Der"):
        name = f"{article} {head}"
    return f"{name} ({year})"
