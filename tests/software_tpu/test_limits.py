"""What the SparseCore kernels refuse, and that padding is never read.

What they compute is in `sparse_core`.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from software_tpu import calls, partitioned

from tpu_embedding.testing import library

D = 8
MANY = 1 << 20  # A limit that no test meets by accident.
LIMITS = {"max_ids_per_sparse_core": MANY, "max_unique_ids_per_sparse_core": MANY}
# One v6e chip: outside of a run there is one replica.
SYSTEM = partitioned.System(1, 2, num_samples=4, num_rows=12)
ENTRIES = [(0, 0, 1.0), (0, 2, 1.0), (1, 2, 1.0), (1, 4, 1.0), (2, 11, 1.0)]


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    library.load()


def look_up(op: str = "StaticBufferSize", **changes: Any) -> tf.Tensor:
    arguments = {
        **SYSTEM.csr(ENTRIES),
        **calls.lookup_attributes(SYSTEM.num_samples),
        "embedding_table": np.ones((SYSTEM.num_rows, D), np.float32),
        "num_sparsecores_per_device": SYSTEM.sparse_cores,
        "table_name": "films",
    }
    arguments |= (LIMITS if op == "StaticBufferSize" else {}) | changes
    return getattr(tf.raw_ops, f"XlaSparseDenseMatmulWith{op}")(**arguments)


def update(**changes: Any) -> Any:
    arguments = {
        **SYSTEM.csr(ENTRIES),
        "activation_gradients": np.ones((SYSTEM.num_samples, D), np.float32),
        "learning_rate": np.float32(0.5),
        "embedding_table": np.ones((SYSTEM.num_rows, D), np.float32),
        "accumulator": np.ones((SYSTEM.num_rows, D), np.float32),
        "num_sparsecores_per_device": SYSTEM.sparse_cores,
        "table_name": "films",
    }
    arguments.update(changes)
    return tf.raw_ops.XlaSparseDenseMatmulGradWithAdagradAndCsrInput(**arguments)


def changed(name: str, index: int, value: float) -> dict[str, np.ndarray]:
    array = SYSTEM.csr(ENTRIES)[name].copy()
    array[index] = value
    return {name: array}


def test_outside_of_a_run_there_is_one_replica():
    assert look_up().numpy()[:, 0].tolist() == [2.0, 2.0, 1.0, 0.0]
    assert update()[0].shape == (SYSTEM.num_rows, D)


@pytest.mark.parametrize("fill", ["nan", "far"])
def test_padding_is_never_read(fill: str):
    """What Google's ops leave there, and worse."""
    csr = SYSTEM.csr(ENTRIES)
    gap = csr["sorted_token_ids"] == partitioned.FILL_ID
    assert gap.any()
    csr["sorted_gains"][gap] = np.nan
    csr["sorted_token_ids"][gap] = csr["sorted_sample_ids"][gap] = {
        "nan": 0,
        "far": -(2**31),
    }[fill]
    tail = {name: np.append(csr[name], [9, 9]) for name in ("row_pointers",)}
    assert look_up(**{**csr, **tail}).numpy()[:, 0].tolist() == [2.0, 2.0, 1.0, 0.0]
    assert np.isfinite(update(**{**csr, **tail})[0]).all()


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"max_ids_per_sparse_core": 3},
        "Table films, entries of SparseCore 0 for rows of SparseCore 0: there are 4 "
        "ids, but max_ids_per_sparse_core is 3.",
    ),
    (
        {"max_unique_ids_per_sparse_core": 2},
        "Table films, entries of SparseCore 0 for rows of SparseCore 0: there are 3 "
        "unique ids, but max_unique_ids_per_sparse_core is 2.",
    ),
    (changed("sorted_sample_ids", 1, 2), "sample id 2 is not in [0, 2)."),
    (changed("sorted_sample_ids", 1, -1), "sample id -1 is not in [0, 2)."),
    (changed("sorted_token_ids", 3, 6), "token id 6 is not in [0, 6)."),
    (changed("sorted_token_ids", 0, -1), "token id -1 is not in [0, 6)."),
    (changed("sorted_token_ids", 0, 5), "token ids must ascend, but 1 follows 5."),
    (
        changed("row_pointers", 1, 7),
        "they begin at 8, and the row pointer must be from there to the number of "
        "entries, 16, but is 7.",
    ),
    (changed("row_pointers", 9, 17), "the number of entries, 16, but is 17."),
    (
        {"row_pointers": np.zeros(15, np.int32)},
        "Table films: 2 SparseCores x 1 minibatches x 2 partitions (padded to 8) need "
        "16 row pointers, but there are 15.",
    ),
    ({"row_pointers": np.zeros((4, 4), np.int32)}, "`row_pointers` must be a vector"),
    (
        {"sorted_gains": np.zeros(3, np.float32)},
        "sample ids, token ids and gains must have one size, but there are 16, 16 "
        "and 3.",
    ),
    (
        {"num_minibatches_per_physical_sparse_core": 0},
        "the number of minibatches must be one number > 0",
    ),
    (
        {"num_sparsecores_per_device": -1},
        "`num_sparsecores_per_device` must be given outside of SoftwareTPUStrategy.run",
    ),
    (
        {"input_size": 5},
        "the samples of a replica must be a multiple of the 2 SparseCores, but there "
        "are 5.",
    ),
    (
        {"embedding_table": np.ones((12, 12), np.float32)},
        "whose width is a multiple of 8, but there is [12,12].",
    ),
    (
        {"embedding_table": np.ones((11, 8), np.float32)},
        "whose rows are a multiple of the 2 SparseCores",
    ),
    ({"quantization_config_num_buckets": 1}, "must be 0 or > 1."),
]


