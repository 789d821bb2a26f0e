"""The options of growing tables of the NumPy reference, drawn and converted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from reference import growing

import tpu_embedding as te


def draw_options(
    rng: np.random.Generator,
    rows: tuple[int, int],
    unknown: Sequence[str],
    kept: float = 1.0,
) -> growing.Options:
    """Draws options; `kept` limits `min_rows`, as a share of `max_rows`."""
    eviction = [None, "lru", "lfu", "age"][rng.integers(4)]
    max_rows, drawn = int(rng.integers(*rows)), str(rng.choice(unknown))
    shares = drawn == "shared_row" and rng.random() < 0.7
    return growing.Options(
        max_rows=max_rows,
        min_count=int(rng.choice([1, 1, 2, 4])),
        max_candidates=int(rng.integers(1, 10)),
        eviction=eviction,
        max_age=int(rng.integers(1, 6)),
        min_rows=int(rng.integers(0, int(kept * max_rows))) if eviction else 0,
        unknown=drawn,
        when_full="shared_row" if shares else "error",
    )


def vocabulary_of(options: growing.Options, **others: Any) -> te.GrowingVocabulary:
    arguments = dataclasses.asdict(options)
    if options.eviction is None:
        arguments["min_rows"] = None
    if options.eviction != "age":
        arguments["max_age"] = None
    if options.min_count == 1:
        arguments["max_candidates"] = None
    return te.GrowingVocabulary(**arguments, **others)
