"""FBGEMM's table-batched embedding on the CPU: the update is part of backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks.scenarios import Scenario, jagged, weights
from benchmarks.timing import timed

RULE = "fused in backward, gradients summed per row"

_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def bags_of(
    scenario: Scenario, optimizer: str
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Makes a table for each feature."""
    if optimizer not in _OPTIMIZERS:
        raise NotImplementedError(f"fbgemm_gpu refuses {optimizer} on the CPU.")
    return SplitTableBatchedEmbeddingBagsCodegen(
        [
            (rows, scenario.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
            for rows in scenario.rows
        ],
        optimizer=_OPTIMIZERS[optimizer],
        learning_rate=0.01,
    )


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes the tables and the batches."""
    bags = bags_of(scenario, optimizer)
    bags.init_embedding_weights_uniform(-0.1, 0.1)
    gradient = torch.ones(scenario.batch_size, scenario.dim * len(scenario.rows))
    weighted = scenario.weighted
    batches = itertools.cycle(
        (*tensors(batch), *([torch.from_numpy(weights(jagged(batch)[0]))] * weighted))
        for batch in scenario.batches(4, with_weights=True)
    )

    def step() -> None:
        bags(*next(batches)).backward(gradient)

    def lookup() -> None:
        with torch.no_grad():
            bags(*next(batches))

    return {"step": timed(step), "lookup": timed(lookup)}


def tensors(batch: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins all ids in one tensor, with the first position of each sample."""
    indices, offsets = jagged(batch)
    return torch.from_numpy(indices).long(), torch.from_numpy(offsets).long()
