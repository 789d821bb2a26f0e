"""Checkpoints that do not fit the tables of a TPUEstimator: what is said, and kept."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from estimator.estimator_models import (
    batches,
    dense,
    linear_model,
    make_estimator,
    variables,
)
from interop.spec_cases import SGD, embedding, ids, spec

from tpu_embedding import estimator, interop

INPUTS = batches({"a": dense([[1], [2]])})
ADAGRAD = interop.AdagradParameters(0.5)
TABLE = "dense_features/a_embedding/embedding_weights"


def make(folder: Any, parameters: Any = ADAGRAD, column: Any = None, **more: Any):
    columns = [column or embedding("a", 1)]
    model = linear_model(columns)
    return make_estimator(model, folder, spec(*columns, parameters=parameters), **more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make(tmp_path_factory.mktemp("trained")).train(INPUTS, steps=1)


def test_another_optimizer_is_refused_by_name(trained: Any, tmp_path: pathlib.Path):
    before = variables(trained)
    path = trained.latest_checkpoint()
    other = make(trained.model_dir, interop.FtrlParameters(0.5))
    text = re.escape(
        f"The checkpoint {path} has no '{TABLE}/Ftrl', '{TABLE}/Ftrl_1', which the "
        "EmbeddingConfigSpec's tables and optimization parameters need. The checkpoint "
        f"has '{TABLE}', '{TABLE}/Adagrad'. Continue with the columns and optimization "
        "parameters that wrote it, or start in a new `model_dir` with "
        f"`warm_start_from='{path}'`, which restores the tables and initializes their"
    )
    with pytest.raises(tf.errors.NotFoundError, match=text):
        other.train(INPUTS, steps=1)
    for name, value in variables(other).items():
        np.testing.assert_array_equal(value, before[name])
    # Evaluation needs no slots; an optimizer with fewer of them leaves some alone.
    assert other.evaluate(INPUTS, steps=1)["global_step"] == 1
    # The way out that the text names.
    warm = make(tmp_path, SGD, warm_start_from=path).train(INPUTS, steps=1)
    expected = before[TABLE].copy()
    expected[[1, 2]] -= 0.5
    np.testing.assert_allclose(variables(warm)[TABLE], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("mode", "use_tpu"),
    [("train", True), ("evaluate", True), ("predict", True), ("predict", False)],
)
def test_another_vocabulary_is_refused(mode: str, use_tpu: bool, trained: Any):
    """TensorFlow itself, with use_tpu=False, would change the variable's shape."""
    column = interop.embedding_column(ids("a", 6), 1)
    other = make(trained.model_dir, column=column, use_tpu=use_tpu)
    text = rf"'{TABLE}' has shape \(6, 1\), but in the checkpoint .* shape \(8, 1\)"
    calls = {
        "train": lambda: other.train(INPUTS, steps=1),
        "evaluate": lambda: other.evaluate(INPUTS, steps=1),
        "predict": lambda: next(other.predict(INPUTS)),
    }
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        calls[mode]()


def test_a_table_of_another_name_is_refused(trained: Any):
    column = embedding("a", 1)
    model = linear_model([column], in_another_scope)
    other = make_estimator(model, trained.model_dir, spec(column, parameters=ADAGRAD))
    with pytest.raises(tf.errors.NotFoundError, match="has no 'other/dense_fe"):
        other.evaluate(INPUTS, steps=1)


def in_another_scope(features: Any, columns: Any) -> Any:
    with tf.compat.v1.variable_scope("other"):
        return estimator.dense_features(features, columns)


def test_a_damaged_checkpoint_is_named(tmp_path: pathlib.Path):
    path = make(tmp_path).train(INPUTS, steps=1).latest_checkpoint()
    pathlib.Path(f"{path}.index").write_bytes(b"none")
    text = re.escape(f"The checkpoint {path} cannot be read: ")
    with pytest.raises(tf.errors.DataLossError, match=text):
        make(tmp_path).train(INPUTS, steps=1)


def test_a_lost_checkpoint_is_no_new_model(tmp_path: pathlib.Path):
    """TensorFlow itself would evaluate, or train, one of initial values."""
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-3"')
    text = f"names {tmp_path}/model.ckpt-3, but {tmp_path}/model.ckpt-3.index does"
    for call in (
        lambda: make(tmp_path).train(INPUTS, max_steps=2),
        lambda: make(tmp_path, use_tpu=False).evaluate(INPUTS, steps=1),
        lambda: next(make(tmp_path).predict(INPUTS)),
    ):
        with pytest.raises(tf.errors.NotFoundError, match=re.escape(text)):
            call()
    (tmp_path / "checkpoint").write_bytes(b"\0")
    text = re.escape(f"{tmp_path / 'checkpoint'} cannot be read, so the latest")
    with pytest.raises(tf.errors.DataLossError, match=text):
        make(tmp_path).evaluate(INPUTS, steps=1)
