"""Two towers and the retrieval task of TFRS: `OPTIMIZER` is the argument."""

from __future__ import annotations

import sys

import tensorflow as tf
import tensorflow_recommenders as tfrs  # pyright: ignore[reportMissingImports]
import tf_keras  # pyright: ignore[reportMissingImports]
from ratings import ratings

data = ratings()


def tower(name: str) -> tf_keras.Model:
    words = sorted({f"{name} {i}" for i in data[name]})
    return tf_keras.Sequential(
        [
            tf_keras.layers.StringLookup(vocabulary=words, mask_token=None),
            tf_keras.layers.Embedding(len(words) + 1, 16),
            tf_keras.layers.Dense(8),
        ]
    )


class TwoTowers(tfrs.Model):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.film = tower("user"), tower("film")
        self.task = tfrs.tasks.Retrieval()

    def compute_loss(self, features, training=False):
        del training
        return self.task(self.user(features["user"]), self.film(features["film"]))


model = TwoTowers()
model.compile(optimizer=tf_keras.optimizers.get(sys.argv[1]))
words = {
    name: tf.constant([f"{name} {i}" for i in data[name]]) for name in ("user", "film")
}
model.fit(tf.data.Dataset.from_tensor_slices(words).batch(64), epochs=2, verbose=0)
