"""Runs SparseCore ops on a software TPU, on values given replica by replica."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from replica_values import of_replicas

from tpu_embedding.testing import SoftwareTPUStrategy

# Limits that no test meets by accident.
MANY = 1 << 20


@functools.cache
def strategy_of(generation: str, num_devices: int) -> SoftwareTPUStrategy:
    return SoftwareTPUStrategy(generation, num_devices)


@functools.cache
def _program(strategy: SoftwareTPUStrategy, op: str, attributes: tuple) -> Any:
    def program(inputs: dict[str, Any]) -> Any:
        return getattr(tf.raw_ops, op)(**inputs, **dict(attributes))

    return program


def call(
    strategy: SoftwareTPUStrategy,
    op: str,
    inputs: Sequence[dict[str, Any]],
    **attributes: Any,
) -> list[list[np.ndarray]]:
    """The outputs of `op` by replica, given its inputs by replica."""
    if op.endswith("StaticBufferSize"):
        attributes.setdefault("max_ids_per_sparse_core", MANY)
        attributes.setdefault("max_unique_ids_per_sparse_core", MANY)
    distributed = {
        name: of_replicas(strategy, [tf.constant(own[name]) for own in inputs])
        for name in inputs[0]
    }
    program = _program(strategy, op, tuple({"table_name": "t", **attributes}.items()))
    outputs = strategy.run(program, (distributed,))
    if not isinstance(outputs, tuple):
        outputs = (outputs,)
    by_output = [strategy.experimental_local_results(output) for output in outputs]
    return [
        [value.numpy() for value in replica] for replica in zip(*by_output, strict=True)
    ]


def lookup_attributes(num_samples: int) -> dict[str, Any]:
    return {
        "input_size": num_samples,
        "quantization_config_low": 0.0,
        "quantization_config_high": 0.0,
        "quantization_config_num_buckets": 0,
    }
