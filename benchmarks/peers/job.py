"""What a process of a job is told, and what it can do."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.scenarios import Scenario


@dataclasses.dataclass(frozen=True)
class Job:
    """A job of several processes on this machine.

    Attributes:
      system: Which peer.
      optimizer: "sgd", "adagrad" or "rowwise_adagrad".
      wire: "float32" or "bfloat16", what values travel as.
      placement: As te.DistributedOptions has it.
      scenario: The tables, and the samples of a process.
      spread: Tables have so many times the rows of the scenario, and of each `spread`
        rows one has an ID.
      addresses: Of the processes.
      steps: How many are timed.
      rank: Index of this process.
    """

    system: str
    optimizer: str
    wire: str
    placement: str
    scenario: Scenario
    spread: int
    addresses: list[str]
    steps: int
    rank: int = 0

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Job:
        """From the JSON of `dataclasses.asdict`."""
        scenario = fields.pop("scenario")
        for name in ("rows", "ids_per_sample"):
            scenario[name] = tuple(scenario[name])
        return cls(scenario=Scenario(**scenario), **fields)

    @property
    def threads(self) -> int:
        """For each process its part of this machine."""
        return max(1, (os.cpu_count() or 1) // len(self.addresses))

    @property
    def rows(self) -> tuple[int, ...]:
        """Of the tables."""
        return tuple(rows * self.spread for rows in self.scenario.rows)

    def batches(self) -> list[list[np.ndarray]]:
        """Three batches of this process: by table int32 [batch, ids]."""
        batches = self.scenario.batches(3, seed=self.rank)
        return [[self._spread(ids) for ids in batch] for batch in batches]

    def _spread(self, ids: np.ndarray) -> np.ndarray:
        """IDs of the larger table; multiples alone may all be of one process."""
        spread = np.int32(self.spread)
        return ids * spread + ids % spread

    def set_tf_config(self) -> None:
        """For MultiWorkerMirroredStrategy."""
        os.environ["TF_CONFIG"] = json.dumps(
            {
                "cluster": {"worker": self.addresses},
                "task": {"type": "worker", "index": self.rank},
            }
        )


@dataclasses.dataclass(frozen=True)
class Running:
    """A process that has joined its job.

    Attributes:
      step: Trains one step, from its number.
      barrier: Waits for the other processes.
      bytes_sent: So far by this process, or None if the system does not count them.
    """

    step: Callable[[int], None]
    barrier: Callable[[], None]
    bytes_sent: Callable[[], Any] = lambda: None
