"""Ours beside ours: the same steps over tables of bfloat16."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.peers import tpu_embedding
from benchmarks.scenarios import Scenario

RULE = "as ours, rows stored as bfloat16 with stochastic rounding, slots float32"


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes the tables and traces the steps."""
    return tpu_embedding.prepare(scenario, optimizer, "bfloat16")
