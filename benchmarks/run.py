"""Times this package and the peers in alternating runs.

python -m benchmarks.run --scenario dlrm --optimizer adagrad
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import options, report
from benchmarks.scenarios import SCENARIOS

OURS = "tpu_embedding"
OURS_BESIDE = {  # The form of ours that is measured beside a peer.
    "keras_fit": "layer_fit",
    "tensorflow_tpu_host_ops": "tpu_embedding_v2",
    "jax_tpu_embedding": "tpu_embedding_v2",
    "tpu_embedding_packed": "tpu_embedding_ragged",
    "tfra": "tpu_embedding_growing",
    **dict.fromkeys(
        ("model_dense", "model_fbgemm", "model_torch_dense"), "model_tpu_embedding"
    ),
}
# Peers that run in the venv of another one.
_VENVS = {"model_fbgemm": "fbgemm", "model_torch_dense": "fbgemm"}
# How much losses of the same model may differ, because sums have other orders.
_LOSSES_DIFFER = 1e-4
_FEWEST_ROUNDS, _SECONDS = 3, 30.0
PEERS = (
    "machine_limits",
    "fbgemm",
    "torch_embedding_bag",
    "tfrs",
    "keras_rs",
    "tensorflow_nn",
    "keras_fit",
    "tpu_embedding_bfloat16",
    "tpu_embedding_packed",
)
# The number of slots as wide as the table, by optimizer.
SLOTS = {"sgd": 0, "adagrad": 1, "adam": 2, "ftrl": 2, "rowwise_adagrad": 0}


@dataclasses.dataclass
class Worker:
    """A peer in its own process.

    Attributes:
      peer: Its name.
      missing: Why it cannot be measured, or None.
      rule: What its update computes.
      loss: The loss of its model after some steps, or None.
      seconds: The times of all runs, by function.
      cold: The times of the first run of each turn, by function.
    """

    peer: str
    process: subprocess.Popen[str]
    missing: str | None = None
    rule: str = ""
    loss: float | None = None
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    cold: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @classmethod
    def start(cls, peer: str, scenario: str, optimizer: str) -> Worker:
        """Starts the process and waits until it is warm."""
        python = python_of(peer)
        command = [python, "-m", "benchmarks.worker", peer, scenario, optimizer]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        worker = cls(peer, process)
        ready = worker._answer()
        worker.missing = ready.get("missing")
        worker.rule = ready.get("rule", "")
        worker.loss = ready.get("loss")
        worker.seconds = {name: [] for name in ready.get("functions", [])}
        return worker

    def measure(self, function: str) -> None:
        """Runs one function some times in a row; a failure makes it `missing`."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # If it ended, the answer says so.
            self.process.stdin.write(function + "\n")
            self.process.stdin.flush()
        answer = self._answer()
        if "missing" in answer:
            self.missing = answer["missing"]
            self.seconds, self.cold = {}, {}  # What it did before is not comparable.
        else:
            self.seconds[function] += answer["seconds"]
            self.cold.setdefault(f"{function}, cold", []).append(answer["cold"])

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        code = self.process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            return {"missing": f"its process was killed by {name} (out of memory?)"}
        return {"missing": f"its process ended early, with code {code}"}

    def stop(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def python_of(peer: str) -> str:
    """Returns the Python of a peer's own venv (`make bench-peers`), else this one."""
    venv = _VENVS.get(peer, peer)
    own = pathlib.Path("build", "peers", venv, "bin", "python")
    return str(own) if own.exists() else sys.executable


def beside(peer: str, scenario: str, optimizer: str, rounds: int) -> dict:
    """Returns a peer's rule, why it is missing or None, its times, and ours.

    Peers come one by one, each in turn with ours, A B A B: all tables of all peers
    at once would not fit into the memory of a small machine.
    """
    print(f"  {peer}: preparing ...", flush=True)
    theirs = Worker.start(peer, scenario, optimizer)
    result = {"rule": theirs.rule, "missing": theirs.missing}
    if theirs.missing:
        print(f"  {peer}: {theirs.missing}", flush=True)
        theirs.stop()
        return {**result, "milliseconds": {}, "ours": {}}
    ours = Worker.start(OURS_BESIDE.get(peer, OURS), scenario, optimizer)
    if theirs.loss is not None and ours.loss is not None:
        print(f"  {peer}: its loss {theirs.loss:.6f}, ours {ours.loss:.6f}")
        if abs(theirs.loss - ours.loss) > _LOSSES_DIFFER * abs(ours.loss):
            theirs.missing = f"loss {theirs.loss:.6f}, ours {ours.loss:.6f}"
    if not (ours.missing or theirs.missing):
        take_turns(ours, theirs, rounds)
    for worker in (ours, theirs):
        worker.stop()
    return {
        **result,
        "missing": theirs.missing or (ours.missing and f"ours: {ours.missing}"),
        "milliseconds": summary(theirs),
        "ours": summary(ours),
    }


def take_turns(ours: Worker, theirs: Worker, rounds: int) -> None:
    """Runs all functions of both in turn, until one of them fails.

    After _FEWEST_ROUNDS it stops if they took _SECONDS, to keep `make bench` short.
    """
    start = time.monotonic()
    for index in range(rounds):
        if index >= _FEWEST_ROUNDS and time.monotonic() - start > _SECONDS:
            break
        print(f"\r  {theirs.peer}: round {index + 1} of {rounds}", end="", flush=True)
        for worker in (ours, theirs):
            for function in list(worker.seconds):
                worker.measure(function)
                if worker.missing:
                    print(f"\n  {worker.peer}: {worker.missing}", flush=True)
                    return
    print()


def summary(worker: Worker) -> dict[str, dict[str, float]]:
    """Returns the median, least and most milliseconds of each function."""
    times = {}
    for function, seconds in (worker.seconds | worker.cold).items():
        milliseconds = sorted(1000 * value for value in seconds)
        if milliseconds:
            times[function] = {
                "median": statistics.median(milliseconds),
                "min": milliseconds[0],
                "max": milliseconds[-1],
            }
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes build/bench/<scenario>-<optimizer>.{json,md,png}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default="dlrm")
    parser.add_argument("--optimizer", choices=sorted(SLOTS), default="adagrad")
    options.add_peers(parser, PEERS)
    options.add_rounds(parser, 8)
    options.add_out(parser)
    flags = parser.parse_args(arguments)
    print(f"{flags.scenario}, {flags.optimizer}")
    scenario = SCENARIOS[flags.scenario]
    run = report.Run(
        scenario=flags.scenario,
        optimizer=flags.optimizer,
        step_bytes=scenario.bytes_per_step(SLOTS[flags.optimizer]),
        distinct_rows=scenario.distinct_rows(),
        peers={},
    )
    with options.alone(flags.out):
        for peer in flags.peers:
            what = (peer, flags.scenario, flags.optimizer)
            run.peers[peer] = beside(*what, flags.rounds)
            report.write(flags.out, run)  # Keeps the results if a later peer fails.
    print(report.markdown(run))


if __name__ == "__main__":
    main()
