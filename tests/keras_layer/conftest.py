"""Each test of the layer starts with the state that Keras has at the beginning."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest
from cpu_engines import EACH_ENGINE

from tpu_embedding import distribution


@pytest.fixture(autouse=True)
def fresh_keras(seed: int) -> Iterator[None]:
    # Not with the collection of garbage, which takes longer than most tests.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture(params=EACH_ENGINE)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """For the tests of what the layer asks of an engine."""
    monkeypatch.setenv(distribution.ENGINE_VARIABLE, request.param)
    return request.param
