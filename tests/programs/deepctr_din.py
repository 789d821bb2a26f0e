"""DIN of deepctr, without its regularizer: `OPTIMIZER` is the argument."""

from __future__ import annotations

import sys

from deepctr.feature_column import (  # pyright: ignore[reportMissingImports]
    SparseFeat,
    VarLenSparseFeat,
)
from deepctr.models import DIN  # pyright: ignore[reportMissingImports]
from ratings import FILMS, GENRES, HISTORY, USERS, ratings

film = SparseFeat("film", FILMS, embedding_dim=8)
seen = SparseFeat("hist_film", FILMS, embedding_dim=8, embedding_name="film")
columns = [
    SparseFeat("user", USERS, embedding_dim=8),
    film,
    SparseFeat("genre", GENRES, embedding_dim=8),
    VarLenSparseFeat(seen, maxlen=HISTORY, length_name="length"),
]
model = DIN(columns, ["film"], l2_reg_embedding=0)
model.compile(sys.argv[1], "binary_crossentropy")
data = ratings()
data["hist_film"] = data.pop("history")
rating = data.pop("rating")
model.fit(data, rating, 64, epochs=2, verbose=0, shuffle=False)
