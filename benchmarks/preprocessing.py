"""Times preprocessing for SparseCores beside the peers that can do it, A B A B.

python -m benchmarks.preprocessing [--scenario dlrm] [--rounds 12]

One device's batch is partitioned for 1 and for 8 devices, all tables in one stack.
Each peer runs in a process of its own, in turn with ours.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import aims, one_stack, out, run
from benchmarks.scenarios import SCENARIOS

PEERS = ("tensorflow_tpu_host_ops", "jax_tpu_embedding")


def markdown(scenario: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each peer and number of devices: its time, ours, and the ratio."""
    ids = SCENARIOS[scenario].ids_per_step
    aim = aims.PREPROCESSING.get(scenario, 0.0)
    lines = [
        f"### {scenario}-preprocessing",
        "",
        f"{ids:,} ids a batch; milliseconds, median (min-max)."
        + (f" Aim: at least {aim:g} times faster." if aim else ""),
        "",
        "| peer | devices | time | ours | times faster | of CPU time | ours, ids/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for peer, result in results.items():
        if result["missing"]:
            lines.append(f"| {peer} | not measured: {result['missing']} |")
            continue
        theirs, ours = result["milliseconds"], result["ours"]
        for name, devices in one_stack.DEVICES.items():
            missed = ratio(result, name) < aim
            cells = [
                *(peer, str(devices), _time(theirs[name]), _time(ours[name])),
                f"{ratio(result, name):.2f} x" + (", **missed**" if missed else ""),
                f"{ratio(result, f'{name}_cpu'):.2f} x",
                f"{ids / ours[name]['median'] / 1e3:.1f} M",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ratio(result: Mapping[str, Any], function: str) -> float:
    """How many times faster ours is, median over median."""
    theirs, ours = (result[side][function] for side in ("milliseconds", "ours"))
    return theirs["median"] / ours["median"]


def _time(times: Mapping[str, float]) -> str:
    return f"{times['median']:.2f} ({times['min']:.2f}-{times['max']:.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes build/bench/<scenario>-preprocessing.{json,md}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default="dlrm")
    parser.add_argument("--peers", nargs="*", default=PEERS)
    parser.add_argument("--rounds", type=int, default=12)
    out.add_option(parser)
    flags = parser.parse_args(arguments)
    print(f"{flags.scenario}, preprocessing")
    results = run.measure(flags.peers, flags.scenario, "none", flags.rounds)
    title = f"{flags.scenario}-preprocessing"
    (flags.out / f"{title}.json").write_text(json.dumps(results, indent=2) + "\n")
    table = markdown(flags.scenario, results)
    (flags.out / f"{title}.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
