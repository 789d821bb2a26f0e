"""Partitioning through the Python API: what the golden files do not show."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import csr_cases
import numpy as np
import pytest
import tensorflow as tf
from reference import csr as reference

from tpu_embedding import preprocessing
from tpu_embedding.inputs import IdBatch, to_id_batch
from tpu_embedding.layout.csr import (
    PartitionedFeature,
    PartitionedStack,
    Partitioning,
)

FORMATS = pathlib.Path(__file__).parents[1] / "docs" / "formats.md"
UNPADDED = preprocessing.PartitionOptions(padded=False)
FEATURE = PartitionedFeature(
    path="user/film",
    table="films",
    vocabulary_size=8,
    combiner="mean",
    invalid_ids="error",
    samples=2,
    sample_offset=0,
    row_offset=0,
    rotation=0,
    output_shape=(2,),
)
TABLE = PartitionedStack(
    name="stack",
    rows=8,
    samples=2,
    features=(0,),
    max_ids_per_partition=256,
    max_unique_ids_per_partition=256,
)


def one_table(**changes: Any) -> Partitioning:
    """Two SparseCores, one feature; `changes` go to whatever has such a field."""
    parts = [FEATURE, TABLE, Partitioning(2, 1, (), ())]
    feature, table, whole = (
        dataclasses.replace(p, **{k: v for k, v in changes.items() if hasattr(p, k)})
        for p in parts
    )
    return dataclasses.replace(whole, features=(feature,), stacks=(table,))


def ragged(rows: Any, dtype: Any = np.int64) -> tf.RaggedTensor:
    return tf.ragged.constant(rows, dtype=dtype, row_splits_dtype=tf.int64)


def partition(
    partitioning: Partitioning, *values: Any, weights: Any = None
) -> preprocessing.PartitionedBatch:
    batches = [
        to_id_batch(feature.path, value, weights)
        for feature, value in zip(partitioning.features, values, strict=True)
    ]
    return preprocessing.partition(batches, partitioning, options=UNPADDED)


def tokens(batch: preprocessing.PartitionedBatch, name: str = "stack") -> list[int]:
    ids = batch.tables[name].sorted_token_ids.numpy()
    return [i for i in ids.tolist() if i != reference.FILL_ID]


def test_the_example_of_the_documentation():
    users = dataclasses.replace(
        FEATURE, path="users", table="users", sample_offset=2, row_offset=8, rotation=1
    )
    table = dataclasses.replace(TABLE, rows=16, samples=4, features=(0, 1))
    whole = Partitioning(2, 1, (FEATURE, users), (table,))
    batch = partition(whole, ragged([[5, 2, 5], [4]]), ragged([[0], [3, 0]]))
    csr = batch.tables["stack"]
    block = re.search(r"```json\n(.*?)```", FORMATS.read_text(), re.DOTALL)
    assert block is not None
    drawn = json.loads(block[1])
    assert csr.row_pointers.numpy().tolist() == drawn["row_pointers"]
    fills = {"token_ids": reference.FILL_ID, "sample_ids": reference.FILL_ID}
    for name, fill in {**fills, "gains": reference.FILL_GAIN}.items():
        found = getattr(csr, f"sorted_{name}").numpy()
        expected = np.full(32, fill, found.dtype)
        for place, value in drawn[name].items():
            expected[int(place)] = value
        np.testing.assert_array_equal(found, expected)


def test_the_first_invalid_id_of_the_batch_is_named():
    rows = [[1], [-1, 9]]
    with pytest.raises(tf.errors.InvalidArgumentError, match="sample 1 has id -1"):
        partition(one_table(), ragged(rows))


def test_invalid_ids_can_be_dropped_and_taken_modulo():
    rows = ragged([[1, 9, -1], [2**40]])
    dropped = partition(one_table(invalid_ids="drop"), rows)
    assert tokens(dropped) == [0]
    assert dropped.tables["stack"].sorted_gains[0] == 1  # also from the divisor
    assert dropped.dropped_ids["films"] == 0
    wrapped = partition(one_table(invalid_ids="mod"), rows)
    assert tokens(wrapped) == [0, 3, 0]  # 9 is 1 again: one entry; -1 is 7


@pytest.mark.parametrize(
    ("combiner", "weights", "gains"),
    [
        ("mean", [[0.0, 0.0], [2e-38, 2e-38]], [0, 0, 0.5, 0.5]),
        ("mean", [[1.0, -1.0], [1e38, 1e38]], [0, 0, 0.5, 0.5]),
        ("sqrtn", [[0.0, 0.0], [3e-30, 4e-30]], [0, 0, 0.6, 0.8]),
        ("sqrtn", [[3e30, 4e30], [-3.0, 4.0]], [0.6, 0.8, -0.6, 0.8]),
        ("sum", [[0.0, -1.0], [2.0, 3.0]], [0, -1, 2, 3]),
    ],
)
def test_gains_at_the_ends_of_float32(combiner: str, weights: Any, gains: Any):
    batch = partition(
        one_table(combiner=combiner),
        ragged([[0, 2], [0, 2]]),
        weights=ragged(weights, np.float32),
    )
    found = batch.tables["stack"].sorted_gains.numpy()
    found = found[found != reference.FILL_GAIN]
    # A root, a reciprocal and a product, each to half a unit in the last place.
    np.testing.assert_allclose(found, gains, rtol=3 * 2.0**-24)


def test_sequences_have_a_sample_per_position():
    whole = one_table(sequence_length=2, samples=4, output_shape=(2, 2))
    batch = partition(whole, ragged([[3, 5, 7], [6]]))
    csr = batch.tables["stack"]
    assert tokens(batch) == [1, 2, 3]  # 7 is cut
    ids = csr.sorted_sample_ids.numpy()
    assert ids[ids != reference.FILL_ID].tolist() == [0, 1, 0]
    # A bad id that the sequence cuts off is an error all the same.
    with pytest.raises(tf.errors.InvalidArgumentError, match="sample 0 has id 8"):
        partition(whole, ragged([[3, 5, 8], [6]]))


def test_a_sparse_sequence_has_gaps():
    whole = one_table(sequence_length=3, samples=6, output_shape=(2, 3))
    value = tf.SparseTensor([[0, 1], [1, 0], [1, 2]], [4, 2, 6], [2, 5])
    csr = partition(whole, value).tables["stack"]
    ids = csr.sorted_sample_ids.numpy()
    assert ids[ids != reference.FILL_ID].tolist() == [1, 0, 2]


def test_positions_are_kept_for_custom_combiners():
    whole = one_table(positions=True, combiner="sum", max_valency=3)
    batch = partition(whole, ragged([[4, 2, 4], [1]]))
    positions = batch.sorted_pos_ids["stack"].numpy()
    kept = positions[positions != reference.FILL_ID]
    assert tokens(batch) == [1, 2, 2, 0]  # nothing is merged
    assert kept.tolist() == [1, 0, 2, 0]
    assert len(positions) == len(batch.tables["stack"].sorted_token_ids)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"has 4 ids.*at most 3"):
        partition(whole, ragged([[4, 2, 4, 1], [1]]))


def test_runs_beside_training_in_a_data_pipeline():
    whole = one_table()

    def prepare(ids: tf.Tensor) -> preprocessing.PartitionedBatch:
        return preprocessing.partition([to_id_batch("f", ids)], whole)

    data = tf.data.Dataset.from_tensor_slices(tf.constant([[[1], [2]], [[3], [4]]]))
    batches = list(data.map(prepare, num_parallel_calls=2))
    assert [b.tables["stack"].sample_count for b in batches] == [2, 2]
    for batch, ids in zip(batches, [[0, 1], [1, 2]], strict=True):
        kept = batch.tables["stack"].sorted_token_ids[: batch.ids_sizes["stack"]]
        assert [i for i in kept.numpy() if i != reference.FILL_ID] == ids
    spec = data.map(prepare).element_spec.tables["stack"]
    assert spec.row_pointers.shape == [2 * 64 * 8]
    assert spec.sorted_gains.shape == [2 * 64]


def test_minibatches_hold_the_limits_on_every_replica():
    whole = one_table(
        vocabulary_size=128,
        rows=128,
        max_ids_per_partition=2,
        minibatching=True,
        combiner="sum",
    )
    crowded = ragged([[0, 2, 4, 126], [1]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="for 4 ids"):
        partition(dataclasses.replace(whole, minibatching=False), crowded)
    first = partition(whole, crowded)
    second = partition(whole, ragged([[3], [5]]))
    assert first.splits["stack"] != 0
    assert second.splits["stack"] == 0
    splits = [first.splits["stack"] | second.splits["stack"]]
    again = preprocessing.partition(
        [to_id_batch("f", ragged([[3], [5]]))], whole, splits, UNPADDED
    )
    csr = again.tables["stack"]
    minibatches = first.tables["stack"].num_minibatches_per_physical_sparse_core
    assert csr.num_minibatches_per_physical_sparse_core == minibatches
    assert len(csr.row_pointers) == 2 * 8 * int(minibatches)
    assert tokens(again) == [1, 2]


def test_a_bucket_above_the_limit_cannot_be_cut():
    whole = one_table(
        minibatching=True, max_ids_per_partition=1, samples=4, output_shape=(4,)
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="bucket 2 of 64"):
        partition(whole, ragged([[2], [2], [4], [4]]))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_ids_per_chip_per_sample": 3}, "is 6, which must be a multiple of 8"),
        ({"rows": 9}, "has 9 rows; it must .* multiple of the 2"),
        ({"samples": 3, "output_shape": (3,)}, "number of samples is 3"),
        ({"row_offset": 1}, "first row is 1"),
        ({"row_offset": 8}, "first row is 8"),
        ({"sample_offset": 2}, "first sample is 2"),
        ({"output_shape": (4,)}, "has 4 samples, but 2 are declared"),
    ],
)
def test_impossible_partitionings_are_refused(changes: Any, text: str):
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        partition(one_table(**changes), ragged([[1], [2]]))


def reference_csr(
    case: csr_cases.Case, splits: int = 0
) -> tuple[reference.Csr, dict[str, Any]]:
    meta = case.meta
    cores = meta["num_sc"]
    stack = reference.Stack(
        cores,
        cores * meta["num_replica"],
        meta["stacked_samples"],
        meta["stacked_vocab"],
    )
    pieces = []
    for i, feature in enumerate(meta["feats"]):
        table = meta["tables"][feature["table"]]
        cuts = np.cumsum(case.arrays[f"in/f{i}/lens"])[:-1]
        pieces.append(
            reference.entries(
                reference.Feature(
                    np.split(case.arrays[f"in/f{i}/ids"], cuts),
                    np.split(case.arrays[f"in/f{i}/weights"], cuts),
                    feature["combiner"],
                    feature["row_offset"],
                    table["col_offset"],
                    table["col_shift"],
                ),
                stack,
            )
        )
    merged = [reference.sort([p[c] for p in pieces], stack) for c in range(cores)]
    capacity = meta["max_ids_per_chip_per_sample"] * meta["stacked_samples"]
    return reference.to_csr(merged, stack, splits, capacity), {
        "coo": pieces,
        "sorted": merged,
    }


GOLDEN = [
    *sorted(csr_cases.CSR.glob("csr_*.npz"))[:6],
    *sorted(csr_cases.LIMITS.glob("drop_*.npz"))[:3],
]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_reference_agrees_with_the_oracle(path: pathlib.Path):
    case = csr_cases.read(path)
    csr, steps = reference_csr(case)
    for c, merged in enumerate(steps["sorted"]):
        for i, piece in enumerate(steps["coo"]):
            found = np.array([e[:2] for e in piece[c]]).reshape(-1, 2)
            for column, key in enumerate(("row", "col")):
                golden = case.arrays[f"coo/f{i}/sc{c}/{key}"]
                np.testing.assert_array_equal(found[:, column], golden)
        tokens = [e[1] for e in merged]
        np.testing.assert_array_equal(tokens, case.arrays[f"sorted/sc{c}/col"])
    for key, ours in parts(csr).items():
        np.testing.assert_array_equal(ours, case.arrays[f"csr/{key}"])


def parts(csr: reference.Csr) -> dict[str, list[Any]]:
    """The arrays of the reference by the names of the package."""
    return {
        "row_pointers": csr.row_pointers,
        "sorted_sample_ids": csr.sample_ids,
        "sorted_token_ids": csr.token_ids,
        "sorted_gains": csr.gains,
    }


def assert_without_weights(case: csr_cases.Case) -> None:
    """Without weights, all of them are 1, but the code is another one."""
    arrays = dict(case.arrays)
    for i in range(len(case.meta["feats"])):
        arrays[f"in/f{i}/weights"] = np.ones(len(arrays[f"in/f{i}/ids"]), np.float32)
    case = csr_cases.Case(arrays, case.meta)
    batches = [
        dataclasses.replace(batch, weights=None, weight_structure=None)
        for batch in csr_cases.to_batches(case)
    ]
    assert_as_the_reference(case, batches)


def assert_as_the_reference(
    case: csr_cases.Case, batches: Sequence[IdBatch], splits: int = 0
) -> None:
    whole = csr_cases.to_partitioning(case.meta, minibatching=splits != 0)
    found = preprocessing.partition(batches, whole, [splits], UNPADDED)
    for key, expected in parts(reference_csr(case, splits)[0]).items():
        actual = getattr(found.tables["t"], key).numpy()
        np.testing.assert_array_max_ulp(actual, np.array(expected, actual.dtype), 1)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_no_weights_are_weights_of_1(path: pathlib.Path):
    assert_without_weights(csr_cases.read(path))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_minibatches_of_rotated_tables(path: pathlib.Path, rng: np.random.Generator):
    """Several features of each combiner in stacks, cut in random places."""
    case = csr_cases.read(path)
    tables = [
        {**table, "col_shift": table["col_shift"] + 1} for table in case.meta["tables"]
    ]
    # Room for the padding of each minibatch.
    room = {"max_ids_per_chip_per_sample": 1 << 12}
    case = csr_cases.Case(case.arrays, {**case.meta, **room, "tables": tables})
    splits = int(np.bitwise_and.reduce(rng.integers(1, 1 << 16, 2))) | 1
    assert_as_the_reference(case, csr_cases.to_batches(case), splits)


@pytest.mark.parametrize("samples", [4, 12, 24])
def test_entries_of_large_tables(samples: int, rng: np.random.Generator):
    """Rows and samples together need up to 33 bits, more than narrow words have."""
    rows = 2**30
    lengths = rng.integers(0, 10, samples)
    ids = np.where(rng.random(lengths.sum()) < 0.5, 3, rows) * rng.random(lengths.sum())
    feature = {"table": 0, "samples": samples, "kind": "ragged", "combiner": "sum"}
    meta = {
        "num_sc": 2,
        "num_replica": 2,
        "tables": [{"vocab": rows, "col_offset": 0, "col_shift": 3}],
        "feats": [{**feature, "row_offset": 0}],
        "stacked_samples": samples,
        "stacked_vocab": rows,
        "max_ids": 1 << 20,
        "max_unique": 1 << 20,
        "max_ids_per_chip_per_sample": 1000,
        "max_minibatches": 64,
    }
    arrays = {"in/f0/lens": lengths, "in/f0/ids": ids.astype(np.int64)}
    assert_without_weights(csr_cases.Case(arrays, meta))
