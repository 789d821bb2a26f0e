"""Reads the reference runs of the removed TPUEstimator (tests/golden/README.md).

Environment variable:
    ESTIMATOR_ORACLE_DIR  a folder of other runs of the same form, to test instead.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
from typing import Any

import numpy as np
import tensorflow as tf
from interop.spec_cases import ids, weighted

from tpu_embedding import interop

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "estimator"
FOLDER = pathlib.Path(os.environ.get("ESTIMATOR_ORACLE_DIR", GOLDEN))
RUNS = sorted(path.parent for path in FOLDER.glob("*/reference.npz"))
RUN_IDS = [f"estimator-oracle-{path.name}" for path in RUNS]
TOLERANCE = 1e-6

_V1 = tf.compat.v1
OPTIMIZERS: dict[str, tuple[Any, Any]] = {  # The model's, and that of the spec.
    "adagrad": (_V1.train.AdagradOptimizer, interop.AdagradParameters),
    "sgd": (
        _V1.train.GradientDescentOptimizer,
        interop.StochasticGradientDescentParameters,
    ),
    "ftrl": (_V1.train.FtrlOptimizer, interop.FtrlParameters),
}


class Run:
    """One reference run; `meta` has the optimizer, rate, sizes, and metrics."""

    def __init__(self, folder: pathlib.Path) -> None:
        with np.load(folder / "reference.npz") as file:
            arrays = {name: file[name] for name in file.files}
        self.name = folder.name
        self.checkpoint = folder / "checkpoint"
        self.meta: dict[str, Any] = json.loads(str(arrays.pop("meta")))
        self.arrays = arrays
        self.variables = {
            name.removeprefix("var_").replace("|", "/"): value
            for name, value in arrays.items()
            if name.startswith("var_")
        }

    def optimizer(self) -> Any:
        """The model's own optimizer."""
        return OPTIMIZERS[self.meta["optimizer"]][0](self.meta["learning_rate"])

    def columns(self) -> list[Any]:
        """The embedding columns, starting at the run's initial values."""

        def start(name: str) -> dict[str, Any]:
            initial = self.arrays[f"init_{name}"]
            return {"initializer": _V1.constant_initializer(initial)}

        size = {name: self.arrays[f"init_{name}"].shape for name in ("x", "w", "s")}
        w = weighted("w", "wt", size["w"][0])
        return [
            interop.embedding_column(
                ids("x", size["x"][0]), size["x"][1], combiner="mean", **start("x")
            ),
            interop.embedding_column(w, size["w"][1], combiner="sum", **start("w")),
            *interop.shared_embedding_columns(
                [ids("y", size["s"][0]), ids("z", size["s"][0])],
                size["s"][1],
                combiner="sqrtn",
                **start("s"),
            ),
        ]

    def spec(self, **options: Any) -> Any:
        """The EmbeddingConfigSpec that trains the tables as the model's optimizer."""
        parameters = OPTIMIZERS[self.meta["optimizer"]][1](self.meta["learning_rate"])
        return interop.EmbeddingConfigSpec(self.columns(), parameters, **options)

    def batch(self, step: int) -> tuple[dict[str, Any], np.ndarray]:
        """The features and labels of one step, counted from 0."""
        size, samples = self.meta["batch_size"], len(self.arrays["labels"])
        return self._rows(np.arange(step * size, (step + 1) * size) % samples)

    def samples(self) -> tuple[dict[str, Any], np.ndarray]:
        """The features and labels of all samples, once."""
        return self._rows(np.arange(len(self.arrays["labels"])))

    def _rows(self, rows: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        keep = {name: self.arrays[f"{name}_keep"][rows] for name in "xyzw"}
        features = {
            name: _sparse(self.arrays[f"{name}_ids"][rows], keep[name])
            for name in "xyzw"
        }
        features["wt"] = _sparse(self.arrays["wt"][rows], keep["w"])
        return features, self.arrays["labels"][rows]


@functools.cache
def load(folder: pathlib.Path) -> Run:
    """The run of one folder."""
    return Run(folder)


def _sparse(values: np.ndarray, keep: np.ndarray) -> tf.SparseTensor:
    # Entries to the left, as in a batch of lists.
    where = np.argwhere(keep)
    place = np.cumsum(keep, axis=1) - 1
    indices = np.stack([where[:, 0], place[keep]], axis=1)
    return tf.SparseTensor(indices.astype(np.int64), values[keep], keep.shape)


def predict(activations: dict[str, Any], head: Any) -> Any:
    """The model: activations in the order of the columns' names, tanh of a layer."""
    joined = tf.concat([activations[name] for name in "wxyz"], axis=1)
    return tf.tanh(joined @ head)
