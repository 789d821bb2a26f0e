"""Single measures with aims, without peers.

Threads, widths of rows, memory, import, tracing and growing tables.

python -m benchmarks.measures [--scenario dlrm] [--steps 10000] [--only memory import]

Each runs in processes of its own. Writes build/bench/measures-<scenario>.{json,md,png},
with --only a file of another name.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks import options, picture
from benchmarks.run import OURS, python_of
from benchmarks.scenarios import FORMS, SCENARIOS, Scenario

_WARM_UP, _TIMED = 5, 30
# Widths that are no multiple of a register's, each with the nearest one that is.
_WIDTHS = ((3, 4), (7, 8), (10, 8), (100, 96))
# The largest width and a quarter of it, on tables of few rows.
_WIDEST = ((1024, 256),)


@dataclasses.dataclass(frozen=True)
class Measure:
    """A number and its limit.

    Attributes:
      name: What was measured.
      value: The number, or None.
      aim: The limit.
      at_least: Whether the number should be larger than the limit, not smaller.
      missing: Why there is no number.
    """

    name: str
    value: float | None
    aim: float = 0.0
    at_least: bool = False
    missing: str | None = None

    @property
    def reached(self) -> float | None:
        """Above 1 where the number is better than its aim, below 1 where it misses."""
        if self.value is None or not self.aim:
            return None
        if self.value == 0:
            return 0.0 if self.at_least else None
        return self.value / self.aim if self.at_least else self.aim / self.value

    @property
    def missed(self) -> bool:
        """Whether the number is on the wrong side of its aim."""
        return self.reached is not None and self.reached < 1.0


class ChildError(Exception):
    """A process that measures has failed."""


def _in_process(
    function: str, *arguments: object, python: str = sys.executable
) -> dict[str, float]:
    command = [python, "-m", "benchmarks.measures", "--child", function]
    command += map(str, arguments)
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        why = (ran.stderr.strip() or "nothing was printed").splitlines()[-1]
        raise ChildError(f"{function} ended with code {ran.returncode}: {why}")
    return json.loads(ran.stdout.splitlines()[-1])


def _step_of(
    workload: Scenario, dtype: str = "float32", form: str | None = None
) -> Callable[[], float]:
    from benchmarks.peers import tpu_embedding  # TensorFlow only in the children

    return tpu_embedding.prepare(workload, "adagrad", dtype, form)["step"]


def _median(step: Callable[[], float]) -> dict[str, float]:
    times = [step() for _ in range(_WARM_UP + _TIMED)][_WARM_UP:]
    return {"seconds": statistics.median(times)}


def child_step(scenario: str, threads: str) -> dict[str, float]:
    """Measures the median seconds of a training step on a number of threads."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(int(threads))
    return _median(_step_of(SCENARIOS[scenario]))


def child_width(scenario: str, dim: str, dtype: str) -> dict[str, float]:
    """Measures the median seconds of a training step over tables of another width."""
    workload = dataclasses.replace(SCENARIOS[scenario], dim=int(dim))
    return _median(_step_of(workload, dtype))


def child_form(scenario: str, form: str) -> dict[str, float]:
    """Measures the median seconds of a training step with a form of batches."""
    return _median(_step_of(SCENARIOS[scenario], form=form))


