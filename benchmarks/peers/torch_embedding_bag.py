"""torch.nn.EmbeddingBag with sparse gradients, and torch's own optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from benchmarks.scenarios import Scenario
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
        [torch.from_numpy(ids).long() for ids in batch] for batch in scenario.batches(4)
    )

    def forward() -> list[torch.Tensor]:
        return [bag(ids) for bag, ids in zip(bags, next(batches), strict=True)]

    def step() -> None:
        rule.zero_grad()
        torch.autograd.backward(forward(), gradients)
        rule.step()

    def lookup() -> None:
        with torch.no_grad():
            forward()

    return {"step": timed(step), "lookup": timed(lookup)}
