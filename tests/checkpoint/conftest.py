"""Runs the tests of checkpoints over the engines."""

from __future__ import annotations

import pytest
from cpu_engines import EACH_ENGINE


@pytest.fixture(params=EACH_ENGINE)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", request.param)
    return request.param
