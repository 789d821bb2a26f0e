"""Asks an exported model in a process that cannot import tpu_embedding.

python load_without_package.py FOLDER < example > logits
"""

from __future__ import annotations

import sys
from typing import Any

sys.modules["tpu_embedding"] = None  # pyright: ignore[reportArgumentType]

import tensorflow as tf  # noqa: E402 - after the package was made impossible.

model: Any = tf.saved_model.load(sys.argv[1])
answers = model.signatures["examples"](examples=tf.constant([sys.stdin.buffer.read()]))
print(*answers["logits"].numpy().tolist())
