"""How much memory an export takes beyond that of the tables and slots.

At full size:

    python tests/serving/measure_export.py /some/folder 2048
"""

from __future__ import annotations

import json
import pathlib

import pytest
from new_process import printed_by

SCRIPT = pathlib.Path(__file__).with_name("measure_export.py")
SIZE = 384  # MiB: half of the table, as 16 bits, would be too much.


@pytest.mark.second_tier
def test_peak_of_an_export(tmp_path: pathlib.Path) -> None:
    # In a process of its own: what other tests have freed would hide a peak.
    found = json.loads(printed_by(SCRIPT, tmp_path, str(SIZE)).splitlines()[-1])
    assert set(found) == {
        *("built", "float32", "bfloat16", "float16", "int8", "int4", "limit"),
        *("float32+deltas", "int8+deltas"),
    }
    assert found["built"] > 0.9 * SIZE, found
    assert max(found.values()) == found["limit"], found
