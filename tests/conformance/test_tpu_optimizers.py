"""FrequencyEstimator, whose tables have one column and whose rate is the step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance import cases
from reference import optimizers as reference

import tpu_embedding as te

V, MOST = 6, 8.0
OPTIONS: dict[str, Any] = {"tau": 0.25, "max_delta": MOST, "outlier_threshold": 2.0}
# By step; row 3 comes late, so that its gap is an outlier, and 5 never.
NAMED = ([0, 1], [0, 0], [0, 2], [1], [0, 2], [1], [0], [3], [3, 1, 0])


def estimator(**options: Any) -> tuple[te.TPUEmbedding, te.TableConfig]:
    table = te.TableConfig(
        V, 1, tf.constant_initializer(MOST), te.FrequencyEstimator(**options)
    )
    return te.TPUEmbedding(te.FeatureConfig(table), None), table


@pytest.mark.parametrize("own_step", [False, True])
def test_frequency_estimator(own_step: bool) -> None:
    step = tf.Variable(0.0)
    options: dict[str, Any] = {**OPTIONS}
    if own_step:
        options["learning_rate"] = lambda: 3.0 * step  # Two steps in three skip it.
    embedding, config = estimator(**options)
    embedding.build()
    table = np.full((V, 1), MOST)
    slots = reference.initial_slots("FrequencyEstimator", options, (V, 1))
    for number, named in enumerate(NAMED):
        embedding.enqueue(tf.constant(named))
        activations: Any = embedding.dequeue()
        np.testing.assert_allclose(activations, table[named], rtol=1e-6)
        # The rule knows no gradient: any will do, and none.
        gradient = None if number % 2 else tf.fill([len(named), 1], np.float32(7))
        step.assign(number)
        embedding.apply_gradients(gradient)
        rows = {row: np.zeros(1) for row in named}
        now = number * (3.0 if own_step else 1.0)
        table, slots = reference.apply(
            "FrequencyEstimator", options, table, slots, rows, now
        )
    actual = embedding.variables[config]
    bound = cases.tolerance(1, MOST, len(NAMED))
    cases.assert_close(actual["parameters"], table, bound, "the table")
    cases.assert_close(actual["last_hit_step"], slots["last_hit_step"], 0, "steps")
    assert table[5] == MOST


def test_what_only_tpus_know_is_refused_by_name(engine: str) -> None:
    table = te.TableConfig(V, 1, name="films")
    optimizer = te.FrequencyEstimator(weight_exponent=0.5)
    with pytest.raises(NotImplementedError) as caught:
        te.TPUEmbedding(te.FeatureConfig(table), optimizer)
    assert str(caught.value) == (
        "Table 'films': `weight_exponent=0.5` of its optimizer is not supported by the "
        f"{engine} engine, only by TPU v2 to v4. Leave it at 0.0."
    )


def test_frequency_estimator_is_for_tables_of_one_column() -> None:
    table = te.TableConfig(V, 2, name="films")
    with pytest.raises(ValueError, match="Table 'films' has dim=2, but Frequency"):
        te.TPUEmbedding(te.FeatureConfig(table), te.FrequencyEstimator())
