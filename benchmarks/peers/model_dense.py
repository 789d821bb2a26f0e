"""The same model without tables: what TensorFlow's dense layers take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from benchmarks import models
from benchmarks.peers.model_tpu_embedding import step_of
from benchmarks.scenarios import Scenario
from benchmarks.timing import timed

RULE = "the model alone, its activations are given"


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes the model."""
    del optimizer
    shape = [scenario.batch_size, scenario.dim]
    # Use variables: TensorFlow would compute with constants before the step.
    given = [tf.Variable(tf.constant(models.first_rows(*shape))) for _ in scenario.rows]

    total = tf.Variable(tf.zeros([]))

    def look_up() -> list[tf.Tensor]:
        return [activations.read_value() for activations in given]

    def use(gradients: Sequence[tf.Tensor]) -> None:
        # Without a use TensorFlow would not compute them.
        total.assign_add(tf.add_n([tf.reduce_sum(each) for each in gradients]))

    return {"step": timed(step_of(scenario, look_up, use))}
