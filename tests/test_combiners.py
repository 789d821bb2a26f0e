from __future__ import annotations

import types
from typing import Any

import pytest
import tensorflow as tf
from reference import lookup

from tpu_embedding import combiners


@pytest.mark.parametrize("combiner", combiners.COMBINERS)
def test_every_combiner_passes_its_own_check(combiner: str) -> None:
    combiners.convert_combiner(combiner)


@pytest.mark.parametrize("combiner", combiners.COMBINERS)
def test_tensorflow_and_the_reference_know_every_combiner(combiner: str) -> None:
    tf.tpu.experimental.embedding.TableConfig(4, 2, combiner=combiner, name="t")
    assert len(lookup.gains([1.0, 2.0], combiner)) == 2


@pytest.mark.parametrize("combiner", ["", "max", "Mean", None, 0, ["sum"]])
def test_other_combiners_are_refused(combiner: object) -> None:
    with pytest.raises(ValueError, match="combiner"):
        combiners.convert_combiner(combiner)


def test_the_positional_combiner_of_tensorflow_is_refused_by_name() -> None:
    stock: Any = tf.tpu.experimental.embedding
    if hasattr(stock, "PositionalWeightedCombiner"):  # TensorFlow 2.22
        rule = stock.CustomOptimizer(lambda *values: values, 0.1)
        combiner = stock.PositionalWeightedCombiner(3, tf.ones_initializer(), rule)
    else:
        combiner = types.SimpleNamespace(combiner="positional_weighted", max_valency=3)
    with pytest.raises(NotImplementedError, match=r"A PositionalWeighted.* Custom"):
        combiners.convert_combiner(combiner)


def test_a_custom_combiner_is_a_word_as_tensorflows_is() -> None:
    def first(valency: Any, vectors: Any) -> Any:
        return vectors[0]

    # Without an address: what processes compare, and as TensorFlow's words begin.
    word = str(combiners.CustomCombiner(first, max_valency=4))
    assert word == "custom_combiner(max_valency=4, num_weights=0)"
