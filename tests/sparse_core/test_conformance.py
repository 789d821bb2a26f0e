"""SparseCores, the NumPy reference and the host engine agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance import cases
from conformance.twin import LARGEST_TERM
from sparse_core import twins

import tpu_embedding as te

RATE = 0.25
OPTIMIZERS = [
    te.SGD(lambda: tf.constant(RATE), clip_weight_min=-2.0, clip_weight_max=2.0),
    te.Adagrad(RATE, initial_accumulator_value=0.2),
    te.AdagradMomentum(*(RATE, 0.9, True), exponent=3.0, beta2=0.99, epsilon=1e-3),
    te.Adam(lambda step: RATE / (1.0 + tf.cast(step, tf.float32)), epsilon=1e-2),
    te.FTRL(RATE, l1_regularization_strength=0.1),
    te.FTRL(
        RATE,
        learning_rate_power=-0.7,
        l1_regularization_strength=0.2,
        l2_regularization_strength=0.3,
        beta=0.4,
        multiply_linear_by_learning_rate=True,
    ),
]


@pytest.mark.parametrize(
    ("system", "optimizer"),
    list(zip(twins.SYSTEMS, OPTIMIZERS, strict=True)),
    ids=lambda value: value[0] + str(value[1]) if isinstance(value, tuple) else "",
)
def test_every_kind_of_input(
    system: tuple[str, int], optimizer: Any, rng: np.random.Generator
) -> None:
    twin = twins.make_twin(system, optimizer)
    assert len(twin.embedding.stacked_tables) == 2
    twin.run(rng, 2)


@pytest.mark.parametrize("pipelined", [False, True])
def test_minibatches(pipelined: bool, rng: np.random.Generator) -> None:
    """A batch that is cut gives the numbers of one that is not: the reference's."""
    limits = {"one_two": 6, "wide": 4}
    config = te.SparseCoreEmbeddingConfig(
        max_ids_per_table=limits, max_unique_ids_per_table=limits, minibatching=True
    )
    twin = twins.make_twin(
        ("v6e", 2),
        te.Adagrad(RATE),
        twins.INPUTS[:4],
        sparse_core_embedding_config=config,
        pipeline_execution_with_tensor_core=pipelined,
    )
    twin.run(rng, 3)
    batch = twin.draw(rng)
    counts = twins.run(
        twin.strategy,
        lambda values, weights: [
            table.num_minibatches_per_physical_sparse_core
            for table in twin.embedding._embedding.enqueue(
                values, weights
            ).tables.values()
        ],
        twin.distribute(batch.values),
        twin.distribute(batch.weights),
    )
    assert counts[0] == counts[1]
    assert min(counts[0]) > 1


def test_the_host_engine_agrees(seed: int) -> None:
    """Each is near the reference; from the same batches both go the same way."""
    found = []
    for make in (twins.make_twin, twins.make_host_twin):
        twin = make(("v6e", 2), te.FTRL(RATE, beta=0.4))
        twin.run(np.random.default_rng(seed), 3)
        found.append(
            {
                f"{key.name}/{name}": value.numpy()
                for key, arrays in twin.embedding.variables.items()
                for name, value in arrays.items()
            }
        )
        terms = max(twin._terms.values())
    sparse_core, host = found
    assert sparse_core.keys() == host.keys()
    for name, value in host.items():
        # Both are within the tolerance of what they stand for.
        scale = max(LARGEST_TERM, np.abs(value).max())
        bound = 2 * cases.tolerance(terms, scale, 3)
        cases.assert_close(sparse_core[name], value, bound, name)
