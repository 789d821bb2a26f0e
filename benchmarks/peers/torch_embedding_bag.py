"""torch.nn.EmbeddingBag with sparse gradients, and torch's own optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.scenarios import Scenario, jagged, weights
from benchmarks.timing import timed

RULE = "torch.optim on sparse gradients, summed per row first"

_OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "adam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.01),
}


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes the tables and the batches."""
    if optimizer not in _OPTIMIZERS:
        raise NotImplementedError(f"torch has no {optimizer} for sparse gradients.")
    bags = torch.nn.ModuleList(
        torch.nn.EmbeddingBag(rows, scenario.dim, mode="sum", sparse=True)
        for rows in scenario.rows
    )
    rule = _OPTIMIZERS[optimizer](list(bags.parameters()))
    gradients = [torch.ones(scenario.batch_size, scenario.dim) for _ in bags]
    batches = itertools.cycle(
        [_inputs(scenario, ids) for ids in batch]
        for batch in scenario.batches(4, with_weights=True)
    )

    def forward() -> list[torch.Tensor]:
        return [bag(*given) for bag, given in zip(bags, next(batches), strict=True)]

    def step() -> None:
        rule.zero_grad()
        torch.autograd.backward(forward(), gradients)
        rule.step()

    def lookup() -> None:
        with torch.no_grad():
            forward()

    return {"step": timed(step), "lookup": timed(lookup)}


def _inputs(scenario: Scenario, ids: np.ndarray) -> list[torch.Tensor | None]:
    """Returns the inputs of a bag: ids of one size, or ids, offsets and weights."""
    if not scenario.most_ids:
        return [torch.from_numpy(ids).long()]
    indices, offsets = jagged([ids])
    given = torch.from_numpy(weights(indices)) if scenario.weighted else None
    return [torch.from_numpy(indices).long(), torch.from_numpy(offsets[:-1]), given]
