"""The trained model as a SavedModel of stock TensorFlow ops."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from movielens.data import Catalogue

QUERY = Path(__file__).parent / "query_saved_model.py"


class Recommender(tf.Module):
    """Predicts how a user would rate each film.

    After saving it needs neither this file nor tpu_embedding: the tables are plain
    variables, and the lookups are TensorFlow's own.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        tables: Mapping[str, tf.Variable],
        dense_part: keras.Model,
    ) -> None:
        super().__init__()
        self._catalogue = catalogue
        self._tables = dict(tables)
        self._dense_part = dense_part

    @tf.function(
        input_signature=[
            tf.TensorSpec([], tf.int64, name="user"),
            tf.TensorSpec([None], tf.int64, name="recent"),
        ]
    )
    def predict(self, user: tf.Tensor, recent: tf.Tensor) -> dict[str, tf.Tensor]:
        """Rates all I films for one user.

        Args:
          user: int64 [].
          recent: int64 [(films)], what the user rated last.

        Returns:
          "rating", float32 [I], and "title", string [I].
        """
        batch = self._catalogue.all_films(user, recent)
        ids, dense = self._catalogue.inputs(batch)
        inputs = {name: _lookup(self._tables[name], ids[name]) for name in ids}
        rating = self._dense_part({**inputs, "numbers": dense}, training=False)
        return {"rating": rating, "title": tf.constant(self._catalogue.titles)}


def _lookup(table: tf.Variable, ids: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
    """Rows, or for ragged ids their mean, with zeros where there are none."""
    if isinstance(ids, tf.Tensor):
        return tf.gather(table, ids)
    count = tf.cast(ids.row_lengths(), tf.float32)[:, tf.newaxis]
    return tf.math.divide_no_nan(tf.reduce_sum(tf.gather(table, ids), axis=1), count)


def export(recommender: Recommender, folder: Path) -> None:
    """Writes the SavedModel; `predict` is also its default signature."""
    tf.saved_model.save(recommender, str(folder), signatures=recommender.predict)


def query(folder: Path, user: int, recent: tf.Tensor) -> np.ndarray:
    """Asks the exported model in a process that cannot import tpu_embedding.

    Returns:
      The ratings that the user would give to all films, float32 [I].
    """
    request = {"user": user, "recent": recent.numpy().tolist()}
    answer = subprocess.run(
        [sys.executable, str(QUERY), str(folder)],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return np.array(json.loads(answer.stdout)["rating"], np.float32)
