"""The trained model as a SavedModel of TensorFlow's ops."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tpu_embedding as te
from movielens.data import Catalogue

QUERY = Path(__file__).parent / "query_saved_model.py"


@dataclasses.dataclass(frozen=True, eq=False)
class Recommender:
    """The dense model and the catalogue of the exported model."""

    catalogue: Catalogue
    dense_part: keras.Model

    def __call__(
        self, activations: Mapping[str, tf.Tensor], dense: Mapping[str, tf.Tensor]
    ) -> dict[str, tf.Tensor]:
        """Predicts the rating of each pair of a user and a film, float32 [B]."""
        rating = self.dense_part({**activations, **dense}, training=False)
        return {"rating": rating}

    def pairs(self) -> te.serving.Signature:
        """Makes a signature of pairs: "user", "item" [B]; "recent" ragged [B, (films)].

        The graph looks all other inputs of the model up in the catalogue.
        """

        def read(inputs: dict[str, tf.Tensor]) -> te.serving.Request:
            recent = tf.RaggedTensor.from_row_splits(
                inputs["recent_values"], inputs["recent_row_splits"]
            )
            batch = {"user": inputs["user"], "item": inputs["item"], "recent": recent}
            return self._request(batch)

        names = ("user", "item", "recent_values", "recent_row_splits")
        return te.serving.Signature(
            dict.fromkeys(names, tf.TensorSpec([None], tf.int64)), read
        )

    def all_films(self) -> te.serving.Signature:
        """Returns a signature for all films: "user" [] and "recent" [(films)]."""

        def read(inputs: dict[str, tf.Tensor]) -> te.serving.Request:
            return self._request(self.catalogue.all_films(**inputs))

        return te.serving.Signature(
            {
                "user": tf.TensorSpec([], tf.int64),
                "recent": tf.TensorSpec([None], tf.int64),
            },
            read,
        )

    def _request(self, batch: dict[str, Any]) -> te.serving.Request:
        ids, numbers = self.catalogue.inputs(batch)
        return te.serving.Request(ids, dense={"numbers": numbers})


def export(
    recommender: Recommender,
    embedding: te.TPUEmbedding | te.TPUEmbeddingForServing,
    folder: Path,
    storage: str = "float32",
) -> te.serving.Report:
    """Writes the SavedModel with the signatures "pairs" and "all_films"."""
    return te.serving.export(
        embedding,
        folder,
        recommender,
        storage=storage,
        signatures={
            "pairs": recommender.pairs(),
            "all_films": recommender.all_films(),
        },
    )


def ask_pairs(served: Any, batch: Mapping[str, Any]) -> tf.Tensor:
    """Asks the signature "pairs" of a loaded model for the ratings of a batch."""
    recent = batch["recent"]
    answer = served(
        user=batch["user"],
        item=batch["item"],
        recent_values=recent.values,
        recent_row_splits=recent.row_splits,
    )
    return answer["rating"]


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
