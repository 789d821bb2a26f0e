"""Hashed tables on servers have the bits of one process."""

from __future__ import annotations

from typing import Any

import pytest
from parameter_servers.cluster import MIXED, features
from parameter_servers.test_numbers import classes, require_bits_of_one_process

import tpu_embedding as te

pytestmark = pytest.mark.second_tier


def configs(**options: Any) -> dict[str, te.FeatureConfig]:
    """The first and the last of three tables are hashed."""
    found = features(**options)
    hashings = {
        "t0": te.Hashing(20, hashes=2, salt=5),
        "t2": te.Hashing(20, hashes=3, combine="sum"),
    }
    for table in {id(c.table): c.table for c in found.values()}.values():
        if table.name in hashings:
            table.vocabulary_size = hashings[table.name]
            table.initializer = te.RowIdInitializer()
    return found


def test_hashed_tables_have_the_bits_of_one_process() -> None:
    for kind, options in classes():
        require_bits_of_one_process(kind, configs(placements=MIXED), **options)
