"""Compiles and runs each `tests/cc/*_test.cc`, plain and under the sanitizers.

A test is a program that checks with `check.h` and returns 0.
"""

from __future__ import annotations

import pathlib

import cc_programs
import pytest

# Folders of plain C++ that a test links beyond the core.
MORE_FOLDERS = {"engine_test": "software_tpu/engine"}


@pytest.mark.parametrize("build", cc_programs.BUILDS)
@pytest.mark.parametrize(
    "source", sorted(cc_programs.TESTS.glob("*_test.cc")), ids=lambda p: p.stem
)
def test_program(source: pathlib.Path, build: str, tmp_path: pathlib.Path) -> None:
    folders = ["core", *filter(None, [MORE_FOLDERS.get(source.stem)])]
    program = cc_programs.build_program([source], build, tmp_path, folders)
    ran = cc_programs.run_program(program)
    assert ran.returncode == 0, ran.stdout + ran.stderr
