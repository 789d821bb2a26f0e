"""The layer where tf.keras is tf_keras: `TF_USE_LEGACY_KERAS=1 pytest tests/tf_keras`.

TensorFlow reads the variable when tf.keras is first used, so these tests need a process
of their own: `tests/test_tf_keras.py` starts it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

collect_ignore_glob = []
if os.environ.get("TF_USE_LEGACY_KERAS") != "1":
    collect_ignore_glob.append("test_*.py")


@pytest.fixture(autouse=True)
def fresh_keras(seed: int) -> Iterator[None]:
    import tf_keras  # pyright: ignore[reportMissingImports]

    tf_keras.backend.clear_session()
    tf_keras.utils.set_random_seed(seed)
    yield
    tf_keras.mixed_precision.set_global_policy("float32")
