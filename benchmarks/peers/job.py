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
      system: The peer to run.
      optimizer: "sgd", "adagrad" or "rowwise_adagrad".
      wire: The dtype in which values travel, "float32" or "bfloat16".
      placement: The `placement` of te.DistributedOptions.
      scenario: The tables, and the samples of a process.
      spread: Tables have `spread` times the rows of the scenario, and one of each
        `spread` rows has an ID.
      addresses: The addresses of the processes.
      steps: The number of timed steps.
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
        """Makes a job from the JSON of `dataclasses.asdict`."""
        scenario = fields.pop("scenario")
        for name in ("rows", "ids_per_sample"):
            scenario[name] = tuple(scenario[name])
        return cls(scenario=Scenario(**scenario), **fields)

    @property
    def threads(self) -> int:
        """The threads of each process, which share this machine's CPUs equally."""
        return max(1, (os.cpu_count() or 1) // len(self.addresses))

    @property
    def rows(self) -> tuple[int, ...]:
        """The number of rows of each table."""
        return tuple(rows * self.spread for rows in self.scenario.rows)

    def batches(self) -> list[list[np.ndarray]]:
        """Returns three batches of this process: by table int32 [batch, ids]."""
        batches = self.scenario.batches(3, seed=self.rank)
        return [[self._spread(ids) for ids in batch] for batch in batches]

    def _spread(self, ids: np.ndarray) -> np.ndarray:
        """Maps IDs to the larger table; one process might own all exact multiples."""
        spread = np.int32(self.spread)
        return ids * spread + ids % spread

    def set_tf_config(self) -> None:
        """Sets TF_CONFIG for MultiWorkerMirroredStrategy."""
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
      bytes_sent: Returns the bytes sent by this process so far, or None if unknown.
    """

    step: Callable[[int], None]
    barrier: Callable[[], None]
    bytes_sent: Callable[[], Any] = lambda: None
