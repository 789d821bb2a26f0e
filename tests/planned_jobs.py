"""Random jobs, whose planned bytes are compared with those that they allocate.

PYTHONPATH=.:tests .venv/bin/python -m planned_jobs 400
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import tpu_embedding as te
from tpu_embedding.engines.host.servers import places_on_servers
from tpu_embedding.layout.balancing import place_on_servers, place_tables
from tpu_embedding.layout.plan import Plan, make_plan
from tpu_embedding.tables.variables import TableVariables, create_parts
from tpu_embedding.tf_configs import convert_features, convert_optimizer

OPTIMIZERS = (te.SGD, te.Adagrad, te.Adam, te.FTRL, te.RowwiseAdagrad)
PLACEMENTS = (None, None, None, "rows", "whole")
LIMIT = 0.05


def random_features(rng: np.random.Generator) -> list[te.FeatureConfig]:
    """Tables of 100 to 30,000 rows; one of more than 16 MiB in a quarter."""
    features = []
    for t in range(int(rng.integers(1, 9))):
        large = t == 0 and rng.random() < 0.25
        rows = int(2 ** rng.uniform(16.5, 17.5) if large else 100 * 300 ** rng.random())
        table = te.TableConfig(
            rows,
            64 if large else int(rng.choice([1, 3, 8, 16, 64])),
            te.RowIdInitializer() if large else None,
            name=f"t{t}",
            dtype=str(rng.choice(["float32", "float32", "bfloat16"])),
            optimizer=OPTIMIZERS[rng.integers(len(OPTIMIZERS))](0.1),
            placement=PLACEMENTS[rng.integers(len(PLACEMENTS))],
        )
        for f in range(int(rng.integers(1, 3))):
            length = int(rng.choice([0, 0, 0, 7]))
            features.append(
                te.FeatureConfig(table, max_sequence_length=length, name=f"{t}_{f}")
            )
    return features


def allocated(tables: list[TableVariables]) -> int:
    """Bytes of the variables of a process."""
    variables: list[Any] = [
        v for t in tables for v in (t.parameters, *t.slots.values())
    ]
    return sum(v.shape.num_elements() * v.dtype.size for v in variables)


def of_processes(plan: Plan, count: int, placement: str) -> list[int]:
    """What each process of a synchronous job allocates."""
    found = []
    for process in range(count):
        own = place_tables(plan, process, count, placement)
        rows = [own.rows_of(t.index, t.config.vocabulary_size) for t in plan.tables]
        parts = create_parts(plan, [[("CPU:0", r)] for r in rows])
        found.append(allocated([part for (part,) in parts]))
    return found


def of_servers(plan: Plan, count: int, placement: str) -> list[int]:
    """What each of some parameter servers allocates."""
    place = place_on_servers(plan, count, placement)
    places = [places_on_servers(t, place, ["CPU:0"] * count) for t in plan.tables]
    found: list[list[TableVariables]] = [[] for _ in range(count)]
    for t, parts in enumerate(create_parts(plan, places)):
        for k, part in enumerate(parts):
            found[k if place.is_divided(t) else place.owners[t]].append(part)
    return list(map(allocated, found))


def compare(seed: int) -> tuple[int, float]:
    """Returns the processes compared in one configuration, and the largest error."""
    rng: Any = np.random.default_rng(seed)
    features, count = random_features(rng), int(rng.integers(2, 5))
    placement = str(rng.choice(["auto", "auto", "rows", "whole"]))
    report = te.plan(
        features,
        batch_size=64,
        processes=[count],
        topologies=[],
        distributed_options=te.DistributedOptions(placement),
    )
    converted = convert_features(features)
    plan = make_plan(
        converted.paths, converted.features, converted.keys, convert_optimizer(None)
    )
    jobs = {
        f"{count} processes, synchronous": of_processes(plan, count, placement),
        f"{count} parameter servers": of_servers(plan, count, placement),
    }
    errors = [
        abs(planned / held - 1) if held else float(planned > 0)
        for place in report.placements
        if place.name in jobs
        for planned, held in zip(place.table_bytes, jobs[place.name], strict=True)
    ]
    return len(errors), max(errors)


if __name__ == "__main__":
    results = [compare(seed) for seed in range(int(sys.argv[1]))]
    worst = max(error for _, error in results)
    print(
        f"{len(results)} configurations, {sum(n for n, _ in results)} processes and "
        f"servers: planned and allocated differ by at most {worst:.2%}"
    )
    sys.exit(worst > LIMIT)
