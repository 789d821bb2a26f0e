"""The tests that need what older versions of TensorFlow lack, and what that is."""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

_raw_ops: Any = tf.raw_ops


def _takes(function: Any, argument: str) -> bool:
    return argument in inspect.signature(function).parameters


# The reason, whether this TensorFlow has it, and files with the names of functions.
_NEEDED: list[tuple[str, bool, dict[str, set[str]]]] = [
    (
        "TensorFlow before 2.20 lacks the ops of a CustomCombiner",
        hasattr(_raw_ops, "XlaSparseDenseMatmulCustomCombinerOnTcWithCsrInput"),
        {
            "software_tpu/test_combiner.py": {
                "test_a_combiner_without_weights_gets_none_and_sees_empty_samples",
                "test_lookup",
                "test_more_ids_than_the_valency_are_refused",
                "test_update",
            },
            "software_tpu/test_library.py": {
                "test_an_op_that_has_a_kernel_keeps_it",
                "test_each_op_has_one_kernel",
            },
            "sparse_core/test_custom.py": {
                "test_a_sample_with_too_many_ids",
                "test_minibatches_beside_a_combiner_are_refused",
                "test_pipelining_does_not_divide_by_weights_that_are_not_there",
                "test_steps",
                "test_the_limits_of_functions_are_those_that_a_tpu_compiles",
            },
            "sparse_core/test_custom_errors.py": {
                "test_functions_that_cannot_be_used",
                "test_what_a_function_raises",
            },
            "sparse_core/test_tpu_strategy.py": {
                "test_the_ops_of_functions_of_the_users",
            },
        },
    ),
    (
        "SparseCore ops before TensorFlow 2.20 lack num_sparsecores_per_device",
        _takes(
            _raw_ops.XlaSparseDenseMatmulWithStaticBufferSize,
            "num_sparsecores_per_device",
        ),
        {
            "software_tpu/test_limits.py": {
                "test_a_lookup_refuses",
                "test_an_update_refuses",
                "test_outside_of_a_run_there_is_one_replica",
                "test_padding_is_never_read",
                "test_replicas_must_agree",
                "test_there_are_no_int32_tables",
            },
        },
    ),
]


def reason_to_skip(path: str, function: str) -> str | None:
    """Why a test cannot run under this TensorFlow, or None if it can.

    Args:
      path: its file, such as ".../tests/sparse_core/test_custom.py".
      function: the name of its function.
    """
    for reason, is_there, tests in _NEEDED:
        for file, names in tests.items():
            if not is_there and path.endswith(f"tests/{file}") and function in names:
                return reason
    return None
