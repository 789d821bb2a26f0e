"""Ours in `model.fit`: the Keras layer, whose tables have optimizers of their own."""

from __future__ import annotations

from collections.abc import Callable

import tpu_embedding as te
import tpu_embedding.keras
from benchmarks import fit
from benchmarks.scenarios import Scenario
from tpu_embedding.ops import library

RULE = "each touched row once, gradients summed first"

_OPTIMIZERS = {
    "sgd": te.SGD(0.01),
    "adagrad": te.Adagrad(0.01),
    "adam": te.Adam(0.01),
    "ftrl": te.FTRL(0.01),
}


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes the model."""
    if optimizer not in _OPTIMIZERS:
        raise NotImplementedError(f"Keras has no {optimizer} for the dense part.")
    library.load()  # Without it the portable engine would be measured.
    features = [
        te.FeatureConfig(te.TableConfig(rows, scenario.dim, combiner="sum"))
        for rows in scenario.rows
    ]
    layer = te.keras.TPUEmbedding(features, _OPTIMIZERS[optimizer])
    return fit.prepare(scenario, optimizer, layer)
