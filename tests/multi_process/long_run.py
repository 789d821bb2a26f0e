"""Jobs of several processes for half an hour: `make test-distributed`.

    PYTHONPATH=tests python -m multi_process.long_run [PART ...] [--seed 1] [--quick]

Parts: fuzz, refusals, faults, checkpoints, steps. Each prints a line per item and a
table at the end; the exit status is 1 if an item failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import numpy as np
import tensorflow as tf
from multi_process import training
from multi_process.calls import Fault
from multi_process.jobs import Failure, Job
from multi_process.training import FEATURES, Case

import tpu_embedding as te

SIZES = (1, 2, 3, 4)
# These promise the bits of one process, the others 1e-6.
EXACT = ("sgd", "adagrad", "rowwise", "ftrl", "clipped", "scheduled_adagrad")
KINDS = ("kill", "stop", "exception", "exit", "stuck")
PLACES = ("enqueue", "dequeue", "update", "save")
TIMEOUT_SECONDS = 30  # of the processes that a stuck one keeps waiting
LIMIT_SECONDS = 60.0  # for an error in each process


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line.

    Attributes:
      seed: Of the fuzzed cases.
      quick: Whether a tenth will do.
    """

    seed: int
    quick: bool


class Report:
    """Lines of progress, and a table."""

    def __init__(self, part: str, number: int, *columns: str) -> None:
        self._part, self._number = part, number
        self._rows: list[Sequence[object]] = [columns, ["---"] * len(columns)]
        self.failed = 0

    def add(self, *values: object, problem: str = "") -> None:
        """Adds an item; `problem` says what is wrong with it."""
        self._rows.append(values)
        self.failed += bool(problem)
        text = " ".join(str(value) for value in values)
        done = f"[{self._part} {len(self._rows) - 2}/{self._number}]"
        print(done, text, f"FAILED: {problem}" if problem else "", flush=True)

    def show(self) -> None:
        print()
        for row in self._rows:
            print("|", " | ".join(str(value) for value in row), "|")
        print(f"\n{self._part}: {self.failed} of {len(self._rows) - 2} failed\n")


@contextlib.contextmanager
def jobs(sizes: Sequence[int]) -> Iterator[dict[int, Job]]:
    """Jobs of these sizes, which start at the same time."""
    with contextlib.ExitStack() as stack:
        started = {size: stack.enter_context(Job(size)) for size in sizes}
        for job in started.values():  # Takes minutes on a busy machine.
            job.run("rank", timeout=900)
        yield started


# Fuzzed training.


def random_case(random: np.random.Generator) -> Case:
    def one(*values: Any) -> Any:
        return values[random.integers(len(values))]

    def each(*values: Any) -> Any:
        return tuple(one(*values) for _ in range(3))

    version, dtype = one(1, 1, 2), one("float32", "float32", "bfloat16", "int8")
    dims = (16, 20, 33, 64) if dtype == "int8" else (1, 4, 5, 8, 16, 33)
    return Case(
        optimizer=one(*training.OPTIMIZERS),
        steps=10,
        version=version,
        pipelined=one(False, True),
        dtype=dtype,
        weights=one(False, True),
        graph=one(False, True),
        invalid_ids=one("error", "drop", "mod"),
        evaluate=version == 1 and one(False, True),
        empty=one(False, True),
        placement=one("auto", "rows", "whole"),
        rows=each(1, 2, 3, 7, 50, 400),
        dims=each(*dims),
        combiners=each("sum", "mean", "sqrtn"),
        choices=each(None, None, "rows", "whole"),
        tables=tuple(int(table) for table in random.integers(0, 3, len(FEATURES))),  # type: ignore[arg-type]
        length=int(random.integers(1, 5)),
        seed=int(random.integers(1 << 31)),
    )


def differing_bits(found: np.ndarray, expected: np.ndarray) -> int:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise AssertionError(f"{found.dtype}{found.shape}, not {expected.shape}")
    parts = (np.ascontiguousarray(a).view(np.uint8) for a in (found, expected))
    return int(np.unpackbits(np.bitwise_xor(*parts)).sum())


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    one, other = found.astype(np.float64), expected.astype(np.float64)
    return float((np.abs(one - other) / np.maximum(np.abs(other), 1)).max(initial=0))


def pairs(found: Any, case: Case, size: int) -> Iterator[tuple[Any, Any]]:
    """What the processes have, beside what as many replicas of one process have."""
    activations, tables = training.train_replicas(case, size)
    for process, (own, own_tables) in enumerate(found):
        assert len(own) == len(activations)
        for step, expected in zip(own, activations, strict=True):
            for name, values in step.items():
                yield values[0], expected[name][process]
        for name, values in own_tables.items():
            yield values, tables[name]


