"""Training steps: every optimizer x combiner x kind of input, on every engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import optimizer_cases
import pytest
from conformance import cases
from conformance.twin import Feature, Table, Twin

RATE = 0.25
# Widths around those of vector registers.
DIMS = (1, 3, 4, 8, 17)

each_variant = pytest.mark.parametrize(
    ("case", "options"),
    [(case, options) for case in optimizer_cases.OPTIMIZERS for options in case.options],
    ids=lambda value: getattr(value, "name", None) or str(value),
)


def all_inputs(combiner: str, optimizer: Any, **arguments: Any) -> Twin:
    """A table for each kind of input, looked up with weights and without.

    As every kind has a table of its own, a failure names it.
    """
    tables, features = {}, {}
    for number, kind in enumerate(cases.INPUTS):
        tables[kind.name] = Table(dim=DIMS[number % len(DIMS)], combiner=combiner)
        features[kind.name] = Feature(kind.name, kind)
        features[f"{kind.name}_weighted"] = Feature(kind.name, kind, weighted=True)
    return Twin(tables, features, optimizer, **arguments)


@pytest.mark.parametrize("combiner", cases.COMBINERS)
@each_variant
def test_rule(case: Any, options: Any, combiner: str, rng: np.random.Generator) -> None:
    optimizer = case.cls(learning_rate=RATE, **options)
    twin = all_inputs(combiner, optimizer)
    # None for the weighted half of the tables' features: touched all the same.
    twin.run(rng, 3, without=[name for name in twin.features if "weighted" in name])
