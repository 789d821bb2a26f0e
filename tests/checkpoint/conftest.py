"""Runs the tests of checkpoints over the engines."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["host", "portable"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", request.param)
    return request.param
