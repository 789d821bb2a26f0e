"""Preprocessing by TensorFlow's own host ops gives what ours gives, bit for bit.

Here they run on the software TPU's kernels, which test_host_ops_oracle.py compares with
Google's.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import csr_cases
import numpy as np
import pytest
import tensorflow as tf
from test_csr_oracle import files
from test_preprocessing import FEATURE, TABLE, one_table, ragged

from tpu_embedding import preprocessing
from tpu_embedding.inputs import to_id_batch
from tpu_embedding.layout.csr import Partitioning
from tpu_embedding.ops import library
from tpu_embedding.testing import library as software_tpu

BY = {
    name: preprocessing.PartitionOptions(padded=False, host_ops=name)
    for name in ("library", "stock")
}
INVALID = tf.errors.InvalidArgumentError


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    software_tpu.load()


def both(
    batches: Any, partitioning: Partitioning
) -> list[preprocessing.PartitionedBatch]:
    return [
        preprocessing.partition(batches, partitioning, options=options)
        for options in BY.values()
    ]


def check_same(
    ours: preprocessing.PartitionedBatch, stock: preprocessing.PartitionedBatch
) -> None:
    tf.nest.assert_same_structure(ours, stock)
    for own, other in zip(tf.nest.flatten(ours), tf.nest.flatten(stock), strict=True):
        np.testing.assert_array_equal(own, other, strict=not isinstance(own, int))


@pytest.mark.parametrize(
    "path",
    [
        *files(csr_cases.CSR, "csr_*.npz")[::15],
        *files(csr_cases.LIMITS, "drop_*.npz")[::8],
    ],
)
def test_same_batch(path: pathlib.Path):
    case = csr_cases.read(path)
    check_same(*both(csr_cases.to_batches(case), csr_cases.to_partitioning(case.meta)))


def test_same_batch_of_all_kinds_of_features():
    dense = dataclasses.replace(
        FEATURE, path="d", samples=4, output_shape=(2, 2), sample_offset=2
    )
    # Each of the two rows is a sequence of two positions.
    sequence = dataclasses.replace(
        FEATURE, path="s", samples=4, output_shape=(2, 2), sample_offset=6
    )
    users = dataclasses.replace(
        FEATURE, path="u", table="users", combiner="sum", invalid_ids="drop"
    )
    films = dataclasses.replace(TABLE, samples=10, features=(0, 1, 2))
    other = dataclasses.replace(TABLE, name="other", features=(3,))
    whole = Partitioning(2, 1, (FEATURE, dense, sequence, users), (films, other))
    weights = ragged([[1.0, 2.0], [0.5]], np.float32)
    batches = [
        to_id_batch("user/film", ragged([[1, 1], [7]]), weights),
        to_id_batch("d", tf.constant([[[1, 2], [1, 1]], [[0, 0], [5, 3]]])),
        to_id_batch("s", ragged([[1, 2, 3], [4]])),
        to_id_batch("u", tf.sparse.from_dense([[3, 9], [-1, 0]])),
    ]
    traced = tf.function(lambda: both(batches, whole), autograph=False)
    check_same(*traced())
    modulo = dataclasses.replace(users, invalid_ids="mod")
    whole = dataclasses.replace(whole, features=(*whole.features[:3], modulo))
    check_same(*both(batches, whole))


def test_errors_of_inputs_and_limits():
    def run(whole: Partitioning, rows: Any, by: str = "stock") -> None:
        batch = to_id_batch("user/film", rows)
        preprocessing.partition([batch], whole, options=BY[by])

    texts = []
    for by in BY:
        with pytest.raises(INVALID) as error:
            run(one_table(), ragged([[1], [8]]), by)
        texts.append(error.value.message.partition("Feature ")[2])
    assert texts[0].startswith("user/film, table films: sample 1 has id 8")
    assert texts[0].partition(" [Op:")[0] == texts[1].partition(" [Op:")[0]
    with pytest.raises(INVALID, match="stack"):
        run(one_table(max_ids_per_partition=1), ragged([[2, 4], [1]]))
    with pytest.raises(NotImplementedError, match=r"stack: .* minibatches"):
        run(one_table(minibatching=True), ragged([[1], [2]]))
    with pytest.raises(NotImplementedError, match=r"stack: .* CustomCombiner"):
        run(one_table(positions=True), ragged([[1], [2]]))


def test_who_preprocesses(monkeypatch: pytest.MonkeyPatch):
    ours, stock = preprocessing.HostOps.LIBRARY, preprocessing.HostOps.STOCK
    remote = "/job:worker/replica:0/task:0/device:CPU:0"
    assert preprocessing.choose() is ours
    assert preprocessing.choose("/job:localhost/device:CPU:1") is ours
    assert preprocessing.choose(remote) is stock
    assert preprocessing.choose(remote, asked="library") is ours
    monkeypatch.setenv(preprocessing.HOST_OPS_VARIABLE, "stock")
    assert preprocessing.choose() is stock
    assert preprocessing.choose(asked="library") is ours
    monkeypatch.setenv(preprocessing.HOST_OPS_VARIABLE, "theirs")
    with pytest.raises(
        ValueError, match=r"TPU_EMBEDDING_HOST_OPS .* Received: 'theirs'"
    ):
        preprocessing.choose()
    monkeypatch.delenv(preprocessing.HOST_OPS_VARIABLE)

    monkeypatch.setattr(library, "unavailable_reason", lambda: "It is not built.")
    assert preprocessing.choose() is stock
    with pytest.raises(RuntimeError, match=r"cannot preprocess. It is not built"):
        preprocessing.choose(asked="library")
    monkeypatch.setattr(preprocessing, "_STOCK_OP", "NoSuchOp")
    with pytest.raises(RuntimeError, match=r"tensorflow-tpu.* It is not built"):
        preprocessing.choose()
    with pytest.raises(RuntimeError, match="no kernels"):
        preprocessing.choose(asked="stock")
    assert preprocessing.choose(remote) is stock
    assert preprocessing.choose(remote, asked="stock") is stock
    # What partition passes on: the device, and what is asked for.
    seen = []
    monkeypatch.setattr(
        preprocessing, "choose", lambda *a, **k: seen.append((*a, k["asked"])) or stock
    )
    options = preprocessing.PartitionOptions(device=remote, host_ops="library")
    batch = to_id_batch("user/film", ragged([[1], [2]]))
    preprocessing.partition([batch], one_table(), options=options)
    assert seen == [(remote, "library")]
