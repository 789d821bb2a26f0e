"""The parts of the portable engine that stand by themselves.

The conformance suite, test_portable_inputs.py and test_portable_steps.py show that
its numbers and errors are those of the host engine.
"""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tpu_embedding.engines.portable.engine import _host_of
from tpu_embedding.lookup.graph_checks import Check, refuse, require, text


def test_the_first_of_many_checks_that_fails_is_named() -> None:
    @tf.function
    def check(holds: tf.Tensor) -> tf.Tensor:
        checks = [
            Check(holds[k], lambda k=k: text(f"Check {k} failed.")) for k in range(9)
        ]
        with tf.control_dependencies(require(checks)):
            return tf.constant(True)

    assert check(tf.ones([9], tf.bool))
    for number in range(9):
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            check(tf.range(9) < number)
        assert f"Check {number} failed." in raised.value.message
        assert raised.value.message.count("Check") == 1


@pytest.mark.parametrize("function", [lambda call: call, tf.function])
def test_errors_say_the_message_as_it_is(function: Any) -> None:
    message = """It's "quoted", {0} %s \\n and 7."""

    @function
    def invalid(number: tf.Tensor) -> tf.Tensor:
        check = Check(
            number < 7, lambda: text("""It's "quoted", {0} %s \\n and """, number, ".")
        )
        with tf.control_dependencies(require([check])):
            return number + 1

    @function
    def wrong(code: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies(refuse(code, ["", "other", message])):
            return code + 1

    assert invalid(tf.constant(6)) == 7
    assert wrong(tf.constant(0)) == 1
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        invalid(tf.constant(7))
    assert message in raised.value.message
    with pytest.raises(tf.errors.FailedPreconditionError) as refused:
        wrong(tf.constant(2))
    assert message in refused.value.message


def test_checks_are_made_on_the_cpu_of_the_device() -> None:
    worker = "/job:localhost/replica:0/task:0"
    assert _host_of(f"{worker}/device:GPU:1") == f"{worker}/device:CPU:0"
    assert _host_of(f"{worker}/device:CPU:1") == f"{worker}/device:CPU:1"
    assert _host_of("/device:CPU:0") == "/device:CPU:0"
