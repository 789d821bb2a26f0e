"""Compares te.plan with libtpu around the limits of a TPU: a part of `make check-tpu`.

Random configurations come within 2 % of a limit: of the memory of a device, which
tables, activations or the copies of pipelining fill, of the size of a table or slot, or
of the memory of a SparseCore for distinct ids. A plan that fits must compile. A program
that compiles although the plan does not fit is counted: there the plan is stricter than
the compiler. Runs in the environment of check_tpu.py.

    make check-tpu CHECK='--limits --seed 3 --count 40'
"""

from __future__ import annotations

import argparse
import bisect
import collections
import dataclasses
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import check_tpu
import numpy as np

COUNT = 40
TOPOLOGIES = (
    "v6e:2x2",
    "v5p:2x2x1",
    "7x:2x2x1",
    "v6e:1x1",
    "v6e:4x4",
    "v5p:2x2x2",
    "v6e:8x8",
)
DIMS = (1, 8, 12, 16, 32, 64, 100, 128, 256, 512)
# The limits of ids do not depend on the width, and near them wider programs compile for
# minutes.
NARROW = DIMS[:3]
# The least and most that a configuration needs, as shares of the limit.
NEAR = (0.98, 1.02)
ATTEMPTS = 4  # Attempts to reach the limit by scaling a batch.
COUNTED = "counted: "