def child_memory(scenario: str, steps: str) -> dict[str, float]:
    """Measures peak bytes: of TensorFlow alone, then with tables, early and late."""
    import tensorflow as tf

    tf.constant(0)
    result = {"tensorflow": _peak()}
    step = _step_of(SCENARIOS[scenario])
    early = max(int(steps) // 10, 1)
    for index in range(int(steps)):
        step()
        if index + 1 == early:
            result["early"] = _peak()
    return {**result, "late": _peak()}


def child_import(module: str) -> dict[str, float]:
    """Measures the seconds that importing a module takes."""
    start = time.perf_counter()
    __import__(module)
    return {"seconds": time.perf_counter() - start}


def child_first_step(peer: str) -> dict[str, float]:
    """Measures the seconds from a peer's constructor to the end of its first step.

    The step has 26 small tables and 32 samples, so that nearly all of the time goes
    into tracing and into TensorFlow's work on the graph.
    """
    module = importlib.import_module(f"benchmarks.peers.{peer}")
    start = time.perf_counter()
    module.prepare(SCENARIOS["small_tables"], "adagrad")["step"]()
    return {"seconds": time.perf_counter() - start}


def child_growing(ids: str) -> dict[str, float]:
    """Measures a table that grows to `ids` ids, is looked up, and evicts a tenth.

    Returns the CPU nanoseconds of a lookup per occurrence, in it and in a static table;
    the longest evicting step divided by the median one; and the memory, divided by the
    bytes of the rows, their ids and uses, and the smallest possible map.
    """
    import numpy as np
    import tensorflow as tf

    import tpu_embedding as te

    size, occurrences, dim = int(ids), 1 << 19, 16
    rng = np.random.default_rng(0)

    def name(numbers: np.ndarray) -> tf.Tensor:  # any bijection
        return tf.constant(numbers.astype(np.int64) * 0x1E3779B97F4A7C15)

    def make(rows: int | te.GrowingVocabulary) -> te.TPUEmbedding:
        table = te.TableConfig(rows, dim, "zeros", combiner="sum")
        embedding = te.TPUEmbedding(te.FeatureConfig(table), te.SGD(0.1))
        embedding.build()
        return embedding

    def lookup(embedding: te.TPUEmbedding, batch: tf.Tensor) -> float:
        embedding.enqueue(batch, training=False)
        start = time.process_time()
        embedding.dequeue()
        return (time.process_time() - start) / occurrences * 1e9

    def step(batch: tf.Tensor) -> float:
        start = time.process_time()
        growing.enqueue(batch)
        growing.apply_gradients(tf.ones_like(growing.dequeue()))
        return time.process_time() - start

    growing = make(te.GrowingVocabulary(size, eviction="lru"))
    before = _resident()
    for first in range(0, size, 1 << 16):
        step(name(np.arange(first, min(first + (1 << 16), size))[:, np.newaxis]))
    grown = _resident() - before
    static = make(size)
    power = (size + 1.0) ** (rng.random((occurrences // 10, 10)) - 1.0)
    hot = np.minimum((size * power).astype(np.int64), size - 1) * 2_654_435_761 % size
    pairs = ((growing, name(hot)), (static, tf.constant(hot)))
    times = [[lookup(*pair) for pair in pairs] for _ in range(9)]
    own, other = (statistics.median(both) for both in zip(*times, strict=True))
    steps, new = [], min(2048, size // 50)
    for first in range(size, size + size // 10, new):
        fresh = np.arange(first, first + new)[:, np.newaxis]
        steps.append(step(name(np.hstack([rng.integers(0, size, (new, 9)), fresh]))))
    return {
        "growing": own,
        "static": other,
        "longest": max(steps) / statistics.median(steps),
        "memory": grown / (size * (4 * dim + 16 + 16 * 8 / 5)),
    }


def _resident() -> float:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return float(pages) * resource.getpagesize()


def _peak() -> float:
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


CHILDREN = {
    "step": child_step,
    "width": child_width,
    "form": child_form,
    "memory": child_memory,
    "import": child_import,
    "first_step": child_first_step,
    "growing": child_growing,
}


def threads(scenario: str) -> Measure:
    """Measures the speedup of a step on two threads over one; runs alternate."""
    seconds = {count: [] for count in (1, 2)}
    for _ in range(3):
        for count, times in seconds.items():
            times.append(_in_process("step", scenario, count)["seconds"])
    one, two = (statistics.median(times) for times in seconds.values())
    return Measure(
        "step on two threads, times faster than on one", one / two, 1.7, True
    )


def widths(
    scenario: str, dtype: str, pairs: Sequence[tuple[int, int]] = _WIDTHS
) -> list[Measure]:
    """Measures a step's time for each byte, at odd widths over the nearest even ones.

    All that a step moves is proportional to the width, so seconds are divided by it.
    """
    measures = []
    for odd, even in pairs:
        seconds = {dim: [] for dim in (odd, even)}
        for _ in range(2):  # A B A B
            for dim, times in seconds.items():
                child = _in_process("width", scenario, dim, dtype)
                times.append(child["seconds"] / dim)
        ours, nearest = (statistics.median(times) for times in seconds.values())
        name = f"{dtype} step per byte at dim {odd} over that at dim {even}"
        measures.append(Measure(name, ours / nearest, 1.3, False))
    return measures


def forms(scenario: str) -> list[Measure]:
    """Measures a step with each form of batches, over the first; runs alternate."""
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(3):
        for form, times in seconds.items():
            times.append(_in_process("form", scenario, form)["seconds"])
    first, *others = ((form, statistics.median(t)) for form, t in seconds.items())
    return [
        Measure(
            f"step with {form} ids over that with {first[0]}", t / first[1], 1.3, False
        )
        for form, t in others
    ]


def memory(scenario: str, steps: int) -> list[Measure]:
    """Measures peak memory relative to the tables, and its growth over many steps."""
    peaks = _in_process("memory", scenario, steps)
    workload = SCENARIOS[scenario]
    tables = 2 * 4 * workload.dim * sum(workload.rows)  # one slot, as wide
    grown = (peaks["early"] - peaks["tensorflow"]) / tables
    flat = peaks["late"] / peaks["early"]
    return [
        Measure("peak without TensorFlow's, over tables and slots", grown, 1.1, False),
        Measure(f"peak after {steps} steps over that after a tenth", flat, 1.01, False),
    ]


def importing() -> Measure:
    """Measures the time of our import relative to TensorFlow's; runs alternate."""
    seconds = {module: [] for module in ("tensorflow", "tpu_embedding")}
    for _ in range(5):
        for module, times in seconds.items():
            times.append(_in_process("import", module)["seconds"])
    tensorflow, ours = (statistics.median(times) for times in seconds.values())
    return Measure("import over TensorFlow's", ours / tensorflow, 1.1, False)


def tracing() -> Measure:
    """Measures the time to our first step's end relative to TFRS; runs alternate."""
    name = "first step of 26 tables, over TFRS's"
    seconds = {peer: [] for peer in ("tfrs", OURS)}
    if python_of("tfrs") == sys.executable:
        return Measure(name, None, 1.0, missing="not installed (make bench-peers)")
    for _ in range(3):
        for peer, times in seconds.items():
            ran = _in_process("first_step", peer, python=python_of(peer))
            times.append(ran["seconds"])
    theirs, ours = (statistics.median(times) for times in seconds.values())
    return Measure(name, ours / theirs, 1.0, False)


def growing() -> list[Measure]:
    """Measures the time and memory of a growing table of ten million ids."""
    few, many = (_in_process("growing", size) for size in (10_000, 10_000_000))
    beyond = [size["growing"] - size["static"] for size in (few, many)]
    return [
        Measure(
            "growing: nanoseconds to find the row of one of 1e7 ids", beyond[1], 20
        ),
        Measure("growing: that over one of 1e4 ids", beyond[1] / beyond[0], 1.3),
        Measure(
            "growing: longest step that evicts, over the median", many["longest"], 2
        ),
        Measure("growing: memory over that of rows and map", many["memory"], 1.1),
    ]


def markdown(measures: Sequence[Measure]) -> str:
    """Returns the measures as a table."""
    lines = ["### measures", "", "| measure | value | aim |", "|---|---|---|"]
    for measure in measures:
        if measure.value is None:
            lines.append(f"| {measure.name} | not measured: {measure.missing} |")
            continue
        bound = "at least" if measure.at_least else "at most"
        mark = ", **missed**" if measure.missed else ""
        value = f"{measure.value:.4g}"
        lines.append(f"| {measure.name} | {value} | {bound} {measure.aim:g}{mark} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes the results, or runs one child process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--child"]:
        name, *values = arguments[1:]
        print(json.dumps(CHILDREN[name](*values)))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default="dlrm")
    parser.add_argument("--steps", type=options.positive, default=10_000)
    parser.add_argument("--only", nargs="+", choices=list(_parts("dlrm", 1)))
    options.add_out(parser)
    flags = parser.parse_args(arguments)
    measures: list[Measure] = []
    parts = _parts(flags.scenario, flags.steps)
    title = "-".join(["measures", flags.scenario, *(flags.only or ())])
    with options.alone(flags.out):
        for name in flags.only or parts:
            print(f"  {name} ...", flush=True)
            try:
                measures += parts[name]()
            except ChildError as error:  # Others can still be measured.
                measures.append(Measure(name, None, missing=str(error)))
            _write(flags.out, title, measures)
    print(markdown(measures))


def _parts(scenario: str, steps: int) -> dict[str, Callable[[], list[Measure]]]:
    """Returns the functions that measure, by their names for --only."""
    return {
        "import": lambda: [importing()],
        "first_step": lambda: [tracing()],
        "threads": lambda: [threads(scenario)],
        "forms": lambda: forms(scenario),
        "dim1024": lambda: widths("wide", "float32", _WIDEST),
        "dim1024_bfloat16": lambda: widths("wide", "bfloat16", _WIDEST),
        "widths": lambda: widths(scenario, "float32"),
        "widths_bfloat16": lambda: widths(scenario, "bfloat16"),
        "memory": lambda: memory(scenario, steps),
        "growing": growing,
    }


def _write(folder: pathlib.Path, title: str, measures: Sequence[Measure]) -> None:
    written = [{**dataclasses.asdict(m), "missed": m.missed} for m in measures]
    (folder / f"{title}.json").write_text(json.dumps(written, indent=2) + "\n")
    (folder / f"{title}.md").write_text(markdown(measures))
    rows = {
        measure.name: {"": picture.Bar(measure.reached, measure.missed)}
        for measure in measures
        if measure.reached is not None
    }
    axis = "how far within the aim (1: just so)"
    picture.bars(folder / f"{title}.png", title, axis, rows)


if __name__ == "__main__":
    main()
