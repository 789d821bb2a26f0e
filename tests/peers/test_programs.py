"""Programs for deepctr, TFRS and keras-hub train by rows, unchanged."""

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


def test_a_decoder_of_keras_hub_keeps_the_table_of_its_logits():
    printed = trying.tried("kerashub_decoder", "sgd", TF_USE_LEGACY_KERAS="0")
    trying.assert_same_losses(printed)
    assert "ReversibleEmbedding is a subclass with a call of its own" in printed
    assert "by rows: optimizer" in printed
