"""A model of a step's time, fitted on one and two threads, for machines with more.

    python -m benchmarks.scaling [--rounds 3] [--cores 8 16 64] [--bandwidth 200]

A step takes fixed + (ids * per_id + bytes * per_byte) / threads: `fixed` is what one
thread does (Python, TensorFlow, the ends of loops), `ids` the ids of its batch, `bytes`
what `Scenario.bytes_per_step` counts. It cannot move its bytes faster than the memory:
its least time is bytes / --bandwidth (GB/s). Each case is also predicted by a fit of
the other cases alone, whose error is the one to expect for a new model.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from benchmarks import options
from benchmarks.scenarios import SCENARIOS

# Scenario, optimizer, and the number of its slots that are as wide as a row.
CASES = (
    *(("dlrm", "adagrad", 1), ("dlrm", "sgd", 0), ("growing", "adagrad", 1)),
    *(("one_hot", "adagrad", 1), ("small_bags", "adagrad", 1)),
)
THREADS = (1, 2)
_WARM_UP, _TIMED = 5, 20


@dataclasses.dataclass(frozen=True)
class Work:
    """What a case does in a step; `seconds` is what it took, the median."""

    name: str
    ids: int
    moved: int  # bytes
    threads: int
    seconds: float

    def terms(self) -> tuple[float, float, float]:
        """What the coefficients of the model are multiplied by."""
        return 1.0, self.ids / self.threads, self.moved / self.threads


def fit(works: Sequence[Work]) -> np.ndarray:
    """Fits coefficients, none negative, with the least squared relative errors."""
    rows = np.array([np.array(w.terms()) / w.seconds for w in works])
    best, least = np.zeros(3), np.inf
    # Fit every subset of the three terms, and keep the best fit.
    for count in (1, 2, 3):
        for used in itertools.combinations(range(3), count):
            found = np.zeros(3)
            found[list(used)] = np.linalg.lstsq(rows[:, used], np.ones(len(rows)))[0]
            error = float(np.sum((rows @ found - 1) ** 2))
            if found.min() >= 0 and error < least:
                best, least = found, error
    return best


def predict(coefficients: np.ndarray, work: Work, bandwidth: float = np.inf) -> float:
    """Returns the seconds of a step that moves at most `bandwidth` bytes a second."""
    return max(float(np.dot(coefficients, work.terms())), work.moved / bandwidth)


def left_out(works: Sequence[Work]) -> dict[str, float]:
    """Returns each case's largest relative error of predictions by the others' fit."""
    errors = {}
    for name in {work.name: None for work in works}:
        coefficients = fit([work for work in works if work.name != name])
        errors[name] = max(
            abs(predict(coefficients, work) / work.seconds - 1)
            for work in works
            if work.name == name
        )
    return errors


def measure(rounds: int) -> list[Work]:
    """Measures each case on each number of threads, in turn, in separate processes."""
    works = []
    for scenario, optimizer, slots in CASES:
        seconds: dict[int, list[float]] = {threads: [] for threads in THREADS}
        for _ in range(rounds):
            for threads, times in seconds.items():
                times.append(_timed(scenario, optimizer, threads))
        workload = SCENARIOS[scenario]
        size = (workload.ids_per_step, workload.bytes_per_step(slots))
        for threads, times in seconds.items():
            name = f"{scenario}, {optimizer}"
            works.append(Work(name, *size, threads, statistics.median(times)))
            print(f"  {name}, {threads}: {1000 * works[-1].seconds:.2f} ms", flush=True)
    return works


def _timed(scenario: str, optimizer: str, threads: int) -> float:
    command = [sys.executable, "-m", "benchmarks.scaling", "--child"]
    command += [scenario, optimizer, str(threads)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def _child(scenario: str, optimizer: str, threads: str) -> float:
    import tensorflow as tf

    from benchmarks.peers import tpu_embedding

    tf.config.threading.set_intra_op_parallelism_threads(int(threads))
    # Random rows of the largest case take longer to make than all its steps.
    zeros = tf.zeros_initializer()
    workload = SCENARIOS[scenario]
    step = tpu_embedding.prepare(workload, optimizer, initializer=zeros)["step"]
    return statistics.median([step() for _ in range(_WARM_UP + _TIMED)][_WARM_UP:])


def markdown(works: Sequence[Work], cores: Sequence[int], bandwidth: float) -> str:
    """Returns what was fitted, its errors and its predictions."""
    coefficients = fit(works)
    fixed, per_id, per_byte = coefficients
    errors = left_out(works)
    lines = [
        "### scaling",
        "",
        f"A step takes {1000 * fixed:.2f} ms, and on one thread {1e9 * per_id:.1f} ns "
        f"an id and {1e9 * per_byte:.3f} ns a byte. At most {bandwidth:g} GB/s.",
        "",
        "| step, ms | measured on 1, 2 threads | error | left out | "
        + " | ".join(f"{n} cores" for n in cores)
        + " |",
        "|---" * (4 + len(cores)) + "|",
    ]
    for name, error in errors.items():
        own = [work for work in works if work.name == name]
        fitted = max(abs(predict(coefficients, w) / w.seconds - 1) for w in own)
        more = [dataclasses.replace(own[0], threads=n) for n in cores]
        cells = [
            name,
            ", ".join(f"{1000 * work.seconds:.2f}" for work in own),
            *(f"{100 * part:.0f} %" for part in (fitted, error)),
            *(f"{1000 * predict(coefficients, w, 1e9 * bandwidth):.2f}" for w in more),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, fits and writes build/bench/scaling.{json,md}."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--child"]:
        print(json.dumps(_child(*arguments[1:])))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cores", nargs="+", type=options.positive, default=[8, 16, 64]
    )
    parser.add_argument("--bandwidth", type=float, default=200.0, help="GB/s")
    options.add_rounds(parser, 3)
    options.add_out(parser)
    flags = parser.parse_args(arguments)
    with options.alone(flags.out):
        works = measure(flags.rounds)
        written = json.dumps([dataclasses.asdict(work) for work in works], indent=2)
        (flags.out / "scaling.json").write_text(written + "\n")
        table = markdown(works, flags.cores, flags.bandwidth)
        (flags.out / "scaling.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
