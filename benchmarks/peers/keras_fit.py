"""keras.layers.Embedding in `model.fit`; a Keras optimizer trains everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from benchmarks import fit
from benchmarks.scenarios import Scenario

RULE = "model.fit with keras.layers.Embedding and the model's optimizer"


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes the model; each sample's rows are summed."""
    if optimizer not in fit.OPTIMIZERS:
        raise NotImplementedError(f"Keras has no {optimizer}.")

    def look_up(inputs: list[Any]) -> list[Any]:
        return [
            keras.ops.sum(keras.layers.Embedding(rows, scenario.dim)(ids), axis=1)
            for rows, ids in zip(scenario.rows, inputs, strict=True)
        ]

    return fit.prepare(scenario, optimizer, look_up)
