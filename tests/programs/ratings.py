"""Made-up ratings of films by users, from which the programs beside this file learn."""

from __future__ import annotations

import numpy as np

USERS, FILMS, GENRES, HISTORY = 500, 800, 12, 6


def ratings(count: int = 2048) -> dict[str, np.ndarray]:
    """By column [count]: ids from 1, "history" [count, HISTORY], "rating" 0 or 1."""
    rng = np.random.default_rng(3)
    film = rng.integers(1, FILMS, count)
    user = rng.integers(1, USERS, count)
    history = rng.integers(1, FILMS, (count, HISTORY))
    lengths = rng.integers(1, HISTORY + 1, count)
    history[np.arange(HISTORY) >= lengths[:, np.newaxis]] = 0  # Padding.
    return {
        "user": user,
        "film": film,
        "genre": 1 + film % (GENRES - 1),
        "history": history,
        "length": lengths,
        "rating": ((user + film) % 3 == 0).astype(np.float32),
    }
