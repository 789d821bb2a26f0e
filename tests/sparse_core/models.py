"""Small embeddings on SparseCores, whose values name their rows."""

from __future__ import annotations

from typing import Any

import v2_calls
from software_tpu.calls import strategy_of

import tpu_embedding as te

SYSTEM = ("v6e", 2)


def two_tables(
    system: tuple[str, int] = SYSTEM, optimizer: Any = None, **arguments: Any
) -> te.TPUEmbeddingV2:
    """Makes films and users, which are stacked, and two features of films."""
    with strategy_of(*system).scope():
        return v2_calls.two_tables(optimizer, [2], **arguments)


def films(**arguments: Any) -> te.TPUEmbeddingV2:
    """Makes one table, and one feature of two samples."""
    table = v2_calls.films(combiner="sum")
    with strategy_of(*arguments.pop("system", SYSTEM)).scope():
        return te.TPUEmbeddingV2(
            te.FeatureConfig(table, output_shape=[2], name="film"),
            arguments.pop("optimizer", te.SGD(1.0)),
            **arguments,
        )
