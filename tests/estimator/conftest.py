"""What the tests of the estimator share: no writer of summaries outlives a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf
from absl import logging


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of the test."""
    found: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *a: found.append(text % a))
    return found


@pytest.fixture(autouse=True)
def closed_summaries() -> Iterator[None]:
    """Closes the writers that TensorFlow's hooks keep for the process.

    Each folder that is trained in has one, with a thread that the fixture of all tests
    would find.
    """
    yield
    tf.compat.v1.summary.FileWriterCache.clear()
