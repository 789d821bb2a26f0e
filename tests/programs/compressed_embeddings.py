"""Quotients and remainders, and two widths: `OPTIMIZER` is the argument."""

from __future__ import annotations

import sys

import keras
from ratings import FILMS, USERS, ratings


class QuotientRemainder(keras.layers.Layer):
    """The product of the rows of an id's quotient and of its remainder."""

    def __init__(self, rows: int, width: int, buckets: int) -> None:
        super().__init__()
        self.buckets = buckets
        self.quotients = keras.layers.Embedding(-(-rows // buckets), width)
        self.remainders = keras.layers.Embedding(buckets, width)

    def call(self, ids):
        quotients = self.quotients(ids // self.buckets)
        return quotients * self.remainders(ids % self.buckets)


class TwoWidths(keras.layers.Layer):
    """Wide rows for the first ids, narrow ones with a projection for the others."""

    def __init__(self, rows: int, width: int, wide_rows: int) -> None:
        super().__init__()
        self.wide_rows = wide_rows
        self.wide = keras.layers.Embedding(wide_rows, width)
        self.narrow = keras.layers.Embedding(rows, width // 4)
        self.projection = keras.layers.Dense(width, use_bias=False)

    def call(self, ids):
        is_wide = keras.ops.expand_dims(ids < self.wide_rows, -1)
        wide = self.wide(keras.ops.minimum(ids, self.wide_rows - 1))
        return keras.ops.where(is_wide, wide, self.projection(self.narrow(ids)))


user = keras.Input([], dtype="int64", name="user")
film = keras.Input([], dtype="int64", name="film")
vectors = [QuotientRemainder(USERS, 16, 32)(user), TwoWidths(FILMS, 16, 100)(film)]
hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Concatenate()(vectors))
rating = keras.layers.Dense(1, activation="sigmoid")(hidden)
model = keras.Model({"user": user, "film": film}, rating)
model.compile(sys.argv[1], "binary_crossentropy")
data = ratings()
features = {name: data[name] for name in ("user", "film")}
model.fit(features, data["rating"], 64, epochs=2, verbose=0, shuffle=False)
