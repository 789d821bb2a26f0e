"""Compares the CPU time of a training step in several processes with other systems.

    python -m benchmarks.distributed [--processes 2] [--systems SYSTEM ...] [--rounds 3]
    python -m benchmarks.distributed --tables 1 --steps 100 --vocabularies 10000 1000000

26 tables of 80,000 x 64; each process trains on 2,048 samples of 10 Zipf-distributed
IDs for each table. There is no dense model: all gradients are 1. In each round each
system runs once, as a job of its own; the figures are medians over the rounds: the CPU
microseconds of all processes per sample, the wall milliseconds of a step, and the
megabytes that a process sends in a step, if the system counts them. The table is
printed and written to build/bench/distributed.md.

`--vocabularies` compares tables of these numbers of rows instead. Their batches name
equally many distinct rows, spread over the whole table. The aim limits the median,
over the rounds, of the CPU time divided by that of the smallest table in the round.

Systems are written SYSTEM:OPTIMIZER[:WIRE]. SYSTEM is `ours`, `torchrec` (over gloo,
table-wise, optimizer fused into the backward pass; install it by `make bench-peers`) or
`mirrored`: tf.Variable, tf.nn.embedding_lookup and tf.compat.v1.train optimizers
under MultiWorkerMirroredStrategy, which gathers all gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import resource
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks import machine, options, run
from benchmarks.peers.job import Job
from benchmarks.scenarios import Scenario

SYSTEMS = ("ours", "torchrec", "mirrored")
DEFAULT = (
    *("ours:adagrad", "torchrec:adagrad", "ours:rowwise_adagrad"),
    *("torchrec:rowwise_adagrad", "ours:adagrad:bfloat16"),
    *("ours:rowwise_adagrad:bfloat16", "mirrored:adagrad"),
)
# Aims: the CPU microseconds of two processes per sample, with the default workload.
AIMS = {
    "ours:adagrad": 54.0,
    "ours:rowwise_adagrad": 48.0,
    "ours:adagrad:bfloat16": 41.0,
    "ours:rowwise_adagrad:bfloat16": 35.0,
}
VOCABULARY_AIM = 1.3  # As a multiple of the cost of the smallest table.
_LIMIT_SECONDS = 900
# The answer to another process's last message may still be on its way.
_LAST_WORDS_SECONDS = 1.0


class Figures(NamedTuple):
    """What a system needs in one round.

    Attributes:
      cpu: Microseconds of all processes per sample.
      wall: Milliseconds of a step.
      sent: Megabytes of a step, of the process that sends most, or None.
    """

    cpu: float
    wall: float
    sent: float | None


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--worker", help=argparse.SUPPRESS)  # A process of a job: JSON of its `Job`.
    add("--systems", nargs="+", default=list(DEFAULT))
    add("--vocabularies", nargs="+", type=options.positive, default=[])
    add("--placement", choices=["auto", "rows", "whole"], default="auto")
    for name, default in (
        ("processes", 2),
        ("tables", 26),
        ("rows", 80_000),
        ("dim", 64),
        ("batch", 2048),
        ("ids", 10),
        ("steps", 10),
    ):
        add(f"--{name}", type=options.positive, default=default)
    options.add_rounds(parser, 3)
    options.add_out(parser)
    flags = parser.parse_args(arguments)
    for system in flags.systems:
        if system.split(":")[0] not in SYSTEMS:
            parser.error(f"--systems: {system!r} is not one of {', '.join(SYSTEMS)}")
    return flags


def work(job: Job) -> None:
    """Runs one process of a job: trains, and prints what the timed steps took."""
    module = {"ours": "job_tpu_embedding"}.get(job.system, f"job_{job.system}")
    running = importlib.import_module(f"benchmarks.peers.{module}").start(job)
    for number in range(3):
        running.step(number)
    running.barrier()
    sent = running.bytes_sent()
    walls, begin = [], cpu_seconds()
    for number in range(job.steps):
        start = time.perf_counter()
        running.step(number)
        walls.append(time.perf_counter() - start)
    running.barrier()
    found = {"cpu": cpu_seconds() - begin, "wall": statistics.median(walls)}
    if sent is not None:
        found["sent"] = (running.bytes_sent() - sent) / job.steps
    print("RESULT", json.dumps(found), flush=True)
    time.sleep(_LAST_WORDS_SECONDS)
    os._exit(0)  # A regular exit may wait for the other processes.


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process, in all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(job: Job) -> Figures:
    """Runs all processes of a job.

    Raises:
      RuntimeError: If a process fails; the text is the last line that it printed.
    """
    number = len(job.addresses)
    with contextlib.ExitStack() as stack:
        outputs = [
            stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(number)
        ]
        running = [
            subprocess.Popen(
                [
                    run.python_of(job.system),
                    *("-m", "benchmarks.distributed", "--worker"),
                    json.dumps(dataclasses.asdict(dataclasses.replace(job, rank=rank))),
                ],
                env={
                    **os.environ,
                    "TF_CPP_MIN_LOG_LEVEL": "2",
                    "CUDA_VISIBLE_DEVICES": "",
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
        deadline = time.monotonic() + _LIMIT_SECONDS
        while time.monotonic() < deadline:
            codes = [process.poll() for process in running]
            if None not in codes or any(codes):
                break
            time.sleep(0.1)
        ended = [process.poll() is not None for process in running]
        results = []
        for process, output in zip(running, outputs, strict=True):
            process.kill()
            process.wait()
            output.seek(0)
            results.append(_result(output.read(), process.returncode))
    errors = [
        (first, len(found["error"]), found["error"])
        for first, found in zip(ended, results, strict=True)
        if "error" in found
    ]
    if errors:  # Take one of a process that ended first: others fail because it ended.
        raise RuntimeError(max(errors)[2])
    samples = number * job.scenario.batch_size * job.steps
    return Figures(
        1e6 * sum(found["cpu"] for found in results) / samples,
        1e3 * max(found["wall"] for found in results),
        max(found["sent"] for found in results) / 1e6 if "sent" in results[0] else None,
    )


def _result(printed: str, code: int) -> dict[str, Any]:
    for line in reversed(printed.strip().splitlines()):
        if line.startswith("RESULT"):
            return json.loads(line.removeprefix("RESULT"))
        if not line.startswith((" ", "  ")):
            return {"error": line}
    return {"error": f"exit code {code}"}


def free_addresses(number: int) -> list[str]:
    """Returns addresses of free ports of this machine."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def make_job(flags: argparse.Namespace, system: str, rows: int, drawn: int) -> Job:
    """Makes a job on tables of `rows` rows, of which batches name up to `drawn`."""
    name, optimizer, wire = (*system.split(":"), "float32")[:3]
    workload = Scenario(
        "distributed",
        flags.batch,
        flags.dim,
        (drawn,) * flags.tables,
        (flags.ids,) * flags.tables,
    )
    return Job(
        system=name,
        optimizer=optimizer,
        wire=wire,
        placement=flags.placement,
        scenario=workload,
        spread=rows // drawn,
        addresses=free_addresses(flags.processes),
        steps=flags.steps,
    )


