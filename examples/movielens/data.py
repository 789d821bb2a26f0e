"""The ratings of MovieLens-100K as inputs of a ranking model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from movielens.source import Table

TEST_SHARE = 0.20  # of all ratings
VALIDATION_SHARE = 0.05  # of the rest
MAX_RECENT = 50


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Row numbers of the ratings, int64, disjoint."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class MovieLens:
    """N ratings of I films by U users, all ids from 0; train rows only in `recent`."""

    user: np.ndarray  # int64 [N]
    item: np.ndarray  # int64 [N]
    rating: np.ndarray  # float32 [N], 1 to 5
    split: Split
    user_columns: dict[str, np.ndarray]  # int64 [U] each: age, occupation, zip_code
    vocabulary_sizes: dict[str, int]  # of every id column
    genres: tf.RaggedTensor  # int64 [I, (genres)]
    titles: list[str]  # [I]
    dense: np.ndarray  # float32
    recent: tf.RaggedTensor  # int64 [N, (films)], the latest last
    latest: tf.RaggedTensor  # int64 [U, (films)], the same at the end of the data


def load(read: Callable[[str], Table], seed: int) -> MovieLens:
    """Builds the data from `read("inter")`, `read("item")` and `read("user")`."""
    ratings, films, people = read("inter"), read("item"), read("user")
