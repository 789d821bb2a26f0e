"""The kinds of files into which tests save tables: each function returns the path."""

from __future__ import annotations

import pathlib
from typing import Any

import tensorflow as tf

from tpu_embedding import checkpoint
from tpu_embedding.__main__ import main


def save_numpy(embedding: Any, path: pathlib.Path) -> str:
    saved = checkpoint.save(embedding, path / "first")
    folder = str(path / "arrays")
    assert main(["checkpoint", "convert", saved, folder, "--to", "numpy"]) == 0
    return folder


def save_tensorflow(embedding: Any, path: pathlib.Path) -> str:
    return tf.train.Checkpoint(embedding=embedding).write(str(path / "tensorflow"))


def save_ours(embedding: Any, path: pathlib.Path) -> str:
    return checkpoint.save(embedding, path / "ours")
