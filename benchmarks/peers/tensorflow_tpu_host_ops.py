"""The host ops of tensorflow-tpu, as its own TPUEmbeddingV2 calls them.

ConvertToListOfSparseCoreCooTensors for each feature, SortListOfSparseCoreCooTensors for
each SparseCore, ConvertToSparseCoreCsrWrappedCooTensor. They need no TPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

# tensorflow-tpu looks for a TPU when it is imported, and asks the network about it.
os.environ.update(
    TF_ENABLED_DEVICE_TYPES="CPU",
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5p-8",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_WORKER_ID="0",
)

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import kernels

from benchmarks import feed, one_stack
from benchmarks.scenarios import Scenario
from benchmarks.timing import timed_both

RULE = "the three host ops of TensorFlow's TPUEmbeddingV2"
_WIDTH = 128


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Traces one function for each number of devices; no optimizer matters."""
    del optimizer
    op = "ConvertToListOfSparseCoreCooTensors"
    if not kernels.get_registered_kernels_for_op(op).kernel:
        raise NotImplementedError("not installed: tensorflow-tpu (make bench-peers)")
    functions: dict[str, Callable[[], float]] = {}
    for name, devices in one_stack.DEVICES.items():
        stack = one_stack.Stack.of(scenario, devices)
        functions |= timed_both(name, step(scenario, stack, scenario.batches(4)))
    return functions


def step(
    scenario: Scenario, stack: one_stack.Stack, batches: list[list[np.ndarray]]
) -> Callable[[], Any]:
    """Returns a function that gives the last op's result for the next batch."""
    weights = [tf.ones(scenario.batch_size * k) for k in scenario.ids_per_sample]
    splits = [
        tf.constant(np.arange(scenario.batch_size + 1) * k, tf.int32)
        for k in scenario.ids_per_sample
    ]

    next_batch = feed.dense([[ids.reshape(-1) for ids in batch] for batch in batches])

    @tf.function(autograph=False)
    def convert() -> Any:
        lists = [
            tf.raw_ops.ConvertToListOfSparseCoreCooTensors(
                indices_or_row_splits=splits[i],
                values=values,
                weights=weights[i],
                sample_count=scenario.batch_size,
                combiner="sum",
                num_sc_per_chip=one_stack.CORES,
                row_offset=stack.places[i].sample_offset,
                col_offset=stack.places[i].row_offset,
                col_shift=stack.places[i].shift,
                num_sc_shards=stack.shards,
                stacked_table_sample_count=stack.samples,
            )
            for i, values in enumerate(next_batch())
        ]
        return _wrap(stack, [_sort(scenario, stack, lists, c) for c in _CORES])

    return convert


_CORES = range(one_stack.CORES)


def _sort(scenario: Scenario, stack: one_stack.Stack, lists: Any, core: int) -> Any:
    return tf.raw_ops.SortListOfSparseCoreCooTensors(
        row_ids_list=[one.row_ids_list[core] for one in lists],
        col_ids_list=[one.col_ids_list[core] for one in lists],
        gains_list=[one.gains_list[core] for one in lists],
        sample_count_list=[scenario.batch_size // one_stack.CORES] * len(lists),
        col_offset_list=[place.row_offset for place in stack.places],
        num_replica=stack.devices,
        table_vocab_size=stack.rows,
        feature_width=_WIDTH,
        num_sc_per_chip=one_stack.CORES,
        max_ids_per_sparse_core=one_stack.NO_LIMIT,
        max_unique_ids_per_sparse_core=one_stack.NO_LIMIT,
        table_name="stack",
    )


def _wrap(stack: one_stack.Stack, cores: list[Any]) -> Any:
    return tf.raw_ops.ConvertToSparseCoreCsrWrappedCooTensor(
        sorted_row_ids_list=[core.sorted_row_ids for core in cores],
        sorted_col_ids_list=[core.sorted_col_ids for core in cores],
        sorted_gains_list=[core.sorted_gains for core in cores],
        id_counts_list=[core.id_counts for core in cores],
        splits=tf.constant(0, tf.int64),
        sample_count_per_sc=stack.samples // one_stack.CORES,
        num_replica=stack.devices,
        max_minibatches_per_sc=64,
        max_ids_per_chip_per_sample=one_stack.IDS_PER_SAMPLE,
        table_vocab_size=stack.rows,
        feature_width=_WIDTH,
        table_name="stack",
        allow_id_dropping=False,
    )
