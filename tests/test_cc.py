"""Compiles and runs each `tests/cc/*_test.cc` under the sanitizers that concern it.

A test is a program that checks with `check.h` and returns 0.
"""

from __future__ import annotations

import pathlib

import cc_programs
import pytest

# Folders of plain C++ that a test links beyond the core.
MORE_FOLDERS = {"engine_test": cc_programs.SOFTWARE_TPU / "tpu_v2_v4" / "engine"}

# Each build shows what no other does; that of "address" runs all checks.
WHERE = {
    "address": "",
    "thread": "std::thread",
    # Instrumented code is compiled for one level of CPU only.
    "plain": "TPU_EMBEDDING_LEVELS",
}
if cc_programs.EMULATOR:  # It has no sanitizers.
    WHERE = {"emulated": ""}
# A quick one; all others are of the second tier.
OF_FIRST_TIER = ("step_queue_test", "address")
PROGRAMS = [
    pytest.param(
        source,
        build,
        id=f"{source.stem}-{build}",
        marks=[pytest.mark.second_tier] * ((source.stem, build) != OF_FIRST_TIER),
    )
    for source in sorted(cc_programs.TESTS.glob("*_test.cc"))
    for build, word in WHERE.items()
    if word in source.read_text()
]


@pytest.mark.skipif(bool(cc_programs.EMULATOR), reason="has one build")
def test_each_build_has_its_programs() -> None:
    """At least those that were written for it."""
    names = {str(program.id) for program in PROGRAMS}
    assert {"update_test-thread", "batch_pool_test-thread"} <= names
    assert "weighted_sum_test-plain" in names


@pytest.mark.parametrize(("source", "build"), PROGRAMS)
def test_program(source: pathlib.Path, build: str, tmp_path: pathlib.Path) -> None:
    folders = [cc_programs.CORE, *filter(None, [MORE_FOLDERS.get(source.stem)])]
    if build == "plain":  # The levels are those of headers.
        folders = []
    program = cc_programs.build_program([source], build, tmp_path, folders)
    ran = cc_programs.run_program(program)
    assert ran.returncode == 0, ran.stdout + ran.stderr