def ratios(found: dict[str, list[Figures]]) -> str:
    """Compares CPU times with the first system's in each round: median and range."""
    first, *others = found
    lines = ["", f"| | times the CPU time of {first} | aim |", "|---|---|---|"]
    for name in others:
        pairs = zip(found[name], found[first], strict=False)  # One may have failed.
        times = [one.cpu / base.cpu for one, base in pairs]
        median = statistics.median(times)
        missed = " **missed**" if median > VOCABULARY_AIM else ""
        lines.append(
            f"| {name} | {median:.2f} ({min(times):.2f} to {max(times):.2f}) | "
            f"{VOCABULARY_AIM}{missed} |"
        )
    return "\n".join(lines) + "\n"


def table(found: dict[str, list[Figures]], aims: dict[str, float]) -> str:
    """Returns a table of the medians, with the lowest and the highest CPU time."""
    lines = [
        "| | CPU us per sample | aim | wall ms per step | MB sent per step |",
        "|---|---|---|---|---|",
    ]
    for name, rounds in found.items():
        cpu, wall, _ = (list(column) for column in zip(*rounds, strict=True))
        sent = "-" if rounds[0].sent is None else f"{rounds[0].sent:.2f}"
        median = statistics.median(cpu)
        aim = ""
        if name in aims:
            aim = f"{aims[name]:.1f}" + (" **missed**" if median > aims[name] else "")
        lines.append(
            f"| {name} | {median:.1f} ({min(cpu):.1f} to {max(cpu):.1f}) | {aim} | "
            f"{statistics.median(wall):.0f} | {sent} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all systems in turns, and prints and writes the table."""
    flags = parse_options(arguments)
    if flags.worker:
        work(Job.from_json(json.loads(flags.worker)))
    most, drawn = flags.rows, flags.rows
    kinds = {system: (system, most, drawn) for system in flags.systems}
    if flags.vocabularies:
        drawn = min(flags.vocabularies)
        kinds = {
            f"{rows} rows": (flags.systems[0], rows, drawn)
            for rows in sorted(flags.vocabularies)
        }
    print(machine.describe(), flush=True)
    found: dict[str, list[Figures]] = {name: [] for name in kinds}
    failed: dict[str, str] = {}
    for number in range(flags.rounds):
        for name, kind in kinds.items():
            if name in failed:
                continue
            try:
                figures = measure(make_job(flags, *kind))
            except RuntimeError as error:
                failed[name] = str(error)
                print(f"{name}: {error}", flush=True)
                continue
            found[name].append(figures)
            print(f"[{number + 1}/{flags.rounds}] {name}: {figures}", flush=True)
    found = {name: rounds for name, rounds in found.items() if rounds}
    title = f"# {flags.processes} processes, {flags.tables} tables, dim {flags.dim}\n\n"
    text = title + table(found, {} if flags.vocabularies else AIMS)
    if flags.vocabularies and found:
        text += ratios(found)
    text += "".join(f"\n{name}: not measured, {why}\n" for name, why in failed.items())
    print(text)
    out = pathlib.Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    what = "distributed_vocabulary" if flags.vocabularies else "distributed"
    (out / f"{what}.md").write_text(text)
    ours = [
        why
        for name, why in failed.items()
        if name not in flags.systems or name.startswith("ours")
    ]
    if ours:
        raise RuntimeError(f"Failed: {ours}")


if __name__ == "__main__":
    main()
