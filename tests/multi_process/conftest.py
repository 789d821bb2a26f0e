"""Jobs that the tests of this folder share: a process takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from multi_process.jobs import Job


@pytest.fixture(scope="session")
def two() -> Iterator[Job]:
    with Job(2) as job:
        yield job


@pytest.fixture(scope="session")
def three() -> Iterator[Job]:
    with Job(3) as job:
        yield job
