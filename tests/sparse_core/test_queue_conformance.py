"""TPUEmbedding on SparseCores against the NumPy reference: a queue on top of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance.cases import Input
from conformance.twin import Feature, Twin
from software_tpu.calls import strategy_of
from sparse_core import twins

import tpu_embedding as te

RATE = 0.25
# The shapes of all features come from the first batch.
INPUTS = (
    *twins.INPUTS,
    Input("dense_sequence", "dense", (4, 3), max_sequence_length=2),
    Input("sparse_sequence", "sparse", (4, 4), max_sequence_length=3),
    Input("ragged_sequence", "ragged", (4, 4), max_sequence_length=3),
)


class QueueTwin(Twin):
    """A twin whose parts are distributed values also where there is one replica."""

    distribute = twins.SparseCoreTwin.distribute


def make_twin(
    system: tuple[str, int], optimizer: Any, inputs: Any = INPUTS, **arguments: Any
) -> Twin:
    tables, features = twins.parts(inputs)
    features = {
        name: Feature(feature.table, feature.input, feature.weighted)
        for name, feature in features.items()
    }
    return QueueTwin(
        tables, features, optimizer, strategy=strategy_of(*system), **arguments
    )


@pytest.mark.parametrize(
    ("system", "optimizer"),
    [
        (("v5p", 1), te.AdagradMomentum(RATE, 0.9, epsilon=1e-3)),
        (("v6e", 2), te.Adam(RATE, beta_2=0.9, epsilon=1e-2, sum_inside_sqrt=False)),
        (("7x", 4), te.Adagrad(RATE)),
    ],
    ids=["v5p", "v6e", "7x"],
)
@pytest.mark.parametrize("pipelined", [False, True])
def test_every_kind_of_input(
    system: tuple[str, int], optimizer: Any, pipelined: bool, rng: np.random.Generator
) -> None:
    twin = make_twin(system, optimizer, pipeline_execution_with_tensor_core=pipelined)
    twin.run(rng, 2, without=["ragged", "dense2"])
    twin.evaluate(twin.draw(rng))
    twin.run(rng, 1)


def test_inside_of_programs(rng: np.random.Generator) -> None:
    make_twin(("v6e", 2), te.SGD(RATE), INPUTS[:4], inside=True).run(rng, 2)


def test_in_a_function(rng: np.random.Generator) -> None:
    rate = tf.keras.optimizers.schedules.PiecewiseConstantDecay([0], [RATE, 0.5])
    make_twin(("v6e", 2), te.Adam(rate), INPUTS[:4], function=tf.function).run(rng, 3)


@pytest.mark.parametrize("inside", [False, True])
def test_minibatches(inside: bool, rng: np.random.Generator) -> None:
    limits = {"one_two": 6, "wide": 4}
    config = te.SparseCoreEmbeddingConfig(
        max_ids_per_table=limits, max_unique_ids_per_table=limits, minibatching=True
    )
    twin = make_twin(
        ("v6e", 2),
        te.Adagrad(RATE),
        INPUTS[:4],
        sparse_core_embedding_config=config,
        inside=inside,
    )
    twin.run(rng, 2)
