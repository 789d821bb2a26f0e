"""Growing tables, deltas and rows of Keras, whose files must load for good.

See `golden_models`: these cases are newer than the others.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from checkpoint import golden_models
from checkpoint.golden_models import Case, initializer, tracked

import tpu_embedding as te
import tpu_embedding.keras
from tpu_embedding import checkpoint

POOL = [0, -1, 2**63 - 1, -(2**63), 5, 1 << 40, 7, 8, 9, 10]


def vocabularies(seed: int) -> dict[str, Any]:
    """With eviction, with ids that wait, and with a shared row."""
    recent = te.GrowingVocabulary(4, eviction="lru", min_rows=2, seed=seed)
    counted = te.GrowingVocabulary(
        8, min_count=2, max_candidates=5, unknown="shared_row", seed=seed
    )
    return {
        "films": te.TableConfig(recent, 3, name="films", optimizer=te.Adam(0.1)),
        "users": te.TableConfig(counted, 2, name="users", combiner="sum"),
        "words": te.TableConfig(6, 2, initializer(seed), name="words"),
    }


def embed(seed: int) -> te.TPUEmbedding:
    tables = vocabularies(seed)
    return te.TPUEmbedding(
        {name: te.FeatureConfig(table) for name, table in tables.items()},
        te.Adagrad(0.1),
    )


def train(embedding: te.TPUEmbedding, steps: range) -> None:
    for step in steps:
        ids = {
            "films": tf.constant([POOL[(2 * step + k) % 10] for k in (0, 1, 1)]),
            "users": tf.constant([POOL[(step + k) % 7] for k in (0, 1, 3)]),
            "words": tf.constant([step % 6, 3, 3]),
        }
        embedding.enqueue(ids)
        embedding.apply_gradients(
            {name: found + 1.0 for name, found in embedding.dequeue().items()}
        )


def looked_up(embedding: te.TPUEmbedding) -> Any:
    embedding.enqueue(asked(), training=False)
    return {name: found.numpy().tolist() for name, found in embedding.dequeue().items()}


def asked() -> dict[str, tf.Tensor]:
    ids = tf.constant(POOL, tf.int64)
    return {"films": ids, "users": ids, "words": tf.range(6, dtype=tf.int64)}


def after_more(embedding: te.TPUEmbedding) -> Any:
    """What ids look up now, and after updates that need counts, times and slots."""
    now = looked_up(embedding)
    train(embedding, range(9, 14))
    return {"now": now, "later": looked_up(embedding)}


def growing(file: str) -> Case:
    """What tf.train.Checkpoint or te.checkpoint writes of growing tables."""

    def save(folder: str) -> Any:
        embedding = embed(0)
        train(embedding, range(9))
        if file == "tensorflow":
            tracked(embedding).write(f"{folder}/saved")
        else:
            checkpoint.save(embedding, f"{folder}/saved")
        return after_more(embedding)

    def load(folder: str) -> Any:
        embedding = embed(0)
        if file == "tensorflow":
            embedding.build()
            tracked(embedding).read(f"{folder}/saved").assert_consumed()
        else:
            checkpoint.restore(embedding, f"{folder}/saved")
        return after_more(embedding)

    return Case(save, load)


def served(model: Any) -> Any:
    found = model.signatures["dense"](**asked())
    return {name: found[name].numpy().tolist() for name in sorted(found)}


def following() -> Case:
    """A model that follows, a delta, and the marks of its writer."""

    def begin(folder: str, export: bool) -> Any:
        embedding = embed(0)
        train(embedding, range(4))
        if export:
            te.serving.export(
                embedding, f"{folder}/base", signatures=["dense"], deltas=True
            )
        writer = te.serving.DeltaWriter(embedding, f"{folder}/base", "replicas")
        return embedding, writer

    def finish(folder: str, embedding: Any, writer: Any) -> Any:
        model = tf.saved_model.load(f"{folder}/base")
        answers = [served(model)]
        writer.export_delta(f"{folder}/2.delta")
        for number in (1, 2):
            te.serving.apply_delta(model, f"{folder}/{number}.delta")
            answers.append(served(model))
        assert answers[-1] == looked_up(embedding)
        return {"answers": answers}

    def save(folder: str) -> Any:
        embedding, writer = begin(folder, export=True)
        train(embedding, range(4, 6))
        writer.export_delta(f"{folder}/1.delta")
        train(embedding, range(6, 9))
        both = tf.train.Checkpoint(embedding=embedding, deltas=writer)
        both.write(f"{folder}/saved")
        found = finish(folder, embedding, writer)
        pathlib.Path(f"{folder}/2.delta").unlink()
        return found

    def load(folder: str) -> Any:
        embedding, writer = begin(folder, export=False)
        both = tf.train.Checkpoint(embedding=embedding, deltas=writer)
        both.read(f"{folder}/saved").assert_consumed()
        return finish(folder, embedding, writer)

    return Case(save, load)


def growing_layer() -> Case:
    """A `.keras` file of a model with growing tables."""

    def answers(model: Any) -> Any:
        ids = dict.fromkeys(("films", "users"), np.array(POOL))
        return {"found": model.predict(ids, 10, verbose=0).tolist()}

    def save(folder: str) -> Any:
        tables = {name: vocabularies(0)[name] for name in ("films", "users")}
        features = {name: te.FeatureConfig(table) for name, table in tables.items()}
        inputs = {name: keras.Input((), dtype="int64", name=name) for name in features}
        found = tpu_embedding.keras.TPUEmbedding(features, "adagrad")(inputs)
        outputs = keras.layers.Concatenate()([found["films"], found["users"]])
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
        ids = np.array(POOL[:4])
        model.fit(
            {"films": ids, "users": ids}, np.ones((4, 5)), 2, verbose=0, shuffle=False
        )
        model.save(f"{folder}/model.keras")
        return answers(model)

    def load(folder: str) -> Any:
        return answers(keras.models.load_model(f"{folder}/model.keras"))

    return Case(save, load)


def rows() -> Case:
    """A `.keras` file of te.keras.Embedding and RowSparseOptimizer."""

    def state(model: Any) -> Any:
        model.fit(np.array([[1, 2], [2, 4]]), np.ones((2, 2, 3)), 2, verbose=0)
        held = [*model.variables, *model.optimizer.variables]
        values = np.concatenate([np.ravel(v) for v in held])
        return {"outputs": values.tolist(), "variables": len(held)}

    def save(folder: str) -> Any:
        embedding = te.keras.Embedding(6, 3, "ones", mask_zero=True)
        model = keras.Sequential([keras.Input((2,), dtype="int32"), embedding])
        model.compile(te.keras.RowSparseOptimizer(keras.optimizers.Adam(0.1)), "mse")
        state(model)
        model.save(f"{folder}/model.keras")
        return state(model)

    def load(folder: str) -> Any:
        return state(keras.models.load_model(f"{folder}/model.keras"))

    return Case(save, load)


CASES: Mapping[str, Case] = {
    "growing-tensorflow": growing("tensorflow"),
    "growing-package": growing("package"),
    "growing-layer": growing_layer(),
    "following": following(),
    "rows": rows(),
}

if __name__ == "__main__":
    for name, case in CASES.items():
        file = pathlib.Path(sys.argv[1], f"{name}.zip.base64")
        file.write_bytes(golden_models.pack(case))
