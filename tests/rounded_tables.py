"""What tests of tables of bfloat16 and of int8 share: one feature, files of tables."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from steps import train_on

import tpu_embedding as te
from tpu_embedding import checkpoint
from tpu_embedding.__main__ import main
from tpu_embedding.testing import SoftwareTPUStrategy

IDS = tf.constant([[1, 2], [2, 10]], tf.int64)


def initial(shape: Any, dtype: Any = tf.float32) -> tf.Tensor:
    return tf.cast(tf.random.stateless_normal(shape, seed=[1, 2]), dtype)


def train(embedding: Any, steps: Sequence[int] = range(3)) -> None:
    """The gradients depend on the step alone."""
    for step in steps:
        train_on(
            embedding,
            {"seen": IDS},
            lambda a, step=step: tf.random.stateless_normal(a.shape, [step, 0]),
        )


def table_of(embedding: Any) -> np.ndarray:
    (table,) = embedding.embedding_tables.values()
    return table.numpy().astype(np.float32)


def refusals(feature: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """Constructors that such tables are refused by, and what their error names."""

    def on(generation: str, kind: Any) -> Any:
        with SoftwareTPUStrategy(generation, 1).scope():
            return kind(feature(), te.Adagrad(0.01))

    return {
        "sparse_core": lambda: on("v6e", te.TPUEmbeddingV2),
        "tpu_v2_v4": lambda: on("v4", te.TPUEmbedding),
        "TPUEmbeddingV0": lambda: te.TPUEmbeddingV0(feature(), te.Adagrad(0.01)),
        "trainable_tables=True": lambda: te.keras.TPUEmbedding(
            feature(), None, trainable_tables=True
        ),
    }


def save_numpy(embedding: Any, path: pathlib.Path) -> str:
    saved = checkpoint.save(embedding, path / "first")
    folder = str(path / "arrays")
    assert main(["checkpoint", "convert", saved, folder, "--to", "numpy"]) == 0
    return folder


def save_tensorflow(embedding: Any, path: pathlib.Path) -> str:
    return tf.train.Checkpoint(embedding=embedding).write(str(path / "tensorflow"))


def save_ours(embedding: Any, path: pathlib.Path) -> str:
    return checkpoint.save(embedding, path / "ours")
