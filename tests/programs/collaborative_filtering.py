"""A dot product of users and films, each with a bias: `OPTIMIZER` is the argument."""

from __future__ import annotations

import sys

import keras
import numpy as np
from ratings import FILMS, USERS, ratings


class Recommender(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        options = {
            "embeddings_initializer": "he_normal",
            "embeddings_regularizer": keras.regularizers.l2(1e-6),
        }
        self.user = keras.layers.Embedding(USERS, 16, **options)
        self.user_bias = keras.layers.Embedding(USERS, 1)
        self.film = keras.layers.Embedding(FILMS, 16, **options)
        self.film_bias = keras.layers.Embedding(FILMS, 1)

    def call(self, pairs):
        user, film = pairs[:, 0], pairs[:, 1]
        score = keras.ops.sum(self.user(user) * self.film(film), -1, keepdims=True)
        score += self.user_bias(user) + self.film_bias(film)
        return keras.ops.sigmoid(score)


data = ratings()
model = Recommender()
model.compile(sys.argv[1], "binary_crossentropy")
pairs = np.stack([data["user"], data["film"]], 1)
model.fit(pairs, data["rating"], batch_size=64, epochs=2, verbose=0, shuffle=False)
