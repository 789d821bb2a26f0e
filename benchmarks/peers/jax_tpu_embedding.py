"""The preprocessor of jax-tpu-embedding, with limits from its own statistics."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax_tpu_embedding.sparsecore.lib.nn import (
    embedding,
    embedding_spec,
    table_stacking,
)

from benchmarks import one_stack
from benchmarks.scenarios import Scenario
from benchmarks.timing import timed_both

RULE = "preprocess_sparse_dense_matmul_input"


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Stacks the tables for each number of devices; no optimizer matters."""
    del optimizer
    batches = scenario.batches(4)
    functions: dict[str, Callable[[], float]] = {}
    for name, devices in one_stack.DEVICES.items():
        specs = _stacked(scenario, devices)
        _fit(specs, batches, devices)
        turns = itertools.cycle(batches)
        functions |= timed_both(
            name, lambda s=specs, d=devices, t=turns: _run(next(t), s, d)
        )
    return functions


def _stacked(scenario: Scenario, devices: int) -> list[Any]:
    whole = scenario.batch_size * devices
    specs = []
    sizes = zip(scenario.rows, scenario.ids_per_sample, strict=True)
    for index, (rows, ids) in enumerate(sizes):
        table = embedding_spec.TableSpec(
            name=f"t{index:03}",
            vocabulary_size=rows,
            embedding_dim=scenario.dim,
            initializer=jax.nn.initializers.zeros,
            optimizer=embedding_spec.SGDOptimizerSpec(0.01),
            combiner="sum",
        )
        specs.append(
            embedding_spec.FeatureSpec(
                name=f"f{index:03}",
                table_spec=table,
                input_shape=(whole, ids),
                output_shape=(whole, scenario.dim),
            )
        )
    table_stacking.stack_tables(
        specs, [spec.table_spec.name for spec in specs], devices, one_stack.CORES
    )
    embedding.prepare_feature_specs_for_training(specs, devices, one_stack.CORES)
    return specs


def _run(batch: Any, specs: list[Any], devices: int, *, dropping: bool = False) -> Any:
    return embedding.preprocess_sparse_dense_matmul_input(
        batch,
        None,
        specs,
        local_device_count=1,
        global_device_count=devices,
        num_sc_per_device=one_stack.CORES,
        allow_id_dropping=dropping,
    )


def _fit(specs: list[Any], batches: list[Any], devices: int) -> None:
    """Sets limits and buffers to what the fullest of the batches needs."""
    seen = [_run(batch, specs, devices, dropping=True)[1] for batch in batches]
    kinds = [
        "max_ids_per_partition",
        "max_unique_ids_per_partition",
        "required_buffer_size_per_sc",
    ]
    fullest = {
        kind: {
            stack: np.max([getattr(stats, kind)[stack] for stats in seen], axis=0)
            for stack in getattr(seen[0], kind)
        }
        for kind in kinds
    }
    embedding.update_preprocessing_parameters(
        specs, embedding.SparseDenseMatmulInputStats(**fullest), one_stack.CORES
    )
