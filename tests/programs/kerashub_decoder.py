"""The next film, by a decoder of keras-hub: `OPTIMIZER` is the argument."""

from __future__ import annotations

import sys

import keras
import keras_hub  # pyright: ignore[reportMissingImports]
from ratings import FILMS, HISTORY, ratings

backbone = keras_hub.models.GPT2Backbone(
    vocabulary_size=FILMS,
    num_layers=1,
    num_heads=2,
    hidden_dim=16,
    intermediate_dim=32,
    max_sequence_length=HISTORY,
)
model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(sys.argv[1], loss)
films = ratings()["history"]
features = {"token_ids": films[:, :-1], "padding_mask": films[:, :-1] != 0}
seen = (films[:, 1:] != 0).astype("float32")
options = {"epochs": 2, "verbose": 0, "shuffle": False}
model.fit(features, films[:, 1:], 64, sample_weight=seen, **options)
