"""Ours: `preprocessing.partition`, which TPUEmbeddingV2 runs for SparseCores."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import tensorflow as tf

from benchmarks import one_stack
from benchmarks.scenarios import Scenario
from benchmarks.timing import timed_both
from tpu_embedding import preprocessing
from tpu_embedding.inputs import to_id_batch
from tpu_embedding.layout.partitions import (
    PartitionedFeature,
    PartitionedTable,
    Partitioning,
)

RULE = "one op for all tables"


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Traces one function for each number of devices; no optimizer matters."""
    del optimizer
    functions: dict[str, Callable[[], float]] = {}
    for name, devices in one_stack.DEVICES.items():
        batches = itertools.cycle(
            [tf.constant(ids) for ids in batch] for batch in scenario.batches(4)
        )
        step = _step(scenario, one_stack.Stack.of(scenario, devices))
        functions |= timed_both(name, lambda s=step, b=batches: s(next(b)))
    return functions


def _step(scenario: Scenario, stack: one_stack.Stack) -> Callable:
    features = tuple(
        PartitionedFeature(
            path=str(index),
            table=str(index),
            vocabulary_size=rows,
            combiner="sum",
            invalid_ids="error",
            samples=scenario.batch_size,
            sample_offset=place.sample_offset,
            row_offset=place.row_offset,
            shift=place.shift,
            output_shape=(scenario.batch_size,),
        )
        for index, (rows, place) in enumerate(
            zip(scenario.rows, stack.places, strict=True)
        )
    )
    table = PartitionedTable(
        name="stack",
        rows=stack.rows,
        samples=stack.samples,
        features=tuple(range(len(features))),
        max_ids_per_partition=one_stack.NO_LIMIT,
        max_unique_ids_per_partition=one_stack.NO_LIMIT,
    )
    partitioning = Partitioning(
        one_stack.CORES,
        stack.devices,
        features,
        (table,),
        max_ids_per_chip_per_sample=one_stack.IDS_PER_SAMPLE,
    )

    @tf.function(autograph=False)
    def step(ids: list[tf.Tensor]) -> preprocessing.PartitionedBatch:
        batches = [to_id_batch(str(i), values) for i, values in enumerate(ids)]
        return preprocessing.partition(batches, partitioning)

    return step
