"""Programs for deepctr and for TFRS, unchanged, by rows."""

from __future__ import annotations

import pytest
from programs import trying

# Each program with the number of its layers that work by rows.
PROGRAMS = {"deepctr_deepfm": 9, "deepctr_din": 3, "tfrs_two_tower": 2}


@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_are_those_of_keras(name: str):
    printed = trying.tried(name, "sgd")
    trying.assert_same_losses(printed)
    assert printed.count("by rows: layer") == PROGRAMS[name]
    assert "left as it is" not in printed
