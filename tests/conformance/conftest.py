"""What the conformance suite is repeated over: engines and strategies."""

from __future__ import annotations

import pytest
import tensorflow as tf
from replica_values import mirrored

from tpu_embedding import distribution

ENGINES = distribution.CPU_ENGINES
STRATEGIES = {
    "one_device": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
    "mirrored2": lambda: mirrored(2),
    "mirrored3": lambda: mirrored(3),
}


@pytest.fixture(params=ENGINES, autouse=True)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Repeats every test of this folder on every engine that the package has."""
    monkeypatch.setenv(distribution.ENGINE_VARIABLE, request.param)
    return request.param


@pytest.fixture(params=sorted(STRATEGIES))
def strategy(request: pytest.FixtureRequest) -> tf.distribute.Strategy:
    return STRATEGIES[request.param]()
