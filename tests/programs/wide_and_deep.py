"""Strings to ids and embeddings, beside a wide part: `OPTIMIZER` is the argument."""

from __future__ import annotations

import math
import sys

import keras
import tensorflow as tf
from ratings import ratings

data = ratings()
COLUMNS = ("user", "film", "genre")
words = {name: [f"{name} {i}" for i in data[name]] for name in COLUMNS}

inputs = {name: keras.Input((), dtype="string", name=name) for name in COLUMNS}
deep, wide = [], []
for name in COLUMNS:
    vocabulary = sorted(set(words[name]))
    lookup = keras.layers.StringLookup(vocabulary=vocabulary, num_oov_indices=1)
    ids = lookup(inputs[name])
    size = lookup.vocabulary_size()
    deep.append(keras.layers.Embedding(size, math.isqrt(size))(ids))
    if name == "genre":
        wide.append(keras.layers.CategoryEncoding(size, output_mode="one_hot")(ids))
hidden = keras.layers.Concatenate()(deep)
for units in (32, 16):
    hidden = keras.layers.Dense(units, activation="relu")(hidden)
joined = keras.layers.Concatenate()([hidden, *wide])
model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(joined))
model.compile(sys.argv[1], "binary_crossentropy")
features = {name: tf.constant(words[name]) for name in COLUMNS}
dataset = tf.data.Dataset.from_tensor_slices((features, data["rating"][:, None]))
model.fit(dataset.batch(64), epochs=2, verbose=0)
