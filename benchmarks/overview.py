"""One table of one scenario: a row for each peer and ours, a column for each time.

python -m benchmarks.overview [--scenario dlrm]

Reads what `benchmarks.run` wrote, whenever that was; writes build/bench/overview.md.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Iterator, Sequence

from benchmarks import run
from benchmarks.report import Run


def read(folder: pathlib.Path, scenario: str) -> list[Run]:
    """Reads the existing runs of a scenario, in the order of optimizers."""
    files = [folder / f"{scenario}-{optimizer}.json" for optimizer in run.SLOTS]
    return [Run(**json.loads(file.read_text())) for file in files if file.exists()]


def markdown(runs: Sequence[Run]) -> str:
    """Returns a table of the peers' milliseconds, and how many times faster ours was.

    Ours is measured beside each peer, so its row gives the lowest and the highest of
    these medians.
    """
    if not runs:
        return ""
    columns = [("lookup", runs), *((one.optimizer, [one]) for one in runs)]
    peers = dict.fromkeys(peer for one in runs for peer in one.peers)
    rows = [
        [peer, *(_theirs(peer, name, of) for name, of in columns)] for peer in peers
    ]
    rows = [row for row in rows if any(cell != "-" for cell in row[1:])]
    rows.append(["**ours**", *(_ours(name, of) for name, of in columns)])
    head = ["milliseconds (times faster)", "lookup"]
    head += [f"{one.optimizer} step" for one in runs]
    lines = [head, ["---"] * len(head), *rows]
    title = f"### {runs[0].scenario}, all peers\n\n"
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    missing = "".join(
        f"\nNot measured with {one.optimizer}: {peer}, {result['missing']}\n"
        for one in runs
        for peer, result in one.peers.items()
        if result["missing"]
    )
    return title + table + missing


def _function(column: str) -> str:
    return column if column == "lookup" else "step"


def _theirs(peer: str, column: str, runs: Sequence[Run]) -> str:
    """Returns a peer's time from the first run that has one."""
    function = _function(column)
    for one in runs:
        ratio = one.ratio(peer, function) if peer in one.peers else None
        if ratio is not None:
            time = one.peers[peer]["milliseconds"][function]["median"]
            missed = one.missed(peer, function)
            mark = f", aim {missed:g} **missed**" if missed else ""
            return f"{time:.2f} ({ratio:.2f} x{mark})"
    return "-"


def _ours(column: str, runs: Sequence[Run]) -> str:
    times = list(_medians(_function(column), runs))
    return f"{min(times):.2f} to {max(times):.2f}" if times else "-"


def _medians(function: str, runs: Sequence[Run]) -> Iterator[float]:
    for one in runs:
        for peer, result in one.peers.items():
            # Beside these peers another form of ours was measured.
            if peer not in run.OURS_BESIDE and function in result["ours"]:
                yield result["ours"][function]["median"]


def write(folder: pathlib.Path, scenario: str) -> str:
    """Writes overview.md into the folder, if there is any run; returns its text."""
    table = markdown(read(folder, scenario))
    if table:
        (folder / "overview.md").write_text(table)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table of a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", default="dlrm")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/bench"))
    flags = parser.parse_args(arguments)
    print(write(flags.out, flags.scenario) or f"No run of {flags.scenario} is there.")


if __name__ == "__main__":
    main()
