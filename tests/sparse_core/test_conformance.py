"""SparseCores = the NumPy reference = the host engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from sparse_core import twins

import tpu_embedding as te

RATE = 0.25
OPTIMIZERS = [
    te.SGD(lambda: tf.constant(RATE), clip_weight_min=-2.0, clip_weight_max=2.0),
    te.Adagrad(RATE, initial_accumulator_value=0.2),
    te.AdagradMomentum(RATE, momentum=0.9, use_nesterov=True, epsilon=1e-3, beta2=0.9),
    te.Adam(lambda step: RATE / (1.0 + tf.cast(step, tf.float32)), epsilon=1e-2),
    te.FTRL(RATE, l1_regularization_strength=0.1, beta=0.4, learning_rate_power=-0.7),
    te.FTRL(RATE, multiply_linear_by_learning_rate=True),
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
