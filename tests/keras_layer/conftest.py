"""Each test of the layer starts with the state that Keras has at the beginning."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest


@pytest.fixture(autouse=True)
def fresh_keras(seed: int) -> Iterator[None]:
    # Not with the collection of garbage, which takes longer than most tests.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    yield
    keras.config.set_dtype_policy("float32")
