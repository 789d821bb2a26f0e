"""A step changes all servers once, or none."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from parameter_servers.cluster import (
    JOB,
    MIXED,
    START,
    B,
    V,
    batch,
    features,
    gradients,
    make,
    require_same,
    require_unchanged,
    schedule,
    step_of,
    values,
)

import tpu_embedding as te

pytestmark = pytest.mark.second_tier


def test_a_push_that_is_repeated_is_dropped() -> None:
    for configs in (features(), features(placements=MIXED)):
        check_repeated_pushes(configs)


def check_repeated_pushes(configs: Any) -> None:
    one, served = make(te.TPUEmbedding, configs, te.Adagrad(0.1))
    step, expected = tf.function(step_of(served)), step_of(one)

    @tf.function
    def twice(first: Any) -> None:  # Two pushes, one of them in a loop.
        step(first)
        for offset in tf.range(1, 2):
            step(first + offset)

    numbered = JOB.coordinator._with_number(twice)
    for number in (1, 2, 1, 2, 3, 3):
        numbered(tf.constant([7, number], tf.int64), tf.constant(2 * number))
    for k in range(2, 8):
        expected(k)
    require_same(one, served)
    step(tf.constant(9))  # Without a number, though traced with one.
    step(tf.constant(9))
    expected(9)
    expected(9)
    require_same(one, served)


def test_a_push_that_reached_one_server_is_completed() -> None:
    one, served = make(
        te.TPUEmbedding, features(placements=("rows",) * 3), te.Adagrad(0.1)
    )
    step = tf.function(step_of(served))
    _, second = served.core.engine._parts
    number = tf.constant([7, 1, 1], tf.int64)
    with (
        mock.patch.object(served.core.engine._transport, "push", return_value=number),
        mock.patch.object(second, "receive_gradients", side_effect=ConnectionError),
        pytest.raises(ConnectionError),  # As if the worker had died here.
    ):
        step_of(served)(0)
    served.reset()
    after = values(served)["t0/parameters"]
    assert (after[0::2] != START[0][0::2]).any()
    np.testing.assert_array_equal(after[1::2], START[0][1::2])
    numbered = JOB.coordinator._with_number(step)
    numbered(tf.constant([7, 1], tf.int64), tf.constant(0))
    found = values(served)
    step_of(one)(0)
    expected = values(one)
    for name, value in found.items():
        np.testing.assert_array_equal(value[0::2], expected[name][0::2], err_msg=name)
    numbered(tf.constant([7, 1], tf.int64), tf.constant(0))
    require_unchanged(found, served)


def test_a_check_before_the_push_keeps_all_servers() -> None:
    _, served = make(te.TPUEmbedding, features(placements=MIXED), te.Adagrad(0.1))
    before = values(served)

    @tf.function
    def step(limit: Any) -> None:
        served.enqueue(batch(0))
        activations = served.dequeue()
        with tf.control_dependencies([tf.debugging.assert_less(0.0, limit)]):
            served.apply_gradients(gradients(activations))

    for _ in range(5):
        JOB.coordinator.schedule(step, args=(tf.constant(-1.0),))
        with pytest.raises(tf.errors.InvalidArgumentError, match="assertion failed"):
            JOB.coordinator.join()
    require_unchanged(before, served)


def test_a_refused_step_changes_no_server() -> None:
    for configs in (features(), features(placements=MIXED)):
        check_refused_steps(configs)


def check_refused_steps(configs: Any) -> None:
    one, served = make(te.TPUEmbedding, configs, te.Adagrad(0.1), check_numerics=True)

    @tf.function
    def bad(ids: Any, gradient: Any) -> None:
        values = batch(0)
        values["a"] = tf.concat([values["a"][:, 1:], ids], 1)
        served.enqueue(values)
        activations = served.dequeue()
        found = gradients(activations)
        found["b"] += gradient
        served.apply_gradients(found)

    ids = tf.zeros([B, 1], tf.int64)
    for arguments, text in (
        ((ids + V, 0.0), "Feature a, table t0: sample 0 has id 50"),
        ((ids, np.nan), "Feature b: the gradient of sample 0 is not finite"),
    ):
        JOB.coordinator.schedule(bad, args=arguments)
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            JOB.coordinator.join()
    with pytest.raises(tf.errors.InvalidArgumentError, match="has id 50"):
        served.enqueue({**batch(0), "a": ids + V})
    require_same(one, served)
    schedule(tf.function(step_of(served)), range(1))
    step_of(one)(0)
    require_same(one, served)


def test_a_refused_evaluation_in_a_function_leaves_what_is_pending() -> None:
    for configs in (features(), features(placements=MIXED)):
        options = {"pipeline_execution_with_tensor_core": True}
        one, served = make(te.TPUEmbedding, configs, te.Adagrad(0.1), **options)
        step, expected = tf.function(step_of(served)), step_of(one)

        @tf.function
        def evaluate(ids: Any, served: Any = served) -> None:
            served.enqueue({**batch(0), "a": ids}, training=False)
            served.dequeue()

        assert schedule(step, range(1)) == [float(expected(0))]
        for _ in range(5):
            JOB.coordinator.schedule(evaluate, args=(batch(0)["a"] + V,))
            with pytest.raises(tf.errors.InvalidArgumentError, match="has id"):
                JOB.coordinator.join()
        # The lookup is one update old, as that update is pending.
        assert schedule(step, range(1, 2)) == [float(expected(1))]


def test_what_servers_refuse_of_divided_tables_changes_none() -> None:
    configs = features(placements=MIXED)
    _, served = make(te.TPUEmbedding, configs, te.Adagrad(0.1))
    before = values(served)
    served.enqueue(batch(0))
    found = gradients(served.dequeue())
    found["b"] = found["b"][1:]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"b.*shape \[15,16\]"):
        served.apply_gradients(found)
    require_unchanged(before, served)
    del configs["d"]
    _, served = make(te.TPUEmbeddingV2, configs, te.Adagrad(0.1))
    before = values(served)
    activations, preserved = served({n: batch(0)[n] for n in configs})
    ids = preserved["t0"].sorted_token_ids
    preserved["t0"] = preserved["t0"]._replace(sorted_token_ids=ids + 1000)
    with pytest.raises(tf.errors.InvalidArgumentError, match="has token id 1"):
        served.apply_gradients(gradients(activations), preserved)
    require_unchanged(before, served)
