"""TensorFlow's documented loops of both classes: only the strategy differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from documented_loops import (
    assert_same,
    feature_config,
    loops,
    loops_of_version_2,
    stock,
)
from everywhere.twins import place, strategy_of

import tpu_embedding as te

LOOPS = {te.TPUEmbedding: loops, te.TPUEmbeddingV2: loops_of_version_2}
# Those that the tests of one engine do not have.
SYSTEMS = {
    te.TPUEmbedding: [("v6e", 2), ("7x", 1)],
    te.TPUEmbeddingV2: [("host", 2), ("v4", 2), ("v6e", 2)],
}


@pytest.mark.parametrize(
    "pipelined",
    [
        pytest.param(False, id=""),
        pytest.param(True, id="pipelined", marks=pytest.mark.second_tier),
    ],
)
@pytest.mark.parametrize("of_class", LOOPS, ids=lambda of_class: of_class.__name__)
def test_loops(of_class: Any, pipelined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(strategy: tf.distribute.Strategy) -> list[np.ndarray]:
        with strategy.scope():
            embedding = of_class(feature_config(), stock.Adagrad(0.1), pipelined)
        return [np.asarray(v) for v in LOOPS[of_class](embedding, strategy)]

    place("host", monkeypatch)
    results = [run(tf.distribute.OneDeviceStrategy("CPU:0"))]
    for engine, devices in SYSTEMS[of_class]:
        place(engine, monkeypatch)
        results.append(run(strategy_of(engine, devices)))
    assert_same(results)
