"""The same model without tables: what torch's dense layers take."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks import models
from benchmarks.peers.model_fbgemm import step_of
from benchmarks.scenarios import Scenario
from benchmarks.timing import timed

RULE = "the model alone in torch, its activations are given"


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes the model."""
    del optimizer
    shape = [scenario.batch_size, scenario.dim]
    given = [torch.from_numpy(models.first_rows(*shape)) for _ in scenario.rows]

    def look_up() -> list[torch.Tensor]:
        for activations in given:
            activations.requires_grad_().grad = None
        return given

    return {"step": timed(step_of(scenario, look_up))}
