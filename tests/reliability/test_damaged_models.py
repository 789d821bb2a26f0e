"""SavedModels that were cut, changed or lost in part: they do not load."""

from __future__ import annotations

import pathlib
import shutil

import pytest
import tensorflow as tf
from checkpoint.test_damage import DAMAGE
from google.protobuf.message import DecodeError

import tpu_embedding as te

GRAPH = "saved_model.pb"
INDEX = "variables/variables.index"
DATA = "variables/variables.data-00000-of-00001"
# A graph has no checksum: what a changed byte does there is up to TensorFlow.
CASES = [
    *((GRAPH, damage) for damage in ("cut", "empty", "lost")),
    *((INDEX, damage) for damage in ("cut", "empty", "middle", "lost")),
    *((DATA, damage) for damage in ("cut", "empty", "first byte", "lost")),
]

# What TensorFlow's loader has for such files.
REFUSALS = (OSError, ValueError, IndexError, DecodeError, tf.errors.OpError)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    films = te.TableConfig(9, 2, te.RowIdInitializer(), name="films")
    embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, None)
    path = tmp_path_factory.mktemp("exported") / "model"
    te.serving.export(embedding, path, signatures=["dense"])
    return path


@pytest.mark.parametrize(("file", "damage"), CASES, ids=lambda part: part)
def test_damaged_model(
    file: str, damage: str, model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    DAMAGE[damage](copy / file)
    with pytest.raises(REFUSALS):
        tf.saved_model.load(str(copy))
