"""Attention over the films of a user and their places: `OPTIMIZER` is the argument."""

from __future__ import annotations

import sys

import keras
from ratings import FILMS, HISTORY, USERS, ratings

WIDTH = 16
history = keras.Input([HISTORY], dtype="int64", name="history")
film = keras.Input([1], dtype="int64", name="film")
user = keras.Input([1], dtype="int64", name="user")

films = keras.layers.Embedding(FILMS, WIDTH, mask_zero=True, name="films")
seen = films(history)
places = keras.layers.Embedding(HISTORY, WIDTH, name="places")
seen += places(keras.ops.arange(HISTORY))
sequence = keras.layers.Concatenate(axis=1)([seen, films(film)])
attended = keras.layers.MultiHeadAttention(2, WIDTH // 2)(sequence, sequence)
sequence = keras.layers.LayerNormalization()(keras.layers.Add()([sequence, attended]))
flat = keras.layers.Flatten()(sequence)
users = keras.layers.Flatten()(keras.layers.Embedding(USERS, WIDTH)(user))
joined = keras.layers.Concatenate()([flat, users])
hidden = keras.layers.Dense(32, activation="leaky_relu")(joined)
rating = keras.layers.Dense(1, activation="sigmoid")(hidden)
model = keras.Model({"history": history, "film": film, "user": user}, rating)
model.compile(sys.argv[1], "binary_crossentropy")
data = ratings()
features = {
    name: data[name].reshape(-1, n)
    for name, n in zip(("history", "film", "user"), (HISTORY, 1, 1), strict=True)
}
model.fit(features, data["rating"], 64, epochs=2, verbose=0, shuffle=False)
