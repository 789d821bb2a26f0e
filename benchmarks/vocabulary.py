"""One table from small to large: does the time for each row that a step touches grow?

python -m benchmarks.vocabulary [--most-rows 2500000] [--peers fbgemm]

One table has all ids of the dlrm batch and trains with Adagrad. Each size takes turns
with a table of BASE_ROWS, so that their ratio is from one run. Then peers take turns
with ours, if both fit into memory. Writes build/bench/vocabulary.{json,md,png}.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks import options, picture, run
from benchmarks.scenarios import SCENARIOS, VOCABULARIES, Scenario

BASE_ROWS = 100_000
AIM = 2.0
"""The limit of the time per distinct row relative to BASE_ROWS; caches do miss."""
PEERS = ("fbgemm", "torch_embedding_bag", "tensorflow_nn")
OPTIMIZER = "adagrad"
_SLOTS = 1
# What a process needs besides the table and its slot: libraries, batches, copies.
_BESIDE = 1.2
_LIBRARIES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Size:
    """The measurements of one size of the table.

    Attributes:
      rows: The number of rows of the table.
      distinct_rows: The number of distinct rows that a batch names.
      missing: Why ours was not measured, or None.
      milliseconds: The median, min and max of our step.
      base: The same for our step on BASE_ROWS, in the same turns.
      base_distinct_rows: The number of distinct rows that a batch names there.
      peers: By peer its `missing` or None, its `milliseconds` and those of `ours`.
    """

    rows: int
    distinct_rows: float
    missing: str | None = None
    milliseconds: dict[str, float] | None = None
    base: dict[str, float] | None = None
    base_distinct_rows: float = 1.0
    peers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def row_nanoseconds(self) -> float | None:
        """The time of a step for each row that it touches."""
        if self.milliseconds is None:
            return None
        return 1e6 * self.milliseconds["median"] / self.distinct_rows

    @property
    def growth(self) -> float | None:
        """That time relative to BASE_ROWS."""
        if self.base is None or self.row_nanoseconds is None:
            return None
        base = 1e6 * self.base["median"] / self.base_distinct_rows
        return self.row_nanoseconds / base

    @property
    def slower(self) -> float | None:
        """The time of a step relative to BASE_ROWS."""
        if self.base is None or self.milliseconds is None:
            return None
        return self.milliseconds["median"] / self.base["median"]


def needed(scenario: Scenario) -> int:
    """The bytes that one process needs, roughly: the tables, their slots, libraries."""
    tables = 4 * scenario.dim * sum(scenario.rows) * (1 + _SLOTS)
    return int(_BESIDE * tables) + _LIBRARIES


def does_not_fit(scenarios: Sequence[Scenario], available: int) -> str | None:
    """Says why processes with these scenarios cannot run side by side, or None."""
    total = sum(needed(scenario) for scenario in scenarios)
    if total <= available:
        return None
    return f"needs {total / 1e9:.0f} GB, {available / 1e9:.0f} GB are free"


def available_bytes() -> int:
    """Returns the bytes that are available without swapping, according to Linux."""
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise OSError("/proc/meminfo has no line MemAvailable.")


def measure(scenario: Scenario, peers: Sequence[str], rounds: int) -> Size:
    """Measures ours and BASE_ROWS in turn, then each peer and ours."""
    (rows,) = scenario.rows
    base = SCENARIOS[f"vocabulary_{BASE_ROWS}"]
    size = Size(rows, scenario.distinct_rows(), base_distinct_rows=base.distinct_rows())
    missing = does_not_fit([scenario, base], available_bytes())
    if missing:
        return dataclasses.replace(size, missing=missing)
    print(f"  {rows:,} rows: preparing ...", flush=True)
    ours = run.Worker.start(run.OURS, scenario.name, OPTIMIZER)
    ours_on_base = run.Worker.start(run.OURS, base.name, OPTIMIZER)
    missing = ours.missing or ours_on_base.missing
    if not missing:
        run.take_turns(ours, ours_on_base, rounds)
        missing = ours.missing or ours_on_base.missing
    for worker in (ours, ours_on_base):
        worker.stop()
    if missing:
        return dataclasses.replace(size, missing=missing)
    return dataclasses.replace(
        size,
        milliseconds=run.summary(ours)["step"],
        base=run.summary(ours_on_base)["step"],
        peers={peer: _beside(peer, scenario, rounds) for peer in peers},
    )


def _beside(peer: str, scenario: Scenario, rounds: int) -> dict[str, Any]:
    missing = does_not_fit([scenario, scenario], available_bytes())
    if missing:
        return {"missing": missing}
    return run.beside(peer, scenario.name, OPTIMIZER, rounds)


def markdown(sizes: Sequence[Size]) -> str:
    """Makes a row for each size, then rows with the results of the peers."""
    lines = [
        "### vocabulary",
        "",
        f"Training step of ours, {OPTIMIZER}; beside {BASE_ROWS:,} rows in the same "
        f"turns. Aim: at most {AIM:g} x a distinct row's time there.",
        "",
        "| rows | distinct rows | ms (min-max) | ns a distinct row | over "
        f"{BASE_ROWS:,} rows | plain ratio |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_row(size) for size in sizes]
    if not any(size.peers for size in sizes):
        return "\n".join(lines) + "\n"
    lines += ["", "| rows | peer | ms | ours | times faster |", "|---|---|---|---|---|"]
    lines += [_peer(size, peer) for size in sizes for peer in size.peers]
    return "\n".join(lines) + "\n"


def missed(size: Size) -> bool:
    """Returns whether a row of a table larger than the base misses the aim.

    On a smaller table the same ids name fewer rows, and each sums more gradients.
    """
    larger = size.rows > BASE_ROWS
    return larger and size.growth is not None and size.growth > AIM


def _row(size: Size) -> str:
    head = f"| {size.rows:,} | {size.distinct_rows:,.0f} |"
    times = size.milliseconds
    if times is None:
        return f"{head} not measured: {size.missing} |"
    mark = ", **missed**" if missed(size) else ""
    return (
        f"{head} {times['median']:.2f} ({times['min']:.2f}-{times['max']:.2f}) | "
        f"{size.row_nanoseconds:.0f} | {size.growth:.2f} x{mark} | "
        f"{size.slower:.2f} x |"
    )


def _peer(size: Size, peer: str) -> str:
    result = size.peers[peer]
    head = f"| {size.rows:,} | {peer} |"
    if result["missing"]:
        return f"{head} not measured: {result['missing']} |"
    theirs, ours = (result[side]["step"]["median"] for side in ("milliseconds", "ours"))
    return f"{head} {theirs:.2f} | {ours:.2f} | {theirs / ours:.2f} x |"


def draw(path: pathlib.Path, sizes: Sequence[Size]) -> None:
    """Draws the time for each distinct row over the size, and the aim as a line."""
    if not picture.can_draw():
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = [size for size in sizes if size.growth is not None]
    figure, axes = plt.subplots(figsize=(8, 4))
    axes.plot([s.rows for s in shown], [s.growth or 0.0 for s in shown], "o-")
    for size in shown:
        text = f"{size.row_nanoseconds:.0f} ns" + (" missed" if missed(size) else "")
        place = (size.rows, size.growth or 0.0)
        axes.annotate(text, place, (0, 8), textcoords="offset points")
    axes.axhline(AIM, color="black", linestyle="--", linewidth=0.8, label="aim")
    axes.set(
        xscale="log", ylim=(0, None), title="vocabulary", xlabel="rows of the table"
    )
    axes.set_ylabel(f"a distinct row's time over {BASE_ROWS:,} rows'")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes build/bench/vocabulary.{json,md,png}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most-rows", type=_most_rows, default=max(VOCABULARIES))
    options.add_peers(parser, PEERS)
    options.add_rounds(parser, 5)
    options.add_out(parser)
    flags = parser.parse_args(arguments)
    sizes: list[Size] = []
    with options.alone(flags.out):
        for rows in VOCABULARIES:
            if rows <= flags.most_rows:
                scenario = SCENARIOS[f"vocabulary_{rows}"]
                sizes.append(measure(scenario, flags.peers, flags.rounds))
                _write(flags.out, sizes)  # Keeps the results if a later size fails.
    print(markdown(sizes))


def _most_rows(text: str) -> int:
    """Parses --most-rows, which is at least the smallest size."""
    value, least = options.positive(text), min(VOCABULARIES)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is less than the smallest, {least}")
    return value


def _write(folder: pathlib.Path, sizes: Sequence[Size]) -> None:
    written = json.dumps([dataclasses.asdict(size) for size in sizes], indent=2)
    (folder / "vocabulary.json").write_text(written + "\n")
    (folder / "vocabulary.md").write_text(markdown(sizes))
    draw(folder / "vocabulary.png", sizes)


if __name__ == "__main__":
    main()
