"""Loads the exported model and answers one request, using only TensorFlow.

    python query_saved_model.py FOLDER < request.json > response.json

The request is {"user": 0, "recent": [...]}, with the film numbers of the data; the
response is {"rating": [...]} over all films.
"""

from __future__ import annotations

import json
import sys
from typing import Any

# The model must not need the package, so this line makes importing it impossible.
sys.modules["tpu_embedding"] = None  # pyright: ignore[reportArgumentType]

import tensorflow as tf  # noqa: E402 - see above.


def main(argv: list[str]) -> None:
    """Answers one request."""
    request = json.load(sys.stdin)
    model: Any = tf.saved_model.load(argv[1])
    answer = model.signatures["all_films"](
        user=tf.constant(request["user"], tf.int64),
        recent=tf.constant(request["recent"], tf.int64),
    )
    json.dump({"rating": answer["rating"].numpy().tolist()}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv)
