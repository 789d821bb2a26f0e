"""What tables are made from: callables that are wrong, and memory that is not there."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import tensorflow as tf
from cpu_engines import EACH_ENGINE

import tpu_embedding as te
from tpu_embedding.tables import variables

BATCH = {"film": tf.constant([1, 2])}
GRADIENTS = {"film": tf.ones([2, 2])}

both_engines = pytest.mark.parametrize("engine", EACH_ENGINE)


def make(optimizer: Any, initializer: Any = None, rows: int = 4) -> te.TPUEmbedding:
    films = te.TableConfig(rows, 2, initializer, name="films")
    return te.TPUEmbedding({"film": te.FeatureConfig(films)}, optimizer)


@both_engines
@pytest.mark.parametrize("value", [None, "fast", [object()]])
def test_a_rate_that_is_no_number(
    value: Any, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", engine)
    rates = [value, 1.0]
    embedding = make(te.SGD(lambda: rates[0]), te.RowIdInitializer())
    embedding.enqueue(BATCH)
    embedding.dequeue()
    with pytest.raises(TypeError) as raised:
        embedding.apply_gradients(GRADIENTS)
    text = str(raised.value)
    assert text.startswith("A callable `learning_rate` must return a number or a")
    assert f"returned {value!r} of type " in text
    (table,) = embedding.embedding_tables.values()
    assert table.numpy()[:, 0].tolist() == [0, 1, 2, 3]
    rates[0] = 1.0
    embedding.apply_gradients(GRADIENTS)  # they are still owed
    assert table.numpy()[:, 0].tolist() == [0, 0, 1, 3]


def no_dtype(shape: Any) -> tf.Tensor:
    return tf.zeros(shape)


def test_an_initializer_without_dtype() -> None:
    embedding = make(te.SGD(0.1), no_dtype)
    for _ in range(2):
        with pytest.raises(TypeError) as raised:
            embedding.build()
        text = str(raised.value)
        assert text.startswith(
            "The initializer of films is called as initializer(shape, "
            "dtype=tf.float32), which <function no_dtype"
        )
        assert text.endswith("Write it as `def initializer(shape, dtype)`.")
    with pytest.raises(RuntimeError, match="before the embedding was built"):
        embedding.dequeue()


@both_engines
def test_tables_that_do_not_fit(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GiB of table and twice that of slots, and no byte of it is taken."""
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", engine)
    monkeypatch.setattr(variables, "available_bytes", lambda root: 40 * 2**30)
    called = []
    embedding = make(te.Adam(0.1), lambda shape, dtype: called.append(shape), 2**31 - 1)
    with pytest.raises(tf.errors.ResourceExhaustedError) as raised:
        embedding.enqueue(BATCH)
    assert raised.value.message == (
        "The tables and slots take 48.0 GiB (films 16.0 GiB, films/momenta 16.0 GiB, "
        "films/velocities 16.0 GiB), but 40.0 GiB of memory are free. Nothing was "
        "created. Use a smaller `vocabulary_size` or `dim`, an optimizer with fewer or "
        "smaller slots (SGD, RowwiseAdagrad), or a machine with more memory."
    )
    adam = te.Adam(0.1, lazy_adam=False)
    if engine == "host":
        with pytest.raises(tf.errors.ResourceExhaustedError, match=r" for 8\.0 GiB"):
            make(adam, "zeros", 2**31 - 1).enqueue(BATCH)
    assert not called


def test_this_machine_says_what_is_free() -> None:
    with pytest.raises(tf.errors.ResourceExhaustedError, match="and 3 more"):
        variables.require_memory(dict.fromkeys("abcdefg", 2**50))
    variables.require_memory({"a": 8})


MEMINFO = "MemTotal: 900 kB\nMemAvailable:   300 kB\nSwapFree:     100 kB\n"


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, None),
        ({"proc/meminfo": MEMINFO}, 400 * 1024),
        ({"proc/meminfo": "MemTotal: 900 kB\n"}, None),
        (
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/memory.max": "5000\n",
                "sys/fs/cgroup/memory.current": "2000\n",
            },
            3000,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/memory.max": "max\n",
                "sys/fs/cgroup/memory.current": "2000\n",
            },
            400 * 1024,
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "10",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "20",
            },
            0,
        ),
    ],
)
def test_what_is_free(
    files: dict[str, str], available: int | None, tmp_path: pathlib.Path
) -> None:
    for name, content in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert variables.available_bytes(tmp_path) == available
