"""Times preprocessing for SparseCores beside the peers that can do it, A B A B.

python -m benchmarks.preprocessing [--scenario dlrm] [--rounds 12]

One device's batch is partitioned for 1 and for 8 devices, all tables in one stack.
Each peer runs in a process of its own, in turn with ours, which is
TPUEmbeddingV2.preprocess_features as a training step in a tf.function calls it.
Writes build/bench/<scenario>-preprocessing.{json,md,png}.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import aims, one_stack, options, picture, report, run
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
        "| peer | what it runs | devices | time | ours | times faster | of CPU time "
        "| ours, ids/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for peer, result in results.items():
        if result["missing"]:
            lines.append(f"| {peer} | not measured: {result['missing']} |")
            continue
        theirs, ours = result["milliseconds"], result["ours"]
        for name, devices in one_stack.DEVICES.items():
            bar = _bar(result, name, aim)
            cells = [
                *(peer, result["rule"], str(devices)),
                *(_time(theirs[name]), _time(ours[name])),
                f"{bar.value:.2f} x" + (", **missed**" if bar.missed else ""),
                f"{ratio(result, f'{name}_cpu'):.2f} x",
                f"{ids / ours[name]['median'] / 1e3:.1f} M",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ratio(result: Mapping[str, Any], function: str) -> float:
    """Returns how many times faster ours is, median over median."""
    theirs, ours = (result[side][function] for side in ("milliseconds", "ours"))
    return theirs["median"] / ours["median"]


def _bar(result: Mapping[str, Any], function: str, aim: float) -> picture.Bar:
    value = ratio(result, function)
    return picture.Bar(value, value < aim)


def _time(times: Mapping[str, float]) -> str:
    return f"{times['median']:.2f} ({times['min']:.2f}-{times['max']:.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes build/bench/<scenario>-preprocessing.{json,md,png}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default="dlrm")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    options.add_rounds(parser, 12)
    options.add_out(parser)
    flags = parser.parse_args(arguments)
    print(f"{flags.scenario}, preprocessing")
    results: dict[str, dict[str, Any]] = {}
    with options.alone(flags.out):
        for peer in flags.peers:
            results[peer] = run.beside(peer, flags.scenario, "none", flags.rounds)
            _write(flags.out, flags.scenario, results)
    print(markdown(flags.scenario, results))


def _write(
    folder: pathlib.Path, scenario: str, results: Mapping[str, Mapping[str, Any]]
) -> None:
    title = f"{scenario}-preprocessing"
    (folder / f"{title}.json").write_text(json.dumps(results, indent=2) + "\n")
    (folder / f"{title}.md").write_text(markdown(scenario, results))
    aim = aims.PREPROCESSING.get(scenario, 0.0)
    rows = {
        peer: {
            name.replace("_", " "): _bar(result, name, aim)
            for name in one_stack.DEVICES
        }
        for peer, result in results.items()
        if not result["missing"]
    }
    picture.bars(folder / f"{title}.png", title, report.FASTER, rows)


if __name__ == "__main__":
    main()
