"""How much memory an export takes above what the tables and slots have."""

from __future__ import annotations

import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).with_name("measure_export.py")
MIB = 2**20


def test_peak_of_an_export(tmp_path: pathlib.Path) -> None:
    # In a process of its own: what other tests have freed would hide a peak.
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), "int8", "float32"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        tables, peak = map(int, line.split())
        assert tables == 192 * MIB
        assert peak <= 1.1 * tables + 64 * MIB
    assert len(done.stdout.splitlines()) == 2
