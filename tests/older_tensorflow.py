"""The tests that need what older versions of TensorFlow lack, and what that is."""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf
from tensorflow.core.tpu.kernels import sparse_core_layout_pb2
from tensorflow.python.tpu import _pywrap_sparse_core_layout

_raw_ops: Any = tf.raw_ops
_stock: Any = tf.tpu.experimental.embedding
_protos: Any = sparse_core_layout_pb2
_layouts: Any = _pywrap_sparse_core_layout


def _takes(function: Any, argument: str) -> bool:
    return argument in inspect.signature(function).parameters


# The reason, whether this TensorFlow has it, and files with the names of tests, with or
# without their parameters.
_NEEDED: list[tuple[str, bool, dict[str, set[str]]]] = [
    (
        "TensorFlow before 2.20 lacks the ops of a CustomCombiner",
        hasattr(_raw_ops, "XlaSparseDenseMatmulCustomCombinerOnTcWithCsrInput"),
        {
            "software_tpu/test_limits.py": {
                "test_more_ids_than_the_valency_are_refused"
            },
            "software_tpu/test_library.py": {
                "test_an_op_that_has_a_kernel_keeps_it",
                "test_each_op_has_one_kernel",
            },
            "checkpoint/test_golden.py": {
                f"test_files_of_earlier_commits[combiner-v6e-{commit}]"
                for commit in ("36ee9cc", "e08f784")
            },
            "sparse_core/test_custom.py": {
                "test_a_combiner_without_weights_sees_empty_samples",
                "test_a_sample_with_too_many_ids",
                "test_minibatches_beside_a_combiner_are_refused",
                "test_pipelining_does_not_divide_by_weights_that_are_not_there",
                "test_steps[pipelined]",
                "test_steps[sparse_core]",
                "test_the_limits_of_functions_are_those_that_a_tpu_compiles",
            },
            "sparse_core/test_custom_errors.py": {
                "test_functions_that_cannot_be_used",
                "test_what_a_function_raises",
            },
            "sparse_core/test_tpu_strategy.py": {
                "test_the_ops_of_functions_of_the_users"
            },
            "test_limits.py": {"test_rows_that_a_custom_combiner_gets"},
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
                "test_wrong_inputs_are_refused",
                "test_outside_of_a_run_there_is_one_replica",
                "test_padding_is_never_read",
                "test_replicas_must_agree",
                "test_there_are_no_int32_tables",
            }
        },
    ),
    (
        "TableConfig before TensorFlow 2.20 lacks dtype",
        _takes(_stock.TableConfig, "dtype"),
        {
            "test_config.py": {
                "test_arguments_are_those_of_tensorflow[TableConfig]",
                "test_bad_table_arguments_raise_as_in_tensorflow[dtype-value11]",
                "test_bad_table_arguments_raise_as_in_tensorflow[dtype-value12]",
            },
            "test_tf_configs.py": {
                "test_every_option_of_a_table_is_carried[dtype]",
                "test_what_this_release_lacks_is_refused_by_name[dtype-value0]",
            },
        },
    ),
    (
        "SparseCoreTableLayout of TensorFlow 2.18 lacks num_features",
        "num_features" in _protos.SparseCoreTableLayout.DESCRIPTOR.fields_by_name,
        {"test_stacking.py": {"test_a_layout_of_the_user_is_kept"}},
    ),
    (
        "compute_sparse_core_stats before TensorFlow 2.21 fails its own assertion "
        "where a table has several features",
        "num_features" in (_layouts.SparseCoreLayoutStacker.AddTable.__doc__ or ""),
        {"test_sparse_core_stats.py": {"test_what_tensorflows_own_class_says"}},
    ),
    (
        "CustomOptimizer before TensorFlow 2.21 lacks slot_dims",
        _takes(_stock.CustomOptimizer, "slot_dims"),
        {"sparse_core/test_custom.py": {"test_steps[host]"}},
    ),
    (
        "TensorFlow's builder of layouts before 2.21 counts no features",
        "num_features" in (_layouts.SparseCoreLayoutStacker.AddTable.__doc__ or ""),
        {
            "checkpoint/test_command_line.py": {"test_convert_to_sparse_core"},
            "checkpoint/test_sparse_core.py": {
                "test_plain_to_sharded",
                "test_records_that_do_not_fit",
                "test_refusals",
                "test_resharding",
                "test_sharded_to_plain",
                "test_slots_of_one_column",
                "test_stacks_in_use",
                "test_tables_with_other_slots_in_one_stack",
            },
            "test_stacking.py": {
                "test_layouts_are_those_of_tensorflow",
                "test_limits_of_tensorflow_by_default",
                "test_stock_feature_counts_are_those_of_the_stock_caller",
            },
        },
    ),
]


def reason_to_skip(path: str, name: str) -> str | None:
    """Why the test of this file and name cannot run under this TensorFlow, or None."""
    listed = {name, name.partition("[")[0]}
    for reason, is_there, tests in _NEEDED:
        for file, names in tests.items():
            if not is_there and path.endswith(f"tests/{file}") and listed & names:
                return reason
    return None


def names() -> list[tuple[str, str]]:
    """The file below tests and the name of the function of each test of the list."""
    return [
        (file, name.partition("[")[0])
        for *_, tests in _NEEDED
        for file, names in tests.items()
        for name in sorted(names)
    ]
