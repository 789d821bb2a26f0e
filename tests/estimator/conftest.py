"""What the tests of the estimator share: no writer of summaries outlives a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf


@pytest.fixture(autouse=True)
def closed_summaries() -> Iterator[None]:
    """Closes the writers that TensorFlow's hooks keep for the process.

    Each folder that is trained in has one, with a thread that the fixture of all tests
    would find.
    """
    yield
    tf.compat.v1.summary.FileWriterCache.clear()
