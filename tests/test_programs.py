"""Programs like those of Keras's documentation train by rows, unchanged."""

from __future__ import annotations

import pytest
from programs import trying

# Each program with the number of its layers that work by rows.
PROGRAMS = {
    "collaborative_filtering": 4,
    "wide_and_deep": 3,
    "behavior_transformer": 3,
    "compressed_embeddings": 4,
}


@pytest.mark.third_tier
@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_are_those_of_keras(name: str):
    printed = trying.tried(name, "sgd")
    trying.assert_same_losses(printed)
    assert printed.count("by rows: layer") == PROGRAMS[name]
    assert "by rows: optimizer" in printed
    assert "left as it is" not in printed


@pytest.mark.third_tier
def test_a_table_in_the_logits_stays_that_of_keras():
    printed = trying.tried("tied_logits", "adam")
    trying.assert_same_losses(printed)
    assert "ReversibleEmbedding is a subclass with a call of its own" in printed
