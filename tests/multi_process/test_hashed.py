"""Hashed tables of jobs have the rows that an oracle chooses."""

from __future__ import annotations

import pathlib

import pytest
from multi_process.jobs import Job

pytestmark = pytest.mark.second_tier


@pytest.mark.parametrize(("version", "placement"), [(1, "rows"), (2, "whole")])
def test_bits_are_those_of_static_tables(
    two: Job, version: int, placement: str, tmp_path: pathlib.Path
) -> None:
    path = str(tmp_path / "saved")
    for tables, refused in two.run("hashed.train", version, placement, path):
        assert {table.tobytes() for table in tables} == {tables[0].tobytes()}
        assert refused[0] == "ValueError"
        assert "salt=6" in refused[1]
        assert "salt=5" in refused[1]