def fuzz(options: Options) -> Report:
    """1,000 steps of random cases in 1 to 4 processes."""
    number = 10 if options.quick else 100
    random = np.random.default_rng(options.seed)
    report = Report("fuzz", number, "case", "processes", "differing bits", "largest")
    with jobs(SIZES) as started:
        for index in range(number):
            case, size = random_case(random), SIZES[index % len(SIZES)]
            problem, bits, largest = "", 0, 0.0
            try:
                found_by_all = started[size].run("train", case, timeout=600)
                for found, expected in pairs(found_by_all, case, size):
                    bits += differing_bits(found, expected)
                    largest = max(largest, relative_error(found, expected))
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if (bits and case.optimizer in EXACT) or largest > 1e-6:
                problem = f"{bits} bits differ"
            report.add(
                case if problem else case.optimizer,
                size,
                bits,
                largest,
                problem=problem,
            )
    return report


def refusals(options: Options) -> Report:
    """2,000 steps, of which some are refused or differ in one process."""
    number = 4 if options.quick else 40
    report = Report("refusals", number, "seed", "processes", "steps")
    with jobs(SIZES[1:3]) as started:
        for index in range(number):
            seed, size, problem = options.seed + index, SIZES[1 + index % 2], ""
            try:
                started[size].run("refusals.run", 50, seed, timeout=600)
            except AssertionError as error:
                problem = str(error)
            report.add(seed, size, 50, problem=problem)
            if problem:
                break  # The processes wait for each other.
    return report


# Faults.


def faults(options: Options) -> Report:
    """Each kind of fault at four calls of a step, of the first and the last process.

    And faults in the second step of the second tf.function of three steps.
    """
    items = [
        (size, Fault(culprit, kind, place), False)
        for size in (2, 3)
        for kind, place in itertools.product(KINDS, PLACES)
        for culprit in ((0, 1) if size == 2 else (2,))
    ]
    items += [
        (size, Fault(0, kind, "any"), False) for size in (2, 3) for kind in KINDS[:2]
    ]
    items += [
        (size, Fault(size - 1, kind, place, step=4), True)
        for size in (2, 3)
        for kind, place in itertools.product(KINDS, PLACES[:3])
        if kind != "exit"  # A program cannot end in order within a function.
    ]
    items = items[::9] if options.quick else items
    columns = (
        "fault",
        "before",
        "culprit",
        "of",
        "function",
        "seconds",
        "error",
        "bits after resume",
    )
    report = Report("faults", len(items), *columns)
    case = Case(
        "adagrad", empty=True, placement="rows", timeout_seconds=TIMEOUT_SECONDS
    )
    with jobs((2, 3)) as started:
        for size, fault, graph in items:
            with tempfile.TemporaryDirectory() as folder:
                of_kind = dataclasses.replace(case, graph=graph)
                others, problem = break_job(size, of_kind, fault, folder)
                bits: object = "-"
                try:
                    bits = resumed_bits(started[size], case, folder)
                except Exception as error:
                    problem += f" {type(error).__name__}: {error}"
            problem += f" {bits} bits differ" if bits else ""
            seconds = ", ".join(f"{other[2]:.1f}" for other in others)
            kinds = ", ".join(sorted({other[0] for other in others}))
            what = (fault.kind, fault.place, fault.culprit, size, graph)
            report.add(*what, seconds, kinds, bits, problem=problem)
    return report


def break_job(size: int, case: Case, fault: Fault, folder: str) -> tuple[Any, str]:
    """The other processes' error, text and seconds; and what is wrong with them."""
    survivors = [p for p in range(size) if p != fault.culprit]
    found, problem = [], ""
    with Job(size) as job:
        for process in job.processes:
            process.send("train_with_fault", (case, fault, folder))
        if fault.place == "any":
            begun = kill_any_time(job, fault, folder)
        for survivor in survivors:
            process = job.processes[survivor]
            try:
                raised = process.receive(300)
            except TimeoutError as error:
                found.append(("none", "", float("inf")))
                problem += f"process {survivor} waits for ever: {error}"
                continue
            if isinstance(raised, Failure):
                found.append((raised.kind, raised.text, float("nan")))
                problem += f"process {survivor}: {raised}\n{process.printed()}"
                continue
            kind, text, moment = raised
            noted = pathlib.Path(folder, "fault")
            if fault.place != "any":
                if not noted.exists():
                    found.append((kind, text, float("nan")))
                    problem += f"before the fault: process {survivor}: {kind}: {text}"
                    continue
                begun = float(noted.read_text())
            found.append((kind, text, moment - begun))
            expected = ["UnavailableError"]
            if case.graph:  # So TensorFlow calls it in functions.
                expected.append("InternalError")
            if fault.kind == "stuck":
                expected = ["DeadlineExceededError"]
            if kind not in expected or moment - begun > LIMIT_SECONDS:
                problem += f"process {survivor}: {kind}: {text}"
            elif not re.search(rf"rocess {fault.culprit}\b", text):
                problem += f"process {survivor} does not name the culprit: {text}"
    return found, problem


