"""A step of a whole model in torch, with fbgemm's tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from benchmarks import models
from benchmarks.peers.fbgemm import bags_of, tensors
from benchmarks.scenarios import Scenario
from benchmarks.timing import timed

RULE = "whole model in torch; tables by fbgemm"

_OPS = models.Ops(
    concat=torch.cat,
    stack=torch.stack,
    reshape=torch.reshape,
    swap=lambda x: x.transpose(-2, -1),
    constant=torch.from_numpy,
    relu=torch.relu,
    softplus=torch.nn.functional.softplus,
    softmax=lambda x: torch.softmax(x, -1),
    logsumexp=lambda x: torch.logsumexp(x, -1),
    sum=lambda x: torch.sum(x, -1),
    mean=torch.mean,
)


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes tables and model."""
    bags = bags_of(scenario, optimizer)
    for weights in bags.split_embedding_weights():
        weights.data.copy_(torch.from_numpy(models.first_rows(*weights.shape)))
    for states in bags.split_optimizer_states():
        for state in states:
            state.fill_(models.FIRST_ACCUMULATOR)
    batches = itertools.cycle(tensors(batch) for batch in scenario.batches(4))

    def look_up() -> Sequence[torch.Tensor]:
        return torch.split(bags(*next(batches)), scenario.dim, 1)

    step = step_of(scenario, look_up)
    return {"step": timed(step), "loss": models.last_loss(step)}


def step_of(
    scenario: Scenario, look_up: Callable[[], Sequence[torch.Tensor]]
) -> Callable[[], torch.Tensor]:
    """Returns a step of the scenario's model, which returns its loss."""
    model = models.model_of(scenario)
    loss_of = model.loss(_OPS)
    parameters = [torch.from_numpy(v).requires_grad_() for v in model.parameters]

    def step() -> torch.Tensor:
        loss = loss_of(parameters, look_up())
        loss.backward()
        with torch.no_grad():
            for parameter in parameters:
                parameter.sub_(models.DENSE_RATE * parameter.grad)
                parameter.grad = None
        return loss.detach()

    return step
