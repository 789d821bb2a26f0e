"""One export for all tests of this folder, as tracing takes most of their time."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import tensorflow as tf
from serving import exported


@pytest.fixture(scope="module")
def trained() -> exported.Trained:
    return exported.train()


@pytest.fixture(scope="module")
def folder(
    trained: exported.Trained, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """A SavedModel of it with all signatures."""
    path = tmp_path_factory.mktemp("exported") / "model"
    exported.export(trained, path)
    return path


@pytest.fixture(scope="module")
def served(folder: pathlib.Path) -> Any:
    """The signatures, loaded."""
    loaded = tf.saved_model.load(str(folder))
    return loaded.signatures
