"""Times ours and the peers in turn, A B A B, and writes what came out.

python -m benchmarks.run --scenario dlrm --optimizer adagrad
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence

from benchmarks import report
from benchmarks.scenarios import SCENARIOS

OURS = "tpu_embedding"


@dataclasses.dataclass
class Worker:
    """A peer in its own process.

    Attributes:
      peer: Its name.
      missing: Why it cannot be measured, or None.
      rule: What its update computes.
      seconds: By function the time of each run.
    """

    peer: str
    process: subprocess.Popen[str]
    missing: str | None = None
    rule: str = ""
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @classmethod
    def start(cls, peer: str, scenario: str, optimizer: str) -> Worker:
        """Starts the process and waits until it is warm."""
        python = _python_of(peer)
        command = [python, "-m", "benchmarks.worker", peer, scenario, optimizer]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        worker = cls(peer, process)
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = json.loads(line) if line else {"missing": "its process ended early"}
        worker.missing = ready.get("missing")
        worker.rule = ready.get("rule", "")
        worker.seconds = {name: [] for name in ready.get("functions", [])}
        return worker

    def measure(self, function: str) -> None:
        """Runs one function once."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(function + "\n")
        self.process.stdin.flush()
        self.seconds[function].append(json.loads(self.process.stdout.readline()))

    def stop(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _python_of(peer: str) -> str:
    """A peer with a venv of its own (`make bench-peers`) runs there."""
    own = pathlib.Path("build", "peers", peer, "bin", "python")
    return str(own) if own.exists() else sys.executable


def measure(
    peers: Sequence[str], scenario: str, optimizer: str, rounds: int
) -> dict[str, dict]:
    """By peer: what it does, why it is missing, and its times in milliseconds."""
    workers = []
    for peer in peers:
        print(f"  preparing {peer} ...", flush=True)
        workers.append(Worker.start(peer, scenario, optimizer))
    present = [worker for worker in workers if worker.missing is None]
    for index in range(rounds):
        print(f"\r  round {index + 1} of {rounds}", end="", flush=True)
        for function in ("lookup", "step"):
            for worker in present:
                if function in worker.seconds:
                    worker.measure(function)
    print()
    for worker in workers:
        worker.stop()
    return {worker.peer: _summary(worker) for worker in workers}


def _summary(worker: Worker) -> dict:
    times = {}
    for function, seconds in worker.seconds.items():
        milliseconds = sorted(1000 * value for value in seconds)
        times[function] = {
            "median": statistics.median(milliseconds),
            "min": milliseconds[0],
            "max": milliseconds[-1],
        }
    return {"rule": worker.rule, "missing": worker.missing, "milliseconds": times}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes build/bench/<scenario>-<optimizer>.{json,md,png}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default="dlrm")
    parser.add_argument("--optimizer", default="adagrad")
    parser.add_argument("--peers", nargs="*", default=["tensorflow_nn"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/bench"))
    flags = parser.parse_args(arguments)
    print(f"{flags.scenario}, {flags.optimizer}")
    results = measure(
        [OURS, *flags.peers], flags.scenario, flags.optimizer, flags.rounds
    )
    title = f"{flags.scenario}-{flags.optimizer}"
    print(report.write(flags.out, title, OURS, results))


if __name__ == "__main__":
    main()