WRONG_UPDATES: list[tuple[dict[str, Any], str]] = [
    (changed("sorted_token_ids", 3, 6), "token id 6 is not in [0, 6)."),
    (
        {"activation_gradients": np.ones((4, 16), np.float32)},
        "Table films: the gradients of all replicas must be matrices of one shape "
        "with the table's width, 8, but there is [4,16].",
    ),
    (
        {"activation_gradients": np.ones((3, 8), np.float32)},
        "the samples of a replica must be a multiple of the 2 SparseCores",
    ),
    (
        {"accumulator": np.ones((12, 16), np.float32)},
        "slot `accumulator` has the shape [12,16], but the table has [12,8].",
    ),
    ({"learning_rate": np.ones(2, np.float32)}, "the learning rate must be one number"),
]


@pytest.mark.parametrize(
    ("call", "change", "expected"),
    [(look_up, *wrong) for wrong in WRONG] + [(update, *w) for w in WRONG_UPDATES],
    ids=[expected for _, expected in WRONG + WRONG_UPDATES],
)
def test_wrong_inputs_are_refused(call: Any, change: dict[str, Any], expected: str):
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(expected)):
        call(**change)


def test_there_are_no_int32_tables():
    with pytest.raises(tf.errors.UnimplementedError, match="no int32 tables"):
        look_up("CsrInput", embedding_table=np.ones((12, 8), np.int32))


def run(generation: str, inputs: list[dict[str, Any]], **attributes: Any) -> None:
    calls.call(
        calls.strategy_of(generation, len(inputs)),
        "XlaSparseDenseMatmulWithStaticBufferSize",
        inputs,
        **LIMITS,
        **calls.lookup_attributes(4),
        **attributes,
    )


def test_replicas_must_agree():
    system = partitioned.System(2, 2, num_samples=4, num_rows=24)
    table = np.ones((12, D), np.float32)
    one = {**system.csr(ENTRIES), "embedding_table": table}
    two = partitioned.System(2, 2, 4, 24, num_minibatches=2).csr(ENTRIES)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="replica 1 comes with 2 minibatches, replica 0 with 1",
    ):
        run("v6e", [one, {**two, "embedding_table": table}])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"of one shape.*there is \[8,8\]"
    ):
        run("v6e", [one, {**one, "embedding_table": table[:8]}])
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="`num_sparsecores_per_device` is 4, but a device has 2",
    ):
        run("v6e", [one, one], num_sparsecores_per_device=4)


def test_a_generation_without_sparse_cores_is_refused():
    one = {**SYSTEM.csr(ENTRIES), "embedding_table": np.ones((12, D), np.float32)}
    with pytest.raises(tf.errors.InvalidArgumentError, match="has no SparseCores"):
        run("v4", [one])


VALENCY = 4


def row(*shape: int) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.float32)


@tf.function(input_signature=[row(1, D), row(1, D), row(1, D), row()])
def forgets_its_slot(gradient, table, slot, rate) -> tf.Tensor:
    return table - rate * gradient


@tf.function(input_signature=[row(1, D), row(1, D), row()])
def returns_another_shape(gradient, table, rate) -> tf.Tensor:
    return (table - rate * gradient)[0]


@tf.function(input_signature=[row(1, D), row(1, D), row()])
def fails(gradient, table, rate) -> tf.Tensor:
    with tf.control_dependencies(
        [tf.debugging.Assert(False, ["an error of the rule"])]
    ):
        return table - gradient


@pytest.mark.parametrize(
    ("rule", "slot_rows", "expected"),
    [
        (returns_another_shape, 0, r"returned .*shape: \[8\].* for a row .* \[1,8\]"),
        (forgets_its_slot, 12, "returned 1 tensors for 2 tables and slots"),
        (fails, 0, "an error of the rule"),
        (
            forgets_its_slot,
            4,
            r"slot has the shape \[4,8\], but must have one entry for each of the 12",
        ),
    ],
    ids=["shape", "slot", "fails", "rows"],
)
def test_what_a_rule_must_not_do(rule: Any, slot_rows: int, expected: str):
    inputs = {
        **SYSTEM.csr(ENTRIES),
        "activation_gradients": np.ones((SYSTEM.num_samples, D), np.float32),
        "tables": [np.ones((rows, D), np.float32) for rows in (12, slot_rows) if rows],
        "hyperparameters": [np.float32(0.5)],
    }
    op = "XlaSparseDenseMatmulGradWithCsrInput"
    with pytest.raises(tf.errors.InvalidArgumentError, match=expected):
        calls.call(calls.strategy_of("v6e", 1), op, [inputs], custom_computation=rule)


@tf.function(
    input_signature=[
        tf.TensorSpec([SYSTEM.num_samples], tf.int32),
        row(SYSTEM.num_samples, VALENCY, D),
    ]
)
def first(valency, vectors) -> tf.Tensor:
    return vectors[:, 0]


def test_more_ids_than_the_valency_are_refused():
    entries = [(0, k, 1.0) for k in range(VALENCY + 1)]
    inputs = {
        **SYSTEM.csr(entries, with_positions=True),
        "embedding_table": np.ones((SYSTEM.num_rows, D), np.float32),
        "weights": np.zeros(0, np.float32),
    }
    options = calls.lookup_attributes(SYSTEM.num_samples)
    options |= {"max_valency": VALENCY, "num_weights": 0}
    op = "XlaSparseDenseMatmulCustomCombinerOnTcWithCsrInput"
    text = r"position 4 is not in \[0, 4\), the combiner's max_valency"
    one_chip = calls.strategy_of("v6e", 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        calls.call(one_chip, op, [inputs], combiner_computation=first, **options)
