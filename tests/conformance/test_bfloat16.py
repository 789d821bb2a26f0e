"""Tables of bfloat16: every optimizer, odd and wide rows, on every engine.

With the same random bits a larger value is never rounded to a smaller one. So what an
engine stores lies between the roundings of the two ends of its tolerance, which mostly
are one number. From there the reference goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import optimizer_cases
import pytest
import tensorflow as tf
from conformance import cases
from conformance.twin import LARGEST_TERM, Batch, Feature, Table, Twin
from reference import rounding
from replica_values import mirrored

import tpu_embedding as te

RATE = 0.25
DIMS = (3, 7, 10, 64, 100, 1024)
KIND = cases.INPUT_BY_NAME["ragged"]
SEED = 2**40 + 5


class RoundedTwin(Twin):
    """A twin whose tables are bfloat16; `seeds` are those that no name gives."""

    def __init__(self, *arguments: Any, seeds: Mapping[str, int], **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._seeds = {name: rounding.seed_of(name) for name in self.tables} | seeds
        for values in self.reference._tables.values():
            values[:] = rounding.nearest(values)
        self._before = self._values()
        self._decided: list[bool] = []

    def step(self, rng: np.random.Generator, batch: Batch, without: Any = ()) -> None:
        """Does `Twin.step`, then checks the tables and takes their values over."""
        step = self._steps
        super().step(rng, batch, without)
        after = self._values()
        for name, values in after.items():
            exact = self.reference.tables[name]
            for row, actual in enumerate(values):
                if np.array_equal(exact[row], self._before[name][row]):
                    # Rounding changes no row that the update left as it was.
                    np.testing.assert_array_equal(actual, exact[row])
                else:
                    self._check_row((name, step, row), exact[row], actual)
            exact[:] = values
        self._before = after

    def _check_row(
        self, at: tuple[str, int, int], exact: np.ndarray, actual: np.ndarray
    ) -> None:
        name, step, row = at
        scale = self._condition * max(LARGEST_TERM, np.abs(exact).max())
        # The ends are rounded to float32 themselves.
        bound = cases.tolerance(self._terms[name], scale, 1) + cases.EPSILON * scale
        low, high = (
            rounding.round_row(exact + way * bound, self._seeds[name], step, row)
            for way in (-1, 1)
        )
        assert np.all(low <= actual), at
        assert np.all(actual <= high), at
        # Near 0 a bfloat16 is finer than the tolerance.
        self._decided += (low == high)[np.abs(exact) > 1 / 16].tolist()

    def check_slots(self) -> None:
        """Compares all slots, which are float32."""
        # Otherwise hardly any value was compared exactly.
        assert np.mean(self._decided) > 0.9
        for name, config in self.configs.items():
            actual = self.embedding.variables[config]
            for slot, values in self.reference.slots[name].items():
                scale = self._condition * max(LARGEST_TERM, np.abs(values).max())
                bound = cases.tolerance(self._terms[name], scale, self._steps)
                cases.assert_close(actual[slot], values, bound, f"{name} {slot}")

    def _values(self) -> dict[str, np.ndarray]:
        tables = self.embedding.embedding_tables
        found = {name: tables[config] for name, config in self.configs.items()}
        assert all(table.dtype == tf.bfloat16 for table in found.values())
        return {name: table.numpy().astype(np.float32) for name, table in found.items()}


def rounded_twin(dims: tuple[int, ...], optimizer: Any, **more: Any) -> RoundedTwin:
    """Makes a table of each width, looked up twice."""
    tables = {f"dim{dim}": Table(rows=9, dim=dim, dtype="bfloat16") for dim in dims}
    features = {}
    for name in tables:
        features[name] = Feature(name, KIND)
        features[f"{name}_weighted"] = Feature(name, KIND, weighted=True)
    return RoundedTwin(tables, features, optimizer, seeds={}, **more)


@pytest.mark.parametrize("case", optimizer_cases.OPTIMIZERS, ids=lambda case: case.name)
def test_rule(case: Any, rng: np.random.Generator) -> None:
    options = {**case.options[-1], "learning_rate": RATE}
    twin = rounded_twin(DIMS, case.cls(**options))
    for _ in range(2):
        twin.step(rng, twin.draw(rng))
    twin.check_slots()


def test_replicas_and_what_surrounds_a_rule(
    engine: str, rng: np.random.Generator
) -> None:
    optimizer = te.Adam(
        RATE,
        lazy_adam=False,
        clipvalue=0.5,
        weight_decay_factor=0.25,
        clip_weight_max=0.75,
    )
    strategy = None
    if engine == "host":
        strategy = mirrored(2)
    # Tracing stock ops takes seconds, and has tests of its own.
    function = tf.function if engine == "host" else lambda step: step
    twin = rounded_twin((7,), optimizer, strategy=strategy, function=function)
    for _ in range(3):
        twin.step(rng, twin.draw(rng))
    twin.check_slots()
