"""Runs SparseCore ops on a software TPU, on values given replica by replica."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from replica_values import of_replicas

from tpu_embedding.testing import SoftwareTPUStrategy


@functools.cache
def strategy_of(generation: str, num_devices: int) -> SoftwareTPUStrategy:
    return SoftwareTPUStrategy(generation, num_devices)


def call(
    strategy: SoftwareTPUStrategy,
    op: str,
    inputs: Sequence[dict[str, Any]],
    **attributes: Any,
) -> None:
    """Runs `op` on inputs by replica; functions among the attributes are traced."""

    def traced(value: Any) -> Any:
        if not hasattr(value, "get_concrete_function"):
            return value
        function = value.get_concrete_function()
        # An attribute that names a function does not bring it along.
        function.add_to_graph(tf.compat.v1.get_default_graph())
        return function

    def program(inputs: dict[str, Any]) -> Any:
        made = {name: traced(value) for name, value in attributes.items()}
        return getattr(tf.raw_ops, op)(**inputs, **made, table_name="t")

    values = [tf.nest.map_structure(tf.constant, own) for own in inputs]
    strategy.run(program, (of_replicas(strategy, values),))


def lookup_attributes(num_samples: int) -> dict[str, Any]:
    return {
        "input_size": num_samples,
        "quantization_config_low": 0.0,
        "quantization_config_high": 0.0,
        "quantization_config_num_buckets": 0,
    }
