"""Files go to and fro between our class and TensorFlow's own."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checkpoint import models
from replica_values import mirrored

import tpu_embedding as te
from tpu_embedding import checkpoint

stock = tf.tpu.experimental.embedding
OPTIMIZERS = ["SGD", "Adagrad", "AdagradMomentum", "FTRL", "Adam"]


def make_stock(optimizer: str) -> Any:
    features = {
        name: stock.FeatureConfig(stock.TableConfig(*size, name=name))
        for name, size in models.SIZES.items()
    }
    return stock.TPUEmbedding(features, getattr(stock, optimizer)())


def make_ours(optimizer: str) -> te.TPUEmbedding:
    return models.make(getattr(te, optimizer)())


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ours_to_theirs(
    optimizer: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    ours = make_ours(optimizer)
    models.scramble(ours, rng)
    written = tf.train.Checkpoint(embedding=ours).write(tmp_path / "written")
    for path in (written, checkpoint.save(ours, tmp_path / "saved")):
        theirs = make_stock(optimizer)
        theirs.build()
        tf.train.Checkpoint(embedding=theirs).read(path).assert_consumed()
        models.assert_same(models.values(theirs), models.values(ours))


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_theirs_to_ours(
    optimizer: str, built: bool, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    theirs = make_stock(optimizer)
    models.scramble(theirs, rng)
    path = tf.train.Checkpoint(embedding=theirs).write(tmp_path / "written")
    ours, restored = make_ours(optimizer), make_ours(optimizer)
    if built:
        ours.build()
    status = tf.train.Checkpoint(embedding=ours).read(path)
    checkpoint.restore(restored, path)
    for embedding in (ours, restored):
        models.assert_same(models.values(embedding), models.values(theirs))
    status.assert_consumed()


@pytest.mark.parametrize("optimizer", ["Adagrad", "Adam"])
def test_under_a_mirrored_strategy(
    optimizer: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    with mirrored(2).scope():
        ours = make_ours(optimizer)
    models.scramble(ours, rng)
    path = tf.train.Checkpoint(embedding=ours).write(tmp_path / "mirrored")
    saved = checkpoint.save(ours, tmp_path / "saved")
    for each in (path, saved):
        theirs, alone = make_stock(optimizer), make_ours(optimizer)
        tf.train.Checkpoint(embedding=theirs).read(each)
        checkpoint.restore(alone, each)
        for embedding in (theirs, alone):
            models.assert_same(models.values(embedding), models.values(ours))
    expected = models.values(ours)
    models.scramble(ours, rng)
    checkpoint.restore(ours, path)
    models.assert_same(models.values(ours), expected)
    models.scramble(ours, rng)
    tf.train.Checkpoint(embedding=ours).read(saved).assert_consumed()
    models.assert_same(models.values(ours), expected)


@pytest.mark.parametrize(
    ("saver", "restorer"), [("host", "portable"), ("portable", "host")]
)
def test_from_engine_to_engine(
    saver: str, restorer: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", saver)
    first = make_ours("Adam")
    models.train(first, 3)
    path = checkpoint.save(first, tmp_path / "saved")
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", restorer)
    second = make_ours("Adam")
    checkpoint.restore(second, path)
    models.assert_same(models.values(second), models.values(first))
