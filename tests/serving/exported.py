"""A small trained model, exported: what the tests of this folder ask in many ways."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import shlex
import subprocess
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

import tpu_embedding as te

FILMS, USERS, D, POSITIONS = 23, 7, 4, 2
IDS = {
    "film": [[3], [22], [0]],
    "seen": [[1, 2, 2], [], [5]],
    "user": [[6, 9], [1], []],
    "history": [[4, 5, 6], [7], []],
}
WEIGHTS = [[0.5, 2.0, -1.0], [], [3.0]]
NUMBERS = [[0.5, -1.0], [2.0, 0.0], [1.0, 1.0]]
SHAPE = [len(NUMBERS), 4]  # As a sparse tensor.


def ragged(rows: Any, dtype: tf.DType = tf.int64) -> tf.RaggedTensor:
    return tf.ragged.constant(rows, dtype, ragged_rank=1, row_splits_dtype=tf.int64)


@dataclasses.dataclass(frozen=True)
class Trained:
    """An embedding with a dense part, some steps on."""

    embedding: te.TPUEmbedding
    kernel: tf.Variable
    films: te.TableConfig
    users: te.TableConfig

    def model(self, activations: Any, dense: Any) -> dict[str, tf.Tensor]:
        """Activations and numbers to logits; gives the activations too."""
        flat = {
            "film": activations["film"],
            "seen": activations["more"][0],
            "user": activations["more"][1],
            "history": activations["history"],
        }
        history = tf.reshape(flat["history"], [-1, POSITIONS * D])
        parts = [flat["film"], flat["seen"], flat["user"], history, dense["numbers"]]
        logits = tf.linalg.matvec(tf.concat(parts, axis=1), self.kernel)
        return {"logits": logits, **flat}

    def expected(self) -> dict[str, np.ndarray]:
        """What the model gives for the batch above, through the embedding itself."""
        features, weights = batch()
        self.embedding.enqueue(features, weights, training=False)
        dense = {"numbers": tf.constant(NUMBERS)}
        outputs = self.model(self.embedding.dequeue(), dense)
        return {name: value.numpy() for name, value in outputs.items()}


def batch() -> tuple[Any, Any]:
    """The batch as ragged features and their weights."""
    ids = {name: ragged(rows) for name, rows in IDS.items()}
    features = {
        "film": ids["film"],
        "more": [ids["seen"], ids["user"]],
        "history": ids["history"],
    }
    weights = {
        "film": None,
        "more": [ragged(WEIGHTS, tf.float32), None],
        "history": None,
    }
    return features, weights


def train() -> Trained:
    """One step of each optimizer, so that slots and tables are their own."""
    films = te.TableConfig(FILMS, D, name="films", combiner="sqrtn")
    users = te.TableConfig(USERS, D, name="users", invalid_ids="drop")
    config = {
        "film": te.FeatureConfig(films),
        "more": [te.FeatureConfig(films), te.FeatureConfig(users)],
        "history": te.FeatureConfig(films, max_sequence_length=POSITIONS),
    }
    embedding = te.TPUEmbedding(config, te.Adagrad(0.1))
    features, weights = batch()
    embedding.enqueue(features, weights)
    embedding.apply_gradients(tf.nest.map_structure(tf.cos, embedding.dequeue()))
    width = 3 * D + POSITIONS * D + len(NUMBERS[0])
    kernel = tf.Variable(np.linspace(-1, 1, width, dtype=np.float32))
    return Trained(embedding, kernel, films, users)


def requests() -> dict[str, dict[str, tf.Tensor]]:
    """The inputs of each signature for the batch, less "dense"."""
    numbers = tf.constant(NUMBERS)
    names = {"film": "film", "seen": "more_0", "user": "more_1", "history": "history"}
    as_ragged, as_sparse = {"numbers": numbers}, {"numbers": numbers}
    for feature, name in names.items():
        value = ragged(IDS[feature])
        as_ragged[f"{name}_values"] = value.values
        as_ragged[f"{name}_row_splits"] = value.row_splits
        sparse = value.to_sparse()
        as_sparse[f"{name}_indices"] = sparse.indices
        as_sparse[f"{name}_values"] = sparse.values
        as_sparse[f"{name}_dense_shape"] = tf.constant(SHAPE, tf.int64)
    weights = ragged(WEIGHTS, tf.float32).values
    as_ragged["more_0_weights"] = as_sparse["more_0_weights"] = weights
    examples = {"examples": tf.constant([example(i) for i in range(len(NUMBERS))])}
    return {"ragged": as_ragged, "sparse": as_sparse, "examples": examples}


def example(row: int) -> bytes:
    """One row of the batch as a serialized tf.train.Example."""
    paths = {"film": "film", "seen": "more/0", "user": "more/1", "history": "history"}
    made = tf.train.Example()
    for feature, path in paths.items():
        ids = IDS[feature][row]
        if ids:  # A feature without ids may be left out.
            made.features.feature[path].int64_list.value.extend(ids)
    weights = made.features.feature["more/0_weights"].float_list
    weights.value.extend(WEIGHTS[row])
    made.features.feature["numbers"].float_list.value.extend(NUMBERS[row])
    return made.SerializeToString()


def export(trained: Trained, path: Any, **options: Any) -> te.serving.Report:
    """The export of all tests of this folder."""
    return te.serving.export(
        trained.embedding,
        path,
        trained.model,
        weighted=["more/0"],
        dense_inputs={"numbers": tf.TensorSpec([None, 2])},
        **options,
    )


def graph_of(path: pathlib.Path) -> Any:
    """The MetaGraphDef of a SavedModel."""
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((path / "saved_model.pb").read_bytes())
    return saved.meta_graphs[0]


def ops_of(path: pathlib.Path) -> set[str]:
    """Returns the ops of a SavedModel, and checks that all are TensorFlow's."""
    graph = graph_of(path).graph_def
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    ops = {node.op for node in nodes}
    assert sorted(ops - set(dir(tf.raw_ops))) == []
    return ops


@functools.cache
def c_program(name: str, folder: pathlib.Path) -> pathlib.Path:
    """A C program of this folder, compiled against TensorFlow's wheel."""
    source = pathlib.Path(__file__).with_name(name)
    program = folder / source.stem
    libraries = tf.sysconfig.get_lib()
    command = [
        *shlex.split(os.environ.get("CC", "gcc")),
        *("-std=c11", "-pthread", "-Wall", "-Wextra", "-Werror"),
        *(f"-isystem{tf.sysconfig.get_include()}", str(source), "-o", str(program)),
        *(f"-L{libraries}", f"-Wl,-rpath,{libraries}"),
        *("-l:libtensorflow_cc.so.2", "-l:libtensorflow_framework.so.2"),
    ]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    return program