def kill_any_time(job: Job, fault: Fault, folder: str) -> float:
    """Kills or stops the culprit somewhere in a step."""
    while not pathlib.Path(folder, "2.index").exists():
        time.sleep(0.01)
    time.sleep(np.random.default_rng().uniform(0, 0.1))
    stop = fault.kind == "stop"
    job.processes[fault.culprit].signal(signal.SIGSTOP if stop else signal.SIGKILL)
    return time.monotonic()


def resumed_bits(job: Job, case: Case, folder: str) -> int:
    """Bits in which a resumed training differs from one without a fault."""
    last = max(int(path.stem) for path in pathlib.Path(folder).glob("*.index"))
    more = dataclasses.replace(case, steps=2)
    resumed = job.run("resume", more, f"{folder}/{last}", last + 1, timeout=600)
    whole = dataclasses.replace(case, steps=last + 3)
    _, tables = training.train_replicas(whole, len(job.processes))
    return sum(
        differing_bits(own[name], tables[name]) for own in resumed for name in tables
    )


# Checkpoints.

PLAIN = Case(
    "scheduled_adagrad",
    rows=(101, 64, 7),
    dims=(8, 8, 16),
    features=("many", "dense", "ragged"),
    tables=(2, 1, 0, 2, 1),
)


def checkpoints(options: Options) -> Report:
    """From each number of processes, one machine and TPUs to each of them."""
    sizes = SIZES[:2] if options.quick else SIZES
    names = [f"{size} processes" for size in sizes] + ["one machine", "v4", "v6e"]
    columns = ("from", "to", "differing bits", "updates")
    report = Report("checkpoints", len(names) ** 2, *columns)
    with tempfile.TemporaryDirectory() as folder, jobs(sizes) as started:
        places: dict[str, Callable[[str, str], list[Any]]] = {
            f"{size} processes": lambda source, path, size=size: started[size].run(
                "save_again", PLAIN, source, path
            )
            for size in sizes
        }
        places |= {
            name: lambda source, path, name=name: [restore_here(name, source, path)]
            for name in names[len(sizes) :]
        }
        expected = started[2].run("save", PLAIN, f"{folder}/first")[0]
        for name in names:  # What each of them saves.
            places[name](f"{folder}/first", f"{folder}/{name}")
        for source, target in itertools.product(names, names):
            problem, bits, updates = "", 0, PLAIN.steps
            try:
                for tables, updates in places[target](
                    f"{folder}/{source}", f"{folder}/{source} to {target}"
                ):
                    assert tables.keys() == expected.keys()
                    for name, values in tables.items():
                        bits += differing_bits(values, expected[name])
                    if updates != PLAIN.steps:
                        problem = f"{updates} updates, not {PLAIN.steps}"
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            problem += f" {bits} bits differ" if bits else ""
            report.add(source, target, bits, updates, problem=problem)
    return report


def restore_here(name: str, source: str, path: str) -> tuple[Any, int]:
    """Restores and saves in this process."""
    from tpu_embedding.testing import SoftwareTPUStrategy

    strategy, case = tf.distribute.get_strategy(), PLAIN
    if name != "one machine":
        strategy = SoftwareTPUStrategy(name, 2)
        version = 1 if name == "v4" else 2
        case = dataclasses.replace(PLAIN, version=version, output_shape=[4])
    embedding = training.create(strategy, case)
    te.checkpoint.restore(embedding, source)
    te.checkpoint.save(embedding, path)
    return training.tables_of(embedding), int(
        tf.convert_to_tensor(embedding.core.checkpoint_updates())
    )


# Many steps.


def steps(options: Options) -> Report:
    """10,000 steps: threads and memory of each process."""
    number = 1000 if options.quick else 10_000
    report = Report("steps", 22, "process", "step", "threads", "MiB")
    case = Case("adagrad", steps=number, pipelined=True, graph=True, empty=True)
    with Job(2) as job:
        found = job.run("train_long", case, 10, timeout=3600)
    for process, samples in enumerate(found):
        after_warm_up = samples[2]
        for step, threads, mib in samples:
            more_threads = threads - after_warm_up[1]
            more_mib = mib - after_warm_up[2]
            problem = ""
            if step > after_warm_up[0] and (more_threads > 2 or more_mib > 16):
                problem = f"{more_threads} threads and {more_mib:.1f} MiB more"
            report.add(process, step, threads, f"{mib:.1f}", problem=problem)
    return report


PARTS: dict[str, Callable[[Options], Report]] = {
    "fuzz": fuzz,
    "refusals": refusals,
    "checkpoints": checkpoints,
    "steps": steps,
    "faults": faults,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a tenth of it")
    flags = parser.parse_args()
    tf.get_logger().setLevel("ERROR")
    # As in tests/conftest.py, before TensorFlow starts.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * len(SIZES),
    )
    options = Options(flags.seed, flags.quick)
    reports = []
    for part in flags.parts or PARTS:
        reports.append(PARTS[part](options))
        reports[-1].show()
    sys.exit(sum(report.failed for report in reports) > 0)


if __name__ == "__main__":
    main()
