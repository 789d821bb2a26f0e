"""Ours beside ours: a tf.function that is called with a packed batch."""

from __future__ import annotations

from collections.abc import Callable

import tpu_embedding as te
from benchmarks.peers import tpu_embedding_ragged
from benchmarks.scenarios import Scenario

RULE = "as ours, the features are packed by te.pack before"


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes the tables and packs the batches."""
    return tpu_embedding_ragged.prepare(scenario, optimizer, te.pack)
