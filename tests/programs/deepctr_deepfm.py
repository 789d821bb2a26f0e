"""DeepFM of deepctr, without its regularizers: `OPTIMIZER` is the argument."""

from __future__ import annotations

import sys

from deepctr.feature_column import SparseFeat  # pyright: ignore[reportMissingImports]
from deepctr.models import DeepFM  # pyright: ignore[reportMissingImports]
from ratings import FILMS, GENRES, USERS, ratings

sizes = {"user": USERS, "film": FILMS, "genre": GENRES}
columns = [SparseFeat(name, size, embedding_dim=8) for name, size in sizes.items()]
model = DeepFM(columns, columns, l2_reg_embedding=0, l2_reg_linear=0)
model.compile(sys.argv[1], "binary_crossentropy")
data = ratings()
features = {name: data[name] for name in sizes}
model.fit(features, data["rating"], 64, epochs=2, verbose=0, shuffle=False)
