"""How long each file of tests took, with its fixtures: printed, and kept in build.

A plugin of pytest. `build/test_times.json` has the figures of the last run of each
file, the slowest first; `python tests/file_times.py` prints them as a table.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest

KEPT = pathlib.Path(__file__).resolve().parents[1] / "build" / "test_times.json"
PRINTED = 10
# Wall, of that the setup and the later tiers; CPU; number of tests.
COLUMNS = ("seconds", "setup", "tier 2", "tier 3", "cpu", "tests")


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


def table(times: dict[str, dict[str, float]], count: int | None = None) -> list[str]:
    """The lines of a table: the first files, and the sum of all."""
    total = {c: sum(values[c] for values in times.values()) for c in COLUMNS}
    return [" ".join(f"{column:>8}" for column in COLUMNS)] + [
        " ".join(f"{values[column]:8.0f}" for column in COLUMNS) + f"  {name}"
        for name, values in [*list(times.items())[:count], ("all files", total)]
    ]


def _slowest_first(times: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return dict(sorted(times.items(), key=lambda item: -item[1]["seconds"]))


class FileTimes:
    """Adds up the phases of all tests by file, also those of other workers."""

    def __init__(self) -> None:
        self._cpu = _cpu_seconds()
        self._times: dict[str, dict[str, float]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Any:
        """Tells the process that reports how much CPU time passed since the last."""
        report = yield
        before, self._cpu = self._cpu, _cpu_seconds()
        report.cpu_seconds = self._cpu - before
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of one phase: "setup", "call" or "teardown"."""
        name = report.nodeid.partition("::")[0]
        values = self._times.setdefault(name, dict.fromkeys(COLUMNS, 0))
        values["seconds"] += report.duration
        values["setup"] += report.duration if report.when == "setup" else 0
        for tier, marker in (("tier 2", "second_tier"), ("tier 3", "third_tier")):
            values[tier] += report.duration if marker in report.keywords else 0
        values["cpu"] += getattr(report, "cpu_seconds", 0)
        values["tests"] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints the slowest files of this run, and keeps the figures of all."""
        if not self._times:
            return
        times = _slowest_first(self._times)
        terminalreporter.section(f"slowest {PRINTED} files")
        for line in table(times, PRINTED):
            terminalreporter.line(line)
        KEPT.parent.mkdir(exist_ok=True)
        kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        beside = KEPT.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(_slowest_first(kept | times), indent=1))
        beside.replace(KEPT)  # Tests of tf_keras are a run within a run.


if __name__ == "__main__":
    print(*table(json.loads(KEPT.read_text())), sep="\n")
