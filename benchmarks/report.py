"""The results of a run: JSON, a Markdown table and a picture."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from benchmarks import aims, picture

FUNCTIONS = ("lookup", "step", "lookup, cold", "step, cold")
FASTER = "how many times faster tpu_embedding is (median over median)"


@dataclasses.dataclass(frozen=True)
class Run:
    """What was measured.

    Attributes:
      scenario: The name of the scenario.
      optimizer: The name of the optimizer.
      step_bytes: The bytes that a training step has to move (Scenario.bytes_per_step).
      distinct_rows: The rows that a batch touches (Scenario.distinct_rows).
      peers: By peer its `rule`, why it is `missing` or None, its `milliseconds` and
        those of `ours` in the same turns: by function the median, min and max.
    """

    scenario: str
    optimizer: str
    step_bytes: int
    distinct_rows: float
    peers: dict[str, dict[str, Any]]

    @property
    def title(self) -> str:
        """The name of the files."""
        return f"{self.scenario}-{self.optimizer}"

    def missed(self, peer: str, function: str) -> float | None:
        """Returns the aim that the ratio misses, or None."""
        ratio = self.ratio(peer, function)
        aim = aims.aim(self.scenario, self.optimizer, peer, function)
        return aim if ratio and aim and ratio < aim else None

    @property
    def row_nanoseconds(self) -> float | None:
        """Our step's time for each distinct row, beside the first peer measured."""
        for result in self.peers.values():
            if "step" in result["ours"]:
                return 1e6 * result["ours"]["step"]["median"] / self.distinct_rows
        return None

    def ratio(self, peer: str, function: str) -> float | None:
        """Returns how many times faster ours is, or None if a time is missing."""
        result = self.peers[peer]
        if function not in result["milliseconds"] or function not in result["ours"]:
            return None
        theirs, ours = (result[side][function] for side in ("milliseconds", "ours"))
        return theirs["median"] / ours["median"]

    @property
    def bandwidth(self) -> tuple[float, float] | None:
        """GB/s of a copy, read and written, and of our step; None if not measured."""
        from benchmarks.peers import machine_limits

        for result in self.peers.values():
            copy, step = result["milliseconds"].get("copy"), result["ours"].get("step")
            if copy and step:
                return (
                    machine_limits.BYTES / copy["median"] / 1e6,
                    self.step_bytes / step["median"] / 1e6,
                )
        return None

    @property
    def gathers(self) -> float | None:
        """Our lookup's time over a plain gather's; None if that was not measured."""
        for result in self.peers.values():
            plain = result["milliseconds"].get("gather")
            if plain and "lookup" in result["ours"]:
                return result["ours"]["lookup"]["median"] / plain["median"]
        return None


def write(folder: pathlib.Path, run: Run) -> None:
    """Writes <title>.json, .md and .png into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(run), indent=2) + "\n"
    (folder / f"{run.title}.json").write_text(text)
    (folder / f"{run.title}.md").write_text(markdown(run))
    _draw(folder / f"{run.title}.png", run)


def markdown(run: Run) -> str:
    """Makes a row for each peer: its time and ours in the same turns, and the ratio."""
    head = ["peer", "update rule"]
    for function in FUNCTIONS:
        head += [f"{function} ms (min-max)", "ours", "times faster"]
    lines = [f"### {run.title}", "", _row(head), _row(["---"] * len(head))]
    for peer, result in run.peers.items():
        if result["missing"]:
            lines.append(_row([peer, f"not measured: {result['missing']}"]))
            continue
        cells = [peer, result["rule"]]
        for function in FUNCTIONS:
            ratio = run.ratio(peer, function)
            cells.append(_time(result["milliseconds"].get(function)))
            cells.append(_time(result["ours"].get(function)))
            missed = run.missed(peer, function)
            mark = f" (aim {missed:g}, **missed**)" if missed else ""
            cells.append("-" if ratio is None else f"{ratio:.2f} x{mark}")
        lines.append(_row(cells))
    if run.row_nanoseconds:
        lines += ["", f"Our step takes {run.row_nanoseconds:.1f} ns a distinct row."]
    if run.bandwidth:
        copy, step = run.bandwidth
        missed = run.title == "dlrm-adagrad" and step < aims.BANDWIDTH * copy
        lines += [
            "",
            f"Our step moves {run.step_bytes / 1e6:.0f} MB at {step:.1f} GB/s, "
            f"{step / copy:.0%} of a copy's {copy:.1f} GB/s"
            + (f" (aim {aims.BANDWIDTH:.0%}, **missed**)." if missed else "."),
        ]
    if run.gathers:
        lines += ["", f"Our lookup takes {run.gathers:.2f} of a plain gather's time."]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _time(times: dict[str, float] | None) -> str:
    if times is None:
        return "-"
    return f"{times['median']:.2f} ({times['min']:.2f}-{times['max']:.2f})"


def _draw(path: pathlib.Path, run: Run) -> None:
    rows: dict[str, dict[str, picture.Bar]] = {}
    for peer in run.peers:
        for function in FUNCTIONS:
            ratio = run.ratio(peer, function)
            if ratio is not None:
                missed = run.missed(peer, function) is not None
                rows.setdefault(peer, {})[function] = picture.Bar(ratio, missed)
    picture.bars(path, run.title, FASTER, rows)
