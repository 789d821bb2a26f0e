"""Savers that work while a model is trained never see half an update."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checkpoint import models
from steps import train_on

import tpu_embedding as te
from tpu_embedding import checkpoint
from tpu_embedding.core import Core


def make_pair() -> tuple[te.TPUEmbedding, te.TPUEmbedding]:
    """A pipelined embedding, and one without as its twin, from the same tables."""
    pair = [
        models.make(te.Adagrad(0.5), pipeline_execution_with_tensor_core=pipelined)
        for pipelined in (True, False)
    ]
    for embedding in pair:
        for table in embedding.embedding_tables.values():
            table.assign(tf.ones_like(table))
    return pair[0], pair[1]


def read(path: str | pathlib.Path, root: str | None = "embedding") -> models.Values:
    return {
        name: {array: rows.numpy() for array, rows in table.arrays.items()}
        for name, table in checkpoint.read(path, root=root).items()
    }


def end_saves(tracked: Any) -> None:
    """Ends the thread of asynchronous saves, which TensorFlow keeps until the exit."""
    tracked._async_checkpointer()._join_async_save_thread()


def test_save_and_restore_come_after_what_is_pending(tmp_path: pathlib.Path) -> None:
    pipelined, twin = make_pair()
    for embedding in (pipelined, twin):
        models.train(embedding)
    path = checkpoint.save(pipelined, tmp_path / "saved")
    models.assert_same(read(path, root=None), models.values(twin))
    models.train(pipelined)
    checkpoint.restore(pipelined, path)
    models.assert_same(models.values(pipelined), models.values(twin))


class Training:
    """Trains a step in another thread while something is saved, in each `call`."""

    def __init__(self, embedding: te.TPUEmbedding, call: str = "advance") -> None:
        self._embedding, self._call = embedding, call

    def start(self, task: str, total: int) -> None:
        self._train("start")

    def advance(self, count: int) -> None:
        self._train("advance")

    def _train(self, call: str) -> None:
        if call != self._call:
            return
        thread = threading.Thread(target=models.train, args=(self._embedding,))
        thread.start()
        thread.join()


def test_a_save_that_another_thread_changes_leaves_no_checkpoint(
    tmp_path: pathlib.Path,
) -> None:
    _, embedding = make_pair()
    before = models.values(embedding)
    with pytest.raises(tf.errors.AbortedError, match="changed while it was saved"):
        checkpoint.save(embedding, tmp_path / "a", progress=Training(embedding))
    assert list(tmp_path.iterdir()) == []
    after = models.values(embedding)
    assert any(
        not np.array_equal(after[t]["parameters"], before[t]["parameters"])
        for t in after
    )
    path = checkpoint.save(embedding, tmp_path / "a")
    models.assert_same(read(path), after)


def test_a_save_whose_number_of_updates_changed_leaves_no_checkpoint(
    tmp_path: pathlib.Path,
) -> None:
    """A step before the first row is read makes the number older than the rows."""
    embedding = models.make(te.SGD(lambda step: 1 / tf.cast(step + 1, tf.float32)))
    models.train(embedding)
    progress = Training(embedding, "start")
    with pytest.raises(tf.errors.AbortedError, match="The number of updates changed"):
        checkpoint.save(embedding, tmp_path / "a", progress=progress)
    assert list(tmp_path.iterdir()) == []
    path = checkpoint.save(embedding, tmp_path / "a")
    assert checkpoint.read(path).updates == 2


def test_a_refused_restore_leaves_what_is_pending(tmp_path: pathlib.Path) -> None:
    """So the next lookup is one step old, as if nothing had been tried."""
    other = models.make(te.Adagrad(0.5), {"films": (5, 3), "users": (6, 2)})
    lesser = models.make(te.Adagrad(0.5), {"films": (11, 3)})
    paths = [checkpoint.save(e, tmp_path / n) for e, n in ((other, "a"), (lesser, "b"))]
    narrow = {
        name: te.FeatureConfig(te.TableConfig(*size, name=name, dtype="bfloat16"))
        for name, size in models.SIZES.items()
    }
    written = tf.train.Checkpoint(embedding=te.TPUEmbedding(narrow, te.Adagrad(0.5)))
    half = written.write(tmp_path / "c")
    pipelined, _ = make_pair()
    tables = {t.name: rows for t, rows in pipelined.embedding_tables.items()}
    models.train(pipelined)
    refused = [
        lambda: checkpoint.restore(pipelined, paths[0]),
        lambda: checkpoint.restore(pipelined, paths[1]),
        lambda: checkpoint.restore(pipelined, tmp_path / "none"),
        lambda: checkpoint.restore(pipelined, paths[0], tables=["nobody"]),
        lambda: tf.train.Checkpoint(embedding=pipelined).restore(half),
    ]
    for call in refused:
        with pytest.raises((ValueError, KeyError, TypeError, tf.errors.NotFoundError)):
            call()
        for rows in tables.values():
            np.testing.assert_array_equal(rows, np.ones(rows.shape))
    pipelined.flush()
    assert all(rows.numpy()[1, 0] < 1 for rows in tables.values())


def test_what_is_exported_comes_after_what_is_pending() -> None:
    pipelined, twin = make_pair()
    for embedding in (pipelined, twin):
        models.train(embedding)
    pipelined.core.refresh()
    current = pipelined.core.tables().items()
    tables = {name: table.rows["parameters"].numpy() for name, table in current}
    for name, arrays in models.values(twin).items():
        np.testing.assert_array_equal(tables[name], arrays["parameters"])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoint_manager(asynchronous: bool, tmp_path: pathlib.Path) -> None:
    # The gradients are constant, so that pipelining changes nothing but the moment.
    pipelined, twin = make_pair()
    options = tf.train.CheckpointOptions(
        experimental_enable_async_checkpoint=asynchronous
    )
    tracked = tf.train.Checkpoint(embedding=pipelined)
    manager = tf.train.CheckpointManager(tracked, str(tmp_path), max_to_keep=None)
    expected = []
    for _ in range(3):
        for embedding in (pipelined, twin):
            models.train(embedding)
        manager.save(options=options)
        expected.append(models.values(twin))
    tracked.sync()
    for number, values in enumerate(expected, 1):
        models.assert_same(read(tmp_path / f"ckpt-{number}"), values)
    if asynchronous:
        end_saves(tracked)
    assert manager.latest_checkpoint == str(tmp_path / "ckpt-3")


def test_an_asynchronous_save_leaves_the_pipeline_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the thread that trains may apply what is pending."""
    pipelined, _ = make_pair()
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    tracked = tf.train.Checkpoint(embedding=pipelined)
    models.train(pipelined)
    threads: set[int] = set()

    def note(method: str) -> None:
        original = getattr(Core, method)

        def noted(core: Core) -> None:
            threads.add(threading.get_ident())
            original(core)

        monkeypatch.setattr(Core, method, noted)

    for method in ("flush", "retrieve"):
        note(method)
    tracked.save(tmp_path / "a", options=options)
    tracked.sync()
    end_saves(tracked)
    assert threads == {threading.get_ident()}


class Model(tf.keras.Model):
    """A model whose train_step trains an embedding with a constant gradient."""

    def __init__(self, embedding: te.TPUEmbedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.dense = tf.keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> Any:
        train_on(self.embedding, {name: tf.constant([1, 2]) for name in models.SIZES})
        return super().train_step(data)


def test_a_checkpoint_after_each_epoch_of_fit(tmp_path: pathlib.Path) -> None:
    pipelined, twin = make_pair()
    model = Model(pipelined)
    model.compile("sgd", "mse")
    saved: list[models.Values] = []
    tracked = tf.train.Checkpoint(embedding=pipelined)

    class Save(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            saved.append(read(tracked.write(tmp_path / f"epoch-{epoch}")))

    data = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)
    model.fit(*data, batch_size=2, epochs=2, verbose=0, callbacks=[Save()])
    for values in saved:
        models.train(twin, 2)
        models.assert_same(values, models.values(twin))
