"""Ours: a step of a whole model, with TPUEmbedding and dense layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import tpu_embedding as te
from benchmarks import feed, models
from benchmarks.peers.tpu_embedding import features
from benchmarks.scenarios import Scenario
from benchmarks.timing import timed
from tpu_embedding.ops import library

RULE = "whole model; tables by TPUEmbedding"

_OPTIMIZERS = {
    "sgd": te.SGD(0.01),
    "adagrad": te.Adagrad(0.01, models.FIRST_ACCUMULATOR),
}
_OPS = models.Ops(
    concat=tf.concat,
    stack=tf.stack,
    reshape=tf.reshape,
    swap=tf.linalg.matrix_transpose,
    constant=tf.constant,
    relu=tf.nn.relu,
    softplus=tf.nn.softplus,
    softmax=tf.nn.softmax,
    logsumexp=lambda x: tf.reduce_logsumexp(x, -1),
    sum=lambda x: tf.reduce_sum(x, -1),
    mean=tf.reduce_mean,
)


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes tables and model."""
    if optimizer not in _OPTIMIZERS:
        raise NotImplementedError(f"The models are not measured with {optimizer}.")
    library.load()  # Without it the portable engine would be measured.
    tables = features(scenario, initializer=_first_rows)
    embedding = te.TPUEmbedding(tables, _OPTIMIZERS[optimizer])
    embedding.build()
    next_batch = feed.dense(scenario.batches(4))

    def look_up() -> list[tf.Tensor]:
        embedding.enqueue(next_batch())
        return embedding.dequeue()

    step = step_of(scenario, look_up, embedding.apply_gradients)
    return {"step": timed(step), "loss": models.last_loss(step)}


def _first_rows(shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    return tf.constant(models.first_rows(*shape), dtype)


def step_of(
    scenario: Scenario,
    look_up: Callable[[], Sequence[tf.Tensor]],
    apply_gradients: Callable[[Sequence[tf.Tensor]], Any],
) -> Callable[[], tf.Tensor]:
    """Returns a step of the scenario's model, which returns its loss."""
    model = models.model_of(scenario)
    loss_of = model.loss(_OPS)
    parameters = [tf.Variable(tf.constant(v)) for v in model.parameters]

    @tf.function
    def step() -> tf.Tensor:
        activations = look_up()
        with tf.GradientTape() as tape:
            tape.watch(activations)
            loss = loss_of(parameters, activations)
        gradients: Any = tape.gradient(loss, [activations, parameters])
        outer, inner = gradients
        apply_gradients(outer)
        for parameter, gradient in zip(parameters, inner, strict=True):
            parameter.assign_sub(models.DENSE_RATE * gradient)
        return loss

    return step
