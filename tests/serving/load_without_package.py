"""Asks an exported model in a process that cannot import tpu_embedding.

python load_without_package.py FOLDER < example > logits
"""

from __future__ import annotations

import sys
from typing import Any


def main() -> None:
    """Prints the logits of the example."""
    sys.modules["tpu_embedding"] = None  # pyright: ignore[reportArgumentType]

    import tensorflow as tf  # After the package was made impossible.

    model: Any = tf.saved_model.load(sys.argv[1])
    example = tf.constant([sys.stdin.buffer.read()])
    answers = model.signatures["examples"](examples=example)
    print(*answers["logits"].numpy().tolist())


if __name__ == "__main__":
    main()
