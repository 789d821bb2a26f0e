"""Deltas of tables on servers equal those of one machine, byte by byte."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from parameter_servers.cluster import (
    MIXED,
    OPTIMIZERS,
    ROUNDED,
    V,
    features,
    make,
    schedule,
    step_of,
    values,
)
from parameter_servers.test_growing import configs

import tpu_embedding as te

pytestmark = pytest.mark.third_tier

FORMS = ("float32", "int8", "int4")


def write(embedding: Any, folder: pathlib.Path) -> None:
    """Three deltas of each form; before the third the trainer goes back."""
    folder.mkdir()
    step, number = step_of(embedding), itertools.count()
    with mock.patch("secrets.randbelow", side_effect=itertools.count()):
        for form in FORMS:
            te.serving.export(
                embedding, folder / form, storage=form, signatures=["dense"], deltas=1.0
            )
        step(next(number))
        writers = {
            form: te.serving.DeltaWriter(embedding, folder / form, form)
            for form in FORMS
        }
        checkpoint = tf.train.Checkpoint(embedding=embedding, **writers)
        for delta in (1, 2, 3):
            for form, writer in writers.items():
                writer.export_delta(folder / f"{form}.{delta}")
            step(next(number))
            if delta == 2:
                path = checkpoint.write(str(folder / "checkpoint"))
                step(next(number))
                checkpoint.read(path).assert_consumed()


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("placements", [(None, None, None), MIXED])
@pytest.mark.parametrize("kind", [te.TPUEmbedding, te.TPUEmbeddingV2])
def test_servers_write_the_delta_of_one_machine(
    placements: Sequence[str | None], kind: Any, dtype: str, tmp_path: pathlib.Path
) -> None:
    static = features(dtype, placements)
    require_same_deltas(make(kind, static, OPTIMIZERS["schedule"]()), tmp_path)


def test_growing_tables(tmp_path: pathlib.Path) -> None:
    require_same_deltas(make(te.TPUEmbedding, configs(), te.Adagrad(0.1)), tmp_path)


def require_same_deltas(embeddings: tuple[Any, Any], tmp_path: pathlib.Path) -> None:
    one, served = embeddings
    for embedding, name in ((one, "one"), (served, "served")):
        write(embedding, tmp_path / name)
    for form in FORMS:
        for number in (1, 2, 3):
            path = f"{form}.{number}"
            found = (tmp_path / "served" / path).read_bytes()
            assert found == (tmp_path / "one" / path).read_bytes(), path


def test_workers_train_between_deltas(tmp_path: pathlib.Path) -> None:
    _, served = make(te.TPUEmbedding, features(placements=MIXED), te.Adagrad(0.1))
    te.serving.export(served, tmp_path / "base", signatures=["dense"], deltas=1.0)
    writer = te.serving.DeltaWriter(served, tmp_path / "base", "replicas")
    model: Any = tf.saved_model.load(str(tmp_path / "base"))
    step, ids = tf.function(step_of(served)), tf.range(V, dtype=tf.int64)
    inputs = {**dict.fromkeys("abc", ids), "d": ids[:, tf.newaxis]}
    for number in range(3):
        schedule(step, range(2 * number, 2 * number + 2))
        path = tmp_path / f"{number}.delta"
        counts = writer.export_delta(path)
        assert all(0 < count <= V for count in counts.values())
        te.serving.apply_delta(model, path)
        found, wanted = model.signatures["dense"](**inputs), values(served)
        for index, feature in enumerate("abc"):
            rows = wanted[f"t{index}/parameters"]
            np.testing.assert_array_equal(found[feature], rows)
