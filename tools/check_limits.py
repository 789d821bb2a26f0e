"""Compares te.plan with libtpu around the limits of a TPU: a part of `make check-tpu`.

Random configurations need nearly as much as a TPU has, or a little more: of the memory
of a device, of one table or slot, or of the memory of a SparseCore for distinct ids.
A plan that fits must compile. What compiles and does not fit is counted: the plan is
stricter there than the compiler. Runs in the environment of check_tpu.py.

    make check-tpu CHECK='--limits --seed 3 --count 40'
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
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
# Around the limits of ids, which are those of every width, wider programs compile for
# minutes.
NARROW = DIMS[:3]
# From a little less than a limit to a little more.
NEAR = (0.97, 1.015)


@dataclasses.dataclass(frozen=True)
class Random:
    """One random configuration.

    Attributes:
      about: The limit that it is near.
      topology: A topology.
      case: The training step.
    """

    about: str
    topology: str
    case: check_tpu.Case


def random_case(seed: int, number: int) -> Random:
    """Returns configuration `number` of a seed."""
    import tpu_embedding as te
    from tpu_embedding import tpu_generations
    from tpu_embedding.layout.plan import MAX_ROWS

    rng: Any = np.random.default_rng([seed, number])
    about = ("device bytes", "tensor bytes", "distinct ids", "custom")[number % 4]
    topology = str(rng.choice(TOPOLOGIES))
    generation, devices = tpu_generations.topology(topology)
    cores = generation.sparse_cores_per_device * devices
    samples = int(generation.sparse_cores_per_device * 2 ** rng.integers(3, 12))
    near = rng.uniform(*NEAR)
    rules = [te.SGD(0.1), te.Adagrad(0.1), te.Adam(0.1), te.FTRL(0.1)]
    config: dict[str, Any] = {"minibatching": bool(rng.random() < 0.3)}
    pipelined = check_tpu.PIPELINED if rng.random() < 0.3 else {}
    combiner = str(rng.choice(["sum", "mean", "sqrtn"]))

    def make(name: str, rows: int, dim: int, rule: Any) -> Any:
        return te.TableConfig(rows, dim, name=name, optimizer=rule, combiner=combiner)

    dim = int(rng.choice(DIMS if "bytes" in about else NARROW))
    width = -(-dim // 8) * 8
    tables = [make("t", 10_000, dim, rng.choice(rules))]
    if about == "device bytes":
        count = int(rng.integers(8, 12))
        rule = rng.choice(rules)
        arrays = count * (1 + len(rule.slots))
        rows = int(near * generation.hbm_bytes * devices / (4 * width * arrays))
        tables = [make(f"t{i}", rows, dim, rule) for i in range(count)]
        config["disable_table_stacking"] = True
    elif about == "tensor bytes":
        most = tpu_generations.SPARSE_CORE_TENSOR_BYTES * devices
        rows = min(int(near * most / (4 * width)), MAX_ROWS)
        tables = [make("t", rows, dim, te.SGD(0.1))]
    elif about == "distinct ids":
        ids = int(generation.max_unique_ids(cores) * rng.choice([1, 2, 16, 40]))
        unique = int(near * generation.max_unique_ids(cores, ids)) // 8 * 8
        config["max_unique_ids_per_table"] = {"t": unique}
        config["max_ids_per_table"] = {"t": ids}
    else:
        per_core = generation.max_unique_ids(cores)
        per_core //= tpu_generations.CUSTOM_IDS_PER_SAMPLE
        samples = int(near * per_core) * generation.sparse_cores_per_device
        config["minibatching"] = False
        rule = te.CustomOptimizer(_descend, 0.1)
        tables = [make("t", 10_000, dim, rule)]
    case = check_tpu.Case(tables, shape=(samples,), config=config, options=pipelined)
    return Random(about, topology, case)


def _descend(gradient: Any, row: Any, _: Any, rate: Any, __: Any) -> Any:
    """The rule of SGD."""
    return row - rate * gradient


def run(generation: str, seed: int, numbers: list[int]) -> int:
    """Compares the configurations of a generation; returns how many disagree."""
    from tpu_embedding.layout import limits
    from tpu_embedding.testing import tpu_compiler

    compared = failed = 0
    for number in numbers:
        found = random_case(seed, number)
        if found.topology.partition(":")[0] != generation:
            continue
        place = found.case.planned(found.topology)
        # Without the errors at construction, which are those of the plan.
        with mock.patch.object(limits, "raise_first"):
            facts = tpu_compiler.check(found.case.build, found.topology)
        error = facts.get("error", "")
        bad = place.fits and bool(error)
        compared, failed = compared + 1, failed + bad
        kinds = sorted({excess.kind for excess in place.excesses})
        plan = "fits" if place.fits else f"exceeds {', '.join(kinds)}"
        if place.unsupported:
            plan = f"unsupported: {place.unsupported}"
        share = place.peak_bytes / place.capacity
        temporary = facts.get("temp_bytes", 0) / 2**20
        print(
            f"{number:3} {found.topology:<10} {found.about:<13} {share:8.3%} of HBM, "
            f"plan: {plan}; compiler: {error[:300] or 'compiles'}"
            f", {temporary:.1f} MiB of temporaries{' FAILED' * bad}",
            flush=True,
        )
    print(f"{generation}: {compared - failed} of {compared} configurations agree")
    return failed


def main(arguments: list[str]) -> int:
    """Runs each generation in a process of its own."""
    parser = argparse.ArgumentParser(prog="check_limits.py")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--only", type=int, help="the number of one configuration")
    parser.add_argument("--generation", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    numbers = list(range(parsed.count)) if parsed.only is None else [parsed.only]
    if parsed.generation:
        return min(run(parsed.generation, parsed.seed, numbers), 100)
    failed = False
    for generation in sorted({name.partition(":")[0] for name in TOPOLOGIES}):
        command = [sys.executable, __file__, *arguments, "--generation", generation]
        failed |= subprocess.run(command, env=os.environ, check=False).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
