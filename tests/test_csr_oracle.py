"""Batches give the same bits as in Google's TPU build of TensorFlow.

tests/golden/README.md says where the files come from. CSR_ORACLE_DIR and
LIMITS_ORACLE_DIR name other folders of files of the same form.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import csr_cases
import numpy as np
import pytest
import tensorflow as tf

from tpu_embedding import preprocessing

# Padded tensors have a tail that is not set.
UNPADDED = preprocessing.PartitionOptions(padded=False)


def files(folder: pathlib.Path, pattern: str) -> list[Any]:
    """One parameter per file; none at all would be a hole in the tests."""
    found = sorted(folder.glob(pattern))
    assert found, f"no {pattern} in {folder}"
    return [pytest.param(path, id=f"oracle-{path.stem}") for path in found]


def limit_cases() -> list[Any]:
    cases = json.loads((csr_cases.LIMITS / "limits.json").read_text())
    paths = sorted(csr_cases.LIMITS.glob("limit_*.npz"))
    by_seed = {csr_cases.read(path).meta["seed"]: path for path in paths}
    assert cases
    return [
        pytest.param(case, by_seed[case["seed"]], id=f"oracle-{case['seed']}-{what}")
        for case in cases
        for what in [case["case"]]
    ]


def check_csr(
    batch: preprocessing.PartitionedBatch, case: csr_cases.Case, prefix: str = "csr/"
) -> None:
    csr = batch.tables["t"]
    expected = {k: case.arrays[prefix + k] for k in ("row_pointers", "sorted_gains")}
    np.testing.assert_array_equal(csr.row_pointers, expected["row_pointers"])
    for key in ("sorted_sample_ids", "sorted_token_ids"):
        np.testing.assert_array_equal(getattr(csr, key), case.arrays[prefix + key])
    np.testing.assert_array_max_ulp(
        csr.sorted_gains.numpy(), expected["sorted_gains"], maxulp=1
    )


def check_whole(batch: preprocessing.PartitionedBatch, case: csr_cases.Case) -> None:
    """The CSR, its sizes and the statistics."""
    check_csr(batch, case)
    arrays, cores = case.arrays, range(case.meta["num_sc"])
    csr = batch.tables["t"]
    assert (
        int(batch.row_pointers_sizes["t"]) == arrays["csr/row_pointers_unpadded_size"]
    )
    assert int(batch.ids_sizes["t"]) == arrays["csr/ids_unpadded_size"]
    assert (
        csr.num_minibatches_per_physical_sparse_core
        == arrays["csr/num_minibatches_per_sc"]
    )
    assert csr.sample_count == case.meta["stacked_samples"]
    for key in ("max_ids", "max_unique_ids"):
        expected = max(arrays[f"stats/sc{c}/{key}"] for c in cores)
        assert getattr(batch, key)["t"] == expected


def by_table(case: csr_cases.Case, tokens: np.ndarray) -> dict[str, int]:
    """How many of the tokens are rows of each unstacked table that a feature has."""
    shards = case.meta["num_sc"] * case.meta["num_replica"]
    counts = {}
    for number in {feature["table"] for feature in case.meta["feats"]}:
        table = case.meta["tables"][number]
        first = table["col_offset"] // shards
        own = (tokens >= first) & (tokens < first + table["vocab"] // shards)
        counts[f"t{number}"] = int(own.sum())
    return counts


def run(case: csr_cases.Case, **changes: Any) -> preprocessing.PartitionedBatch:
    return preprocessing.partition(
        csr_cases.to_batches(case),
        csr_cases.to_partitioning(case.meta, **changes),
        options=UNPADDED,
    )


@pytest.mark.parametrize("path", files(csr_cases.CSR, "csr_*.npz"))
def test_csr(path: pathlib.Path):
    case = csr_cases.read(path)
    batch = run(case)
    check_whole(batch, case)
    assert set(map(int, batch.dropped_ids.values())) == {0}
    assert int(batch.required_ids["t"]) == int(batch.ids_sizes["t"])


@pytest.mark.parametrize("path", files(csr_cases.CSR, "csr_*.npz")[:3])
def test_padded_tensors_have_the_size_of_the_buffers(path: pathlib.Path):
    case = csr_cases.read(path)
    arrays = case.arrays
    batch = preprocessing.partition(
        csr_cases.to_batches(case), csr_cases.to_partitioning(case.meta)
    )
    csr = batch.tables["t"]
    assert csr.row_pointers.shape == [arrays["csr/row_pointers_padded_size"]]
    for key in ("sorted_sample_ids", "sorted_token_ids", "sorted_gains"):
        tensor = getattr(csr, key)
        assert tensor.shape == [arrays["csr/ids_padded_size"]]
        np.testing.assert_array_equal(
            tensor[: batch.ids_sizes["t"]], arrays["csr/" + key]
        )


@pytest.mark.parametrize("path", files(csr_cases.LIMITS, "drop_*.npz"))
def test_dropped_ids(path: pathlib.Path):
    case = csr_cases.read(path)
    batch = run(case)
    check_whole(batch, case)
    sorted_ids = [
        case.arrays[f"sorted/sc{core}/col"] for core in range(case.meta["num_sc"])
    ]
    wanted = by_table(case, np.concatenate(sorted_ids))
    kept = by_table(case, case.arrays["csr/sorted_token_ids"])
    dropped = {name: wanted[name] - kept[name] for name in wanted}
    assert {name: int(n) for name, n in batch.dropped_ids.items()} == dropped
    if any(dropped.values()):
        text = f"id buffer of {batch.required_ids['t'].numpy()} places"
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            run(case, allow_id_dropping=False)


CHANGES = {
    "max_ids": "max_ids_per_partition",
    "max_unique": "max_unique_ids_per_partition",
}


@pytest.mark.parametrize(("limit", "path"), limit_cases())
def test_limits_of_partitions(limit: dict[str, Any], path: pathlib.Path):
    case = csr_cases.read(path)
    changes = {CHANGES[limit["case"]]: limit["value"]}
    if limit["error"] is None:
        run(case, **changes)
        return
    # Google's text names the partition, its count and the limit, in this order.
    numbers = re.findall(r"\d+", limit["text"])
    assert int(numbers[2]) == limit["value"]
    with pytest.raises(getattr(tf.errors, limit["error"])) as error:
        run(case, **changes)
    message = error.value.message
    assert re.findall(r"SparseCore (\d+) for (\d+) (?:unique )?ids", message) == [
        (numbers[0], numbers[1])
    ]
    assert f"the limit is {numbers[2]}" in message
    assert "Table t:" in message


@pytest.mark.parametrize("path", files(csr_cases.LIMITS, "minibatch_*.npz"))
def test_minibatches(path: pathlib.Path):
    case = csr_cases.read(path)
    partitioning, batches = csr_cases.minibatch_case(case)
    number = 0
    while f"csr{number}/mask" in case.arrays:
        mask = case.arrays[f"csr{number}/mask"]
        batch = preprocessing.partition(
            batches, partitioning, [tf.constant(mask)], UNPADDED
        )
        check_csr(batch, case, f"csr{number}/")
        assert (
            batch.tables["t"].num_minibatches_per_physical_sparse_core
            == case.arrays[f"csr{number}/num_minibatches"]
        )
        assert batch.splits["t"] == mask
        assert batch.max_ids["t"] == case.arrays["splits/max_ids"]
        assert batch.max_unique_ids["t"] == case.arrays["splits/max_uniques"]
        number += 1
    assert number > 0