@dataclasses.dataclass(frozen=True)
class Draw:
    """What a kind of configuration is drawn from.

    Attributes:
      rng: The source of random numbers.
      topology: The name of a topology.
      generation: The TPU generation of the topology.
      devices: The number of devices of the topology.
      near: The share of the limit that the configuration needs.
    """

    rng: Any
    topology: str
    generation: Any
    devices: int
    near: float

    @property
    def cores(self) -> int:
        """SparseCores of all devices."""
        return self.generation.sparse_cores_per_device * self.devices

    def samples(self, most: int = 12) -> int:
        """Draws a device's samples: for each SparseCore 8 to 2 ** (most - 1)."""
        count = 2 ** self.rng.integers(3, most)
        return int(self.generation.sparse_cores_per_device * count)

    def table(self, rows: int, dim: int, name: str = "t", rule: Any = None) -> Any:
        """Makes a table with a random combiner, and a random rule if none is given."""
        import tpu_embedding as te

        rules = [te.SGD(0.1), te.Adagrad(0.1), te.Adam(0.1), te.FTRL(0.1)]
        return te.TableConfig(
            rows,
            dim,
            name=name,
            optimizer=rule or self.rng.choice(rules),
            combiner=str(self.rng.choice(["sum", "mean", "sqrtn"])),
        )

    def fill(self, make: Callable[[int], check_tpu.Case], most: int) -> check_tpu.Case:
        """Makes the case, up to number `most`, whose plan is near a device's memory."""

        def needed(number: int) -> int:
            return make(number).planned(self.topology).peak_bytes

        wanted = self.near * self.generation.hbm_bytes
        return make(1 + bisect.bisect_left(range(1, most), wanted, key=needed))

    def filled_by_tables(
        self, count: int, combiner: Any = None, **options: Any
    ) -> check_tpu.Case:
        """Makes tables without stacks, with as many rows as fit into the memory."""
        from tpu_embedding.layout.plan import MAX_ROWS

        memory = self.generation.hbm_bytes * self.devices
        dims = [d for d in DIMS if count * MAX_ROWS * _row_bytes(d) > memory]
        dim, samples = int(self.rng.choice(dims)), self.samples()
        tables = [self.table(8, dim, f"t{i}") for i in range(count)]
        config = {"disable_table_stacking": True, **options.pop("config", {})}
        changes = {} if combiner is None else {"combiner": combiner}

        def make(rows: int) -> check_tpu.Case:
            own = [
                dataclasses.replace(t, vocabulary_size=8 * self.cores * rows, **changes)
                for t in tables
            ]
            return check_tpu.Case(own, shape=(samples,), config=config, **options)

        return self.fill(make, MAX_ROWS // (8 * self.cores))


def _row_bytes(dim: int) -> int:
    """Returns the bytes of a row on SparseCores, which pad it."""
    return 4 * -(-dim // 8) * 8


def tables(draw: Draw) -> check_tpu.Case:
    """Makes tables that fill the memory."""
    return draw.filled_by_tables(int(draw.rng.integers(8, 12)))


def minibatching(draw: Draw) -> check_tpu.Case:
    """Makes tables that fill the memory, with minibatches."""
    return draw.filled_by_tables(
        int(draw.rng.integers(8, 12)), config={"minibatching": True}
    )


def custom_combiner(draw: Draw) -> check_tpu.Case:
    """Fills the memory with tables and the inputs of their CustomCombiners."""
    import tensorflow as tf

    import tpu_embedding as te

    combiner = te.CustomCombiner(
        lambda _, vectors: tf.reduce_sum(vectors, 0), int(draw.rng.choice([3, 8, 16]))
    )
    return draw.filled_by_tables(int(draw.rng.integers(8, 12)), combiner)


def activations(draw: Draw, **options: Any) -> check_tpu.Case:
    """Fills a part of the memory with tables, and the rest with a large batch."""
    from tpu_embedding.layout.plan import MAX_ROWS

    rng, generation = draw.rng, draw.generation
    count, dim = int(rng.integers(1, 5)), int(rng.choice(DIMS))
    share, first = rng.uniform(0.3, 0.9), draw.table(8, dim)
    arrays = count * (1 + len(first.optimizer.slots))
    rows = share * generation.hbm_bytes * draw.devices / (_row_bytes(dim) * arrays)
    most = min(0.9 * draw.devices * 2**34 / _row_bytes(dim), MAX_ROWS)
    own = [
        dataclasses.replace(first, vocabulary_size=int(min(rows, most)), name=f"t{i}")
        for i in range(count)
    ]
    config = {
        "disable_table_stacking": True,
        "max_ids_per_chip_per_sample": int(rng.choice([8, 64])),
        "minibatching": bool(rng.random() < 0.3),
    }
    cores = generation.sparse_cores_per_device

    def make(samples: int) -> check_tpu.Case:
        return check_tpu.Case(
            own, shape=(8 * cores * samples,), config=config, options=options
        )

    return draw.fill(make, 2**24 // cores)


def pipelined(draw: Draw) -> check_tpu.Case:
    """Makes `activations` with pipelining, which keeps the previous step's update."""
    return activations(draw, **check_tpu.PIPELINED)


def tensor(draw: Draw) -> check_tpu.Case:
    """Makes one table near the largest size that SparseCores support."""
    import tpu_embedding as te
    from tpu_embedding import tpu_generations
    from tpu_embedding.layout.plan import MAX_ROWS

    most = draw.near * tpu_generations.SPARSE_CORE_TENSOR_BYTES * draw.devices

    def rows(dim: int) -> int:
        return int(most / _row_bytes(dim))

    dim = int(draw.rng.choice([dim for dim in DIMS if rows(dim) <= MAX_ROWS]))
    own = [draw.table(rows(dim), dim, rule=te.SGD(0.1))]
    config = {"minibatching": bool(draw.rng.random() < 0.3)}
    return check_tpu.Case(own, shape=(draw.samples(),), config=config)


def distinct_ids(draw: Draw) -> check_tpu.Case:
    """Sets limits of a partition that fill the memory of a SparseCore."""
    rng, generation, cores = draw.rng, draw.generation, draw.cores
    ids = int(generation.max_unique_ids(cores) * rng.choice([1, 2, 16, 40]))
    unique = int(draw.near * generation.max_unique_ids(cores, ids)) // 8 * 8
    config = {
        "max_unique_ids_per_table": {"t": unique},
        "max_ids_per_table": {"t": ids},
        "minibatching": bool(rng.random() < 0.5),
    }
    options = check_tpu.PIPELINED if rng.random() < 0.3 else {}
    own = [draw.table(10_000, int(rng.choice(NARROW)))]
    return check_tpu.Case(own, shape=(draw.samples(),), config=config, options=options)


def custom_optimizer(draw: Draw) -> check_tpu.Case:
    """Makes a batch near the limits of a CustomOptimizer or a CustomCombiner."""
    import tensorflow as tf

    import tpu_embedding as te
    from tpu_embedding import tpu_generations

    most = draw.generation.max_unique_ids(draw.cores)
    most //= tpu_generations.CUSTOM_IDS_PER_SAMPLE
    samples = int(draw.near * most) * draw.generation.sparse_cores_per_device
    own = draw.table(10_000, int(draw.rng.choice(NARROW)))
    if draw.rng.random() < 0.5:
        own = dataclasses.replace(own, optimizer=te.CustomOptimizer(_descend, 0.1))
    else:
        combiner = te.CustomCombiner(lambda _, vectors: tf.reduce_sum(vectors, 0), 4)
        own = dataclasses.replace(own, combiner=combiner)
    return check_tpu.Case([own], shape=(samples,))


def _descend(gradient: Any, row: Any, _: Any, rate: Any, __: Any) -> Any:
    """Applies the rule of SGD."""
    return row - rate * gradient


KINDS = (
    tables,
    activations,
    pipelined,
    distinct_ids,
    minibatching,
    custom_combiner,
    tensor,
    custom_optimizer,
)


# Kinds whose batch is scaled until libtpu itself needs what a device has.
SCALED = ("activations", "pipelined")


def random_case(seed: int, number: int) -> tuple[str, Draw, check_tpu.Case]:
    """Returns the kind, its draw and the step of a configuration of a seed."""
    from tpu_embedding import tpu_generations

    rng: Any = np.random.default_rng([seed, number])
    kind = KINDS[number % len(KINDS)]
    topology = str(rng.choice(TOPOLOGIES))
    found = tpu_generations.topology(topology)
    draw = Draw(rng, topology, *found, near=rng.uniform(*NEAR))
    return kind.__name__, draw, kind(draw)


@dataclasses.dataclass(frozen=True)
class Result:
    """What plan and compiler say of a configuration.

    Attributes:
      place: The plan.
      error: The error of the compiler, or "".
      used: Bytes of a device that the compiler's program needs, or 0.
      temporary: The part of these for temporaries, if the program compiles.
    """

    place: Any
    error: str
    used: float
    temporary: int

    @classmethod
    def of(cls, case: check_tpu.Case, topology: str) -> Result:
        """Plans and compiles a case."""
        from tpu_embedding.layout import limits
        from tpu_embedding.testing import tpu_compiler

        # Skip the errors at construction, which are those of the plan.
        with mock.patch.object(limits, "raise_first"):
            facts = tpu_compiler.check(case.build, topology)
        error, temporary = facts.get("error", ""), facts.get("temp_bytes", 0)
        used = facts.get("argument_bytes", 0) + temporary
        told = re.search(r"Used ([\d.]+)G of", error)
        if told:
            used = float(told[1]) * 2**30
        return cls(case.planned(topology), error, used, temporary)

    @property
    def plan(self) -> str:
        """Returns "fits", "close" or "no"."""
        place = self.place
        return "fits" if place.fits else "close" if place.close else "no"

    @property
    def wrong(self) -> bool:
        """Whether the plan fits and the step does not compile."""
        return self.place.fits and bool(self.error)

    def __str__(self) -> str:
        place, kinds = self.place, sorted({e.kind for e in self.place.excesses})
        reasons = f" ({place.unsupported or ', '.join(kinds)})" if kinds else ""
        return (
            f"{place.peak_bytes / place.capacity:8.3%} of HBM, plan: "
            f"{self.plan}{reasons}; compiler: {self.error[:300] or 'compiles'}, "
            f"{self.used / place.capacity:.3%}, of which {self.temporary / 2**20:.1f} "
            f"MiB are temporaries, planned {place.program_bytes / 2**20:.1f}"
            f"{' FAILED' * self.wrong}"
        )


def results(seed: int, number: int) -> Iterator[Result]:
    """Yields the result of a configuration; if it is scaled, one for each attempt."""
    kind, draw, case = random_case(seed, number)
    for _ in range(ATTEMPTS if kind in SCALED else 1):
        result = Result.of(case, draw.topology)
        yield result
        share = result.used / result.place.capacity
        if not share or NEAR[0] <= share <= NEAR[1]:
            return
        # Only the step grows with the batch.
        tables = result.place.table_bytes[0]
        wanted = draw.near * result.place.capacity - tables
        (samples,), multiple = case.shape, 8 * draw.generation.sparse_cores_per_device
        samples = int(samples * wanted / (result.used - tables)) // multiple * multiple
        case = dataclasses.replace(case, shape=(samples,))


def tell(seed: int, number: int, result: Result) -> None:
    """Prints a line for the reader, and one for the process that counts."""
    kind, draw, _ = random_case(seed, number)
    print(f"{number:3} {draw.topology:<10} {kind:<16} {result}")
    verdict = f"{result.plan} and {'do not compile' if result.error else 'compile'}"
    print(COUNTED + json.dumps([draw.generation.name, verdict, result.wrong]))
    sys.stdout.flush()


def ended(seed: int, number: int, code: int) -> None:
    """Reports a configuration with which libtpu ended its process."""
    _, draw, case = random_case(seed, number)
    error = f"libtpu ended its process, {signal.Signals(-code).name}"
    tell(seed, number, Result(case.planned(draw.topology), error, 0, 0))


def main(arguments: list[str]) -> int:
    """Runs each configuration in a process of its own, which libtpu may end."""
    parser = argparse.ArgumentParser(prog="check_limits.py")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--only", type=int, help="the number of one configuration")
    parser.add_argument("--here", help=argparse.SUPPRESS, action="store_true")
    parser.add_argument("--ended", help=argparse.SUPPRESS, type=int)
    parsed = parser.parse_args(arguments)
    if parsed.ended:
        ended(parsed.seed, parsed.only, parsed.ended)
        return 0
    if parsed.here:
        for result in results(parsed.seed, parsed.only):
            tell(parsed.seed, parsed.only, result)
        return 0
    counts: dict[str, collections.Counter[str]]
    counts, wrong = collections.defaultdict(collections.Counter), 0
    for number in range(parsed.count) if parsed.only is None else [parsed.only]:
        own = ["--seed", str(parsed.seed), "--only", str(number)]
        code, lines = _lines([*own, "--here"])
        if code < 0:
            lines += _lines([*own, "--ended", str(code)])[1]
        elif code:
            return code
        for line in lines:
            generation, verdict, is_wrong = json.loads(line)
            counts[generation][verdict] += 1
            wrong += is_wrong
    for generation, verdicts in sorted(counts.items()):
        listed = "; ".join(f"{n} {name}" for name, n in sorted(verdicts.items()))
        print(f"{generation}: {listed}")
    print(f"{wrong} wrong")
    return min(wrong, 100)


def _lines(arguments: list[str]) -> tuple[int, list[str]]:
    """Runs this tool; returns its exit code and lines to count, and prints the rest."""
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        counted = []
        for line in process.stdout or ():
            if line.startswith(COUNTED):
                counted.append(line.removeprefix(COUNTED))
            else:
                print(line, end="", flush=True)
    return process.returncode, counted


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
